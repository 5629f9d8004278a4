"""What processes tell each other: what the first one did for all, or what each of them has."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from ampwise.distributed.layout import is_up
from ampwise.errors import AmpwiseError

T = TypeVar("T")


def from_lead(make: Callable[[], T]) -> T:
    """What `make` returns on the first rank, on all of them.

    Raises
    ------
    AmpwiseError
        Whatever it raised there, on all ranks; the first one says it (`__ampwise_said__`).
    """
    if not is_up():
        return make()
    sent: list[object] = [None, None]
    failed: AmpwiseError | None = None
    if dist.get_rank() == 0:
        try:
            sent[0] = make()
        except AmpwiseError as error:
            failed = error
            sent[1] = (type(error), str(error))
    dist.broadcast_object_list(sent, src=0, device=torch.device("cpu"))
    if failed is not None:
        raise failed
    if sent[1] is not None:
        kind, words = sent[1]  # pyright: ignore[reportGeneralTypeIssues, reportUnknownVariableType]
        told: AmpwiseError = kind(words)
        told.__ampwise_said__ = True  # pyright: ignore[reportAttributeAccessIssue]
        raise told
    return sent[0]  # pyright: ignore[reportReturnType]


def from_each(mine: T) -> list[T]:
    """What each rank has, by rank; alone, a list of one."""
    if not is_up():
        return [mine]
    found: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found  # pyright: ignore[reportReturnType]
