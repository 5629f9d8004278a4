"""How processes find those of their own start in a store that outlives them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from ampwise.distributed.launch import Launch, _name_of_start, joined
from ampwise.errors import UsageError

SIZE = 3


@pytest.fixture
def store() -> dist.TCPStore:
    """As an agent keeps it."""
    return dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5)
    )


@pytest.fixture
def begin(store: dist.TCPStore) -> Iterator[Callable[[int], Future[str]]]:
    """Starts a rank; the name it finds."""
    with ThreadPoolExecutor() as threads:
        yield lambda rank: threads.submit(_name_of_start, store.clone(), Launch(rank, SIZE), 5.0)


def test_each_start_has_a_name_of_its_own_on_all_ranks(begin) -> None:
    names: list[str] = []
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1)):
        ranks = [begin(rank) for rank in order]
        (name,) = {each.result() for each in ranks}
        names.append(name)
    assert len(set(names)) == len(names)


def test_what_a_start_left_that_did_not_come_to_its_end_is_nobodys(begin, store) -> None:
    store.set("first", "dead")
    waiting = [begin(1), begin(2)]  # they name themselves to the dead
    for rank in (1, 2):
        store.get(f"dead/{rank}")
    assert not any(each.done() for each in waiting)
    name = begin(0).result()
    assert {each.result() for each in waiting} == {name} != {"dead"}


def test_processes_that_stay_alone_say_so(store, monkeypatch) -> None:
    told = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    expected = r"rank 0: the 2 processes did not meet \(not all came within 0.1 s\); start all of"
    with pytest.raises(UsageError, match=expected), joined(Launch(0, 2), "cpu", 0.1):
        pass
