"""What else grows with the number of ranks: memory, metadata, skipped steps, rounding, failures.

Each figure twice: a formula, and a simulation that does not use it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import norm

from ampwise.step import LossScale

Floats = NDArray[np.float32]


# -- a model ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GPT:
    """Parameter shapes of a GPT; the defaults are 1.3 billion parameters (GPT-3 XL)."""

    layers: int = 24
    width: int = 2048
    vocabulary: int = 50257
    context: int = 2048

    @property
    def block(self) -> list[tuple[int, ...]]:
        w = self.width
        matrices = [(3 * w, w), (w, w), (4 * w, w), (w, 4 * w)]
        return [*matrices, *[(rows,) for rows, _ in matrices], *[(w,)] * 4]

    @property
    def rest(self) -> list[tuple[int, ...]]:
        return [(self.vocabulary, self.width), (self.context, self.width), *[(self.width,)] * 2]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return self.block * self.layers + self.rest


def elements(shapes: Sequence[tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def fullest_shard(shapes: Sequence[tuple[int, ...]], ranks: int) -> int:
    """Elements on the rank that holds most: FSDP2 deals out rows, ceil(rows / ranks) to each."""
    return sum(-(-shape[0] // ranks) * math.prod(shape[1:]) for shape in shapes)


def memory_bytes(model: GPT, ranks: int) -> dict[str, float]:
    """Parameters, gradients and AdamW's state in float32 on one rank, and what else is held."""
    count = elements(model.shapes)
    unsharded = max(elements(model.block), elements(model.rest))
    return {
        "ddp": 16 * count,
        "ddp_buckets": 4 * count,
        "fsdp_even": 16 * count / ranks,
        "fsdp": 16 * fullest_shard(model.shapes, ranks),
        # The largest unit whole: 2-byte parameters, and gradients that wait in 4 bytes.
        "fsdp_unsharded": 6 * unsharded,
    }


# -- one overflow skips everybody ------------------------------------------------------------------


def skip_probability(p_rank: float, ranks: int) -> float:
    """That any of independent ranks overflows: 1 - (1 - p)^R."""
    return -math.expm1(ranks * math.log1p(-p_rank))


def balance(growth_interval: int) -> float:
    """Skips per step at which a scale falls as often as it rises.

    With q skips a step, G clean ones in a row take ((1 - q)^-G - 1) / q steps. Rises are as
    frequent as falls where that is 1 / q: where (1 - q)^G = 1/2.
    """
    return -math.expm1(-math.log(2) / growth_interval)


def balanced_scale(at_one: float, power: float, ranks: int, growth_interval: int) -> float:
    """Scale where the skips of all ranks balance, if one rank's p is (scale / at_one)^power."""
    p_rank = -math.expm1(math.log1p(-balance(growth_interval)) / ranks)
    return at_one * p_rank ** (1 / power)


def simulate_loss_scale(
    p_rank: Callable[[float], float],
    ranks: int,
    steps: int,
    *,
    warm_up: int = 0,
    growth_interval: int = 2000,
    seed: int = 0,
) -> dict[str, float]:
    """Run `ampwise.LossScale` over steps in which any rank may overflow.

    Returns
    -------
    dict
        Of the steps after the warm-up: share skipped, median and last log2 of the scale, and the
        step at which the scale first was at its floor (-1: never).
    """
    scale = LossScale(growth_interval=growth_interval)
    draws = np.random.default_rng(seed).random(steps)
    flags = {False: torch.tensor(0.0), True: torch.tensor(1.0)}
    known: dict[float, float] = {}
    seen, skipped, floor_at = [], 0, -1
    for index, draw in enumerate(draws):
        value = scale.value
        if value not in known:
            known[value] = skip_probability(p_rank(value), ranks)
        bad = bool(draw < known[value])
        scale.update(flags[bad])
        if index >= warm_up:
            seen.append(value)
            skipped += bad
        if floor_at < 0 and value <= scale.floor:
            floor_at = index
    return {
        "skipped": skipped / len(seen),
        "log2_scale": math.log2(float(np.median(seen))),
        "last_log2_scale": math.log2(scale.value),
        "floor_at_step": floor_at,
    }


# -- sums over ranks in 16 bits --------------------------------------------------------------------


def to_bfloat16(x: Floats) -> Floats:
    """Round to nearest, ties to even, on the upper 16 bits."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def to_float16(x: Floats) -> Floats:
    return x.astype(np.float16).astype(np.float32)


ROUND: dict[str, Callable[[Floats], Floats]] = {
    "bfloat16": to_bfloat16,
    "float16": to_float16,
    "float32": lambda x: x,
}


def sum_errors(
    most: int, agreement: float, *, count: int = 4096, seed: int = 0
) -> dict[int, dict[str, float]]:
    """Relative error (L2) of the sum over 2, 4, ... `most` ranks, each partial sum rounded.

    Each rank's gradient is a common part of size `agreement` plus noise of size 1. Every rank's
    gradient is rounded to the format, then a ring adds one after the other, and hands on the sum in
    the format.
    """
    draw = np.random.default_rng(seed)
    common = (agreement * draw.standard_normal(count)).astype(np.float32)
    exact = np.zeros(count)
    held = {name: np.zeros(count, np.float32) for name in ROUND}
    found: dict[int, dict[str, float]] = {}
    for rank in range(1, most + 1):
        gradient = common + draw.standard_normal(count, np.float32)
        exact += gradient
        for name, rounded in ROUND.items():
            held[name] = rounded(held[name] + rounded(gradient))
        if rank > 1 and rank & (rank - 1) == 0:
            length = float(np.linalg.norm(exact))
            found[rank] = {
                name: float(np.linalg.norm(total - exact)) / length for name, total in held.items()
            }
    return found


# -- failures, and ranks that are slow -------------------------------------------------------------


def young_daly_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Time between checkpoints that loses least.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
    2006; the leading term is J. W. Young's, 1974.
    """
    if checkpoint_s >= 2 * mtbf_s:
        return mtbf_s
    x = checkpoint_s / (2 * mtbf_s)
    return math.sqrt(2 * checkpoint_s * mtbf_s) * (1 + math.sqrt(x) / 3 + x / 9) - checkpoint_s


def lost_share(interval_s: float, checkpoint_s: float, restart_s: float, mtbf_s: float) -> float:
    """Share of the time that checkpoints, repeated work and restarts take; first order."""
    return checkpoint_s / interval_s + (interval_s / 2 + restart_s) / mtbf_s


def simulate_failures(
    interval_s: float,
    checkpoint_s: float,
    restart_s: float,
    mtbf_s: float,
    *,
    checkpoints: int = 200_000,
    seed: int = 0,
) -> float:
    """The same share, from failures that strike at random, while saving and restarting too."""
    draw = np.random.default_rng(seed)
    need = interval_s + checkpoint_s
    total, done, left = 0.0, 0, float(draw.exponential(mtbf_s))
    while done < checkpoints:
        whole = min(int(left // need), checkpoints - done)
        total, done, left = total + whole * need, done + whole, left - whole * need
        if done < checkpoints:  # struck in this one
            total += left
            left = float(draw.exponential(mtbf_s))
            while left < restart_s:
                total += left
                left = float(draw.exponential(mtbf_s))
            total, left = total + restart_s, left - restart_s
    return 1 - checkpoints * interval_s / total


def slowest(ranks: int) -> float:
    """Expected largest of R normal numbers, in standard deviations (G. Blom, 1958)."""
    return float(norm.ppf((ranks - 0.375) / (ranks + 0.25)))


def simulate_slowest(ranks: int, steps: int = 2000, seed: int = 0) -> float:
    draw = np.random.default_rng(seed)
    return float(np.mean([draw.standard_normal(ranks).max() for _ in range(steps)]))
