"""Every tensor in any nesting moves; everything else passes through."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from ampwise.data import leaves, to_device

# "meta" stands for an accelerator: a device that is not where the batch is.
META = torch.device("meta")


class Pair(NamedTuple):
    x: Tensor
    y: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Tensor
    name: str = "sample"


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: Tensor
    doubled: Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "doubled", self.x * 2)


class MovesItself:
    """Like a graph batch of another library: not a container, its `to` knows no non_blocking."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> MovesItself:
        return MovesItself(self.x.to(device))


def devices(batch: object) -> set[str]:
    return {tensor.device.type for _, tensor in leaves(batch)}


def test_nested_batch_moves_and_keeps_its_types():
    batch = {
        "image": torch.ones(2, 3),
        "pair": Pair(torch.zeros(1), [torch.zeros(2), None]),
        "frozen": (Frozen(torch.ones(4)), Slotted(torch.ones(1))),
        "text": "words",
        "count": 3,
    }
    moved = to_device(batch, META)
    assert devices(batch) == {"cpu"}, "the batch itself must stay as it was"
    assert devices(moved) == {"meta"}
    assert [path for path, _ in leaves(moved)] == [path for path, _ in leaves(batch)]
    assert type(moved["pair"]) is Pair
    assert type(moved["pair"].y) is list
    assert type(moved["frozen"][0]) is Frozen
    assert (moved["text"], moved["count"], moved["pair"].y[1]) == ("words", 3, None)
    assert moved["frozen"][0].name == "sample"


@pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict, MappingProxyType])
def test_mappings_of_all_kinds_move(kind):
    moved = to_device(kind({"x": torch.ones(2)}), META)
    assert moved["x"].device == META
    assert kind is MappingProxyType or type(moved) is kind


def test_a_mapping_keeps_what_else_it_carries():
    batch = defaultdict(list, x=torch.ones(2))
    moved = to_device(batch, META)
    assert moved["absent"] == []
    assert batch["x"].device.type == "cpu"


def test_what_moves_itself_does():
    assert to_device([MovesItself(torch.ones(2))], META)[0].x.device == META
    packed = to_device(pack_sequence([torch.ones(3), torch.ones(2)]), torch.device("cpu"))
    assert isinstance(packed, PackedSequence)


def test_a_type_error_inside_a_batchs_own_move_is_not_hidden():
    class Broken:
        def to(self, device, non_blocking=False):
            raise TypeError("broken on purpose")

    with pytest.raises(TypeError, match="broken on purpose"):
        to_device(Broken(), META)


def test_copies_to_the_host_are_waited_for():
    asked = []

    class Recorder:
        def to(self, device, non_blocking):
            asked.append((device.type, non_blocking))

    to_device([Recorder()], "cpu")
    to_device([Recorder()], "meta")
    assert asked == [("cpu", False), ("meta", True)]


def test_paths_of_leaves_are_how_one_writes_them():
    batch = {"a": [torch.ones(1), (torch.ones(2),)], "b": Frozen(torch.ones(3))}
    assert {path: len(tensor) for path, tensor in leaves(batch)} == {
        "batch['a'][0]": 1,
        "batch['a'][1][0]": 2,
        "batch['b'].x": 3,
    }
