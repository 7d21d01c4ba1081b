"""Off-policy correction as pure torch functions: no I/O, no state, no model.

Columns are log-probs named by role: `mu` (the engine that sampled), `old` (the trainer under the version that
sampled), `prox` (the trainer as the update began), `cur` (the learner now), `ref` (a reference policy). Shape
suffixes: `_RT` response x token, `_R` response, `_RTK` response x token x behaviour top-K. Masked slots may hold
anything, NaN included.
"""
