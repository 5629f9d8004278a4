"""What calling a name from outside the project does: torch's own, known packages."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from ampwise_lint.path.state import State
from ampwise_lint.source import library
from ampwise_lint.source.roles import HANDLES, LOSS
from ampwise_lint.torch_model import (
    casts,
    layers,
    methods,
    networks,
    precision,
    python_functions,
    tensors,
    training,
)
from ampwise_lint.values.abstract import (
    FALSE,
    NONE,
    Const,
    DictValue,
    Instance,
    ListValue,
    Model,
    Parameters,
    Partial,
    Tensor,
    Unknown,
    Value,
    is_low,
    key_of,
)
from ampwise_lint.values.arguments import Arguments
from ampwise_lint.values.classes import is_network
from ampwise_lint.values.contents import flatten
from ampwise_lint.values.events import (
    Loss,
)


def call(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    """Call something by its full name."""
    return _handler(path)(state, node, path, a)


@lru_cache(maxsize=4096)
def _handler(path: str) -> Handler:
    found = NAMES.get(path)
    return found or next((each for holds, each in FAMILIES if holds(path)), _other)


def _is_scripting(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    """``torch.jit.is_scripting()``: training runs in Python."""
    return FALSE


def _operation(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    name = library.operation(path)
    if name == "as_tensor" and a.count == 1 and isinstance(same := a.first("data"), Tensor):
        return same
    if name in library.FACTORIES:
        dtype = casts.dtype_named(a.named["dtype"]) if "dtype" in a.named else None
        kind = "float32" if name in ("zeros", "ones", "rand", "randn", "full", "empty") else None
        like = a.first("input") if name.endswith("_like") else None
        if isinstance(like, Tensor) and dtype is None:
            kind = like.dtype
        if "device" in a.named or a.open:
            host = False
        else:
            host = like.host if isinstance(like, Tensor) else like is None
        return Tensor(
            key=state.made_here(node, name),
            dtype=dtype or kind,
            op=name,
            inputs=tuple(a.positional),
            host=host,
        )
    if not a.values and name not in library.PLAIN:
        return state.unknown(node, "called", path)
    if name not in library.INTEGER and not name.startswith("_foreach_"):
        methods.note_gradients(state, node, a, copies=name in library.SIDE_BY_SIDE)
    inputs = list(a.positional)
    inputs += [a.named[key] for key in ("input", "pred", "target") if key in a.named]
    return tensors.apply(state, node, name, inputs, a.named)


def _host_tensor(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    """``torch.LongTensor(lengths)``."""
    dtype = "float32" if _last(path) in ("Tensor", "FloatTensor") else None
    inputs = tuple(a.positional)
    return Tensor(state.made_here(node, "tensor"), dtype, op="tensor", inputs=inputs, host=True)


def _padded(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    """``pad_packed_sequence(packed)``: what it holds, and the lengths, which are on the host."""
    padded = tensors.apply(state, node, "pad", a.positional[:1])
    return ListValue([padded, Tensor(state.made_here(node, "lengths"), "int", host=True)])


def _distribution(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    """A distribution; of Python's numbers it draws on the host."""
    made = tensors.apply(state, node, library.operation(path), a.values, a.named)
    made.host = made.host or not any(isinstance(e, Tensor) for e in flatten(a.values))
    return made


def _compiled(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    return a.first("model", "module") or state.unknown(node, "called")


def _copied(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    """A copy of a network; whose copy it is stays known, and its code is not walked again."""
    of = a.first("x")
    key = state.made_here(node, "copy")
    match of:
        case Instance(class_=class_) if is_network(class_):
            return Model(key, class_.node.name, node, copy_of=of)
        case Model():
            return replace(of, key=key, copy_of=of)
        case Unknown():
            return Unknown(key, "called", op="copy", operands=(of,))
        case _:
            return _other(state, node, path, a)


def _device(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    first = a.first("device", "type")
    if isinstance(first, Const):
        text = str(first.value)
        return Const(text if not text.isdigit() else "cuda")
    return first or state.unknown(node, "called")


def _partial(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    if not a.positional:
        return state.unknown(node, "called")
    return Partial(a.positional[0], tuple(a.positional[1:]), a.named)


def _cycle(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    """``itertools.cycle(loader)``: its items, as ``iter`` has them."""
    return python_functions.call(state, node, "builtins.iter", a)


def _chain(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    """``itertools.chain(a.parameters(), b.parameters())``: those of both."""
    parts = flatten(a.positional)
    owners: list[Value] = [each.of for each in parts if isinstance(each, Parameters)]
    if a.open or not owners or len(owners) < len(parts):
        return _other(state, node, path, a)
    return Parameters(ListValue(owners), f"chain({', '.join(map(key_of, owners))})")


def _namespace(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    """An object with the attributes that it is given."""
    return DictValue(dict(a.named), node, open=True, is_object=True)


def _available(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    return Unknown(f"{path}()")


def _tqdm(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    over = a.first("iterable") or NONE
    return Unknown(f"tqdm({key_of(over)})", op="tqdm", operands=(over,))


def _other(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    last = path.rpartition(".")[2]
    if library.CLIP_NAME.match(last):
        return training.clip(state, node, path, a)
    methods.given_away(state, node, last, a)
    methods.note_norm(state, node, last, a)
    flat = flatten(a.values)
    if methods.SHOWS.match(last) or path.startswith(("wandb.", "logging.", "mlflow.")):
        waits = not path.startswith(("wandb.", "mlflow."))
        tensors.shown_all(state, node, a.values, waits=waits)
        methods.note_gradients(state, node, a)
        return state.unknown(node, "called")
    if any(isinstance(each, Tensor) for each in flat) and not last[:1].isupper():
        if LOSS.search(last) and not HANDLES.match(last):
            networks.run_given(state, node, a)
            state.emit(Loss, node, last, tuple(a.values))
        return unknown_of_tensors(state, node, last, a)
    if (network := networks.given_back(last, a)) is not None:
        return network
    if (returned := methods.walk_callbacks(state, node, a)) is not None:
        return returned
    made = state.unknown(node, "called", path)
    made.of = methods.made_of(last, a)
    return made


def _on_host(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    """NumPy, and what is built on it, computes on the host, and takes nothing that is not there."""
    made = _other(state, node, path, a)
    return made.but(host=True) if isinstance(made, Tensor) else made


def _math(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    """``math.isfinite(loss)``: a tensor is made a number first."""
    first = a.positional[0] if a.positional else NONE
    if not isinstance(first, Tensor) or first.data:
        return _other(state, node, path, a)
    number = tensors.read(state, node, first, f"{path}()")
    is_check = _last(path) in tensors.CHECKS
    return Unknown(f"{path}({number.key})", loop=state.iteration) if is_check else number


def _pretrained(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    """A network as it is stored, or in the dtype that is asked for."""
    made = _other(state, node, path, a)
    asked = [a.named[each] for each in ("dtype", "torch_dtype") if each in a.named]
    dtype = casts.dtype_named(asked[0]) if asked else None
    if dtype is None or not is_low(dtype):
        return made
    return casts.halved(state, node, Model(key_of(made), path, node), dtype)


TO_HOST = re.compile(r"(to|2)_?(python_)?(float|np|numpy|item)$", re.IGNORECASE)
"""Functions that make a number or an array of a tensor, by their names."""


def unknown_of_tensors(state: State, node: ast.Call, name: str, a: Arguments) -> Value:
    """What a function nobody showed us makes of tensors."""
    flat = [each for each in flatten(a.values) if isinstance(each, Tensor)]
    host = all(each.host for each in flat)
    if not host and TO_HOST.search(name):
        return tensors.read(state, node, next(e for e in flat if not e.host), name)
    scaled = Unknown(name, "called") if "scale" in name.lower() else None
    return Tensor(
        key=state.made_here(node, name),
        op=name,
        inputs=tuple(a.values),
        scaled=scaled,
        loss=bool(LOSS.search(name)),
        data=all(each.data for each in flat) and not LOSS.search(name),
        moved=True,  # for all that is known
        host=host,
        of=flat[0].of,
        node=node,
    )


def _last(path: str) -> str:
    return path.rpartition(".")[2]


Handler = Callable[[State, ast.Call, str, Arguments], Value]
"""What a call does: the path's state, the call, the function's full name, its arguments."""

NAMES: dict[str, Handler] = {
    **dict.fromkeys(library.SCALERS, precision.make_scaler),
    **dict.fromkeys(library.AUTOCASTS, precision.autocast),
    **dict.fromkeys(library.NO_GRAD, precision.no_grad),
    **dict.fromkeys(library.ENABLE_GRAD, precision.enable_grad),
    **dict.fromkeys(library.NULL, precision.null),
    **dict.fromkeys(library.CLIP, training.clip),
    **dict.fromkeys(library.CLOCKS, training.clock),
    **dict.fromkeys(library.SAME_NETWORK, _compiled),
    "torch.set_grad_enabled": precision.set_grad_enabled,
    "torch.autograd.set_grad_enabled": precision.set_grad_enabled,
    "torch.autograd.grad": training.grad,
    "torch.is_autocast_enabled": precision.asks_autocast,
    "torch.jit.is_scripting": _is_scripting,
    "torch.device": _device,
    **dict.fromkeys(library.HOST_TENSORS, _host_tensor),
    "torch.nn.utils.rnn.pad_packed_sequence": _padded,
    "torch.save": training.save,
    "apex.amp.scale_loss": precision.scale_loss,
    **dict.fromkeys(library.FULLY_SHARD, precision.fully_sharded),
    "deepspeed.initialize": training.deepspeed,
    **dict.fromkeys(("copy.copy", "copy.deepcopy"), _copied),
    "functools.partial": _partial,
    "types.SimpleNamespace": _namespace,
    "itertools.cycle": _cycle,
    "itertools.chain": _chain,
    "itertools.chain.from_iterable": _chain,
    "ignite.distributed.auto_optim": training.auto_optimizer,
    "ignite.handlers.Checkpoint": training.checkpoint,
    "ignite.handlers.checkpoint.Checkpoint": training.checkpoint,
}
"""Functions and classes by their full names, as `library.canonical` has them: a row each."""

FAMILIES: list[tuple[Callable[[str], bool], Handler]] = [
    (lambda p: p.startswith("builtins."), python_functions.call),
    (lambda p: p.startswith("apex.amp."), precision.apex),
    (lambda p: bool(library.WAITS.match(p)), training.synchronize),
    (library.is_scheduler, training.make_scheduler),
    (library.is_optimizer, training.make_optimizer),
    (lambda p: _last(p) in ("DataLoader", "FastDataLoader", "DataLoaderX"), training.loader),
    (lambda p: bool(library.FSDP.search(p)), training.wrap("fsdp")),
    (lambda p: bool(library.FSDP_POLICY.match(p)), precision.policy),
    (lambda p: bool(library.DDP.search(p)), training.wrap("ddp")),
    (lambda p: bool(library.DP.search(p)), training.wrap("dp")),
    (lambda p: p.startswith("torch.distributions."), _distribution),
    (lambda p: p.endswith(("is_available", "is_bf16_supported")), _available),
    (lambda p: _last(p) in ("tqdm", "trange", "track"), _tqdm),
    (lambda p: bool(library.WRAPPERS.match(p)) and _last(p)[:1].isupper(), training.wrapper),
    (lambda p: p.startswith("torch.nn.") and _last(p)[:1].isupper(), layers.layer),
    (library.is_operation, _operation),
    (lambda p: _last(p) in ("from_pretrained", "from_config", "_from_config"), _pretrained),
    (lambda p: p.startswith(library.ON_HOST), _on_host),
    (lambda p: p.startswith("math."), _math),
]
"""All others by what their names have in common; the first that holds counts."""
