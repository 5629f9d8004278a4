"""What is kept from one update to the next, and what of it feeds on itself."""

from __future__ import annotations

import weakref
from collections.abc import Container, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ampwise.bench.arm import Arm
from ampwise.formats import dtype_name
from ampwise.numerics.observe.exact import HALF
from ampwise.numerics.observe.operations import (
    Operation,
    OperationMode,
    is_whole,
    memory,
    tensors,
    written,
)
from ampwise.numerics.observe.shadow import Shadow
from ampwise.places import Place, Places
from ampwise.step.replay import Replay

PARAMETERS = "parameters"
_BY_THEN = 2
"""Updates after which it is known what feeds on itself."""
_OVERWRITES = ("copy_", "fill_", "zero_")

_Line = tuple[str, int]


@dataclass(frozen=True)
class Rounding:
    """An operation of an update with a result in 16 bits, the last one on its line."""

    name: str
    place: Place
    dtype: str


@dataclass(frozen=True)
class Change:
    """What some steps made of a tensor.

    Attributes
    ----------
    kind
        What it is: a parameter, or some state.
    actual, ideal
        By how much it changed, and should have.
    holds, should_hold
        What it is now, and should be.
    """

    kind: str
    name: str
    dtype: torch.dtype
    actual: Tensor
    ideal: Tensor
    holds: Tensor
    should_hold: Tensor


@dataclass(frozen=True)
class Kept:
    """Something that is looked at before and after steps: its kind, its name, the tensor."""

    kind: str
    name: str
    tensor: Tensor


def kept(arm: Arm, feeds: Feedback) -> list[Kept]:
    """All that is looked at: parameters, buffers, and what is in 16 bits of state and others.

    Parameters in 16 bits that an optimizer updates are left to `observe.stagnation`, unless they
    are asked for.
    """
    named = Replay(arm.step).named_tensors()
    own = {id(each) for one in arm.step.optimizers for group in one.param_groups
           for each in group["params"]}  # fmt: skip
    found = [
        Kept(PARAMETERS if id(each) in own else "weights that no optimizer holds", name, each)
        for name, each in named.items()
        if each.dtype not in HALF or id(each) not in own or name in feeds.also
    ]
    names = {id(each): name for name, each in named.items()}
    for optimizer in arm.step.optimizers:
        for parameter, state in list(optimizer.state.items()):
            of = names.get(id(parameter), "")
            found += [
                Kept(f"the optimizer's {key!r}", f"{key} of {of}", each)
                for key, each in _tensors_in(state)
                if each.dtype in HALF or f"{key} of {of}" in feeds.also
            ]
    found += [Kept("buffers", name, each) for name, each in own_buffers(arm.model).items()]
    known = {memory(each.tensor) for each in found} | {memory(each) for each in named.values()}
    found += [each for each in feeds.others() if memory(each.tensor) not in known]
    return [each for each in found if each.tensor.is_floating_point() and each.tensor.numel()]


def own_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers in floating point that code of the user's own may write to.

    Those of torch's layers in float32 are left out: their kernels average in float32.
    """
    found = dict[str, Tensor]()
    for path, module in model.named_modules():
        torchs = type(module).__module__.startswith("torch.nn.")
        for name, each in module.named_buffers(path, recurse=False):
            if each.is_floating_point() and (each.dtype in HALF or not torchs):
                found[name] = each
    return found


def _tensors_in(state: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(state, Mapping):
        for key, each in state.items():
            if isinstance(each, Tensor):
                yield str(key), each


class Values:
    """What tensors held when they were first seen, and should have held."""

    def __init__(self, mode: Shadow | None) -> None:
        self._mode = mode
        self._first: dict[str, tuple[Tensor, Tensor]] = {}

    def note(self, kept: Sequence[Kept]) -> None:
        """Look at those that are new."""
        for each in kept:
            if self._mode is not None and each.name not in self._first:
                self._first[each.name] = self._now(each.tensor)

    def knows(self, each: Kept) -> bool:
        """Whether a tensor is still of the shape that it was first seen with."""
        return self._first[each.name][0].shape == each.tensor.shape

    def change(self, each: Kept) -> Change:
        """What became of one."""
        first, now = self._first[each.name], self._now(each.tensor)
        dtype = each.tensor.dtype
        changes = (now[0] - first[0], now[1] - first[1])
        return Change(each.kind, each.name, dtype, *changes, *now)

    def _now(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        assert self._mode is not None
        actual, ideal = tensor.detach().double().clone(), self._mode.of(tensor.detach())
        return actual, actual if ideal is None else ideal.clone()


class Feedback(OperationMode):
    """Sees which tensors are made of what they were, and where updates round to 16 bits.

    Attributes
    ----------
    accumulates
        Names of tensors that were made of themselves.
    updates
        How many steps wrote parameters: others were skipped.
    roundings
        By line.
    draws
        Whether random numbers were drawn.
    also
        Names of state that is looked at in any format.
    """

    def __init__(self, places: Places, also: Container[str] = ()) -> None:
        super().__init__()
        self.also = also
        self.accumulates: set[str] = set()
        self.updates = 0
        self.roundings: dict[_Line, Rounding] = {}
        self.draws = False
        self._places = places
        self._begun = self._updates = False
        self._made_of: dict[int, frozenset[str]] = {}
        self._written: set[int] = set()
        self._others: dict[str, weakref.ref[Tensor]] = {}
        self._names: dict[int, str] = {}

    @contextmanager
    def inside(self, mode: Shadow | None) -> Generator[None]:
        """Context of what is looked at, with a shadow if there is one."""
        with nullcontext() if mode is None else mode.beside(), self:
            yield

    @contextmanager
    def in_update(self) -> Generator[None]:
        """Context of an update of an optimizer."""
        self._updates = True
        try:
            yield
        finally:
            self._updates = False

    def begin(self, kept: Sequence[Kept]) -> None:
        """A step begins, with these."""
        self._made_of = {memory(each.tensor): frozenset([each.name]) for each in kept}
        self._written.clear()
        self._begun = True

    def end(self, kept: Sequence[Kept]) -> None:
        """It is over.

        What the first update makes of a tensor may be its copy: then it is another that feeds on
        itself.
        """
        found = {each.name for each in kept if self._feeds_on_itself(each)}
        made = any(e.kind == PARAMETERS and memory(e.tensor) in self._written for e in kept)
        self.updates += made
        self.accumulates = found if made and self.updates == _BY_THEN else self.accumulates | found

    def _feeds_on_itself(self, each: Kept) -> bool:
        at = memory(each.tensor)
        return at in self._written and each.name in self._made_of.get(at, ())

    def anew(self, gradient: Tensor) -> None:
        """A gradient counts as given, whatever it was made of."""
        self._made_of.pop(memory(gradient), None)

    def others(self) -> Iterator[Kept]:
        """Tensors in 16 bits that were written in place, and live on."""
        for name, weak in list(self._others.items()):
            tensor = weak()
            if tensor is not None:
                yield Kept(name.partition(" #")[0], name, tensor)

    def operate(self, op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation."""
        func = op.func
        result = func(*args, **kwargs)
        if op.empty:
            return result
        made = written(op, args, kwargs, result)
        of_update = self._updates or not torch.is_grad_enabled()
        if of_update and self._begun and torch.Tag.nondeterministic_seeded in func.tags:
            self.draws = True
        if made:
            self._feed(op.name, args, kwargs, made)
            if of_update or op.mutates:
                self._note(op.name, made, in_place=op.mutates)
        return result

    def _feed(self, name: str, args: Any, kwargs: Any, made: Sequence[Tensor]) -> None:
        """What is written is made of what the arguments are made of."""
        given = tensors((args, kwargs))
        if name in _OVERWRITES and is_whole(given[0]):
            given = given[1:]
        of = frozenset().union(*(self._made_of.get(memory(each), ()) for each in given))
        self._made_of.update(dict.fromkeys(map(memory, made), of))
        self._written.update(map(memory, made))

    def _note(self, name: str, made: Sequence[Tensor], *, in_place: bool) -> None:
        half = [each for each in made if each.dtype in HALF]
        if not half:
            return
        place = self._places.here()
        if place.file and place.phase == "forward":
            self.roundings[place.file_line] = Rounding(name, place, dtype_name(half[0].dtype))
        for each in half if in_place else ():
            where = f"what {Path(place.file).name} keeps (line {place.line})"
            name = self._names.setdefault(memory(each), f"{where} #{len(self._names)}")
            self._others[name] = weakref.ref(each)
