"""What sets the precision: scalers, autocast and the modes beside it, FSDP's policies."""

from __future__ import annotations

import ast

from ampwise_lint.path.conditions import decide
from ampwise_lint.path.state import State
from ampwise_lint.source.defaults import setting_in
from ampwise_lint.torch_model import casts
from ampwise_lint.values.abstract import (
    FALSE,
    NONE,
    TRUE,
    Const,
    ListValue,
    Manager,
    Parameters,
    Region,
    Scaler,
    Tensor,
    Unknown,
    Value,
    Wrapper,
    key_of,
)
from ampwise_lint.values.arguments import Arguments
from ampwise_lint.values.events import (
    Made,
    Managed,
)


def make_scaler(
    state: State, node: ast.Call, path: str, a: Arguments, *, opaque: bool = False
) -> Value:
    """A scaler of the class `path`; `opaque`: its methods are not torch's."""
    new = path in ("torch.amp.GradScaler", "torch.GradScaler")
    device = a.get(0, "device") if new else Const("cpu" if ".cpu." in path else "cuda")
    enabled = a.get(5 if new else 4, "enabled")
    is_on = enabled is None or decide(state, enabled)
    scaler = Scaler(
        node,
        state.here,
        TRUE if is_on else FALSE,
        state.made_here(node, "scaler"),
        path,
        device or Const("cuda"),
        opaque,
        a.get(1 if new else 0, "init_scale"),
    )
    state.emit(Made, node, scaler)
    return scaler


def autocast(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    """Autocast, by any of its names."""
    if path.startswith(("torch.cuda.", "torch.cpu.")):
        device: str | None = "cuda" if ".cuda." in path else "cpu"
        enabled, dtype = a.get(0, "enabled"), a.get(1, "dtype")
    else:
        device = _device_named(state, a.get(0, "device_type"))
        dtype, enabled = a.get(1, "dtype"), a.get(2, "enabled")
    if device is not None:
        device = device.partition(":")[0]
    is_on = enabled is None or decide(state, enabled)
    name: str | None = None
    if dtype is None or dtype is NONE or (isinstance(dtype, Const) and dtype.value is None):
        name = {"cuda": "float16", "cpu": "bfloat16"}.get(device or "")
        if a.open:
            name = None
    else:
        name = casts.dtype_named(dtype)
    region = Region(node, state.here, is_on and name != "float32", device, name)
    return Manager("autocast", node, region)


def _device_named(state: State, value: Value | None) -> str | None:
    """A device by its text, or by what the setting it was read from is by default."""
    if isinstance(value, Const):
        return value.value if isinstance(value.value, str) else None
    if not isinstance(value, Unknown):
        return None
    name = setting_in(value.key)
    return state.here.device_defaults.get(name) or state.module.device_defaults.get(name)


def scale_loss(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    """``with amp.scale_loss(loss, optimizer) as scaled``."""
    loss = a.first("loss")
    base = loss if isinstance(loss, Tensor) else Tensor(key=key_of(loss), loss=True)
    return Manager("other", node, bound=base.but(scaled=Wrapper("apex.amp")))


def apex(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    """Any other function of ``apex.amp``."""
    state.emit(Managed, node, path)
    if path.endswith("initialize"):
        return ListValue(a.positional) if len(a.positional) > 1 else a.first("models") or NONE
    if path.endswith("master_params"):
        return Parameters(a.first("optimizer") or NONE, "apex.amp.master_params")
    return state.unknown(node, "called")


def asks_autocast(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    """``torch.is_autocast_enabled()``: outside of any region a caller may have opened one."""
    if state.region is not None:
        return TRUE
    return FALSE if state.context.regions else state.unknown(node, "called", path)


def no_grad(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    """Inside, no gradients."""
    return Manager("no_grad", node)


def enable_grad(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    """Inside, gradients."""
    return Manager("enable_grad", node)


def set_grad_enabled(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    """Inside, gradients or none, as asked."""
    mode = a.first("mode") or TRUE
    return Manager("enable_grad" if decide(state, mode) else "no_grad", node)


def null(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    """A context that does nothing."""
    return Manager("null", node)


POLICIES = ("mixed_precision", "mp_policy")


def note_policy(state: State, node: ast.Call, a: Arguments) -> None:
    """Note a policy that FSDP is handed; one that is not in sight is made for lower precision."""
    policy = next((a.named[each] for each in POLICIES if each in a.named), NONE)
    if isinstance(policy, Unknown):
        policy = Wrapper(policy.key, lower=True)
    if isinstance(policy, Wrapper):
        state.emit(Made, node, policy)


def fully_sharded(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    """``fully_shard(model, mp_policy=...)``, which gives the network back."""
    note_policy(state, node, a)
    return a.first("module") or state.unknown(node, "called")


def policy(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    """The dtypes in which FSDP gathers parameters: those of its forward and backward."""
    dtype = a.first("param_dtype")
    named = None if dtype is None else casts.dtype_named(dtype)
    is_full = dtype is None or named == "float32" or (isinstance(dtype, Const) and named is None)
    policy = Wrapper(path, lower=a.open or not is_full)
    state.emit(Made, node, policy)
    return policy
