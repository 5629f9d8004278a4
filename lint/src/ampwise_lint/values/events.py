"""What happens in a training loop, in the order in which it happens on one path."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field

from ampwise_lint.source.nodes import Node
from ampwise_lint.source.project import Module
from ampwise_lint.values.abstract import (
    Class,
    DictValue,
    Loader,
    Model,
    Optimizer,
    Region,
    Scaler,
    Tensor,
    Value,
    Wrapper,
)


@dataclass(frozen=True, slots=True)
class Loop:
    """One iteration of one loop."""

    node: Node
    iteration: int
    serial: int
    """Tells one run of the loop from the next."""
    over_data: bool
    """It runs over batches (a loader), not over epochs."""
    held: int
    """How many conditions were held when it began."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A branch that was taken."""

    node: Node
    key: str
    taken: bool
    periodic: bool
    known: bool
    """It could go no other way."""

    @property
    def asked(self) -> str:
        """What it asks, the same in each iteration."""
        return without_iteration(self.key)


def without_iteration(key: str) -> str:
    """The key of a value, the same in each iteration of a loop."""
    return SERIAL.sub("", key)


SERIAL = re.compile(r"#\d+")
"""What tells a value of one iteration from that of the next."""


@dataclass(frozen=True, slots=True)
class Site:
    """Where a function is called."""

    node: Node
    module: Module
    functions: tuple[str, ...]
    """Names of the functions around, outermost first."""


@dataclass(frozen=True, slots=True)
class Context:
    """Where the path stands when something happens."""

    loops: tuple[Loop, ...] = ()
    conditions: tuple[Condition, ...] = ()
    regions: tuple[Region, ...] = ()
    no_grad: bool = False
    functions: tuple[str, ...] = ()
    """Names of the functions that are being executed, outermost first."""
    sites: tuple[Site, ...] = ()
    """Where they were called."""

    @property
    def region(self) -> Region | None:
        """The autocast region in force, if one is on."""
        inner = self.regions[-1] if self.regions else None
        return inner if inner is not None and inner.enabled else None

    @property
    def is_periodic(self) -> bool:
        """Whether it happens only once in a window, or every so many steps."""
        return any(each.periodic for each in self.conditions)

    @property
    def branches(self) -> list[Condition]:
        """Conditions inside the innermost loop, if there is one, that decide about it."""
        if self.loops:
            return self.branches_in(self.loops[-1])
        return [each for each in self.conditions if not each.known]

    def branches_in(self, loop: Loop) -> list[Condition]:
        """Conditions inside a loop's body, and in what it calls, that decide about it."""
        return [each for each in self.conditions[loop.held :] if not each.known]


@dataclass(eq=False, slots=True)
class Event:
    """Something that happened."""

    node: Node
    module: Module
    context: Context

    @property
    def site(self) -> Site:
        """Where it happened."""
        return Site(self.node, self.module, self.context.functions)

    @property
    def way(self) -> tuple[Site, ...]:
        """The calls that led there, and where it happened."""
        return (*self.context.sites, self.site)


@dataclass(eq=False, slots=True)
class Made(Event):
    """A scaler, optimizer, loader, scheduler or layer was constructed."""

    value: Scaler | Optimizer | Loader | Model | Wrapper


PREPARED = "prepared"
"""By what a loader is read that a trainer has prepared: by steps or an evaluation, nobody knows."""


@dataclass(eq=False, slots=True)
class Read(Event):
    """Batches are taken of a loader: by a loop, by ``next``, by whom it is handed to."""

    loader: Loader
    by: str = ""
    """The function nobody showed us that is given it."""


@dataclass(eq=False, slots=True)
class Enter(Event):
    """An autocast region was entered."""

    region: Region


@dataclass(eq=False, slots=True)
class Forward(Event):
    """A network was called."""

    model: Value
    inputs: tuple[Value, ...]
    is_root: bool
    """Called by a loop, not by another network's forward."""
    training: bool | None = None
    on_cpu: bool = False
    """It was surely on the CPU then."""


@dataclass(eq=False, slots=True)
class Op(Event):
    """A function of torch was called on tensors, a layer applied, or an operator used."""

    path: str
    inputs: tuple[Value, ...]
    arguments: dict[str, Value] = field(default_factory=dict[str, Value])
    result: Value | None = None


@dataclass(eq=False, slots=True)
class Loss(Event):
    """A loss was computed of something."""

    path: str
    inputs: tuple[Value, ...]


@dataclass(eq=False, slots=True)
class Backward(Event):
    """``tensor.backward()``."""

    tensor: Value
    scaled: Value | None


@dataclass(eq=False, slots=True)
class Grad(Event):
    """``torch.autograd.grad``."""

    result: Tensor
    creates_graph: bool = False


@dataclass(eq=False, slots=True)
class Clip(Event):
    """Gradients are clipped."""

    params: Value | None
    by_hand: bool = False


@dataclass(eq=False, slots=True)
class GradientRead(Event):
    """A gradient is read or edited."""

    is_edit: bool = False
    divisor: Value | None = None
    given: Value | None = None
    """What is put in its place."""
    copies: bool = False
    """It is read only to be put elsewhere as it is, or something is put there."""
    is_linear: bool = False
    """It is multiplied or divided, which unscaling commutes with."""


@dataclass(eq=False, slots=True)
class Unscale(Event):
    """``scaler.unscale_(optimizer)``."""

    scaler: Scaler
    optimizer: Value | None


@dataclass(eq=False, slots=True)
class ScalerStep(Event):
    """``scaler.step(optimizer)``."""

    scaler: Scaler
    optimizer: Value | None
    closure: Value | None = None
    """What else it is given."""


@dataclass(eq=False, slots=True)
class Update(Event):
    """``scaler.update()``."""

    scaler: Scaler


@dataclass(eq=False, slots=True)
class OptimizerStep(Event):
    """``optimizer.step()``."""

    optimizer: Optimizer


@dataclass(eq=False, slots=True)
class SchedulerStep(Event):
    """``scheduler.step()``."""

    scheduler: Value
    has_metric: bool = False
    """It is given something else than a count of epochs or steps."""


@dataclass(eq=False, slots=True)
class ZeroGrad(Event):
    """Gradients are zeroed."""

    of: Value | None


@dataclass(eq=False, slots=True)
class StateDict(Event):
    """``x.state_dict()`` or ``x.load_state_dict(...)``."""

    of: Value
    loads: bool


@dataclass(eq=False, slots=True)
class Save(Event):
    """``torch.save``."""

    what: Value
    mapping: DictValue | None

    @property
    def made(self) -> ast.AST | None:
        """Where the dict of a checkpoint is written, if that is in sight."""
        return None if self.mapping is None else self.mapping.node


@dataclass(eq=False, slots=True)
class HostSync(Event):
    """The host waits for a value of the device."""

    tensor: Value | None
    how: str
    shows: bool = False
    """A text is made of it, to be printed or logged; `how` is what makes it."""


@dataclass(eq=False, slots=True)
class Report(Event):
    """A number is printed, logged or added to a running figure."""

    tensor: Tensor
    into: str = ""
    """The name it is added to; empty when it is shown as it is."""
    rescaled: bool = False


@dataclass(eq=False, slots=True)
class Synchronize(Event):
    """``torch.cuda.synchronize`` or ``empty_cache``; of a stream or an event."""

    path: str
    """Full name of the function; empty for a method."""


@dataclass(eq=False, slots=True)
class Clock(Event):
    """The host's clock is read."""


@dataclass(eq=False, slots=True)
class Elapsed(Event):
    """One reading of the clock is taken from another: a duration."""

    begin: int
    """Events that had happened at the first reading."""
    end: int


@dataclass(eq=False, slots=True)
class Moved(Event):
    """A tensor is copied to a device."""

    tensor: Value
    non_blocking: bool
    device: str | None


@dataclass(eq=False, slots=True)
class CastDown(Event):
    """``.half()``, ``.bfloat16()``, ``.to(float16)`` of a tensor or a network."""

    value: Value
    cast: str


@dataclass(eq=False, slots=True)
class CastUp(Event):
    """``.float()`` of a network, or of its parameters in place."""

    value: Value


@dataclass(eq=False, slots=True)
class Accumulate(Event):
    """Something is added to a running sum."""

    into: Value
    added: Value


@dataclass(eq=False, slots=True)
class Applied(Event):
    """``SomeFunction.apply(...)`` of a class of the code."""

    class_: Class


@dataclass(eq=False, slots=True)
class NoSync(Event):
    """A function is called that may call ``model.no_sync()``."""


@dataclass(eq=False, slots=True)
class Managed(Event):
    """A wrapper runs backward or the step."""

    path: str
    loss: Tensor | None = None
    """The loss it is called with: it runs backward of that."""
    unscales: bool = False
    """It divides gradients by the loss scale."""
    plain: bool = False
    """Of steps it does nothing but what is in sight: it neither divides losses nor steps."""
    trainer: Wrapper | None = None
    """The trainer that runs the whole training."""
    optimizer: Optimizer | None = None
    """What it steps by a scaler of its own, which may skip that."""
    off: bool = False
    """That scaler is switched off."""
