"""What one process does for all, or each for itself: everyone is told, also of errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

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
        raise _told(*sent[1])  # pyright: ignore[reportGeneralTypeIssues]
    return sent[0]  # pyright: ignore[reportReturnType]


def from_all(make: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """What `make` returns on each rank of a group (default: all), by rank; on all of them.

    Raises
    ------
    AmpwiseError
        Whatever it raised on the first of the ranks where it did, on all; that one says it.
    """
    if not is_up():
        return [make()]
    mine: T | None = None
    failed: AmpwiseError | None = None
    try:
        mine = make()
    except AmpwiseError as error:
        failed = error
    words = None if failed is None else (type(failed), str(failed))
    answers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(answers, (mine, words), group=group)
    for rank, (_, told) in enumerate(answers):
        if told is not None:
            own = failed if rank == dist.get_rank(group) else None
            raise own or _told(*told)
    return [answer for answer, _ in answers]


def _told(kind: type[AmpwiseError], words: str) -> AmpwiseError:
    """An error that another rank says."""
    error = kind(words)
    error.__ampwise_said__ = True  # pyright: ignore[reportAttributeAccessIssue]
    return error
