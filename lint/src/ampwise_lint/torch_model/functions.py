"""What calling a name from outside the project does: torch's own, known packages."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from ampwise_lint.path.conditions import decide
from ampwise_lint.path.state import State
from ampwise_lint.source import library
from ampwise_lint.source.defaults import setting_in
from ampwise_lint.source.nodes import Node
from ampwise_lint.source.roles import HANDLES, LOSS
from ampwise_lint.torch_model import casts, methods, networks, python_functions, tensors, trainers
from ampwise_lint.values.abstract import (
    FALSE,
    NONE,
    TRUE,
    Const,
    DictValue,
    Function,
    Instance,
    ListValue,
    Loader,
    Manager,
    Model,
    Optimizer,
    Parameters,
    Partial,
    Region,
    Scaler,
    Scheduler,
    Tensor,
    Unknown,
    Value,
    Wrapper,
    is_low,
    key_of,
    truth,
)
from ampwise_lint.values.arguments import Arguments
from ampwise_lint.values.classes import is_network
from ampwise_lint.values.contents import flatten
from ampwise_lint.values.events import (
    Clip,
    Clock,
    Grad,
    Loss,
    Made,
    Managed,
    Save,
    Synchronize,
)


def call(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    """Call something by its full name."""
    return _handler(path)(state, node, path, a)


@lru_cache(maxsize=4096)
def _handler(path: str) -> Handler:
    found = NAMES.get(path)
    return found or next((each for holds, each in FAMILIES if holds(path)), _other)


# ---------------------------------------------------------------------- mixed precision


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
        _place(state, node, "scaler"),
        path,
        device or Const("cuda"),
        opaque,
    )
    state.emit(Made, node, scaler)
    return scaler


def _autocast(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
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


def _scale_loss(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    loss = a.first("loss")
    base = loss if isinstance(loss, Tensor) else Tensor(key=key_of(loss), loss=True)
    return Manager("other", node, bound=base.but(scaled=Wrapper("apex.amp")))


def _apex(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    state.emit(Managed, node, path)
    if path.endswith("initialize"):
        return ListValue(a.positional) if len(a.positional) > 1 else a.first("models") or NONE
    if path.endswith("master_params"):
        return Parameters(a.first("optimizer") or NONE, "apex.amp.master_params")
    return state.unknown(node, "called")


def _asks_autocast(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    """``torch.is_autocast_enabled()``: outside of any region a caller may have opened one."""
    if state.region is not None:
        return TRUE
    return FALSE if state.context.regions else state.unknown(node, "called", path)


def _is_scripting(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    """``torch.jit.is_scripting()``: training runs in Python."""
    return FALSE


def _no_grad(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    return Manager("no_grad", node)


def _enable_grad(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    return Manager("enable_grad", node)


def _set_grad_enabled(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    mode = a.first("mode") or TRUE
    return Manager("enable_grad" if decide(state, mode) else "no_grad", node)


def _null(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    return Manager("null", node)


# ---------------------------------------------------------------------- training


def make_optimizer(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    """An optimizer of the class `path`."""
    arguments = dict(a.named)
    if a.open:
        arguments["**"] = NONE
    params = a.first("params")
    key = _place(state, node, "optimizer")
    loops = tuple(id(each.node) for each in state.context.loops)
    optimizer = Optimizer(node, state.here, key, path, params, arguments, loops)
    state.emit(Made, node, optimizer)
    return optimizer


def make_scheduler(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    """A learning-rate scheduler."""
    return Scheduler(_place(state, node, "scheduler"), path)


def _loader(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    arguments = dict(a.named)
    for index, name in ((0, "dataset"), (5, "num_workers"), (7, "pin_memory")):
        if index < len(a.positional):
            arguments[name] = a.positional[index]
    loader = Loader(node, state.here, arguments, opaque=a.open)
    state.emit(Made, node, loader)
    return loader


def _wrap(kind: str) -> Callable[[State, ast.Call, str, Arguments], Value]:
    def wrap(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
        _note_policy(state, node, a)
        inner = a.first("module", "model")
        if isinstance(inner, Instance):
            inner.wrapped = kind
            inner.attributes["module"] = inner
            return inner
        return Model(_place(state, node, "model"), path, node, kind, inner=inner)

    return wrap


def _clip(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    state.emit(Clip, node, a.first("parameters", "params"))
    return Tensor(key=_place(state, node, "norm"), op="grad_norm", dtype="float32")


def _grad(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    outputs = a.first("outputs") or NONE
    scaled = isinstance(outputs, Tensor) and isinstance(outputs.scaled, Scaler)
    of = flatten([a.get(1, "inputs") or NONE])
    result = Tensor(
        key=_place(state, node, "gradient"), op="autograd.grad", grad_scaled=scaled,
        inputs=(outputs,), node=node, dtype=tensors.widest(of) if of else None,
    )  # fmt: skip
    state.emit(Grad, node, result, _is_true(a.get(4, "create_graph")))
    return result


def _is_true(value: Value | None) -> bool:
    return isinstance(value, Const) and value.value is True


def _save(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    what = a.first("obj") or NONE
    state.emit(Save, node, what, what if isinstance(what, DictValue) else None)
    return NONE


def _checkpoint(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    """A handler of ignite's that saves what it is told whenever it is called."""
    what = a.first("to_save")
    if isinstance(what, DictValue):
        state.emit(Save, node, what, what)
    return _wrapper(state, node, path, a)


def _synchronize(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    state.emit(Synchronize, node, path)
    return NONE


def _clock(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    state.emit(Clock, node)
    return Unknown(_place(state, node, "time"), clock=len(state.trace))


def _wrapper(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    wrapper = trainers.make(path, a)
    state.emit(Made, node, wrapper)
    if path.startswith("ignite.engine.") and a.positional:
        _walk_each_batch(state, node, a.positional[0])
    return wrapper


def _deepspeed(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    """``deepspeed.initialize(config={"bf16": {"enabled": True}})``: an engine that runs steps."""
    wrapper = trainers.make(path, a)
    config = a.named.get("config") or a.named.get("config_params")
    wrapper.lower = any(_is_on(state, config, each) for each in ("fp16", "bf16"))
    state.emit(Made, node, wrapper)
    return wrapper


def _is_on(state: State, config: Value | None, name: str) -> bool:
    """Whether a configuration has a section for a precision that is not switched off."""
    if isinstance(config, DictValue):
        section = config.items.get(name)
        enabled = section.items.get("enabled") if isinstance(section, DictValue) else None
    else:  # one that was read from a file, and set anew
        enabled = state.converted.get(f"item {key_of(config)}[{name!r}]['enabled']")
    return enabled is not None and truth(enabled) is not False


def _walk_each_batch(state: State, node: ast.Call, function: Value) -> None:
    """``Engine(update)``: a function that is called with each batch."""
    if isinstance(function, Function):
        with state.in_iteration(node, 0, over_data=True):
            batch = Tensor(key=f"batch@{node.lineno}", data=True)
            state.call(function, Arguments([Unknown("engine", "given"), batch]), node)


# ---------------------------------------------------------------------- networks and operations


def _layer(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    arguments = dict(a.named)
    for index, value in enumerate(a.positional):
        arguments[f"#{index}"] = value
    inner = ListValue(a.positional) if path.endswith(("Sequential", "ModuleList")) else None
    key = _place(state, node, path.rpartition(".")[2])
    layer = Model(key, path, node, arguments=arguments, inner=inner)
    state.emit(Made, node, layer)
    return layer


def apply_layer(state: State, node: ast.Call, layer: Model, a: Arguments) -> Value:
    """Call a layer of torch."""
    inputs = a.positional
    if library.LOSS_LAYERS.match(layer.path):
        name = LAYER_TO_FUNCTION.get(layer.path.rpartition(".")[2], "loss")
        result = tensors.apply(state, node, name, inputs, layer.arguments)
        result.loss = True
        return result
    if isinstance(layer.inner, ListValue) and layer.path.endswith("Sequential"):
        value: Value = inputs[0] if inputs else NONE
        for each in layer.inner.items:
            if isinstance(each, Model):
                value = apply_layer(state, node, each, Arguments([value]))
            else:
                value = Tensor(key=f"sequential@{node.lineno}", forward=True)
        return value
    name = layer.path.rpartition(".")[2]
    if _ends_in_norm(layer):
        operation = "layer_norm"
    elif library.LAYERS_LOW.match(layer.path):
        operation = "linear"
    elif library.LAYERS_FLOAT32.match(layer.path):
        operation = "layer_norm" if name != "Softmax" else "softmax"
        operation = {"LogSoftmax": "log_softmax", "Softplus": "softplus"}.get(name, operation)
    else:
        operation = name.lower()
    result = tensors.apply(state, node, operation, inputs)
    given = [each for each in inputs if isinstance(each, Tensor)]
    result.host = bool(given) and all(each.host for each in given)  # where its weights are
    return (
        ListValue([result, state.unknown(node)])
        if name in ("LSTM", "GRU", "RNN", "MultiheadAttention")
        else result
    )


OF_TRANSFORMERS = re.compile(r"\.Transformer(Encoder|Decoder)(Layer)?$")


def _ends_in_norm(layer: Value | None) -> bool:
    """Whether the last thing a part of a Transformer does is to normalize: that is in float32.

    A layer does unless it is told ``norm_first=True``, a stack that is given a norm, or whose
    layers do.
    """
    if not isinstance(layer, Model) or (kind := OF_TRANSFORMERS.search(layer.path)) is None:
        return False
    if kind.group(2):
        first = layer.arguments.get("norm_first", FALSE)
        return isinstance(first, Const) and not first.value
    norm = layer.arguments.get("norm", layer.arguments.get("#2", NONE))
    if isinstance(norm, Model):
        return bool(library.LAYERS_FLOAT32.match(norm.path))
    one = layer.arguments.get("#0", layer.arguments.get(f"{kind.group(1).lower()}_layer"))
    return norm is NONE and _ends_in_norm(one)


LAYER_TO_FUNCTION = {
    "BCELoss": "binary_cross_entropy",
    "BCEWithLogitsLoss": "binary_cross_entropy_with_logits",
    "CrossEntropyLoss": "cross_entropy",
    "NLLLoss": "nll_loss",
    "MSELoss": "mse_loss",
    "L1Loss": "l1_loss",
    "SmoothL1Loss": "smooth_l1_loss",
    "HuberLoss": "huber_loss",
    "KLDivLoss": "kl_div",
    "CTCLoss": "ctc_loss",
    "CosineEmbeddingLoss": "cosine_embedding_loss",
    "GaussianNLLLoss": "gaussian_nll_loss",
    "HingeEmbeddingLoss": "hinge_embedding_loss",
    "MarginRankingLoss": "margin_ranking_loss",
    "MultiLabelSoftMarginLoss": "multilabel_soft_margin_loss",
    "PoissonNLLLoss": "poisson_nll_loss",
    "SoftMarginLoss": "soft_margin_loss",
    "TripletMarginLoss": "triplet_margin_loss",
}


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
            key=_place(state, node, name),
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
    return Tensor(_place(state, node, "tensor"), dtype, op="tensor", inputs=inputs, host=True)


def _distribution(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    """A distribution; of Python's numbers it draws on the host."""
    made = tensors.apply(state, node, library.operation(path), a.values, a.named)
    made.host = made.host or not any(isinstance(e, Tensor) for e in flatten(a.values))
    return made


def _fully_sharded(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    """``fully_shard(model, mp_policy=...)``, which gives the network back."""
    _note_policy(state, node, a)
    return a.first("module") or state.unknown(node, "called")


POLICIES = ("mixed_precision", "mp_policy")


def _note_policy(state: State, node: ast.Call, a: Arguments) -> None:
    """Note a policy that FSDP is handed; one that is not in sight is made for lower precision."""
    policy = next((a.named[each] for each in POLICIES if each in a.named), NONE)
    if isinstance(policy, Unknown):
        policy = Wrapper(policy.key, lower=True)
    if isinstance(policy, Wrapper):
        state.emit(Made, node, policy)


def _policy(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    """The dtypes in which FSDP gathers parameters: those of its forward and backward."""
    dtype = a.first("param_dtype")
    named = None if dtype is None else casts.dtype_named(dtype)
    is_full = dtype is None or named == "float32" or (isinstance(dtype, Const) and named is None)
    policy = Wrapper(path, lower=a.open or not is_full)
    state.emit(Made, node, policy)
    return policy


def _compiled(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    return a.first("model", "module") or state.unknown(node, "called")


def _copied(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    """A copy of a network; whose copy it is stays known, and its code is not walked again."""
    of = a.first("x")
    key = _place(state, node, "copy")
    match of:
        case Instance(class_=class_) if is_network(class_):
            return Model(key, class_.node.name, node, copy_of=of)
        case Model():
            return replace(of, key=key, copy_of=of)
        case Unknown():
            return Unknown(key, "called", op="copy", operands=(of,))
        case _:
            return _other(state, node, path, a)


def _auto_optimizer(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    return a.first("optimizer") or state.unknown(node, "called")


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
        return _clip(state, node, path, a)
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


def _numpy(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    """NumPy computes on the host, and takes nothing that is not there."""
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
        key=_place(state, node, name),
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


def _place(state: State, node: Node, what: str) -> str:
    return f"{what}@{state.here.path.name}:{node.lineno}#{state.iteration}"


def _last(path: str) -> str:
    return path.rpartition(".")[2]


Handler = Callable[[State, ast.Call, str, Arguments], Value]
"""What a call does: the path's state, the call, the function's full name, its arguments."""

NAMES: dict[str, Handler] = {
    **dict.fromkeys(library.SCALERS, make_scaler),
    **dict.fromkeys(library.AUTOCASTS, _autocast),
    **dict.fromkeys(library.NO_GRAD, _no_grad),
    **dict.fromkeys(library.ENABLE_GRAD, _enable_grad),
    **dict.fromkeys(library.NULL, _null),
    **dict.fromkeys(library.CLIP, _clip),
    **dict.fromkeys(library.CLOCKS, _clock),
    **dict.fromkeys(library.SAME_NETWORK, _compiled),
    "torch.set_grad_enabled": _set_grad_enabled,
    "torch.autograd.set_grad_enabled": _set_grad_enabled,
    "torch.autograd.grad": _grad,
    "torch.is_autocast_enabled": _asks_autocast,
    "torch.jit.is_scripting": _is_scripting,
    "torch.device": _device,
    **dict.fromkeys(library.HOST_TENSORS, _host_tensor),
    "torch.save": _save,
    "apex.amp.scale_loss": _scale_loss,
    **dict.fromkeys(library.FULLY_SHARD, _fully_sharded),
    "deepspeed.initialize": _deepspeed,
    **dict.fromkeys(("copy.copy", "copy.deepcopy"), _copied),
    "functools.partial": _partial,
    "types.SimpleNamespace": _namespace,
    "itertools.cycle": _cycle,
    "itertools.chain": _chain,
    "itertools.chain.from_iterable": _chain,
    "ignite.distributed.auto_optim": _auto_optimizer,
    "ignite.handlers.Checkpoint": _checkpoint,
    "ignite.handlers.checkpoint.Checkpoint": _checkpoint,
}
"""Functions and classes by their full names, as `library.canonical` has them: a row each."""

FAMILIES: list[tuple[Callable[[str], bool], Handler]] = [
    (lambda p: p.startswith("builtins."), python_functions.call),
    (lambda p: p.startswith("apex.amp."), _apex),
    (lambda p: bool(library.WAITS.match(p)), _synchronize),
    (library.is_scheduler, make_scheduler),
    (library.is_optimizer, make_optimizer),
    (lambda p: _last(p) in ("DataLoader", "FastDataLoader", "DataLoaderX"), _loader),
    (lambda p: bool(library.FSDP.search(p)), _wrap("fsdp")),
    (lambda p: bool(library.FSDP_POLICY.match(p)), _policy),
    (lambda p: bool(library.DDP.search(p)), _wrap("ddp")),
    (lambda p: bool(library.DP.search(p)), _wrap("dp")),
    (lambda p: p.startswith("torch.distributions."), _distribution),
    (lambda p: p.endswith(("is_available", "is_bf16_supported")), _available),
    (lambda p: _last(p) in ("tqdm", "trange", "track"), _tqdm),
    (lambda p: bool(library.WRAPPERS.match(p)) and _last(p)[:1].isupper(), _wrapper),
    (lambda p: p.startswith("torch.nn.") and _last(p)[:1].isupper(), _layer),
    (library.is_operation, _operation),
    (lambda p: _last(p) in ("from_pretrained", "from_config", "_from_config"), _pretrained),
    (lambda p: p.startswith("numpy."), _numpy),
    (lambda p: p.startswith("math."), _math),
]
"""All others by what their names have in common; the first that holds counts."""
