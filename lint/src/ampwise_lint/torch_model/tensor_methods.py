"""What methods of tensors and gradients do."""

from __future__ import annotations

import ast
from collections.abc import Callable

from ampwise_lint.path.state import State
from ampwise_lint.source.library import CAST_ON_HOST, HALVES
from ampwise_lint.torch_model import casts, tensors
from ampwise_lint.values.abstract import (
    NONE,
    Const,
    Gradient,
    Tensor,
    Unknown,
    Value,
    key_of,
)
from ampwise_lint.values.arguments import Arguments
from ampwise_lint.values.events import (
    Backward,
    Clip,
    GradientRead,
    Moved,
    ZeroGrad,
)

READS = {"item", "tolist", "cpu", "numpy"}


def tensor(state: State, node: ast.Call, owner: Tensor, name: str, a: Arguments) -> Value:
    """Call a method of a tensor."""
    found = OF_TENSORS.get(name)
    if found is not None:
        return found(state, node, owner, name, a)
    if name in OF_TEXTS and _is_by_text(a):
        return state.unknown(node, "called")  # the key of a mapping that a network returned
    return tensors.apply(state, node, name, (owner, *a.positional), a.named)


OF_TEXTS = ("split", "rsplit", "partition", "rpartition")


def _is_by_text(a: Arguments) -> bool:
    """Whether something is split as texts are: by a text, or by none."""
    first = next(iter(a.positional), None)
    return not a.count or (isinstance(first, Const) and isinstance(first.value, str))


def _backward(state: State, node: ast.Call, owner: Tensor, name: str, a: Arguments) -> Value:
    gradient = a.first("gradient")
    scaled = owner.scaled
    if scaled is None and gradient is not NONE:
        scaled = gradient.scaled if isinstance(gradient, Tensor) else gradient
    state.emit(Backward, node, owner, scaled)
    return NONE


def _read(state: State, node: ast.Call, owner: Tensor, name: str, a: Arguments) -> Value:
    if owner.data and not owner.moved:
        return owner.but(host=True)
    return tensors.read(state, node, owner, name)


def _copied(state: State, node: ast.Call, owner: Tensor, name: str, a: Arguments) -> Value:
    """In memory of its own: what is done to it in place is not done to what it was copied from."""
    return owner.but()


def _as_float32(state: State, node: ast.Call, owner: Tensor, name: str, a: Arguments) -> Value:
    return _cast(owner, "float32").but(cast=None)


def _cast(owner: Tensor, dtype: str | None) -> Tensor:
    """A batch that is cast before it is moved lies in new memory, if the dtype is another."""
    op = CAST_ON_HOST if owner.data and not owner.moved else owner.op
    return owner.but(dtype=dtype, op=op)


def _as_other(state: State, node: ast.Call, owner: Tensor, name: str, a: Arguments) -> Value:
    first = a.first("other")
    return owner.but(dtype=first.dtype if isinstance(first, Tensor) else None)


def _scaled_by(state: State, node: ast.Call, owner: Tensor, name: str, a: Arguments) -> Value:
    kind = "div" if name.startswith(("div", "true")) else "mul"
    result = tensors.arithmetic(state, node, kind, owner, a.first("other") or NONE)
    if name.endswith("_") and isinstance(result, Tensor):
        owner.divided, owner.divisor = result.divided, result.divisor
        owner.factor = result.factor
    return result


def _clamped(state: State, node: ast.Call, owner: Tensor, name: str, a: Arguments) -> Value:
    """In place: whoever reads it later reads what was clamped."""
    before = owner.but()
    result = tensors.apply(state, node, name.rstrip("_"), (before, *a.positional), a.named)
    owner.op, owner.inputs = result.op, result.inputs
    return owner


def _extent(state: State, node: ast.Call, owner: Tensor, name: str, a: Arguments) -> Value:
    return Unknown(f"{key_of(owner)}.{name}()", of=owner)


def _entries(state: State, node: ast.Call, owner: Tensor, name: str, a: Arguments) -> Value:
    return owner if owner.forward else owner.but(op="items")


def _looked_up(state: State, node: ast.Call, owner: Tensor, name: str, a: Arguments) -> Value:
    """``losses.get("mse", 0.0)``: of a mapping, in which there are numbers in place of tensors."""
    default = a.get(1, "default")
    is_number = isinstance(default, Const) and isinstance(default.value, int | float)
    if is_number:
        return owner.but(op="items")
    return tensors.apply(state, node, name, (owner, *a.positional), a.named)


def _zeroed(state: State, node: ast.Call, owner: Tensor, name: str, a: Arguments) -> Value:
    state.emit(ZeroGrad, node, None)
    return NONE


def _hooked(state: State, node: ast.Call, owner: Tensor, name: str, a: Arguments) -> Value:
    return NONE


def _moved(state: State, node: ast.Call, owner: Tensor, name: str, a: Arguments) -> Value:
    dtype = casts.dtype_given(a)
    if dtype in ("float16", "bfloat16"):
        return casts.halved(state, node, owner, dtype)
    if casts.is_cast(name, a):
        return _cast(owner, dtype)
    # A variable may be "cpu" for want of a GPU only.
    named = [each for each in node.args if not isinstance(each, ast.IfExp)]
    if any("cpu" in state.here.unparsed(each) for each in named):
        return owner if owner.data else tensors.read(state, node, owner, "cpu")
    owner = owner.but(host=False) if owner.host and (dtype is None or a.count > 1) else owner
    # Most batches are float32 already, and lose nothing by being told to be.
    is_copy = dtype is None or (dtype == "float32" and owner.data)
    if is_copy and not owner.moved and (owner.data or not (owner.forward or owner.loss)):
        non_blocking = "non_blocking" in a.named or (name == "cuda" and a.count > 1) or a.open
        state.emit(Moved, node, owner, non_blocking, casts.device_given(a))
        owner = owner.but(moved=owner.data)
    return owner if dtype is None else owner.but(dtype=dtype)


EXTENTS = ("size", "dim", "numel", "ndimension", "get_device", "nelement")
COPIES = ("detach", "data", "view", "flatten", "clone", "reshape", "contiguous")
"""Methods of gradients that give what they hold."""


def gradient(state: State, node: ast.Call, owner: Gradient, name: str, a: Arguments) -> Value:
    """Call a method of a gradient."""
    if name in ("zero_", "detach_", "requires_grad_") or (name == "fill_" and a.count == 1):
        if name in ("zero_", "fill_"):
            state.emit(ZeroGrad, node, owner.of)
        return owner
    if name in ("clamp_", "clip_", "clamp"):
        state.emit(Clip, node, owner.of, True)
        return owner
    if name in ("mul_", "div_"):
        text = ast.unparse(node).lower()
        if "clip" in text or "max_norm" in text or "clamp" in text:
            state.emit(Clip, node, owner.of, True)
        else:
            state.emit(GradientRead, node, True, a.first("other"), is_linear=True)
        return owner
    if name in EXTENTS:
        return state.unknown(node)
    if name in COPIES:
        if not isinstance(state.here.parents.get(id(node)), ast.Attribute | ast.BinOp):
            state.emit(GradientRead, node, copies=True)  # else what is done with it tells
        return owner
    if not owner.is_unscaled:
        state.emit(GradientRead, node, name.endswith("_"), copies=name == "copy_")
    return Tensor(key=f"gradient {name}", op=f"grad.{name}", inputs=(owner,))


OF_TENSORS: dict[str, Callable[[State, ast.Call, Tensor, str, Arguments], Value]] = {
    **dict.fromkeys(READS, _read),
    **dict.fromkeys(
        (
            "detach",
            "requires_grad_",
            "contiguous",
            "detach_",
            "retain_grad",
            "unbind",
            "data_ptr",
        ),
        casts.same,
    ),
    **dict.fromkeys(("float", "double"), _as_float32),
    **dict.fromkeys(HALVES, casts.halved_by_name),
    **dict.fromkeys(("to", "cuda", "type", "xpu", "npu"), _moved),
    **dict.fromkeys(
        ("div_", "mul_", "div", "mul", "divide", "true_divide", "multiply"), _scaled_by
    ),
    **dict.fromkeys(("clamp_", "clip_"), _clamped),
    **dict.fromkeys(EXTENTS, _extent),
    **dict.fromkeys(("values", "items", "keys"), _entries),
    "clone": _copied,
    "get": _looked_up,
    "backward": _backward,
    "type_as": _as_other,
    "zero_grad": _zeroed,
    "register_hook": _hooked,
}
"""What methods of tensors do; any other is an operation on them."""
