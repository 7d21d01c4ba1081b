"""Writes docs/recipes.md from the named recipes: `python scripts/recipe_reference.py`. With --check: exit 1 when it is not current."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from leeway.recipes import Row, rows  # noqa: E402
from scripts.curves.draw import curves  # noqa: E402
from scripts.pages import write  # noqa: E402

PAGE = ROOT / "docs" / "recipes.md"

HEAD = """# Recipes

Generated from `configs/recipes.py` by `scripts/recipe_reference.py`. A test holds it current. `leeway recipes` prints the same.

A recipe is a set of settings with a name: `name = "gmc_grpo"` in `[recipe]`, or `--set recipe.name=gmc_grpo`. Keys written beside the name
win over its settings. A later file, or `--set`, that names a recipe begins `[recipe]` anew, so it can be laid over any shipped config;
what a recipe wants of other tables (`learner.reference`, `sampling.top_logprobs`, `learner.steps_per_update`) gives way to what is there
already. A name that is not below only labels settings of your own; one that looks like a name below with a typing error is refused.

*Established*: the paper or its code says so. *Reconstructed*: the idea is published, and the last column says what is ours.

## One choice per axis

| axis | key | reads | choices |
|---|---|---|---|
| groups | `dynamic_sampling` | rewards | drop groups with equal rewards as they settle (`dropped(no_contrast)`), ask other prompts |
| rewards | `overlong`, `mask_truncated`, `kl_in = "reward"` | lengths; old and ref | |
| advantages | `estimator` | rewards of a group | grpo, dr_grpo, rloo, reinforce_pp, reinforce_pp_ema, zcpo, remax |
| engine mismatch | `engine` | old/mu | none, tis, icepop, kpop |
| whole responses | `filter` | old/mu | none, sequence, geometric, k3, carm, veto |
| staleness | `staleness` | prox/old, prox/mu | none, decoupled, m2_mask, m2_range, opsm, sis |
| group mass | `group_mass_cap` | prox/mu of whole responses | |
| objective | `objective` on `base` | cur/old or cur/prox | score, unit, ppo, gppo, gspo, luspo, cispo, ripo, fdiv, tapo, minirl |
| proximal policy | `prox` | | version_in, ewma |
| reference | `kl` with `learner.reference` | cur, ref | k1, k2, k3, full; in the loss or in the reward |
| entropy | `entropy` | the whole vocabulary | |
| mean over tokens | `aggregation` | lengths | token_mean, sequence_mean, constant, length_weighted |

What would correct twice is refused when the config is read, in one line that says what to do: for example `tis` with `score` or
`minirl` (which weigh by the total ratio or not at all), `decoupled` with `base = "old"` (cur/old holds prox/old already), `luspo` with
`token_mean` (the length would be divided away), `zcpo` with `kl` (the KL is in its coefficients).

## What happens in which order

Rewards are shaped, then advantages are made on complete groups, before anything is masked. Engine, filter, staleness and group weights are
made once per update, from the policy as the update begins. A token is trained if every corrector keeps it; its loss is multiplied by the
weights. Means are over all ranks and micro-batches of the optimizer step; `denominator` says whether dropped tokens count.

A lease in which no kept token has an advantage makes no step, whatever the KL or the entropy would say.

The reference KL has its own mask (`kl_mask`) and no correction weight unless `kl_weight = "total"`: on stale samples k2 and k3 are
estimates under the wrong policy without it, and `full` is exact at each sampled prefix.

`remax` asks for one greedy response beside the samples of each group. Its reward is subtracted; nothing else of it is used, and it is
outside the books.

## All of them

Every one makes three updates on one recorded batch in `make test`.
"""


def page() -> str:
    head = "\n| name | status | settings | needs | source | |\n|---|---|---|---|---|---|\n"
    return HEAD + head + "".join(_row(row) for row in rows()) + "\n" + curves()


def _row(row: Row) -> str:
    settings = row.settings.replace(", ", "<br>")
    return f"| `{row.name}` | {row.status} | {settings} | {row.needs} | {row.citation} | {row.note} |\n"


if __name__ == "__main__":
    sys.exit(write(PAGE, page()))
