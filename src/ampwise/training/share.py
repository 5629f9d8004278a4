"""Each rank's share of the data: the batches of an epoch are dealt out in turns.

With R ranks the task's batches are taken R at a time, and rank r trains on the r-th of them; so one
step of all ranks is over the same samples as a window of R batches in one process. In the last turn
of an epoch there may be fewer: ranks without one take the turn's first batch again, and it counts
nothing. So all ranks make the same steps, which DDP and FSDP2 need.

The order of the data must be the same on all ranks, while dropout should not be. So whatever the
task's batches draw at random comes from a random state of its own, that starts the same everywhere.

A `DataLoader` over a dataset that can be indexed is asked for this rank's batches only, and what
the dataset draws (augmentation) is the rank's own; of any other iterable each rank reads all and
leaves out those of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from ampwise.errors import TaskError
from ampwise.step.recorder import RandomState
from ampwise.tasks.checks import empty_epoch

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Turn:
    """A batch of this rank.

    Attributes
    ----------
    counts
        Whether it is its own; one that is not weighs nothing.
    last
        Whether the epoch ends with it.
    whole
        Whether every rank has one of its own in this turn.
    """

    batch: Any
    counts: bool
    last: bool
    whole: bool = True


class DataRandom:
    """A random state that only data is drawn from.

    Attributes
    ----------
    state
        State of the generators of Python, NumPy and torch (CPU).
    """

    def __init__(self, state: RandomState | None = None) -> None:
        self.state = state or RandomState.now(_CPU)

    def draw(self, make: Callable[[], Any]) -> Any:
        """What `make` returns, its random numbers taken from here."""
        outside = RandomState.now(_CPU)
        self.state.restore(_CPU)
        try:
            return make()
        finally:
            self.state = RandomState.now(_CPU)
            outside.restore(_CPU)


def turns(
    epoch: Callable[[], Iterable[Any]], rank: int, size: int, source: DataRandom, skip: int = 0
) -> Iterator[Turn]:
    """The batches of an epoch that this rank trains on.

    Parameters
    ----------
    epoch
        Starts an epoch.
    source
        The random state its data comes from; the same on all ranks.
    skip
        Turns to leave out, for a run that is resumed.

    Raises
    ------
    TaskError
        For an epoch without a batch.
    """
    batches: Any = source.draw(epoch)
    if isinstance(batches, DataLoader) and _can_be_dealt(batches):
        order, seed = source.draw(lambda: _order(batches))
        groups = [order[start : start + size] for start in range(0, len(order), size)][skip:]
        if not order and not skip:
            raise empty_epoch()
        mine = [group[rank] if rank < len(group) else group[0] for group in groups]
        loaded = iter(_with_order(batches, mine, seed + rank))
        for index, group in enumerate(groups):
            last, whole = index == len(groups) - 1, len(group) == size
            yield Turn(next(loaded), rank < len(group), last, whole)
        return
    rest: Iterator[Any] = source.draw(lambda: iter(batches))
    width, mine_at = (1, 0) if _is_dealt(batches) else (size, rank)

    def next_group() -> list[Any]:
        return source.draw(lambda: list(islice(rest, width)))

    for _ in range(skip):
        if not next_group():
            break
    held = next_group()
    if not held and not skip:
        raise empty_epoch()
    while held:
        following = next_group()
        counts = mine_at < len(held)
        yield Turn(held[mine_at if counts else 0], counts, not following, len(held) == width)
        held = following


def whole_turns(dealt: Iterable[Turn], *, begins: bool) -> Iterator[Turn]:
    """The turns in which every rank has a batch: for iterations, which weigh losses by themselves.

    Parameters
    ----------
    begins
        Whether they are those of a whole epoch, of which there has to be one.

    Raises
    ------
    TaskError
        When there is none.
    """
    for turn in dealt:
        if turn.whole:
            begins = False
            yield turn
    if begins:
        raise TaskError(
            "task batches() gave fewer batches than there are ranks: expected at least one for "
            "each, as a task's iteration cannot count a batch as nothing"
        )


def whole_batches(
    epoch: Callable[[], Iterable[Any]], samples: int, size: int, samples_in: Callable[[Any], int]
) -> tuple[int, int]:
    """How many batches at the start of an epoch hold at most so many samples; how many they hold.

    Parameters
    ----------
    epoch
        Starts an epoch.
    samples
        How many there may be.
    size
        Number of ranks: where each has data of its own, it has as many batches as this one.
    samples_in
        How many are in a batch.
    """
    batches, number, held = epoch(), 0, 0
    ranks = size if _is_dealt(batches) else 1
    for batch in batches:
        more = ranks * samples_in(batch)
        if held + more > samples:
            break
        number, held = number + ranks, held + more
    return number, held


def _is_dealt(batches: Any) -> bool:
    """Whether each rank gets batches of its own already."""
    return isinstance(batches, DataLoader) and isinstance(batches.sampler, DistributedSampler)


def _can_be_dealt(loader: DataLoader[Any]) -> bool:
    try:
        len(loader)
    except TypeError:  # a sampler without end
        return False
    return (
        type(loader).__iter__ is DataLoader.__iter__
        and loader.batch_sampler is not None
        and not isinstance(loader.dataset, IterableDataset)
        and not _is_dealt(loader)
    )


def _order(loader: DataLoader[Any]) -> tuple[list[Any], int]:
    """The indices of an epoch's batches, and the seed of its workers, as one process draws them."""
    seed = int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item())
    assert loader.batch_sampler is not None
    return list(loader.batch_sampler), seed


def _with_order(loader: DataLoader[Any], order: list[Any], seed: int) -> DataLoader[Any]:
    """The same loader over batches given by their indices; its workers draw from this seed."""
    generator = torch.Generator().manual_seed(seed)
    names = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn")
    settings = {name: getattr(loader, name) for name in names}
    if loader.num_workers:
        settings |= {
            "multiprocessing_context": loader.multiprocessing_context,
            "prefetch_factor": loader.prefetch_factor,
        }
    return DataLoader(loader.dataset, batch_sampler=order, generator=generator, **settings)
