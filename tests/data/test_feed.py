"""Batches come in order, and waiting for a slow loader is noticed."""

from __future__ import annotations

import time
import traceback

import pytest
import torch

from ampwise.data import Feed
from ampwise.data.feed import SLOW_LOADER, slow_loader

CPU = torch.device("cpu")


def loader(count: int, wait_s: float = 0.0):
    for index in range(count):
        time.sleep(wait_s)
        yield {"x": torch.full((2,), float(index))}


def consume(feed: Feed, work_s: float) -> list[float]:
    values = []
    for batch in feed:
        values.append(batch["x"][0].item())
        time.sleep(work_s)
    return values


def test_all_batches_arrive_in_order():
    assert consume(Feed(loader(5), CPU), 0.0) == [0, 1, 2, 3, 4]
    assert consume(Feed([], CPU), 0.0) == []


def test_a_slow_loader_is_noticed():
    feed = Feed(loader(10, wait_s=0.02), CPU)
    consume(feed, work_s=0.01)
    assert feed.wait_s >= 10 * 0.02
    # 2/3 by construction; a busy machine stretches both sleeps alike
    assert 0.4 < feed.wait_fraction < 0.9


def test_a_loader_that_keeps_up_is_not_blamed():
    feed = Feed(loader(10), CPU)
    consume(feed, work_s=0.02)
    assert feed.wait_fraction < SLOW_LOADER


def test_what_is_said_about_a_slow_loader():
    said = slow_loader(0.38)
    assert said.startswith("the device waited 38% of the time for data")
    assert "num_workers" in said


def test_a_loaders_error_keeps_its_traceback():
    def broken():
        yield torch.ones(1)
        raise KeyError("image_17")

    received = []
    with pytest.raises(KeyError, match="image_17") as raised:
        for batch in Feed(broken(), CPU):
            received.append(batch)
    assert len(received) == 1
    assert traceback.extract_tb(raised.value.__traceback__)[-1].name == "broken"


def test_leaving_early_closes_the_loader():
    closed = []

    def endless():
        try:
            while True:
                yield torch.ones(1)
        finally:
            closed.append(True)

    for _ in Feed(endless(), CPU):
        break
    assert closed == [True]


def test_batches_may_be_iterated_again():
    feed = Feed([torch.ones(1), torch.ones(1)], CPU)
    assert len(list(feed)) == len(list(feed)) == 2
