"""Calls: what is called, what it is given, and classes of the project."""

from __future__ import annotations

import ast
import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from ampwise_lint.interpreter.attributes import attribute
from ampwise_lint.interpreter.functions import generator_manager, is_context_manager
from ampwise_lint.path.state import State
from ampwise_lint.source import library
from ampwise_lint.source.nodes import Node
from ampwise_lint.source.roles import HANDLES, LOSS, NETWORK, RUNS, SCALER, dotted
from ampwise_lint.torch_model import (
    functions,
    layers,
    methods,
    networks,
    precision,
    steps,
    tensors,
    training,
)
from ampwise_lint.values.abstract import (
    NONE,
    Bound,
    Class,
    DictValue,
    Function,
    Instance,
    ListValue,
    Model,
    Partial,
    Ref,
    Scaler,
    Scheduler,
    Super,
    Tensor,
    Unknown,
    Value,
    Wrapper,
    is_low,
    key_of,
    truth,
)
from ampwise_lint.values.arguments import Arguments
from ampwise_lint.values.classes import is_network, is_schedule, is_step_wrapper
from ampwise_lint.values.contents import flatten, modules_in
from ampwise_lint.values.events import (
    Forward,
    Loss,
    Made,
    Managed,
    NoSync,
    Op,
    Report,
)

SCALER_METHODS = ("scale", "unscale_", "step", "update")


def evaluate_call(state: State, node: ast.Call) -> Value:
    """The value of a call, and what it does."""
    state.called.add(id(node.func))
    owner: Value | None = None
    if isinstance(node.func, ast.Attribute):
        owner = state.evaluate(node.func.value)
        state.budget.spend()
        function = attribute(state, node.func, owner, node.func.attr)
    else:
        function = state.evaluate(node.func)
    if isinstance(function, Bound) and function.name == "register_hook":
        return NONE
    arguments = _arguments(state, node)
    return invoke(state, node, function, owner, arguments)


def invoke(
    state: State, node: ast.Call, function: Value, owner: Value | None, a: Arguments
) -> Value:
    """Call a value; `owner`: what it is a method of, if it is one."""
    match function:
        case Function(owner=Instance() as made) if _is_forward(function, owner):
            return _instance(state, node, made, a)
        case Function(owner=Instance() as made) if _is_evaluated(state, function, made):
            return _evaluated(state, node, function, made, a)
        case Function():
            return _function(state, node, function, a)
        case Class():
            return _construct(state, node, function, a)
        case Ref(path="builtins.super"):
            return _super(state)
        case Ref(path=path):
            return functions.call(state, node, path, a)
        case Bound(owner=Model() as network, name=name) if RUNS.search(name):
            return _model(state, node, network, a)
        case Bound(owner=Model(), name=name) if _computes_loss(name, a):
            assert isinstance(function, Bound)
            networks.run(state, node, function.owner, a)
            return _loss(state, node, name, a)
        case Bound(owner=bound_to, name=name):
            return methods.call(state, node, bound_to, name, a)
        case Partial(function=inner, positional=first, named=given):
            merged = Arguments([*first, *a.positional], {**given, **a.named}, a.open)
            return invoke(state, node, inner, owner, merged)
        case Instance():
            return _instance(state, node, function, a)
        case Model():
            return _model(state, node, function, a)
        case Wrapper(path=path):
            stepped = steps.stepped(a) if function.skips else None
            off = function.off
            state.emit(Managed, node, path, _loss_given(a), optimizer=stepped, off=off)
            return state.unknown(node, "called", path)
        case Unknown() if isinstance(owner, Unknown):
            return _method_of_unknown(state, node, owner, a)
        case _:
            return _unknown(state, node, function, a)


def _computes_loss(name: str, a: Arguments) -> bool:
    """``model.get_loss(batch)``: of a batch, not of what a network returned."""
    return (
        bool(LOSS.search(name))
        and not HANDLES.match(name)
        and bool(a.count)
        and not networks.is_run(a)
    )


def _is_forward(function: Function, owner: Value | None) -> bool:
    """``network.forward(x)``, which is ``network(x)``; a class's own call of its base is not."""
    name = getattr(function.node, "name", "")
    class_ = function.class_
    return (
        name == "forward"
        and isinstance(owner, Instance)
        and class_ is not None
        and is_network(class_)
    )


def _is_evaluated(state: State, function: Function, owner: Instance) -> bool:
    """``network.infer(x)`` of a network in sight, without gradients."""
    name = getattr(function.node, "name", "")
    outside = state.context.no_grad and not state.in_forward
    return outside and bool(RUNS.search(name)) and "step" not in name and is_network(owner.class_)


def _evaluated(
    state: State, node: ast.Call, function: Function, owner: Instance, a: Arguments
) -> Value:
    """Run a method of a network: if it runs parts of it, and opens no autocast, that runs."""
    before = len(state.trace)
    value = _function(state, node, function, a)
    inside = state.trace[before:]
    runs = [each for each in inside if isinstance(each, Forward)]
    if runs and all(each.context.regions == state.context.regions for each in runs):
        networks.run(state, node, owner, a)
    return value


def _method_of_unknown(state: State, node: ast.Call, owner: Unknown, a: Arguments) -> Value:
    """``x.name(...)`` where neither x nor the method is known."""
    assert isinstance(node.func, ast.Attribute)
    name = node.func.attr
    if LOSS.search(name) and owner.made == "given" and a.count:
        return _loss(state, node, name, a)
    if (network := networks.given_back(name, a)) is not None:
        methods.given_away(state, node, name, a, owner)
        return network
    return methods.call(state, node, owner, name, a)


def _arguments(state: State, node: ast.Call) -> Arguments:
    a = Arguments()
    for each in node.args:
        value = state.evaluate(each)
        if isinstance(each, ast.Starred):
            if isinstance(value, ListValue):
                a.positional += value.items
            else:
                a.open = True
        else:
            a.positional.append(value)
    for keyword in node.keywords:
        value = state.evaluate(keyword.value)
        if keyword.arg is not None:
            a.named[keyword.arg] = value
        elif isinstance(value, DictValue):
            a.named |= {k: v for k, v in value.items.items() if isinstance(k, str)}
            a.open |= value.open
        else:
            a.open = True
    return a


# ---------------------------------------------------------------------- functions of the project


def _function(state: State, node: ast.Call, function: Function, a: Arguments) -> Value:
    if function.class_ is not None and is_step_wrapper(function.class_):
        state.emit(Managed, node, function.name)
        return state.unknown(node, "called")
    name = getattr(function.node, "name", "")
    if id(function.node) in function.module.keeping_gradients:
        state.emit(NoSync, node)
    if is_context_manager(function):
        return generator_manager(state, node, function, a)
    if function.class_ is not None and METER.search(function.class_.node.name):
        return _metered(state, node, function, a)
    owner = function.owner if name in steps.OF_SCHEDULES else None
    if isinstance(owner, Instance) and is_schedule(owner.class_):
        steps.scheduler(state, node, Scheduler(owner.class_.node.name), name, a)
    before = len(state.trace)
    value = state.call(function, a, node)
    if isinstance(value, Unknown) and value.made == "called" and function.class_ is None:
        value = _of_arguments(value, a)
    if LOSS.search(name) and not HANDLES.match(name):
        if isinstance(value, Unknown | Tensor) and not _casts_up(state, before, a):
            state.emit(Loss, node, name, tuple(a.values))
        if isinstance(value, Unknown):
            return Tensor(key=value.key, loss=True, inputs=tuple(a.values))
    return value


def _of_arguments(made: Unknown, a: Arguments) -> Unknown:
    """What a function makes of settings, as ``instantiate(conf.optim)``; of others, another."""
    if any(made is each for each in a.values):
        return made  # changed in place, and given back
    given = ", ".join(map(key_of, a.values))
    return replace(made, key=f"{made.key} of {given}") if given else made


METER = re.compile(r"Meter|Averager?\b|RunningMean")
"""Classes that average what they are given."""


def _metered(state: State, node: ast.Call, function: Function, a: Arguments) -> Value:
    """``losses.update(loss.item(), n)``: reported where it is handed in."""
    before = len(state.trace)
    value = state.call(function, a, node)
    inside = state.trace[before:]
    state.trace[before:] = [each for each in inside if not isinstance(each, Report)]
    tensors.shown_all(state, node, a.values, waits=False)
    return value


# ---------------------------------------------------------------------- classes of the project


def _construct(state: State, node: ast.Call, class_: Class, a: Arguments) -> Value:
    ancestors = class_.ancestors()
    base = next((each for each in ancestors[1:] if each in library.SCALERS), None)
    if base is not None:
        return _construct_scaler(state, node, class_, base, a)
    wraps = is_step_wrapper(class_) or any(library.WRAPPERS.match(e) for e in ancestors[1:])
    if wraps and not any("Module" in each for each in ancestors):
        has_state = "__call__" in class_.attributes and "state_dict" in class_.attributes
        scaler = _scaler_in(state, node, class_, a) if is_step_wrapper(class_) else None
        off = scaler is not None and truth(scaler.enabled) is False
        skips = scaler is not None and not off
        wrapper = Wrapper(class_.node.name, has_state=has_state, skips=skips, off=off)
        state.emit(Made, node, wrapper)
        return wrapper
    if any(library.is_optimizer(each) or each == "torch.optim.Optimizer" for each in ancestors[1:]):
        return training.make_optimizer(state, node, class_.node.name, a)
    if any("torch.optim.lr_scheduler." in each for each in ancestors[1:]):
        return training.make_scheduler(state, node, class_.node.name, a)
    if any(each.endswith(".DataLoader") for each in ancestors[1:]):
        return functions.call(state, node, "torch.utils.data.DataLoader", a)
    made = Instance(class_, key=state.nth_made(node, class_.node.name))
    initialise(state, made, a, node)
    return made


def _scaler_in(state: State, node: ast.Call, class_: Class, a: Arguments) -> Scaler | None:
    """The scaler that an object of a class that runs the step makes for it."""
    made, walked = Instance(class_), set(state.walked)
    with state.silent():
        initialise(state, made, a, node)
    state.walked = walked
    return next((each for each in made.attributes.values() if isinstance(each, Scaler)), None)


def _construct_scaler(
    state: State, node: ast.Call, class_: Class, base: str, a: Arguments
) -> Value:
    """An object of a class derived from torch's scaler `base`: a scaler, as that is one."""
    if class_.lookup("__init__") is not None:  # its parameters stand in an order of their own
        a = Arguments(named=a.named, open=a.open)
    own = any(class_.lookup(each) is not None for each in SCALER_METHODS)
    return precision.make_scaler(state, node, base, a, opaque=own)


def initialise(state: State, made: Instance, a: Arguments, node: Node) -> None:
    """Walk a new object's ``__init__``, or set a dataclass's fields."""
    found = made.class_.lookup("__init__")
    if found is not None and isinstance(found[0], Function):
        function = found[0]
        bound = Function(function.node, function.module, function.scope, made, found[1])
        state.call(bound, a, node)
        return
    fields = [
        each.target.id
        for each in made.class_.node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    ]
    made.attributes.update(zip(fields, a.positional, strict=False))
    made.attributes.update(a.named)


def _super(state: State) -> Value:
    for frame in reversed(state.frames):
        function = frame.function
        if function is not None and function.class_ is not None and function.owner is not None:
            return Super(function.owner, function.class_)
    return Unknown("super()")


def _instance(state: State, node: ast.Call, instance: Instance, a: Arguments) -> Value:
    class_ = instance.class_
    if is_step_wrapper(class_):
        state.emit(Managed, node, class_.node.name, _loss_given(a))
        return state.unknown(node, "called")
    found = class_.lookup("__call__") or class_.lookup("forward")
    if found is None or not isinstance(found[0], Function):
        return _unknown(state, node, Unknown(class_.node.name, "called"), a)
    function = found[0]
    bound = Function(function.node, function.module, function.scope, instance, found[1])
    used_as = dotted(node.func).rpartition(".")[2]
    is_loss = any(LOSS.search(each) for each in class_.ancestors()) or (
        bool(LOSS.search(used_as)) and not NETWORK.search(used_as)
    )
    if is_network(class_) and not is_loss:
        return _forward(state, node, instance, a, bound)
    before = len(state.trace)
    value = state.call(bound, a, node)
    if is_loss:
        if not _casts_up(state, before, a):
            state.emit(Loss, node, class_.node.name, tuple(a.values))
        if not isinstance(value, Tensor | ListValue):
            value = Tensor(key=key_of(value), inputs=tuple(a.values))
        if isinstance(value, Tensor):
            return _mean_of_its_own(value).but(loss=True)
    return value


WINDOW = re.compile(r"accum|micro|grad_steps|window|iter_size|update_freq", re.IGNORECASE)
"""What the number of micro-batches in a window is called."""


def _mean_of_its_own(value: Tensor) -> Tensor:
    """What a criterion divides by is its own affair, unless it was told of a window."""
    if WINDOW.search(key_of(value.divisor)):
        return value
    return value.but(divided=False, divisor=None)


def _casts_up(state: State, since: int, a: Arguments) -> bool:
    """Whether a loss in sight computes with nothing in the 16 bits that it is given."""
    if not any(isinstance(each, Tensor) and is_low(each.dtype) for each in flatten(a.values)):
        return False
    inside = [each for each in state.trace[since:] if isinstance(each, Op)]
    used = [value for each in inside for value in flatten(each.inputs)]
    return bool(inside) and not any(isinstance(e, Tensor) and is_low(e.dtype) for e in used)


def _loss_given(a: Arguments) -> Tensor | None:
    """The loss of ``loss_scaler(loss, optimizer, ...)``."""
    first = a.first("loss")
    return first if isinstance(first, Tensor) else None


def _forward(
    state: State, node: ast.Call, instance: Instance, a: Arguments, bound: Function
) -> Value:
    with _prepared(state, instance):
        networks.run(state, node, instance, a)
        with state.in_network(instance):
            value = state.call(bound, a, node)
    return _as_returned(state, instance, _output(state, node, value))


def _prepared(state: State, network: Value) -> AbstractContextManager[None]:
    """The autocast that a trainer has put around a network, while it runs."""
    region = state.prepared.get(key_of(network))
    return nullcontext() if region is None else state.in_region(region)


def _as_returned(state: State, network: Value, output: Value) -> Value:
    """What a network returns: a trainer that has prepared it casts that up."""
    return _raised(output) if key_of(network) in state.prepared else output


def _raised(output: Value) -> Value:
    match output:
        case Tensor():
            return output.but(dtype="float32", guessed=False, region=None)
        case ListValue(items=items):
            return ListValue([*map(_raised, items)])
        case DictValue(items=items):
            return replace(output, items={key: _raised(each) for key, each in items.items()})
        case _:
            return output


def _output(state: State, node: ast.Call, value: Value) -> Value:
    match value:
        case Tensor():
            return value.but(forward=True, region=value.region or state.region)
        case ListValue(items=items):
            return ListValue([_output(state, node, each) for each in items])
        case DictValue(items=items):
            return replace(value, items={k: _part(state, node, e) for k, e in items.items()})
        case _:
            region = state.region
            # What a trainer has prepared returns float32 again.
            dtype = None if region is None or region.of_trainer else tensors.low(region)
            return Tensor(
                key=key_of(value), dtype=dtype, guessed=True, region=region, forward=True, node=node
            )


def _part(state: State, node: ast.Call, value: Value) -> Value:
    """What a dict that a network returns holds: tensors are outputs, other things are not."""
    return _output(state, node, value) if isinstance(value, Tensor | ListValue) else value


def _model(state: State, node: ast.Call, model: Model, a: Arguments) -> Value:
    inner = model.inner
    if model.wrapped and isinstance(inner, Instance):
        return _instance(state, node, inner, a)
    if model.path.endswith(".Sequential") and _has_own(model):
        return _sequential(state, node, model, a)
    if model.path.startswith("torch.nn.") and not model.wrapped:
        if state.in_forward or library.LOSS_LAYERS.match(model.path):
            return layers.apply_layer(state, node, model, a)
        networks.run(state, node, model, a)
        return _output(state, node, layers.apply_layer(state, node, model, a))
    with _prepared(state, model):
        networks.run(state, node, model, a)
    output = _output(state, node, state.unknown(node))
    if isinstance(output, Tensor) and _is_filled(state, node):
        output.dtype = None  # of which of its parts it is nobody tells
    if isinstance(output, Tensor):
        output.host = tensors.are_on_host(a.values)
    return _as_returned(state, model, output)


RECORD = re.compile(r"^(data|batch|record|samples?)(_(dict|data|batch))?$")


def _is_filled(state: State, node: ast.Call) -> bool:
    """``batch = model(batch)``: a network is given a record, and writes its outputs into it."""
    around = state.here.parents.get(id(node))
    given = {dotted(each) for each in node.args}
    return isinstance(around, ast.Assign) and any(
        dotted(each) in given and RECORD.search(dotted(each)) for each in around.targets
    )


def _has_own(model: Model) -> bool:
    return any(isinstance(each, Instance) for each in modules_in(model))


def _sequential(state: State, node: ast.Call, model: Model, a: Arguments) -> Value:
    """``nn.Sequential`` of networks in sight, among others: one after the other runs."""
    networks.run(state, node, model, a)
    value: Value = a.positional[0] if a.positional else NONE
    with state.in_network(model):
        for each in modules_in(model):
            value = invoke(state, node, each, None, Arguments([value]))
    return _output(state, node, value)


# ---------------------------------------------------------------------- what nobody showed us


def _unknown(state: State, node: ast.Call, function: Value, a: Arguments) -> Value:
    name = dotted(node.func).rpartition(".")[2] or key_of(function)
    if library.CLIP_NAME.match(name):
        return functions.call(state, node, "torch.nn.utils.clip_grad_norm_", a)
    if SCALER.search(name) and a.count >= 2:
        state.emit(Managed, node, name, _loss_given(a), optimizer=steps.stepped(a))
        return state.unknown(node)
    if methods.SHOWS.match(name):
        tensors.shown_all(state, node, a.values, waits=False)
    methods.given_away(state, node, name, a)
    methods.note_norm(state, node, name, a)
    if LOSS.search(name):
        networks.run_given(state, node, a)
        return _loss(state, node, name, a)
    if (network := networks.given_back(name, a)) is not None:
        return network
    is_class = name[:1].isupper()  # what it makes may hold tensors, and is none
    if not is_class and any(isinstance(each, Tensor) for each in flatten(a.values)):
        return functions.unknown_of_tensors(state, node, name, a)
    if (returned := methods.walk_callbacks(state, node, a)) is not None:
        return returned
    made = state.unknown(node, "called", name)
    made.of = methods.made_of(name, a)
    if isinstance(function, Unknown):
        made.periodic = function.periodic
    return made


def _loss(state: State, node: ast.Call, name: str, a: Arguments) -> Value:
    state.emit(Loss, node, name, tuple(a.values))
    scaled = Unknown(name, "called") if "scale" in name.lower() else None
    return Tensor(
        key=f"{name}@{node.lineno}#{state.iteration}",
        loss=True,
        scaled=scaled,
        inputs=tuple(a.values),
        host=tensors.are_on_host(a.values),
        node=node,
    )
