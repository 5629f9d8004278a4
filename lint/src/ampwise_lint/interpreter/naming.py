"""Turning values nobody constructed in sight into what their use and name say they are."""

from __future__ import annotations

import ast
import re
from dataclasses import replace

from ampwise_lint.path.state import State
from ampwise_lint.source.roles import LOSS, Role
from ampwise_lint.values.abstract import (
    TRUE,
    Instance,
    Model,
    Optimizer,
    Parameters,
    Scaler,
    Scheduler,
    Tensor,
    Unknown,
    Value,
    Wrapper,
)

HOST = re.compile(r"numpy\.|np\.|sum\b|AverageMeter|\w*Meter|collections\.")
"""What makes numbers on the host, or counters."""

_NOWHERE = ast.Pass(lineno=0, col_offset=0)


NO_LOSS = (
    "fn", "func", "function", "es", "weight", "weights", "name", "type", "key", "str", "meter",
    "meters", "tracker", "log", "logger", "history", "list", "dict", "scaler", "metric", "metrics",
    "config", "cfg", "conf", "settings", "options", "args", "kwargs", "params",
)  # fmt: skip
"""Endings of names of things about losses that are none."""


KINDS: dict[Role, type[Value]] = {
    "scaler": Scaler,
    "optimizer": Optimizer,
    "scheduler": Scheduler,
    "network": Model,
}
"""What is one of these is none of the others."""


def as_role(state: State, value: Value, text: str) -> Value:
    """A value read under a name; an unknown one becomes what the name is used as in this file."""
    if not isinstance(value, Unknown) or value.made == "computed" or not text:
        return value
    role = state.here.roles.of(text)
    known = state.converted.get(value.key)
    if known is not None and _is_another(value, known, role):
        value = replace(value, key=f"{value.key} as {role}")
        known = state.converted.get(value.key)
    if known is not None:
        return known
    made = _made(state, value, text, role)
    if made is not value:
        state.converted[value.key] = made
    return made


def _is_another(value: Unknown, known: Value, role: Role) -> bool:
    """Whether one place made both, as the line of a registry does that builds what it is told."""
    is_kind = role in KINDS and isinstance(known, tuple(KINDS.values()))
    return value.made == "called" and is_kind and not isinstance(known, KINDS[role])


def _made(state: State, value: Unknown, text: str, role: Role) -> Value:
    match role:
        case "scaler":
            opaque = value.made == "called"
            return Scaler(_NOWHERE, state.here, TRUE, value.key, opaque=opaque)
        case "wrapper":
            name = text.rpartition(".")[2]
            # What an Accelerator is told, or its launch, is not in sight: it is there for 16 bits.
            return Wrapper(name, lower=name.endswith("accelerator"))
        case "optimizer":
            of = value.of if value.made == "called" else None
            trained = of if isinstance(of, Model | Instance | Parameters) else None
            return Optimizer(_NOWHERE, state.here, value.key, params=trained)
        case "scheduler":
            return Scheduler(value.key)
        case "network":
            return Model(value.key, copy_of=value.operands[0] if value.op == "copy" else None)
        case _:
            return value


def named(value: Value, name: str) -> Value:
    """A value as it is bound to a name: what is called a loss is one."""
    last = name.rpartition(".")[2].rstrip("0123456789_")  # of ``loss_type_2``, too
    if LOSS.search(last) and not last.endswith(NO_LOSS):
        if isinstance(value, Unknown) and value.made == "called" and not HOST.match(value.key):
            scaled = value if "scale" in f"{name} {value.key}".lower() else None
            return Tensor(key=value.key, loss=True, scaled=scaled)
        if isinstance(value, Tensor) and not value.loss and not value.data and not value.host:
            return as_loss(value)
    return value


def as_loss(value: Tensor) -> Tensor:
    """What is a loss by its name; that of a network autocast has computed in float32."""
    dtype = "float32" if value.forward and value.guessed else value.dtype
    return value.but(loss=True, dtype=dtype)


HIDDEN = ("hidden_states", "last_hidden_state")
"""What the networks of transformers call what runs from layer to layer, in their outputs."""


def part_of(output: Tensor, name: object) -> Tensor:
    """What a batch or an output holds under a name.

    Hidden states are sums with the embedding, which promotes them, or what a norm made: no half.
    """
    return output.but(dtype=None) if output.guessed and name in HIDDEN else output
