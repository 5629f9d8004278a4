"""Training whose updates are followed in float64: what they add up to, and what they should have.

A task is trained once more from its beginning, with a float64 shadow of its updates that lives as
long as the training. The gradients are those of the run; what an update makes of them, and all that
is kept from one to the next, has a shadow: parameters, state of optimizers, averages of weights. So
the shadow has the same updates without rounding, added up without rounding. Compared are changes:
an average of weights may be right to three digits, and yet never have moved.

Only what feeds on itself from one update to the next is compared, as only there an error grows. A
copy of float32 master weights in 16 bits is none of it. Where an iteration is the task's own, or
buffers are in 16 bits, forward and backward are shadowed, too, as averages may be made there.

Cost: the steps once more; where their updates compute in 16 bits, and only there, an update in
float64 beside each.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import (
    Callable,
    Container,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampwise.bench.arm import Arm
from ampwise.data import to_device
from ampwise.formats import dtype_name
from ampwise.numerics.observe.exact import HALF
from ampwise.numerics.observe.gradient_errors import NOISE_DB, GradientErrors
from ampwise.numerics.observe.operations import (
    Operation,
    OperationMode,
    is_whole,
    memory,
    tensors,
    written,
)
from ampwise.numerics.observe.shadow import Shadow
from ampwise.numerics.update import one_by_one
from ampwise.numerics.update_of_task import Trained, each_update
from ampwise.places import Place, Places, placing
from ampwise.step.replay import Replay
from ampwise.tasks.checks import endless

MATRIX_DB = 4.0
"""SQNR of the change of a weight matrix below which it is wrong; of all `NOISE_DB`."""
_BY_CHANCE = 1e-3
"""Change in exact arithmetic, beside the actual one, of what holds only what rounding lost."""
_GATE = 2
"""Updates after which it is known whether any of them computes in 16 bits."""
LIMIT_S = 60.0

_Line = tuple[str, int]
_OVERWRITES = ("copy_", "fill_", "zero_")


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


@dataclass
class Followed:
    """Training, and what its updates should have made.

    Attributes
    ----------
    changes
        Of what feeds on itself.
    roundings
        Where updates round to 16 bits, in order.
    draws
        Whether updates draw random numbers: then they round by chance, which loses nothing.
    gradients
        What each update was given, by parameter.
    began
        Of parameters in 16 bits that were asked for, what they were then.
    """

    arm: Arm
    batches: Iterator[Any]
    steps: int = 0
    changes: list[Change] = field(default_factory=list[Change])
    roundings: list[Rounding] = field(default_factory=list[Rounding])
    draws: bool = False
    gradients: list[dict[str, Tensor]] = field(default_factory=list[dict[str, Tensor]])
    began: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    @property
    def is_deliberate(self) -> bool:
        """Whether what rounding loses is kept: by chance, or in a compensation."""
        return self.draws or any(
            bool(each.actual.norm() > 0)
            and bool(each.ideal.norm() < _BY_CHANCE * each.actual.norm())
            for each in self.changes
        )

    def errors(self) -> dict[str, GradientErrors]:
        """Of changes against what they should be, by kind: state in 16 bits first."""
        kinds = sorted({each.kind for each in self.changes}, key=lambda kind: kind == PARAMETERS)
        return {kind: GradientErrors(*self._of(kind)) for kind in kinds}

    def _of(self, kind: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        mine = [each for each in self.changes if each.kind == kind]
        return {e.name: e.actual for e in mine}, {e.name: e.ideal for e in mine}

    def wrong(self) -> dict[str, GradientErrors]:
        """The same, of what did not change as it should; nothing where that is meant."""
        found = {} if self.is_deliberate else self.errors()
        return {kind: each for kind, each in found.items() if is_wrong(each)}

    def kept_of_db(self, ideal: Mapping[str, Tensor]) -> float:
        """The least SQNR of a kind against changes that are given, in dB."""
        kinds: dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]] = {}
        for each in self.changes:
            if each.name in ideal:
                actual, wanted = kinds.setdefault(each.kind, ({}, {}))
                actual[each.name], wanted[each.name] = each.actual, ideal[each.name]
        return min((GradientErrors(*pair).sqnr_db for pair in kinds.values()), default=math.inf)

    def kept_db(self) -> float:
        """The least SQNR of a kind, in dB."""
        return min((each.sqnr_db for each in self.errors().values()), default=math.inf)


PARAMETERS = "parameters"


def is_wrong(errors: GradientErrors) -> bool:
    """Whether changes are not what they should be: by the limits of gradients that mend."""
    low = errors.sqnr_db < NOISE_DB or bool(errors.noisy(MATRIX_DB))
    return errors.norm > 0 and (low or bool(errors.missing()))


def rounds_updates(trained: Trained, arm: Arm) -> bool:
    """Whether updates of a task compute in 16 bits, or keep something in them.

    At no price for torch's own optimizers of float32 parameters.

    Parameters
    ----------
    arm
        What was trained.
    """
    plain = are_torchs(arm)
    kept = [*arm.model.parameters(), *arm.model.buffers()]
    if plain and not any(each.dtype in HALF for each in kept):
        return False
    if any(each.dtype in HALF for each in arm.model.buffers()):
        return True
    return bool(follow(trained, _GATE, shadowed=False).roundings)


def are_torchs(arm: Arm) -> bool:
    """Whether all that updates do is done by optimizers of torch's."""
    return not arm.iteration.makes_updates and all(map(_is_torchs, arm.step.optimizers))


def _is_torchs(optimizer: Optimizer) -> bool:
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    return type(optimizer).__module__.startswith("torch.optim.") and not any(hooks)


def follow(
    trained: Trained,
    steps: int,
    *,
    shadowed: bool = True,
    rounds: Callable[[Place], bool] | None = None,
    given: Iterable[Mapping[str, Tensor]] | None = None,
    also: Container[str] = (),
    began: Mapping[str, Tensor] | None = None,
) -> Followed:
    """Train a task from its beginning, with its updates beside float64.

    Parameters
    ----------
    shadowed
        False to see only where updates round.
    rounds
        Places at which the shadow rounds, too.
    given
        Gradients for each update, in place of its own.
    also
        Names of state that is looked at in float32, too, and of parameters in 16 bits.
    began
        Parameters that begin as these, in place of their own values.
    """
    since = time.monotonic()
    with placing([]) as places:
        mode = Shadow(places, errors=False, at=None, rounds=rounds) if shadowed else None
        feeds = _Feeds(places, also)
        with feeds.inside(mode):
            arm = Arm(trained.task, trained.policy, trained.settings)
            begins = _begins(arm, also, began or {})
        groups = [each for one in arm.step.optimizers for each in one.param_groups]
        one_by_one(groups)
        batches = (to_device(each, arm.step.device) for each in endless(trained.task))
        found = Followed(arm, batches, began=begins)
        turns = _Gradients(found, None if given is None else iter(given))
        first = _Values(mode)
        first.note(_kept(arm, feeds))
        while found.steps < steps and time.monotonic() - since < LIMIT_S:
            feeds.begin(_kept(arm, feeds))
            _step(
                arm, [next(batches) for _ in range(trained.settings.accumulate)], feeds, mode, turns
            )
            kept = _kept(arm, feeds)
            feeds.end(kept)
            first.note(kept)
            found.steps += 1
        found.roundings, found.draws = list(feeds.roundings.values()), feeds.draws
        if mode is not None:
            found.changes = [
                first.change(each)
                for each in _kept(arm, feeds)
                if each.name in feeds.accumulates and first.knows(each)
            ]
    return found


def _begins(arm: Arm, also: Container[str], began: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What parameters in 16 bits are that are asked for; first they become what is given."""
    named = dict(arm.model.named_parameters())
    with torch.no_grad():
        for name in named.keys() & began.keys():
            named[name].copy_(began[name])
    return {n: e.detach().clone() for n, e in named.items() if e.dtype in HALF and n in also}


class _Gradients:
    """Notes what updates are given, or has them be given what others were."""

    def __init__(self, found: Followed, given: Iterator[Mapping[str, Tensor]] | None) -> None:
        self._found, self._given = found, given

    def at_update(self) -> None:
        """An update is about to begin."""
        arm = self._found.arm
        scale = float(arm.step.loss_scale.scale)
        held = {n: e for n, e in Replay(arm.step).named_tensors().items() if e.grad is not None}
        wanted = {} if self._given is None else next(self._given, {})
        for name, each in held.items():
            assert each.grad is not None
            if name in wanted:
                each.grad.copy_(wanted[name] * scale)
        if self._given is None:
            self._found.gradients.append(
                {n: e.grad.detach() / scale for n, e in held.items() if e.grad is not None}
            )


def _step(
    arm: Arm, window: Sequence[Any], feeds: _Feeds, mode: Shadow | None, gradients: _Gradients
) -> None:
    """A step; an update of it begins with the gradients that are there."""

    def update(make: Callable[[], None], _: Sequence[Optimizer]) -> bool:
        gradients.at_update()
        for each in Replay(arm.step).named_tensors().values():
            if each.grad is not None:
                feeds.anew(each.grad)
                if mode is not None:
                    mode.source(each.grad)
        with feeds.in_update():
            make()
        return False

    if arm.iteration.makes_updates:
        with feeds.inside(mode):
            each_update(arm, window[0], update)
        return
    forward_too = any(each.dtype in HALF for each in arm.model.buffers())
    with feeds.inside(mode) if forward_too else nullcontext():
        for batch in window:
            arm.iteration.again(arm.step, batch)
    with feeds.inside(mode):
        update(arm.step.update, ())


# -- what is kept from one update to the next ------------------------------------------------------


@dataclass(frozen=True)
class _Kept:
    kind: str
    name: str
    tensor: Tensor


def _kept(arm: Arm, feeds: _Feeds) -> list[_Kept]:
    """All that is looked at: parameters, and what is in 16 bits of state, buffers and others.

    Parameters in 16 bits that an optimizer updates are left to `observe.stagnation`, unless they
    are asked for.
    """
    named = Replay(arm.step).named_tensors()
    own = {id(each) for one in arm.step.optimizers for group in one.param_groups
           for each in group["params"]}  # fmt: skip
    found = [
        _Kept(PARAMETERS if id(each) in own else "weights that no optimizer holds", name, each)
        for name, each in named.items()
        if each.dtype not in HALF or id(each) not in own or name in feeds.also
    ]
    names = {id(each): name for name, each in named.items()}
    for optimizer in arm.step.optimizers:
        for parameter, state in list(optimizer.state.items()):
            of = names.get(id(parameter), "")
            found += [
                _Kept(f"the optimizer's {key!r}", f"{key} of {of}", each)
                for key, each in _tensors_in(state)
                if each.dtype in HALF or f"{key} of {of}" in feeds.also
            ]
    found += [_Kept("buffers", name, each) for name, each in arm.model.named_buffers()
              if each.dtype in HALF]  # fmt: skip
    known = {memory(each.tensor) for each in found} | {memory(each) for each in named.values()}
    found += [each for each in feeds.others() if memory(each.tensor) not in known]
    return [each for each in found if each.tensor.is_floating_point() and each.tensor.numel()]


def _tensors_in(state: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(state, Mapping):
        for key, each in state.items():
            if isinstance(each, Tensor):
                yield str(key), each


class _Values:
    """What tensors held when they were first seen, and should have held."""

    def __init__(self, mode: Shadow | None) -> None:
        self._mode = mode
        self._first: dict[str, tuple[Tensor, Tensor]] = {}

    def note(self, kept: Sequence[_Kept]) -> None:
        """Look at those that are new."""
        for each in kept:
            if self._mode is not None and each.name not in self._first:
                self._first[each.name] = self._now(each.tensor)

    def knows(self, each: _Kept) -> bool:
        """Whether a tensor is still of the shape that it was first seen with."""
        return self._first[each.name][0].shape == each.tensor.shape

    def change(self, each: _Kept) -> Change:
        """What became of one."""
        first, now = self._first[each.name], self._now(each.tensor)
        dtype = each.tensor.dtype
        changes = (now[0] - first[0], now[1] - first[1])
        return Change(each.kind, each.name, dtype, *changes, *now)

    def _now(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        assert self._mode is not None
        actual, ideal = tensor.detach().double().clone(), self._mode.of(tensor.detach())
        return actual, actual if ideal is None else ideal.clone()


class _Feeds(OperationMode):
    """Sees which tensors are made of what they were, and where updates round to 16 bits.

    Attributes
    ----------
    accumulates
        Names of tensors that were made of themselves.
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
        self.roundings: dict[_Line, Rounding] = {}
        self.draws = False
        self._places = places
        self._begun = self._updates = False
        self._steps = 0
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

    def begin(self, kept: Sequence[_Kept]) -> None:
        """A step begins, with these.

        What the first one makes of a tensor may be its copy: then it is another that feeds on
        itself.
        """
        if self._steps == 1:
            self.accumulates.clear()
        self._steps += 1
        self._made_of = {memory(each.tensor): frozenset([each.name]) for each in kept}
        self._written.clear()
        self._begun = True

    def end(self, kept: Sequence[_Kept]) -> None:
        """It is over."""
        for each in kept:
            at = memory(each.tensor)
            if at in self._written and each.name in self._made_of.get(at, ()):
                self.accumulates.add(each.name)

    def anew(self, gradient: Tensor) -> None:
        """A gradient counts as given, whatever it was made of."""
        self._made_of.pop(memory(gradient), None)

    def others(self) -> Iterator[_Kept]:
        """Tensors in 16 bits that were written in place, and live on."""
        for name, weak in list(self._others.items()):
            tensor = weak()
            if tensor is not None:
                yield _Kept(name.partition(" #")[0], name, tensor)

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
            self.roundings[place.file, place.line] = Rounding(
                name, place, dtype_name(half[0].dtype)
            )
        for each in half if in_place else ():
            where = f"what {Path(place.file).name} keeps (line {place.line})"
            name = self._names.setdefault(memory(each), f"{where} #{len(self._names)}")
            self._others[name] = weakref.ref(each)
