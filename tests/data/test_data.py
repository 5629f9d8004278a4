"""Moving batches of any shape, and noticing that they come too slowly."""

from __future__ import annotations

import time
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

from ampwise.data import Feed, leaves, to_device
from ampwise.data.feed import slow_loader

META = torch.device("meta")


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclass(frozen=True)
class Record:
    image: torch.Tensor
    name: str


class Moves:
    """Moves itself, as a tokenizer's output does."""

    def __init__(self, device="cpu") -> None:
        self.device = device

    def to(self, device, non_blocking=False):
        return Moves(device)


def test_every_nesting_is_moved_and_keeps_its_types():
    x = torch.ones(2)
    extra = defaultdict(list, {"a": x})
    batch = {
        "list": [x, (x, 3)],
        "pair": Pair(x, x),
        "record": Record(x, "cat"),
        "ordered": OrderedDict(a=x),
        "extra": extra,
        "moves": Moves(),
        "none": None,
        "text": "as it is",
    }
    moved = to_device(batch, META)
    assert all(tensor.device == META for _, tensor in leaves(moved))
    assert type(moved["pair"]) is Pair
    assert moved["record"].name == "cat"
    assert type(moved["ordered"]) is OrderedDict
    assert moved["extra"]["new"] == []
    assert moved["moves"].device == META
    assert (moved["none"], moved["text"], moved["list"][1][1]) == (None, "as it is", 3)
    assert batch["pair"].x.device.type == "cpu"


def test_leaves_have_paths():
    batch = {"a": [torch.ones(1), Record(torch.ones(2), "x")], "b": (torch.ones(3),)}
    assert [path for path, _ in leaves(batch)] == [
        "batch['a'][0]",
        "batch['a'][1].image",
        "batch['b'][0]",
    ]


def test_feed_gives_every_batch_in_order():
    batches = [torch.full((1,), float(index)) for index in range(5)]
    assert [int(each) for each in Feed(batches, torch.device("cpu"))] == [0, 1, 2, 3, 4]


def test_a_slow_loader_is_measured():
    def slowly():
        for _ in range(5):
            time.sleep(0.04)
            yield torch.ones(1)

    feed = Feed(slowly(), torch.device("cpu"))
    for _ in feed:
        time.sleep(0.01)
    assert 0.5 < feed.wait_fraction < 1
    quick = Feed([torch.ones(1)] * 5, torch.device("cpu"))
    for _ in quick:
        time.sleep(0.02)
    assert quick.wait_fraction < 0.2
    assert slow_loader(0.38).startswith("the device waited 38% of the time for data")


def test_a_loaders_error_comes_through():
    def broken():
        yield torch.ones(1)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        list(Feed(broken(), torch.device("cpu")))
