"""Whose parameters a clip, a step or a backward is about."""

from __future__ import annotations

import re

from ampwise_lint.analysis import Trace
from ampwise_lint.values.abstract import (
    DictValue,
    Instance,
    ListValue,
    Model,
    Optimizer,
    Parameter,
    Parameters,
    Unknown,
    Value,
    key_of,
)
from ampwise_lint.values.contents import modules_in, origins
from ampwise_lint.values.events import Backward, Forward


def owners(value: Value | None) -> set[str]:
    """Whose parameters something holds; empty where that is not known."""
    match value:
        case Parameters(of=Optimizer() as optimizer):
            return owners(optimizer.params)
        case Parameters(of=owner) | Parameter(of=owner):
            return owners(owner) or _named(owner)
        case Optimizer(params=params):
            return owners(params)
        case ListValue(items=items):
            found = [owners(each) for each in items]
            return set().union(*found) if all(found) and found else set()
        case DictValue(items=items):
            return owners(items.get("params"))
        case Unknown() | None:
            return set()
        case Model(wrapped=str(kind), inner=Model() as inner) if kind:
            return owners(inner)
        case _:
            return _named(value)


def _named(value: Value) -> set[str]:
    key = key_of(value)
    return set() if ELEMENT.search(key) else {key}


ELEMENT = re.compile(r"^\w+ of .*#")
"""What a loop over something unknown yields: it may be what another such loop yields."""


def networks_in(trace: Trace, backward: Backward) -> set[str]:
    """The networks a backward goes through, as `owners` names them."""
    nodes = {id(each.node) for each in origins(backward.tensor)}
    return {key_of(each.model) for each in trace.of(Forward) if id(each.node) in nodes}


def same_owner(first: Value | None, second: Value | None) -> bool | None:
    """Whether two things hold parameters of the same network; None where that is not known."""
    one, other = owners(first), owners(second)
    if not one or not other:
        return None
    return any(_shares(mine, its) for mine in one for its in other)


def _shares(one: str, other: str) -> bool:
    """Whether two names are of one network, or of one and its part."""
    return is_within(one, other) or is_within(other, one)


def is_within(part: str, whole: str) -> bool:
    """Whether one name, as `owners` gives it, is of a network or a part of it."""
    return part == whole or part.startswith(f"{whole}.")


def is_part(network: Value, of: Value | None) -> bool:
    """Whether a network is a module of another, or of one that an optimizer's parameters are of."""
    match of:
        case Optimizer(params=inner) | Parameters(of=inner):
            return is_part(network, inner)
        case ListValue(items=items):
            return any(is_part(network, each) for each in items)
        case DictValue(items=items):
            return is_part(network, items.get("params"))
        case Model() | Unknown():
            is_named = key_of(network).startswith((f"{of.key}.", f"{of.key}["))
            return is_named or any(each is network for each in modules_in(of))
        case Instance():
            return key_of(network).startswith(f"{key_of(of)}.")
        case _:
            return False
