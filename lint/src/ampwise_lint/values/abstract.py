"""What a name can stand for, as far as the source says.

The interpreter evaluates code over these values instead of numbers. Each keeps only
what a rule may ask: which scaler scaled this tensor, whether this optimizer is fused, in which
dtype that product ran. What cannot be known is `Unknown`, with a *key* that says where it came
from: two conditions with the same key are the same condition, on every path and in every function
the value was handed to.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2s
from pathlib import Path
from typing import Any, Literal

from ampwise_lint.source.nodes import Node
from ampwise_lint.source.project import Module

LOW = ("float16", "bfloat16")
Origin = Literal["given", "computed", "called"]
"""A parameter or attribute nobody set; an expression; what an unknown function returned."""


LONGEST = 2000
"""Letters of a key. ``x = x + x`` in every line doubles it; a digest stands for the rest."""

MOST = 10_000
"""Values in a value, each as often as it is in it: as many as anything walks through."""


@dataclass(eq=False, slots=True)
class Value:
    """Anything."""


@dataclass(eq=False, slots=True)
class Unknown(Value):
    """A value the source does not tell; also the result of an operation on such values."""

    key: str
    """Where it comes from, in terms of the program: equal keys are equal values."""
    made: Origin = "computed"
    op: str = ""
    """``not``, ``and``, ``or``, ``==``, ``%`` ...: what `operands` were joined by.

    ``either``: one of several constants, by the branches that were taken. ``copy``: of what.
    """
    operands: tuple[Value, ...] = ()
    periodic: bool = False
    """Depends on a remainder, as ``(i + 1) % n == 0`` does: true once in a window."""
    loop: int | None = None
    """Iteration, of the innermost loop, in which it was made; None outside loops."""
    scale: bool = False
    """It holds a loss scale read back (``scaler.get_scale()``)."""
    of: Value | None = None
    """What it was read from: ``.item()`` of which tensor, attribute of which object.

    Of what an unknown call returned: the scaler it was given, or the network it is to optimize.
    """
    clock: int | None = None
    """A time: how many events had happened when it was read."""
    size: int = field(init=False)

    def __post_init__(self) -> None:
        if len(self.key) > LONGEST:
            self.key = self.key[:LONGEST] + blake2s(self.key.encode()).hexdigest()
        self.size = 1 + sum(map(size_of, self.operands))
        if self.size > MOST:
            self.op, self.operands, self.size = "", (), 1


@dataclass(eq=False, slots=True)
class Const(Value):
    """A literal."""

    value: Any


@dataclass(eq=False, slots=True)
class Ref(Value):
    """Something outside the code that is read, by its full name: ``torch.nn.Linear``."""

    path: str
    value: Const | None = None
    """What it stands for, where it is a member of an enumeration of the code."""


class Scope:
    """Names of a module, function or class body."""

    __slots__ = ("globals", "module", "names", "parent")

    def __init__(self, module: Module, parent: Scope | None = None) -> None:
        self.module = module
        self.parent = parent
        self.names: dict[str, Value] = {}
        self.globals: set[str] = set()

    def get(self, name: str) -> Value | None:
        """What a name stands for; None where nothing was bound to it."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.parent
        return None

    def set(self, name: str, value: Value) -> None:
        """Bind a name."""
        if name in self.globals:
            self.top.names[name] = value
        else:
            self.names[name] = value

    def put(self, name: str, value: Value) -> None:
        """Bind a name anew where it is bound."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.names:
                scope.names[name] = value
                return
            scope = scope.parent

    @property
    def top(self) -> Scope:
        """The module's scope."""
        scope = self
        while scope.parent is not None:
            scope = scope.parent
        return scope


@dataclass(eq=False, slots=True)
class Function(Value):
    """A function of the code that is read; `owner` the object it is bound to."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    module: Module
    scope: Scope
    owner: Value | None = None
    class_: Class | None = None

    @property
    def name(self) -> str:
        """Its name, with its class."""
        own = getattr(self.node, "name", "<lambda>")
        return f"{self.class_.node.name}.{own}" if self.class_ is not None else own


@dataclass(eq=False, slots=True)
class Class(Value):
    """A class of the code that is read."""

    node: ast.ClassDef
    module: Module
    scope: Scope
    bases: tuple[Value, ...] = ()
    attributes: dict[str, Value] = field(default_factory=dict[str, Value])

    def lookup(self, name: str) -> tuple[Value, Class] | None:
        """An attribute, and the class of the code that defines it, along the bases."""
        if name in self.attributes:
            return self.attributes[name], self
        for base in self.bases:
            if isinstance(base, Class) and base is not self and (found := base.lookup(name)):
                return found
        return None

    def lineage(self) -> Iterator[Class]:
        """It, and the classes of the code that it derives from."""
        waiting, seen = [self], set[int]()
        while waiting:
            class_ = waiting.pop(0)
            if id(class_) not in seen:
                seen.add(id(class_))
                yield class_
                waiting += [each for each in class_.bases if isinstance(each, Class)]

    def ancestors(self, seen: frozenset[int] = frozenset()) -> list[str]:
        """Names of all classes it derives from, outside ones by their full name."""
        if id(self) in seen:
            return []
        names = [self.node.name]
        for base in self.bases:
            if isinstance(base, Class):
                names += base.ancestors(seen | {id(self)})
            elif isinstance(base, Ref):
                names.append(base.path)
            elif isinstance(base, Unknown):
                names.append(base.key)
        return names


@dataclass(eq=False, slots=True)
class Instance(Value):
    """An object of a class of the code that is read."""

    class_: Class
    attributes: dict[str, Value] = field(default_factory=dict[str, Value])
    wrapped: str = ""
    """``ddp``, ``dp``, ``fsdp`` when a wrapper of torch holds it."""
    key: str = ""
    """Its class and where it was made, the same on every path."""


@dataclass(eq=False, slots=True)
class ListValue(Value):
    """A tuple or list whose items are known."""

    items: list[Value]
    repeats: bool = False
    """Of any length: its one item stands for all."""
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = 1 + sum(map(size_of, self.items))


@dataclass(eq=False, slots=True)
class DictValue(Value):
    """A dict whose keys are known, by their constants; `open` when it may hold more."""

    items: dict[Any, Value]
    node: ast.AST
    open: bool = False
    is_object: bool = False
    """A namespace, whose attributes these are."""
    periodic: bool = False
    """Empty, but for once in a window."""


@dataclass(eq=False, slots=True)
class Scaler(Value):
    """A gradient scaler."""

    node: Node
    module: Module
    enabled: Value
    key: str
    path: str = ""
    """Full name of the class it was made from; empty for one that was handed in."""
    device: Value | None = None
    opaque: bool = False
    """From a function nobody showed us: what its methods do is not ours to judge."""
    first_scale: Value | None = None
    """What it is told to begin with; None where torch's own choice stands."""


@dataclass(eq=False, slots=True)
class Wrapper(Value):
    """An object that runs the step itself: Accelerator, Fabric, NativeScaler, an engine."""

    path: str
    lower: bool = False
    """It was told to use a lower precision."""
    has_state: bool = False
    """Its ``state_dict`` is that of a gradient scaler."""
    mixed: str = ""
    """The dtype of its autocast; ``any`` where that is a setting, empty where it opens none."""
    weights: str = ""
    """The dtype of 16 bits that it casts parameters to."""
    divides: bool = True
    """It may divide losses by the number of micro-batches itself."""
    network: Value | None = None
    """What it was made to train."""
    skips: bool = False
    """It steps optimizers by a gradient scaler of its own, which may skip that."""
    off: bool = False
    """The gradient scaler of its own is switched off: it backwards and steps in any precision."""

    @property
    def scales(self) -> bool:
        """Whether it may scale losses."""
        return self.mixed in ("float16", "any")


@dataclass(eq=False, slots=True)
class Optimizer(Value):
    """An optimizer."""

    node: Node
    module: Module
    key: str
    path: str = ""
    params: Value | None = None
    arguments: dict[str, Value] = field(default_factory=dict[str, Value])
    loops: tuple[int, ...] = ()
    """The loops it was made in."""
    others: tuple[Optimizer, ...] = ()
    """What the name stands for where other branches were taken."""


@dataclass(eq=False, slots=True)
class Scheduler(Value):
    """A learning-rate scheduler."""

    key: str
    path: str = ""
    optimizer: Value | None = None
    """What it was made for."""


@dataclass(eq=False, slots=True)
class Model(Value):
    """A network whose code is not read, or a layer of torch."""

    key: str
    path: str = ""
    """Full name of the class, where known."""
    node: Node | None = None
    wrapped: str = ""
    cpu: bool = False
    arguments: dict[str, Value] = field(default_factory=dict[str, Value])
    inner: Value | None = None
    """The network inside a wrapper, or the modules of a Sequential."""
    copy_of: Value | None = None
    """The network it was copied from."""


@dataclass(eq=False, slots=True)
class Parameters(Value):
    """The parameters (or ``state_dict``) of something."""

    of: Value
    key: str


@dataclass(eq=False, slots=True)
class Parameter(Value):
    """One parameter, as a loop over `Parameters` yields it."""

    of: Value


@dataclass(eq=False, slots=True)
class Gradient(Value):
    """``p.grad``, or what was computed of it."""

    of: Value
    divisor: Value | None = None
    """What it was divided by or multiplied with."""

    @property
    def is_unscaled(self) -> bool:
        """Whether it was divided by the loss scale by hand."""
        return isinstance(self.divisor, Unknown) and self.divisor.scale


@dataclass(eq=False, slots=True)
class Loader(Value):
    """A DataLoader."""

    node: Node
    module: Module
    arguments: dict[str, Value]
    opaque: bool = False


@dataclass(eq=False, slots=True)
class Cast:
    """Where something was made half."""

    node: Node
    module: Module
    dtype: str


@dataclass(eq=False, slots=True)
class Region:
    """One entry into autocast."""

    node: Node
    module: Module
    enabled: bool
    """On the path that is being walked."""
    device: str | None
    """``cuda``, ``cpu`` ..., None where the code does not tell."""
    dtype: str | None
    """``float16``, ``bfloat16``, None where the code does not tell."""
    of_trainer: bool = False
    """It is that of a trainer which prepares networks: they run in it wherever they are called."""


@dataclass(eq=False, slots=True)
class Tensor(Value):
    """A tensor."""

    key: str = ""
    dtype: str | None = None
    """``low`` (the region's or half), ``float32``, ``int``, or None for not known."""
    guessed: bool = False
    """The dtype is what networks in autocast mostly return, nothing that was seen."""
    region: Region | None = None
    """The autocast region it was computed in."""
    op: str = ""
    """The operation it is the result of."""
    inputs: tuple[Value, ...] = ()
    scaled: Value | None = None
    """The scaler it was multiplied by; an Unknown when a function nobody showed us may have."""
    divided: bool = False
    """Divided, or weighted by something that is no literal."""
    divisor: Value | None = None
    """What the division was by."""
    factor: Value | None = None
    """The literal it was multiplied with."""
    forward: bool = False
    """It is what a network returned."""
    loss: bool = False
    grown: bool = False
    """A sum over micro-batches or batches."""
    data: bool = False
    """It came from a loader."""
    moved: bool = False
    """A batch that was copied to the device."""
    cast: Cast | None = None
    node: Node | None = None
    host: bool = False
    """It is on the host (or a number read from a tensor)."""
    of: Value | None = None
    """The tensor whose number this is (``.item()``, ``.detach()``)."""
    grad_scaled: bool = False
    """A gradient, by ``autograd.grad``, of something scaled."""

    def but(self, **changes: Any) -> Tensor:
        """A copy with changes."""
        return replace(self, **changes)


@dataclass(eq=False, slots=True)
class Manager(Value):
    """A context manager, not entered yet."""

    kind: Literal["autocast", "no_grad", "enable_grad", "many", "null", "other"]
    node: Node
    region: Region | None = None
    bound: Value | None = None
    """What ``as`` binds."""
    managers: tuple[Manager, ...] = ()


@dataclass(eq=False, slots=True)
class Bound(Value):
    """A method that is not called yet: ``p.grad.clamp_``, ``model.parameters``."""

    owner: Value
    name: str
    node: Node


@dataclass(eq=False, slots=True)
class Imported(Value):
    """A file of the project, or a name in it, that nobody has looked into yet."""

    path: Path
    name: str = ""
    """Empty for the module itself."""
    full: str = ""
    """The name as it was imported, for when the file has no such name."""


@dataclass(eq=False, slots=True)
class Super(Value):
    """``super()``."""

    owner: Value
    class_: Class


@dataclass(eq=False, slots=True)
class Partial(Value):
    """``functools.partial``."""

    function: Value
    positional: tuple[Value, ...]
    named: dict[str, Value]


NONE = Const(None)
TRUE = Const(True)
FALSE = Const(False)


def is_low(dtype: str | None) -> bool:
    """Whether a dtype is one of 16 bits."""
    return dtype == "low" or dtype in LOW


def size_of(value: Value) -> int:
    """How many values there are in a value, itself included."""
    return value.size if isinstance(value, Unknown | ListValue) else 1


def truth(value: Value) -> bool | None:
    """Whether a value is true, or None where that is not known."""
    match value:
        case Const(value=constant):
            return bool(constant)
        case Unknown() | Tensor() | Gradient() | Parameters():
            return None
        case ListValue(items=items):
            return bool(items) or None
        case DictValue(periodic=True):
            return None
        case DictValue(items=items, open=is_open):
            return True if items else None if is_open else False
        case _:
            return True


def key_of(value: Value | None) -> str:
    """A text that is equal for equal values."""
    match value:
        case None:
            return "?"
        case Const(value=constant):
            return repr(constant)
        case Ref(path=path) | Wrapper(path=path):
            return path
        case (
            Unknown(key=key)
            | Scaler(key=key)
            | Optimizer(key=key)
            | Scheduler(key=key)
            | Model(key=key)
            | Parameters(key=key)
        ):
            return key
        case Tensor(key=key) | Instance(key=key) if key:
            return key
        case ListValue(items=items):
            return "(" + ", ".join(map(key_of, items)) + ")"
        case DictValue(node=ast.expr(lineno=line, col_offset=column)):
            return f"dict@{line}:{column}"  # the same on every path
        case _:
            return f"{type(value).__name__}@{id(value):x}"


def loop_of(values: Sequence[Value]) -> int | None:
    """The iteration in which the latest of some values was made."""
    seen = [each.loop for each in values if isinstance(each, Unknown) and each.loop is not None]
    return max(seen, default=None)


def is_periodic(values: Sequence[Value]) -> bool:
    """Whether any of some values is true once in a window."""
    return any(isinstance(each, Unknown | DictValue) and each.periodic for each in values)
