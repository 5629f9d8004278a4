"""As many batches on each rank as on the one that has most: DDP and FSDP2 need equal numbers.

`torch.distributed.algorithms.join` answers the collectives of DDP for a rank that has run out; those
of FSDP2 and of a step it does not know. A micro-batch that counts nothing takes part in all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ampwise.distributed.layout import is_up
from ampwise.errors import UsageError

Batch = TypeVar("Batch")


class _None:
    """No further batch."""


_NONE = _None()


def in_step(batches: Iterable[Batch]) -> Iterator[tuple[Batch, bool]]:
    """An epoch in which all ranks make the same number of micro-batches.

    ::

        for batch, counts in ampwise.distributed.in_step(loader):
            step(loss_fn, batch, weight=None if counts else 0)
        step.flush()

    Yields
    ------
    tuple
        A batch, and whether it is this rank's own; after its last one it comes again, and counts
        nothing. The ranks ask each other before each batch, host to host.

    Raises
    ------
    UsageError
        On all ranks, when one has no batch and others do: it has nothing to repeat.
    """
    if not is_up():
        for batch in batches:
            yield batch, True
        return
    hosts: Any = None if "gloo" in dist.get_backend() else dist.new_group(backend="gloo")
    latest: list[Batch] = []
    rest = iter(batches)
    while True:
        batch = next(rest, _NONE)
        if not isinstance(batch, _None):
            latest = [batch]
        if not _some_go_on(batch is not _NONE, bool(latest), hosts):
            return
        yield latest[0], batch is not _NONE


def _some_go_on(has_one: bool, has_had_one: bool, hosts: Any) -> bool:
    """Whether any rank has another batch; all of them hear of one that never had any."""
    empty = 0 if has_had_one else dist.get_rank() + 1
    flags = torch.tensor([int(has_one), empty])
    dist.all_reduce(flags, dist.ReduceOp.MAX, group=hosts)
    goes_on, empty = flags.tolist()
    if goes_on and empty:
        raise UsageError(
            f"rank {empty - 1} has no batch in this epoch and others do: give each rank at least "
            "one, as DistributedSampler does"
        )
    return bool(goes_on)
