"""Collectives of a training step, simulated message by message, and their closed forms.

A message of n bytes leaves when its sender has it and the sender's port is free, keeps the port for
n / bandwidth, and arrives one latency after that (Hockney's alpha-beta model). Each rank's times
are carried forward step by step, so delays spread as they would: along a ring one neighbour a step,
in doubling to everyone. A rank may start late, be slow, or be held up at random for each message.

Ranks are counted node by node. A ring crosses between two nodes once, over all network ports of a
node together (one ring through each). In doubling all ranks of a node talk to another node at once
and share its ports. Without disturbance the simulation equals the closed form: exactly where all
links are alike, and in the cases that `ring_s` names.

Not in the model: congestion in switches, protocols (NCCL's LL, LL128, Simple) other than by their
latency, slices of a message that are passed on before the rest is there, copies and kernels.

Sources: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations
in MPICH", 2005 (ring, recursive doubling, halving and doubling).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]
"""Seconds, one for each rank."""


@dataclass(frozen=True)
class Link:
    """Latency of a message, and the bandwidth it then has, in one direction."""

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Fabric:
    """How ranks are connected.

    Attributes
    ----------
    inside
        Between two ranks of a node.
    between
        Between two nodes; the bandwidth is that of a node.
    per_node
        Ranks in a node.
    start_s
        What a collective costs before its first message.
    """

    inside: Link
    between: Link
    per_node: int = 8
    start_s: float = 0.0

    def shared(self) -> Fabric:
        """As one rank sees it when all ranks of its node send to other nodes at once."""
        alone = replace(self.between, bytes_per_s=self.between.bytes_per_s / self.per_node)
        return replace(self, between=alone)

    def nodes(self, ranks: int) -> int:
        return math.ceil(ranks / self.per_node)


@dataclass(frozen=True)
class Disturbance:
    """What makes ranks unlike each other.

    Attributes
    ----------
    jitter_s
        Mean of the random delay (exponential) of each message.
    late_s
        How much later than the others rank 0 starts.
    slow
        How many times as long rank 0's port takes for its messages.
    """

    jitter_s: float = 0.0
    late_s: float = 0.0
    slow: float = 1.0
    seed: int = 0


STILL = Disturbance()


class _Ranks:
    """The ranks of one simulated collective: when each has its data, and its port is free."""

    def __init__(self, fabric: Fabric, ranks: int, disturbance: Disturbance) -> None:
        self._fabric, self._by = fabric, disturbance
        self._draw = np.random.default_rng(disturbance.seed)
        self.me = np.arange(ranks)
        self.ready = np.zeros(ranks)
        self.ready[0] = disturbance.late_s
        self._free = np.zeros(ranks)

    def link_to(self, receiver: NDArray[np.int64]) -> tuple[Times, Times]:
        """Latency, and seconds per byte, of each rank's link to its receiver."""
        inside, between = self._fabric.inside, self._fabric.between
        same = self.me // self._fabric.per_node == receiver // self._fabric.per_node
        latency = np.where(same, inside.latency_s, between.latency_s)
        per_byte = np.where(same, 1 / inside.bytes_per_s, 1 / between.bytes_per_s)
        per_byte[0] *= self._by.slow
        return latency, per_byte

    def send(self, latency: Times, busy: Times) -> Times:
        """All ranks send what they have; when each message arrives."""
        sent = np.maximum(self.ready, self._free)
        if self._by.jitter_s:
            sent += self._draw.exponential(self._by.jitter_s, len(sent))
        self._free = sent + busy
        return self._free + latency

    def done_s(self) -> float:
        return self._fabric.start_s + float(np.maximum(self.ready, self._free).max())


# -- simulated -------------------------------------------------------------------------------------


def simulate_ring(
    fabric: Fabric, ranks: int, n_bytes: float, rounds: int = 2, disturbance: Disturbance = STILL
) -> float:
    """Seconds of a ring over `n_bytes`: 2 rounds all-reduce, 1 all-gather or reduce-scatter."""
    group = _Ranks(fabric, ranks, disturbance)
    latency, per_byte = group.link_to((group.me + 1) % ranks)
    busy = per_byte * n_bytes / ranks
    for _ in range(rounds * (ranks - 1)):
        arrived = group.send(latency, busy)
        group.ready = np.roll(arrived, 1)
    return group.done_s()


def simulate_exchanges(
    fabric: Fabric, ranks: int, sizes: list[float], disturbance: Disturbance = STILL
) -> float:
    """Seconds of exchanges with the partner 1, 2, 4, ... ranks away; with 2 log2 R sizes, back.

    The sizes in bytes make the collective: see `doubling_sizes`, `halving_sizes`, `gather_sizes`.
    """
    group = _Ranks(fabric.shared(), ranks, disturbance)
    levels = _levels(ranks)
    for size, level in zip(sizes, [*range(levels), *reversed(range(levels))], strict=False):
        partner = group.me ^ (1 << level)
        latency, per_byte = group.link_to(partner)
        group.ready = np.maximum(group.send(latency, per_byte * size)[partner], group.ready)
    return group.done_s()


def simulate_gather(
    fabric: Fabric, ranks: int, n_bytes: float, disturbance: Disturbance = STILL
) -> float:
    """Seconds until rank 0 has `n_bytes` of each other rank, which come in through one port."""
    group = _Ranks(fabric.shared(), ranks, disturbance)
    latency, per_byte = group.link_to(np.zeros(ranks, np.int64))
    held_up = group.send(latency, np.zeros(ranks))[1:]
    order = np.argsort(held_up)
    busy = (per_byte[1:] * n_bytes)[order]
    ended = np.cumsum(busy)
    begun = np.maximum.accumulate(held_up[order] - (ended - busy))
    return fabric.start_s + float((begun + ended)[-1])


# -- closed forms ----------------------------------------------------------------------------------


def ring_s(fabric: Fabric, ranks: int, n_bytes: float, rounds: int = 2) -> float:
    """Seconds of a ring: all hops of the worst rank, or the slowest port all the time.

    Exact where all links are alike, where every message passes faster than the ring turns
    (latency-bound), and where the port between nodes is always busy (bandwidth-bound).
    """
    steps, chunk = rounds * (ranks - 1), n_bytes / ranks
    inside = fabric.inside.latency_s + chunk / fabric.inside.bytes_per_s
    if fabric.nodes(ranks) == 1:
        return fabric.start_s + steps * inside
    busy = chunk / fabric.between.bytes_per_s
    across = min(steps, rounds * fabric.nodes(ranks))
    hops = (steps - across) * inside + across * (fabric.between.latency_s + busy)
    return fabric.start_s + max(hops, steps * busy + fabric.between.latency_s)


def exchanges_s(fabric: Fabric, ranks: int, sizes: list[float]) -> float:
    """Seconds of exchanges with partners 1, 2, 4, ... away: latencies and bytes, added up."""
    levels = _levels(ranks)
    link = fabric.shared()
    total = fabric.start_s
    for size, level in zip(sizes, [*range(levels), *reversed(range(levels))], strict=False):
        way = link.inside if 1 << level < fabric.per_node else link.between
        total += way.latency_s + size / way.bytes_per_s
    return total


def gather_s(fabric: Fabric, ranks: int, n_bytes: float) -> float:
    """Seconds of a gather at one rank: its port is busy with all the others."""
    link = fabric.shared()
    near = min(ranks, fabric.per_node) - 1
    far = ranks - 1 - near
    begun = link.inside.latency_s + near * n_bytes / link.inside.bytes_per_s
    if far:
        begun = max(begun, link.between.latency_s) + far * n_bytes / link.between.bytes_per_s
    return fabric.start_s + begun


def doubling_sizes(ranks: int, n_bytes: float) -> list[float]:
    """All-reduce by recursive doubling: everything, log2 R times. For small things."""
    return [n_bytes] * _levels(ranks)


def halving_sizes(ranks: int, n_bytes: float) -> list[float]:
    """All-reduce by halving and doubling: half, a quarter, ... and the way back."""
    there = [n_bytes / 2 ** (level + 1) for level in range(_levels(ranks))]
    return there + there[::-1]


def gather_sizes(ranks: int, n_bytes: float) -> list[float]:
    """All-gather of `n_bytes` a rank: once, twice, four times as much."""
    return [n_bytes * 2**level for level in range(_levels(ranks))]


def _levels(ranks: int) -> int:
    levels = ranks.bit_length() - 1
    if 1 << levels != ranks:
        raise ValueError(f"ranks: expected a power of 2, got {ranks}")
    return levels
