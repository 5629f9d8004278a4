"""Which way a condition goes on a path, as far as the code and the path's oracle tell."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ampwise_lint.path.oracle import PRECISION
from ampwise_lint.path.state import State
from ampwise_lint.source import library
from ampwise_lint.values.abstract import (
    Const,
    ListValue,
    Model,
    Optimizer,
    Scaler,
    Scheduler,
    Unknown,
    Value,
    key_of,
    truth,
)


def decide(state: State, value: Value, default: bool = True) -> bool:
    """Whether a condition holds on this path."""
    if isinstance(value, Unknown):
        return _decide_unknown(state, value, default)
    if is_known(value):
        return bool(truth(value))
    if isinstance(value, Scaler | Optimizer | Scheduler | Model):
        return _ask(state, f"has {value.key}", True)
    key = key_of(value)
    return _ask(state, key, default and not any(each in key for each in ("nan", "inf")))


def settled(state: State, value: Value) -> bool | None:
    """Which way a condition has gone on this path already; None where it was not asked for."""
    if isinstance(value, Scaler | Optimizer | Scheduler | Model):
        return state.oracle.decided.get(f"has {value.key}")
    if not isinstance(value, Unknown):
        return None
    match value.op:
        case "not":
            inner = settled(state, value.operands[0])
            return None if inner is None else not inner
        case "and" | "or":
            decisive = value.op == "or"
            parts = [settled(state, each) for each in value.operands]
            if decisive in parts:
                return decisive
            return None if None in parts else not decisive
        case _:
            return state.oracle.decided.get(value.key)


def _decide_unknown(state: State, value: Unknown, default: bool) -> bool:
    match value.op:
        case "not":
            return not decide(state, value.operands[0], not default)
        case "and":
            return all(decide(state, each, default) for each in value.operands)
        case "or":
            return any(decide(state, each, default) for each in value.operands)
        case "%":  # a remainder is false once in a window
            return not _ask(state, f"({value.key} Eq 0)", state.micro_batch > 0)
        case "Eq":
            return _equals(state, value, default)
        case "In" if isinstance(value.operands[1], ListValue):
            return _is_among(state, value, value.operands[1], default)
        case _:
            return _ask(state, value.key, _default(state, value, default))


def _ask(state: State, key: str, default: bool) -> bool:
    return state.oracle.ask(key, default, own=state.here is state.module)


def _default(state: State, value: Unknown, default: bool) -> bool:
    """What holds once in a window holds on its last micro-batch; a GPU is there."""
    if value.key.endswith("is_available()"):
        return True
    return state.micro_batch > 0 if value.periodic else default


def is_known(value: Value) -> bool:
    """Whether a condition can go one way only."""
    if isinstance(value, Unknown):
        match value.op:
            case "not":
                return is_known(value.operands[0])
            case "and" | "or":
                return all(map(is_known, value.operands))
            case _:
                return False
    if isinstance(value, Scaler | Optimizer | Scheduler | Model) and not value.path:
        return False
    return truth(value) is not None


def _equals(state: State, value: Unknown, default: bool) -> bool:
    """``x == "a"``: false where ``x == "b"`` was true."""
    left, right = value.operands
    default = _default(state, value, default)
    key = CLEANED.sub("", value.key)
    if not isinstance(right, Const):
        return _ask(state, key, default)
    subject = CLEANED.sub("", key_of(left))
    equal = state.oracle.equal
    known = equal.get(subject)
    if known is not None and known != repr(right.value):
        return False
    if repr(right.value) not in state.oracle.among.get(subject, {repr(right.value)}):
        return False
    if right.value in library.FULL_PRECISION and PRECISION.search(subject):
        default = False  # paths begin with a lower one
    holds = _ask(state, key, default)
    if holds:
        equal[subject] = repr(right.value)
    return holds


CLEANED = re.compile(r"\.(lower|strip)\(\)")
"""What a text is asked for under another key, and is the same: ``kind.lower() == "ddp"``."""


def _is_among(state: State, value: Unknown, items: ListValue, default: bool) -> bool:
    """``x in ("a", "b")``: false where ``x == "c"`` or ``x in ("c", "d")`` was true."""
    default = _default(state, value, default)
    named = frozenset(repr(each.value) for each in items.items if isinstance(each, Const))
    if len(named) < len(items.items):
        return _ask(state, value.key, default)
    subject = CLEANED.sub("", key_of(value.operands[0]))
    equal, among = state.oracle.equal.get(subject), state.oracle.among.get(subject)
    if equal is not None:
        return equal in named
    if among is not None and (among <= named or not among & named):
        return among <= named
    holds = _ask(state, value.key, default)
    if holds:
        state.oracle.among[subject] = named if among is None else named & among
    return holds


def chosen(state: State, items: Mapping[Any, Value], index: Value) -> Value:
    """What of some things an index that is not known picks on this path."""
    *first, last = items
    for name in first:
        key = f"({key_of(index)} Eq {name!r})"
        if decide(state, Unknown(key, op="Eq", operands=(index, Const(name)))):
            return items[name]
    return items[last]


def exists(state: State, value: Scaler | Optimizer | Scheduler) -> None:
    """Note that a method of it is called: it is not None on this path."""
    if not value.path:
        state.oracle.assume(f"has {value.key}")
