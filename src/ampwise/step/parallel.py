"""The processes that train together: one, or several ranks, with the same verbs.

A step says what happens (a forward begins, a backward is over, the window closes); what that means
for other ranks is decided here. `OneRank` has none, and does nothing.
"""

from __future__ import annotations

import atexit
import json
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ampwise.distributed.checksum import Compared
from ampwise.distributed.consensus import Consensus
from ampwise.distributed.launch import is_lost
from ampwise.distributed.layout import GradientSync, group_of
from ampwise.distributed.watch import Unwatched, Watch, forward_waits
from ampwise.errors import LostRankError, kind_and_words
from ampwise.step import gradients as grads
from ampwise.step.guard import Guard
from ampwise.step.host import HostFlag, Outcomes
from ampwise.step.loss_scale import LossScale
from ampwise.step.warn import users_line, warn_user
from ampwise.step.window import Weight, Window

_LAST_WORDS_S = 2.0
"""How long a rank that lost another waits for what that one said."""


_NOBODY = nullcontext()


class OneRank:
    """A process that trains by itself.

    Attributes
    ----------
    rank, size
        Its number, and how many train together.
    group
        Their process group; None for one.
    shards
        Whether parameters are gathered for forward and backward, as under FSDP2.
    stopping
        Whether somebody asked to stop.
    owes
        Whether gradients wait to be summed over ranks, since the window is not over.
    """

    rank = 0
    size = 1
    group: ProcessGroup | None = None
    shards = False

    def __init__(self) -> None:
        self.stopping = False
        self.owes = False

    @property
    def slow_rank(self) -> str | None:
        """The rank that keeps the others waiting, in words."""
        return None

    def ask_to_stop(self) -> None:
        """Have `stopping` become true, on all ranks at the same step."""
        self.stopping = True

    def first_weight(self, weight: Weight) -> Weight:
        """What the weights of windows are relative to: this one, or the mean over ranks."""
        return weight

    def collecting(
        self,
        last: bool,  # noqa: ARG002 - one rank has nothing to sum
        again: Callable[[], object],  # noqa: ARG002
    ) -> AbstractContextManager[None]:
        """Context of a micro-batch, whose backward sums over ranks if it is the window's last.

        `again` runs it once more in such a way that it counts nothing.
        """
        return _NOBODY

    def sum_rest(self) -> None:
        """Sum what was only collected, since no micro-batch turned out to be the last."""

    def drop_rest(self) -> None:
        """Forget it."""

    def begin_forward(self) -> None:
        """A forward begins."""

    def end_forward(self) -> None:
        """Forward and loss are over."""

    def end_backward(self) -> None:
        """A backward is over."""

    def agree(self, guard: Guard, window: Window) -> None:
        """Have all ranks decide by the same norm, shares and losses."""

    def mean(self, value: Tensor) -> Tensor:
        """The mean over ranks of a scalar."""
        return value

    def close(self, steps: int, loss_scale: LossScale) -> None:
        """The window is over, and its step made or skipped."""

    def apart(self) -> AbstractContextManager[None]:
        """Context: this process by itself, for replays."""
        return nullcontext()

    def telling(self) -> AbstractContextManager[None]:
        """Context: an error inside is told to the others, and theirs are told here."""
        return _NOBODY


class Ranks(OneRank):
    """Several ranks that train one model.

    Parameters
    ----------
    models
        As they are trained, wrapped in DDP or sharded.
    group
        Their process group.
    device
        Where their parameters are.
    watch_every
        Steps between two comparisons of the ranks with each other; 0 compares nothing.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        group: ProcessGroup,
        device: torch.device,
        watch_every: int,
    ) -> None:
        super().__init__()
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._device = device
        self._consensus = Consensus(group, device)
        self._sync = GradientSync(models)
        self.shards = self._sync.shards
        self._again: Callable[[], object] | None = None
        self._has_told = False
        self._stop_flag: HostFlag | None = None
        self._stops = Outcomes(device)
        self._watch = Unwatched()
        if watch_every:
            waits = forward_waits(models)
            compared = Compared(models, device)
            self._watch = Watch(group, device, watch_every, compared, forward_waits=waits)
        _finish_threads()

    @property
    def slow_rank(self) -> str | None:
        """The rank that keeps the others waiting, in words, the same on all; None if none does."""
        return self._watch.slow_rank

    def ask_to_stop(self) -> None:
        """Have `stopping` become true, on all ranks at the same step."""
        self._consensus.stop_wanted = True

    def first_weight(self, weight: Weight) -> Weight:
        """The mean over ranks; a number (0 where all weigh nothing), for one host sync a run."""
        return float(self._consensus.mean(weight))

    @contextmanager
    def collecting(self, last: bool, again: Callable[[], object]) -> Generator[None]:
        """Context of a micro-batch: only the window's last sums over ranks."""
        self.owes, self._again = not last, None if last else again
        self._sync.switch(last)
        try:
            yield
        finally:
            self._sync.switch(True)

    def sum_rest(self) -> None:
        """Sum by a micro-batch that counts nothing.

        DDP and FSDP2 sum in backward only, and every rank must take part in the same way.
        """
        if self._again is not None:
            again = self._again
            self.drop_rest()
            again()

    def drop_rest(self) -> None:
        """Forget what was only collected."""
        self.owes, self._again = False, None

    def begin_forward(self) -> None:
        """A forward begins."""
        self._watch.begin_forward()

    def end_forward(self) -> None:
        """Forward and loss are over."""
        self._watch.end_forward()

    def end_backward(self) -> None:
        """A backward is over."""
        self._watch.end_backward()

    def agree(self, guard: Guard, window: Window) -> None:
        """Sum over ranks what they decide by, in one small all-reduce."""
        squares = grads.square(grads.spread_of(guard.optimizers, self.size), self._device)
        row = self._consensus.sums(squares, window.share, window.loss_sum)
        norm, bad, shares, losses, stops = row.unbind()
        # A window in which nothing counts has no gradient: it is skipped, like one that is NaN.
        guard.agree(torch.where((bad > 0) | ~(shares > 0), torch.inf, norm.sqrt()))
        window.agree((shares / self.size).float(), (losses / self.size).float())
        self._stop_flag = HostFlag((stops > 0).float())

    def mean(self, value: Tensor) -> Tensor:
        """The mean over ranks of a scalar."""
        return self._consensus.mean(value).float()

    def close(self, steps: int, loss_scale: LossScale) -> None:
        """Compare ranks now and then, and say once which keeps the others waiting."""
        assert self._stop_flag is not None
        self.stopping |= any(self._stops.settle(self._stop_flag))
        said = self._watch.slow_rank
        self._watch.close(steps, loss_scale.fingerprint)
        slow = self._watch.slow_rank
        if slow is not None and slow != said and not self.rank:
            warn_user(slow)

    def apart(self) -> AbstractContextManager[None]:
        """Context: each rank by itself; what is in DDP, wherever it is, sums nothing."""
        return self._sync.apart()

    @contextmanager
    def telling(self) -> Generator[None]:
        """Context: an error of this rank alone is told to the others, and theirs are told here.

        Raises
        ------
        LostRankError
            When another rank has failed, in words that name it, instead of the broken connection
            that shows of it here.
        """
        try:
            yield
        except Exception as error:
            if not is_lost(error):
                self._tell(error)
            elif (words := self._told()) is not None:
                raise words from error
            raise
        if self._has_told:  # and has met the others again since
            self._has_told = False
            _store().delete_key(f"{self.rank}")

    def _tell(self, error: Exception) -> None:
        words = {"error": kind_and_words(error), "line": users_line(error.__traceback__)}
        try:
            _store().set(f"{self.rank}", json.dumps(words))
        except RuntimeError:  # the store is gone, and whoever would ask it
            return
        self._has_told = True

    def _told(self) -> LostRankError | None:
        """The error that names the ranks that failed by themselves; None if nothing is known."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        until = time.monotonic() + _LAST_WORDS_S
        failed: list[int] = []
        try:
            store = _store()
            while not failed and time.monotonic() < until:
                failed = [rank for rank in others if store.check([f"{rank}"])]
                time.sleep(0.02)
            if not failed:
                return None
            words = json.loads(store.get(f"{failed[0]}"))
        except RuntimeError:
            return None
        where = f" at {words['line']}" if words["line"] else ""
        return LostRankError(
            f"rank {failed[0]} failed{where}: {words['error']}; this rank, {self.rank}, cannot go "
            "on without it",
            failed,
        )


def parallel_of(models: Sequence[nn.Module], device: torch.device, watch_every: int) -> OneRank:
    """The ranks that train some models together, as they are wrapped or sharded."""
    group = group_of(models)
    return OneRank() if group is None else Ranks(models, group, device, watch_every)


def _store() -> Any:
    """Where ranks leave last words."""
    from torch.distributed import distributed_c10d as c10d

    store: Any = dist.PrefixStore("ampwise/failed", c10d._get_default_store())
    store.set_timeout(timedelta(seconds=_LAST_WORDS_S))
    return store


@cache
def _finish_threads() -> None:
    """At exit, let gloo's threads drop what the last collectives held.

    They need the interpreter's lock for it (a collective of a backward keeps Python objects of that
    backward). One that asks for it while the interpreter ends aborts the process ("terminate called
    without an active exception"), in torch 2.13 with plain DDP, too. Sleeping hands the lock over.
    """
    atexit.register(time.sleep, 0.02)
