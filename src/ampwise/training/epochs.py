"""Where a run is in its data, and which batches come next.

To resume, an epoch is begun again from the random state it began with (a shuffling loader draws the
same order), the batches that were already used are skipped, and the generators are set to what they
were at the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ampwise.distributed.host_group import everyone
from ampwise.distributed.launch import Launch
from ampwise.tasks import Task
from ampwise.tasks.checks import trained_on, user_code
from ampwise.training.random_state import random_state, set_random_state
from ampwise.training.share import DataRandom, Turn, turns, whole_turns
from ampwise_lint.base.words import counted


@dataclass
class Position:
    """Where a run is in its data.

    Attributes
    ----------
    epoch
        Epochs begun, from 0.
    batch
        Batches of the epoch already trained on.
    epoch_rng
        Random state when the epoch began, from which a shuffling loader draws its order.
    samples
        Samples in those batches, of all ranks, as the task counts them.
    """

    epoch: int = 0
    batch: int = 0
    epoch_rng: dict[str, Any] | None = None
    samples: int = 0


class Epochs:
    """The epochs of a task's batches, one after the other; with several processes, a share of them.

    Parameters
    ----------
    task
        Whose batches they are.
    me
        Which process of how many this is.
    whole
        Whether only turns in which every rank has a batch are wanted.
    say
        Told where batches are trained on again.

    Attributes
    ----------
    position
        Where the run is; batches count as they are passed, samples when they are counted.
    reseeded
        Whether the next epoch is of another seed than the current one.
    """

    def __init__(
        self, task: Task, me: Launch, *, whole: bool, say: Callable[[str], object]
    ) -> None:
        self.position = Position()
        self.reseeded = False
        self._task, self._me, self._whole, self._say = task, me, whole, say
        self._data = DataRandom()
        self._own_samples = 0  # since `position` was last told
        self._resumed: dict[str, Any] | None = None  # random state at the checkpoint

    def resume(self, position: Position, rng: dict[str, Any]) -> None:
        """Go on from a checkpoint's position and random state."""
        self.position, self._resumed = position, rng

    def rest(self) -> Iterator[Turn]:
        """The rest of the current epoch; with several processes, the share of this one."""
        if self._me.size > 1:
            yield from self._shared()
            return
        yield from (Turn(batch, counts=True, last=False) for batch in self._batches())

    def used(self, samples: int) -> None:
        """A batch of this process, of so many samples, has been trained on."""
        self._own_samples += samples

    def passed(self) -> None:
        """A turn of all ranks is over."""
        self.position.batch += self._me.size

    def count_samples(self) -> None:
        """Take into the position what all ranks have trained on since it was last told."""
        self.position.samples += sum(everyone().all(lambda: self._own_samples))
        self._own_samples = 0

    def end(self) -> None:
        """The epoch is over: be at the start of the next."""
        # Data of several ranks draws from a random state of its own, which goes on from here.
        drawn = None if self._me.size == 1 else self._data.draw(random_state)
        self.position = Position(epoch=self.position.epoch + 1, epoch_rng=drawn)
        self._own_samples = 0

    def _batches(self) -> Iterator[Any]:
        """The rest of the epoch for one process, from where the run is in it."""
        resumed, self._resumed = self._resumed, None
        if self.position.batch and self.position.epoch_rng is not None:
            set_random_state(self.position.epoch_rng)
        else:
            self.position.epoch_rng = random_state()
        batches = trained_on(self._task.batches)
        next(islice(batches, self.position.batch, self.position.batch), None)  # skipped
        if resumed is not None:
            set_random_state(resumed)
        yield from batches

    def _shared(self) -> Iterator[Turn]:
        """The rest of the epoch for one of several processes."""
        data, position = self._data, self.position
        if position.epoch_rng is not None:
            data = DataRandom() if self.reseeded else data  # the next epoch is of the new seed
            began = {**position.epoch_rng, "cuda": []}  # the model's own
            data.draw(lambda: set_random_state(began))
        else:
            position.epoch_rng = data.draw(random_state)
        skip, rest = divmod(position.batch, self._me.size)
        if rest:
            batches = counted(rest, "batch", "batches")
            self._say(f"trained on again: {batches}, too few for a turn of all ranks")
            position.samples -= position.samples * rest // position.batch
            position.batch -= rest
        with user_code("the task's batches()"):
            dealt = turns(self._task.batches, self._me.rank, self._me.size, data, skip)
            yield from whole_turns(dealt, begins=not skip) if self._whole else dealt
