"""Where the data of a loader lies: on the host, as loaders want it, or on the device already.

What is on the device cannot be pinned, and worker processes cannot make it. Told by what the data
set and the collate function do, and the functions and objects of the code that they call.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampwise_lint.source.places import assignments, names, scope_of
from ampwise_lint.source.roles import dotted
from ampwise_lint.values.abstract import (
    Const,
    Function,
    Instance,
    ListValue,
    Loader,
    Partial,
    Tensor,
    Value,
)
from ampwise_lint.values.contents import flatten
from ampwise_lint.values.events import Made

CALLS = 3
"""How far calls are followed from what makes a batch."""

MAKES = ("__getitem__", "__getitems__", "__iter__", "__call__")
"""Methods by which objects make samples and batches."""


def is_on_device(event: Made) -> bool:
    """Whether what a loader yields is on the device: ``TensorDataset(x.cuda(), y.cuda())``."""
    assert isinstance(event.value, Loader)
    given = event.value.arguments
    if any(_puts_there(given.get(each), CALLS) for each in ("dataset", "collate_fn")):
        return True
    parts = data_of(event, 2)
    return any(_moves(each, None) for each in (*parts, *_returned(event, parts)))


def _returned(event: Made, parts: list[ast.expr]) -> Iterator[ast.expr]:
    """What functions of the file return that data is unpacked from: ``x, y = make(device)``."""
    read = {name for each in parts for name in _read_whole(each)}
    made = {
        each.value.func.id
        for each in ast.walk(scope_of(event.module, event.node))
        if isinstance(each, ast.Assign)
        and isinstance(each.value, ast.Call)
        and isinstance(each.value.func, ast.Name)
        and any(isinstance(to, ast.Tuple) and names(to) & read for to in each.targets)
    }
    for each in event.module.tree.body:
        if isinstance(each, ast.FunctionDef) and each.name in made:
            given = [e.value for e in ast.walk(each) if isinstance(e, ast.Return) and e.value]
            yield from _with_names(each, given, 1)


def data_of(event: Made, depth: int) -> list[ast.expr]:
    """The data set a loader is given, and what the names in it stand for, over so many steps."""
    call = event.node
    if not isinstance(call, ast.Call):
        return []
    parts = [*call.args[:1], *(each.value for each in call.keywords if each.arg == "dataset")]
    return _with_names(scope_of(event.module, event.node), parts, depth)


def _with_names(scope: ast.AST, parts: list[ast.expr], depth: int) -> list[ast.expr]:
    """Some code, and what the names in it stand for in a scope, over so many steps."""
    for _ in range(depth):
        read = {name for each in parts for name in _read_whole(each)}
        found = [e.value for name in read for e in assignments(scope, name)]
        parts = [*parts, *(each for each in found if each is not None)]
    return parts


def _read_whole(code: ast.AST) -> set[str]:
    """Names whose own value code takes: of ``network.config.size`` a setting alone gets there."""
    nodes = list(ast.walk(code))
    # A chain of attributes stands for its owner where it ends in a method that is called.
    chains = {id(each.func) for each in nodes if isinstance(each, ast.Call)}
    settings: set[int] = set()
    for each in nodes:  # outermost first
        if isinstance(each, ast.Attribute):
            (chains if id(each) in chains else settings).add(id(each.value))
    return {e.id for e in nodes if isinstance(e, ast.Name) and id(e) not in settings}


def _puts_there(maker: Value | None, calls: int) -> bool:
    """Whether what makes samples or batches leaves them on the device."""
    match maker:
        case ListValue(items=[_, *_] as items):  # a data set of what networks returned
            return all(isinstance(e, Tensor) and e.forward and not e.host for e in flatten(items))
        case Partial(function=inner):
            return _puts_there(inner, calls)
        case Instance(class_=class_):
            if any(_moves(each.node, maker) for each in class_.lineage()):
                return True
            return any(_puts_there(_method(maker, each), calls) for each in MAKES)
        case Function(node=node, owner=owner):
            if _moves(node, owner):
                return True
            return calls > 0 and any(_puts_there(each, calls - 1) for each in _called(maker))
        case _:
            return False


def _called(function: Function) -> Iterator[Value | None]:
    """What a function of the code calls: functions, methods and objects in sight."""
    owner = function.owner
    for each in ast.walk(function.node):
        match each:
            case ast.Call(func=ast.Name(id=name)):
                found = function.scope.get(name)
                yield found if isinstance(found, Function) else None
            case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=name)):
                if isinstance(owner, Instance):
                    part = owner.attributes.get(name)
                    yield _method(part if isinstance(part, Instance) else owner, name, "__call__")
            case ast.Call(
                func=ast.Attribute(
                    value=ast.Attribute(value=ast.Name(id="self"), attr=part_name), attr=name
                )
            ):
                part = owner.attributes.get(part_name) if isinstance(owner, Instance) else None
                yield _method(part, name)
            case _:
                pass


def _method(owner: Value | None, *names: str) -> Function | None:
    """The first of some methods that an object has."""
    if not isinstance(owner, Instance):
        return None
    for name in names:
        found = owner.class_.lookup(name)
        if found is not None and isinstance(method := found[0], Function):
            return Function(method.node, method.module, method.scope, owner, found[1])
    return None


def _moves(code: ast.AST, owner: Value | None) -> bool:
    """Whether something in it is copied to the device, or made there; `owner`: its ``self``."""
    return any(
        isinstance(each, ast.Call)
        and isinstance(each.func, ast.Attribute)
        and (each.func.attr == "cuda" or _is_told_device(each, owner, code))
        for each in ast.walk(code)
    )


PLACES = ("device", "map_location")
"""Parameters of torch's functions that tell where something is made."""


def _is_told_device(call: ast.Call, owner: Value | None, code: ast.AST) -> bool:
    """``x.to(device)``, ``torch.tensor(x, device="cuda")``."""
    told = [each.value for each in call.keywords if each.arg in PLACES]
    if isinstance(call.func, ast.Attribute) and call.func.attr == "to":
        return any(_is_device(each, owner) for each in (*call.args, *told))
    return dotted(call.func).startswith("torch.") and any(
        _is_device(each, owner) and not _is_of_another(each, code) for each in told
    )


def _is_of_another(place: ast.expr, code: ast.AST) -> bool:
    """Whether it is where another tensor is, which on the host is the host."""
    name = dotted(place)
    if name.endswith(".device"):
        return name != "self.device"
    made = [each.value for each in assignments(code, name)] if name else []
    return any(isinstance(each, ast.Attribute) and each.attr == "device" for each in made)


def _is_device(node: ast.expr, owner: Value | None) -> bool:
    text = ast.unparse(node)
    name = text.removeprefix("self.")
    if isinstance(owner, Instance) and name != text:
        given = owner.attributes.get(name)
        if isinstance(given, Const) and isinstance(given.value, str):
            text = given.value
    return "cuda" in text or ("dev" in text and "cpu" not in text)
