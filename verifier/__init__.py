"""Rewards from untrusted text, computed in killable child processes. No torch; never imported by the learner.

Start at `pool.py` (what the actor calls), then `process.py` (one child, seen from outside) and `worker.py` (the same, from inside).
"""

from verifier.pool import VerifierPool, check_spec
from verifier.protocol import VerifyItem
from verifier.resolve import SpecError

__all__ = ["SpecError", "VerifierPool", "VerifyItem", "check_spec"]
