"""What ranks tell each other from host to host, beside training: paths, and who failed at what.

Files are written while training goes on, so these words go over a group of their own (gloo): on the
group that sums gradients they would meet the sums of another rank. A rank that fails at its part
still takes part in the exchange, so all ranks raise the same error and none waits for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

Result = TypeVar("Result")


class RankError(RuntimeError):
    """A rank failed at its part; raised on all of them, and says which one, and why."""


class HostGroup:
    """The processes that train together, or this one alone.

    Attributes
    ----------
    rank, size
        This process's number, and how many there are.
    process_group
        The group they talk on; None alone.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        self.rank, self.size = 0, 1
        self.process_group: ProcessGroup | None = None
        if group is not None:
            members = dist.get_process_group_ranks(group)
            own = dist.new_group(members, backend="gloo", use_local_synchronization=True)
            assert isinstance(own, ProcessGroup)
            self.process_group = own
            self.rank, self.size = dist.get_rank(own), dist.get_world_size(own)

    def agree(self, work: Callable[[], Result]) -> Result:
        """Do this rank's part of a work, and wait for the others; what this rank's part returns.

        Raises
        ------
        RankError
            On all ranks, when the work failed on any. Alone, the work's own error is raised.
        """
        if self.process_group is None:
            return work()
        return self._exchanged(work)[0]

    def first(self, work: Callable[[], Result]) -> Result:
        """What a work returns that the first rank alone does; on all ranks.

        Raises
        ------
        RankError
            As `agree`.
        """
        if self.process_group is None:
            return work()
        return self._exchanged(work if self.rank == 0 else _nothing, share=self.rank == 0)[1]

    def _exchanged(self, work: Callable[[], Any], *, share: bool = False) -> tuple[Any, Any]:
        """Result of this rank, and the first rank's where that is shared."""
        result, failure, cause = None, "", None
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - the others wait, whatever it is
            words = " ".join(str(error).split())[:300] or type(error).__name__
            failure = words if isinstance(error, RankError) else f"rank {self.rank}: {words}"
            cause = error
        answers: list[Any] = [None] * self.size
        try:
            mine = (failure, result if share else None)
            dist.all_gather_object(answers, mine, group=self.process_group)
        except RuntimeError as error:
            raise RankError(failure or f"another rank is gone ({error})") from error
        for failed, _ in answers:
            if failed:
                raise RankError(failed) from cause
        return result, answers[0][1]


@cache
def host_group(group: ProcessGroup | None) -> HostGroup:
    """The `HostGroup` of the ranks of a group, made once; all of them call this together."""
    return HostGroup(group)


def _nothing() -> None:
    """The part of a rank that has none."""
