"""Into which dtype something is made, and what becomes of it."""

from __future__ import annotations

import ast
import re

from ampwise_lint.path.state import State
from ampwise_lint.source import library
from ampwise_lint.source.nodes import Node
from ampwise_lint.values.abstract import (
    Cast,
    Const,
    Instance,
    Model,
    Ref,
    Tensor,
    Unknown,
    Value,
    key_of,
)
from ampwise_lint.values.arguments import Arguments
from ampwise_lint.values.events import (
    CastDown,
)


def halved(state: State, node: Node, owner: Value, dtype: str) -> Value:
    """A network or tensor made half."""
    cast = Cast(node, state.here, dtype)
    state.emit(CastDown, node, owner, dtype)
    if isinstance(owner, Model | Instance):
        return owner
    if isinstance(owner, Tensor):
        return owner.but(dtype=dtype, guessed=False, cast=cast)
    return Tensor(key=key_of(owner), dtype=dtype, cast=cast, of=owner)


def dtype_named(value: Value) -> str | None:
    """The dtype a value names: ``torch.float16`` or ``"float16"``."""
    if isinstance(value, Ref):
        return library.DTYPES.get(value.path)
    if isinstance(value, Const) and isinstance(value.value, str):
        return library.DTYPES.get(value.value) or library.DTYPES.get(f"torch.{value.value}")
    return None


def halved_by_name(
    state: State, node: ast.Call, owner: Model | Instance | Tensor, name: str, a: Arguments
) -> Value:
    """``x.half()`` and ``x.bfloat16()``."""
    return halved(state, node, owner, library.HALVES[name])


def same(state: State, node: ast.Call, owner: Value, name: str, a: Arguments) -> Value:
    """What a method returns that changes nothing we follow."""
    return owner


def dtype_given(a: Arguments) -> str | None:
    """The dtype that ``.to(...)`` is told, if any."""
    return next((dtype for each in a.values if (dtype := dtype_named(each)) is not None), None)


DTYPE = re.compile(r"(^|[._])d?type(@.*)?$|dtype")
"""What values that name a dtype are called."""
NO_PLACE = ("non_blocking", "copy", "memory_format")


def is_cast(name: str, a: Arguments) -> bool:
    """Whether ``x.to(...)``, ``x.type(...)`` moves nothing: all it is told is a dtype."""
    told = [*a.positional, *(v for key, v in a.named.items() if key not in (*NO_PLACE, "dtype"))]
    if name == "type":
        return not any("cuda" in key_of(each) for each in told)
    return name == "to" and bool(a.count) and not a.open and all(map(_is_dtype, told))


def _is_dtype(value: Value) -> bool:
    match value:
        case Ref(path=path):
            return path.startswith("torch.") and path.rpartition(".")[2] in library.TYPES
        case Unknown(key=key):
            return bool(DTYPE.search(key))
        case Const(value=bool()):
            return True
        case _:
            return False


def device_given(a: Arguments) -> str | None:
    """The device that ``.to(...)`` is told as text, if any."""
    return next(
        (e.value for e in a.values if isinstance(e, Const) and isinstance(e.value, str)), None
    )
