"""Each rank's share of an epoch, one rank after the other in this process."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from ampwise.training.share import DataRandom, Turn, turns, whole_batches


class Numbers(Dataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def dealt(epoch: Callable[[], Iterable[Any]], size: int, skip: int = 0) -> list[list[Turn]]:
    """What each rank gets, dropout drawing other random numbers on each of them."""
    torch.manual_seed(0)
    random.seed(0)
    state = DataRandom().state
    found: list[list[Turn]] = []
    for rank in range(size):
        torch.manual_seed(100 + rank)
        mine: list[Turn] = []
        for turn in turns(epoch, rank, size, DataRandom(state), skip):
            torch.rand(3 + rank)
            random.random()
            mine.append(turn)
        found.append(mine)
    return found


def values(batch: Any) -> list[int]:
    return batch.tolist() if isinstance(batch, torch.Tensor) else [batch]


def shuffled() -> Iterator[int]:
    """A task that draws its data as it goes."""
    for _ in range(7):
        yield random.randrange(1000) + int(torch.randint(0, 1000, ())) * 1000


EPOCHS: dict[str, Callable[[], Iterable[Any]]] = {
    "list": lambda: list(range(7)),
    "drawn": shuffled,
    "loader": lambda: DataLoader(Numbers(14), batch_size=2, shuffle=True),
    "short last": lambda: DataLoader(Numbers(13), batch_size=2, shuffle=True),
    "workers": lambda: DataLoader(Numbers(14), batch_size=2, shuffle=True, num_workers=1),
    "stream": lambda: DataLoader(Stream(), batch_size=2),
}


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("kind", EPOCHS)
def test_each_batch_goes_to_one_rank_in_the_order_of_one_process(kind: str, size: int) -> None:
    if kind == "workers" and size > 2:
        pytest.skip("starts processes")
    torch.manual_seed(0)
    random.seed(0)
    alone = [values(batch) for batch in EPOCHS[kind]()]
    ranks = dealt(EPOCHS[kind], size)
    assert len({len(mine) for mine in ranks}) == 1
    in_turn = [mine[index] for index in range(len(ranks[0])) for mine in ranks]
    assert [values(turn.batch) for turn in in_turn if turn.counts] == alone
    for mine in ranks:
        assert [turn.last for turn in mine] == [False] * (len(mine) - 1) + [True]
    for spare in (turn for turn in in_turn if not turn.counts):
        assert values(spare.batch) in alone


def test_a_resumed_epoch_leaves_out_turns_and_goes_on_the_same() -> None:
    for kind in ("list", "drawn", "loader"):
        whole, rest = dealt(EPOCHS[kind], 2), dealt(EPOCHS[kind], 2, skip=2)
        for all_of_it, end in zip(whole, rest, strict=True):
            assert [values(e.batch) for e in end] == [values(e.batch) for e in all_of_it[2:]]


def test_a_loader_reads_only_what_this_rank_needs() -> None:
    data = Numbers(12)
    list(turns(lambda: DataLoader(data, batch_size=2), 1, 3, DataRandom()))
    assert data.read == [2, 3, 8, 9]


def test_data_that_is_dealt_out_already_is_taken_as_it_is() -> None:
    def epoch() -> DataLoader[int]:
        data = Numbers(8)
        return DataLoader(data, batch_size=2, sampler=DistributedSampler(data, 2, 1, shuffle=False))

    mine = list(turns(epoch, 1, 2, DataRandom()))
    assert [values(turn.batch) for turn in mine] == [[1, 3], [5, 7]]
    assert all(turn.counts for turn in mine)


def test_what_data_draws_does_not_show_outside() -> None:
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    source = DataRandom()
    source.draw(lambda: torch.rand(100))
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize(
    ("samples", "expected"), [(0, (0, 0)), (7, (1, 4)), (8, (2, 8)), (12, (3, 12)), (99, (4, 14))]
)
def test_whole_batches_hold_no_more_than_so_many_samples(
    samples: int, expected: tuple[int, int]
) -> None:
    loader = DataLoader(Numbers(14), batch_size=4)
    assert whole_batches(lambda: loader, samples, 2, len) == expected


def test_whole_batches_of_data_that_is_dealt_out_are_those_of_all_ranks() -> None:
    data = Numbers(16)
    loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, 2, 1, shuffle=False))
    assert whole_batches(lambda: loader, 11, 2, len) == (4, 8)
