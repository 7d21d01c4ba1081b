"""Correction plus objective, forward and backward, for 64 x 4,096 tokens: seconds on one core, and how much memory it takes at its peak."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from correction.choice import CorrectionChoice
from correction.pipeline import correct
from correction.table import PolicyTable
from learner.objective import OBJECTIVES, WITHOUT_BASE, aggregate, token_losses
from scripts.bench.machine import markdown

RESPONSES, TOKENS, GROUP = 64, 4096, 8
TENSOR = 4 * RESPONSES * TOKENS
"""Bytes of one float32 tensor of the batch's shape."""
CLIP = {"clip_low": 0.2, "clip_high": 0.28}
HYPER: dict[str, dict[str, Any]] = {
    "ppo": CLIP, "gppo": CLIP, "gspo": {"clip_low": 3e-4, "clip_high": 4e-4}, "cispo": {"cap": 5.0}, "tapo": CLIP,
    "fdiv": {"divergence": "kl", "topology": "binary", "delta": 0.05}}
ENGINES: dict[str, dict[str, Any]] = {
    "tis": {"engine": "tis"}, "tis, sequence": {"engine": "tis", "level": "sequence"}, "icepop": {"engine": "icepop"},
    "kpop": {"engine": "kpop", "threshold": 0.03}}
FILTERS: dict[str, dict[str, float]] = {
    "sequence": {"low": 0.5, "high": 2.0}, "geometric": {}, "k3": {}, "carm": {"threshold": 1.1}, "veto": {}}


def cases() -> Iterator[tuple[str, CorrectionChoice]]:
    """Every objective with tis or icepop beside it, and every corrector with ppo."""
    for objective in OBJECTIVES:
        mode = "sequence_mean" if objective in ("gspo", "luspo") else "token_mean"
        masks_only = objective in ("score", "minirl")
        choice = CorrectionChoice(engine="icepop" if masks_only else "tis", objective=objective, aggregation=mode)
        yield f"{choice.engine} + {objective}", choice
    plain = CorrectionChoice(objective="ppo")
    for name, engine in ENGINES.items():
        yield f"{name} + ppo", replace(plain, **engine)
    for name, hyper in FILTERS.items():
        yield f"{name} filter + ppo", replace(plain, filter=name, filter_hyper=hyper)
    for name in ("m2_mask", "m2_range", "opsm"):
        yield f"{name} + ppo", replace(plain, staleness=name)
    yield "decoupled + ppo", replace(plain, staleness="decoupled", base="prox", steps_per_update=2)
    yield "group mass + score", replace(plain, objective="score", group_mass_cap_per_response=1.0)
    yield "tis + veto + opsm + ppo", replace(plain, engine="tis", filter="veto", staleness="opsm")


class Batch:
    """Columns a little apart, about a tenth of the slots masked; the same in every process."""

    def __init__(self, responses: int = RESPONSES, tokens: int = TOKENS) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = responses, tokens

        def apart(base: Tensor, by: float) -> Tensor:
            return (base + by * torch.randn(shape, generator=generator)).clamp(max=0)

        mu = -torch.rand(shape, generator=generator) * 4
        old = apart(mu, 0.05)
        prox = apart(old, 0.05)
        self.cur = apart(prox, 0.02).requires_grad_()
        mask = torch.rand(shape, generator=generator) > 0.1
        self.table = PolicyTable(
            mu_RT=mu, old_RT=old, prox_RT=prox, cur_RT=None, ref_RT=None, mask_RT=mask, version_RT=torch.zeros(shape, dtype=torch.int64),
            group_R=torch.arange(responses) // GROUP)
        self.advantage = torch.randn(responses, generator=generator)


def run(batch: Batch, choice: CorrectionChoice) -> None:
    """What the learner does with a batch between its columns and the gradient with respect to `cur`."""
    table = batch.table
    correction = correct(table, choice, batch.advantage)
    hyper = dict(HYPER.get(choice.objective, {}))
    if correction.clip is not None:
        hyper["clip_low"], hyper["clip_high"] = correction.clip
    if choice.objective == "minirl":
        hyper["mu_RT"] = table.mu_RT
    base = None if choice.objective in WITHOUT_BASE else table.prox_RT if choice.base == "prox" else table.old_RT
    batch.cur.grad = None
    loss = token_losses(batch.cur, base, batch.advantage, table.mask_RT, objective=choice.objective, **hyper)
    aggregate(loss * correction.weight_RT, correction.keep_RT, mode=choice.aggregation, count_mask_RT=table.mask_RT).backward()


def peak_bytes(body: Callable[[], object]) -> int:
    """Most bytes of tensors alive at once beyond those that were there before, as torch's allocator saw them."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        body()
    moves = [event for event in prof.profiler.kineto_results.events() if event.name() == "[memory]"]
    total = peak = 0
    for event in sorted(moves, key=lambda event: event.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    return peak


def table() -> str:
    torch.set_num_threads(1)
    rows, batch = [], Batch()
    for name, choice in cases():
        run(batch, choice)  # warm
        began = time.process_time()
        run(batch, choice)
        seconds = time.process_time() - began
        batch.cur.grad = None
        tensors = peak_bytes(lambda choice=choice: run(batch, choice)) / TENSOR
        rows.append([name, f"{seconds * 1000:.0f}", f"{tensors:.1f}"])
    return (
        f"Correction plus objective, forward and backward, for {RESPONSES} x {TOKENS:,} tokens in fp32, one core. Memory: tensors of that "
        "shape at the peak, beside the columns themselves:\n\n" + markdown(["correctors and objective", "ms", "tensors at the peak"], rows)
    )
