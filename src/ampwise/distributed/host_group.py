"""What ranks tell each other from host to host: results, decisions, and who failed at what.

A rank that fails at its part still takes part in the exchange, so all ranks raise the same error
and none waits for ever. Files are written while training goes on: words about them go over a group
of their own (`beside`), since on the group that sums gradients they would meet other ranks' sums.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from ampwise.distributed.layout import is_up
from ampwise.errors import AmpwiseError, in_one_line

Result = TypeVar("Result")


class RankError(RuntimeError):
    """A rank failed at its part; raised on all of them, and says which one, and why."""


class HostGroup:
    """Processes that tell each other things, or this one alone.

    When a work fails, all ranks raise the same error: that of the first rank where it did, with its
    number before the words unless all ranks failed alike. An `AmpwiseError` keeps its kind; any
    other becomes a `RankError`. Alone, the work's own error is raised.

    Attributes
    ----------
    rank, size
        This process's number, and how many there are.
    process_group
        The group they talk on; None alone.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        self.process_group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def all(self, work: Callable[[], Result]) -> list[Result]:
        """What each rank's part of a work returns, by rank; on all ranks."""
        if self.process_group is None:
            return [work()]
        return self._told(*_done(work), by=self.size)

    def agree(self, work: Callable[[], Result]) -> Result:
        """Do this rank's part of a work, and wait for the others; what this rank's part returns."""
        if self.process_group is None:
            return work()
        result, error = _done(work)
        self._told(None, error, by=self.size)
        return result

    def first(self, work: Callable[[], Result]) -> Result:
        """What a work returns that the first rank alone does; on all ranks."""
        if self.process_group is None:
            return work()
        return self._told(*_done(work if self.rank == 0 else _nothing), by=1)[0]

    def _told(self, result: Any, error: Exception | None, by: int) -> list[Any]:
        """Everyone's result, of a work that was for the first so many ranks."""
        answers: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(answers, (result, _words(error)), group=self.process_group)
        except RuntimeError as gone:  # with another rank
            raise error or gone from None
        failures = [failure for _, failure in answers[:by]]
        for rank, failure in enumerate(failures):
            if failure is not None:
                kind, words = failure
                alike = all(each == failure for each in failures)
                raise kind(words if alike else f"rank {rank}: {words}") from error
        return [answer for answer, _ in answers]


ALONE = HostGroup(None)
"""This process, whoever else there is."""


def everyone() -> HostGroup:
    """All processes that were started together."""
    return HostGroup(dist.group.WORLD) if is_up() else ALONE


@cache
def beside(group: ProcessGroup | None) -> HostGroup:
    """The ranks of a group on one of their own (gloo), made once; all of them call this."""
    if group is None:
        return ALONE
    members = dist.get_process_group_ranks(group)
    own = dist.new_group(members, backend="gloo", use_local_synchronization=True)
    assert isinstance(own, ProcessGroup)
    return HostGroup(own)


def _done(work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """What a work returns, or raises: the others wait for this rank, whatever it is."""
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001 - all ranks raise it
        return None, error


def _words(error: Exception | None) -> tuple[type[Exception], str] | None:
    """An error as it is told: its kind, if it is ours, and its words."""
    if error is None:
        return None
    if isinstance(error, AmpwiseError):
        return type(error), str(error)
    return RankError, in_one_line(error)


def _nothing() -> None:
    """The part of a rank that has none."""
