"""Gradients that became zero on the way, and the loss scale under which they do not."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ampwise import formats
from ampwise.numerics.explain.lost import Lost
from ampwise.numerics.observe.gradient_errors import GradientErrors
from ampwise.numerics.observe.shadow import ShadowRun
from ampwise.numerics.result import Extent, percent
from ampwise.places import NOWHERE, Place
from ampwise.step.recorder import Stash
from ampwise.step.replayable import Replayable
from ampwise_lint.base.words import power

FLUSHED = 0.5
"""Share of a parameter's gradient (by norm) that underflow may take before it is a fault."""

_MOST_POWER = 126
"""Of a loss scale, which is kept in float32."""


def flushed_gradients(
    step: Replayable, stash: Stash, run: ShadowRun, errors: GradientErrors
) -> list[Lost]:
    """Parameters whose gradients became zero on the way."""
    wrong = errors.missing()
    lost = {name: each.flushed for name, each in wrong.items() if each.flushed > FLUSHED}
    if not lost:
        return []
    needed = _scale_for(step, stash, [run.gradients[name] for name in lost])
    if needed <= float(stash.scale):  # they fit the format as it is: sums that cancel
        return []
    scale = _scale_that_lifts(step, stash, run, list(lost), needed)
    named = ", ".join(f"{name} {percent(share)}" for name, share in list(lost.items())[:6])
    more = f" and {len(lost) - 6} more" if len(lost) > 6 else ""
    first = next(iter(lost))
    fmt = formats.lookup(step.policy.compute_dtype)
    explanation = (
        f"Gradients underflow in {fmt}: of {len(lost)} of {len(run.gradients)} parameters most of "
        f"the gradient became zero ({named}{more}). {_lifts(scale, needed, float(stash.scale))}"
    )
    place = _maker_of(first, run)
    return [Lost("UNDERFLOW", explanation, place, "", fmt.name, severe=True, scale=scale,
                 extent=_zeros_in(run, list(lost)))]  # fmt: skip


def _zeros_in(run: ShadowRun, names: Sequence[str]) -> Extent:
    """How many elements of some gradients are 0 and should not be."""
    pairs = [(run.replayed.gradients[name], run.gradients[name]) for name in names]
    zeros = sum(int(((actual == 0) & (wanted != 0)).sum()) for actual, wanted in pairs)
    return Extent(zeros, sum(wanted.numel() for _, wanted in pairs))


def _lifts(scale: float | None, needed: float, current: float) -> str:
    """What was tried for them."""
    if scale is not None:
        return f"Under a loss scale of {power(scale)}, tried on this step, they are there."
    return (
        f"The loss scale is {power(current)}. It would take one of {power(needed)}, under which, "
        "as under smaller ones that were tried, other gradients overflow or these stay zero."
    )


def _scale_that_lifts(
    step: Replayable, stash: Stash, run: ShadowRun, lost: Sequence[str], needed: float
) -> float | None:
    """The largest loss scale up to the needed one under which they are there; None without one."""
    current = float(stash.scale)
    scale = needed
    while scale > current:
        result = step.replay(stash, scale=scale)
        if result.clean:
            errors = GradientErrors(result.gradients, run.gradients, scale / current)
            return None if any(name in errors.missing() for name in lost) else scale
        scale /= 4
    return None


def _scale_for(step: Replayable, stash: Stash, gradients: list[Tensor]) -> float:
    """Power of two that lifts 99 % of the non-zero gradients into the normal numbers."""
    fmt = formats.lookup(step.policy.compute_dtype)
    least = math.inf
    for each in gradients:
        held = each.abs().flatten()
        held = held[held > 0]
        if held.numel():
            kept = held[torch.randperm(held.numel())[:100_000]] if held.numel() > 100_000 else held
            least = min(least, float(torch.quantile(kept, 0.01)))
    if not math.isfinite(least) or least <= 0:
        return float(stash.scale)
    needed = math.ceil(math.log2(fmt.min_normal / least)) + math.log2(float(stash.scale))
    return 2.0 ** max(0, min(_MOST_POWER, needed))


def _maker_of(parameter: str, run: ShadowRun) -> Place:
    """Where a parameter is used: the first forward operation of its module."""
    module = parameter.rpartition(".")[0]
    for each in run.errors:
        if each.place.phase == "forward" and each.place.module == module:
            place = each.place
            return Place("backward", module, place.call, place.file, place.line, place.library)
    return NOWHERE
