"""One answer for all ranks: that of the first one whose own part of the window is at fault.

Gradients are summed over ranks, so after a backward all of them are bad wherever it came from. Each
rank therefore replays its own micro-batches by itself, without summing, and they compare notes.
Where forward or loss contain collectives, all ranks replay them together, each as often as the
others. The parts of a model under FSDP2 cannot be run by one rank alone; then what a rank was
given, and the loss that came of it, is all there is to go by.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from ampwise.data import leaves
from ampwise.distributed.host_group import HostGroup, beside
from ampwise.numerics.examine import Examiner
from ampwise.numerics.result import Diagnosis
from ampwise.step.compiled import eager
from ampwise.step.recorder import Stash, finite
from ampwise.step.replayable import Replayable

_ALIKE_S = 10.0
"""How long a rank whose step raised waits for others whose steps do, too."""

_WORST_FIRST = ("fault", "benign", "not_reproduced", "clean")


def examined(
    examiner: Examiner, stash: Stash, alone: Callable[[], Diagnosis | None]
) -> Diagnosis | None:
    """Why a window was skipped, the same on all ranks.

    Parameters
    ----------
    alone
        Examines this rank's part of it, by replays that no other rank takes part in.
    """
    step = examiner.step
    if step.ranks == 1:
        return alone()
    if not step.can_replay:
        mine = by_what_went_in(examiner.empty(stash), stash)
    elif talks(step, stash):
        mine = examiner.together(stash, HostGroup(step.group))
    else:
        mine = alone()
    return first_at_fault(mine, step.group)


def talks(step: Replayable, stash: Stash) -> bool:
    """Whether a window has collectives in it beside those of DDP; all ranks replay it to see.

    A loss that gathers over ranks has, and so has SyncBatchNorm.
    """
    collectives = _replayed(step, stash, _Collectives())
    return any(HostGroup(step.group).all(lambda: collectives.seen))


def would_talk(step: Replayable, stash: Stash) -> bool:
    """The same of this rank by itself: none of them is begun, as nobody else takes part."""
    return _replayed(step, stash, _Collectives(refuse=True)).seen


def _replayed(step: Replayable, stash: Stash, collectives: _Collectives) -> _Collectives:
    @contextmanager
    def around() -> Generator[None]:
        with eager(step.models), collectives:
            yield

    step.replay(stash, around=around)
    return collectives


class _RefusedError(Exception):
    """A collective that nobody else would take part in."""


class _Collectives(TorchDispatchMode):
    """Sees whether there are any; refuses them, if it is to."""

    def __init__(self, *, refuse: bool = False) -> None:
        super().__init__()
        self.seen = False
        self._refuse = refuse

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.seen = True
            if self._refuse:
                raise _RefusedError
        return func(*args, **(kwargs or {}))


def first_at_fault(mine: Diagnosis | None, group: ProcessGroup | None) -> Diagnosis | None:
    """The same diagnosis on all ranks: of those that found a fault, the first one's."""
    answers = HostGroup(group).all(lambda: mine)
    if len(answers) == 1:
        return mine
    known = [(rank, each) for rank, each in enumerate(answers) if each is not None]
    if not known:
        return None
    rank, found = min(known, key=lambda pair: (_WORST_FIRST.index(pair[1].status), pair[0]))
    if found.status != "fault":
        return found
    faulty = [other for other, each in known if each.status == "fault"]
    found.rank = rank
    found.explanation = f"On rank {found.rank} of {len(answers)}: {found.explanation}"
    if also := faulty[1:]:
        found.notes.append(f"The same on rank {', '.join(map(str, also))}; rank {rank} is shown.")
    else:
        found.notes.append("The other ranks' parts of this step are finite by themselves.")
    return found


def all_raised(step: Replayable) -> bool:
    """Whether the steps of all ranks raised; else the others wait for this one in a collective."""
    if step.ranks == 1:
        return True
    met: Any = dist.barrier(beside(step.group).process_group, async_op=True)
    try:
        met.wait(timedelta(seconds=_ALIKE_S))
    except RuntimeError:
        return False
    return True


def by_what_went_in(found: Diagnosis, stash: Stash) -> Diagnosis | None:
    """Whether this rank is at fault, as far as its batches and losses show; None if they do not.

    `found` is filled in and returned.
    """
    for index, each in enumerate(stash.micro_batches):
        bad = [path for path, tensor in leaves(each.batch) if not finite(tensor)]
        if bad:
            found.status, found.phase, found.cause = "fault", "data", "BAD_INPUT"
            found.explanation = (
                f"{', '.join(bad)} of micro-batch {index} holds inf or NaN. Leave out or mend that "
                "data; no precision can train on it."
            )
            return found
    for index, loss in enumerate(stash.losses):
        if not finite(loss):
            found.status, found.phase = "fault", "forward"
            found.explanation = (
                f"The loss of micro-batch {index} is {float(loss)} although its batch is finite. "
                "FSDP2's parts of a model cannot be replayed by one rank alone: ampwise diagnose "
                "in one process, or under torchrun with DDP, finds the operation."
            )
            return found
    return None
