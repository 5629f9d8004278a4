"""The last update of an optimizer, where training cannot be repeated: by the state that it left.

When a parameter is found inf or NaN, the gradients of the update that made it so are gone, and so
is what it was before: to keep them would cost memory in every step. But an optimizer's state is
what that update left, and what it divides by follows from it. So the update is made again on copies
of the parameter and its state: one step back, with the state's own mean of gradients for a gradient
(0 where it keeps none), and with 0 for the lost elements. If that loses the very same elements, the
operation which does is taken for the one that did. If not, nothing is claimed.

Only copies are written, by the code of the optimizer's class; its hooks are not called.
"""

from __future__ import annotations

import copy
import linecache
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampwise import formats
from ampwise.distributed.layout import is_sharded
from ampwise.errors import kind_and_words
from ampwise.formats import dtype_name
from ampwise.lines import Line, is_users
from ampwise.numerics.observe.roots import Root
from ampwise.numerics.result import Diagnosis, Fix, Origin
from ampwise.numerics.updates import update
from ampwise.step.attributes import Attributes
from ampwise.step.recorder import RandomState, finite
from ampwise.step.replayable import Replayable
from ampwise_lint.base.words import counted, figure

_MEANS = ("exp_avg", "momentum_buffer")
"""Where optimizers keep a mean of gradients."""


@dataclass(frozen=True)
class LastUpdate:
    """The last update that an optimizer made, of finite gradients.

    Attributes
    ----------
    step
        Its number.
    line
        Where the user's code asked for it.
    """

    optimizer: Optimizer
    step: int
    line: Line


def in_last_update(found: Diagnosis, step: Replayable, updates: Iterable[LastUpdate]) -> None:
    """Say of a parameter that is not finite which operation of its optimizer made it so.

    Changes `found` where the last update is the culprit; where that cannot be known, says why.
    """
    lost = next(_lost(step, updates), None)
    if lost is None:
        return
    try:
        if bad := lost.bad_state:
            _overflowed(found, lost, *bad)
        else:
            _made_again(found, step.models, lost)
    except Exception as error:  # noqa: BLE001 - an optimizer may be anybody's
        found.notes.append(
            f"The last update of {lost.name} could not be made again: {kind_and_words(error)}."
        )


@dataclass(frozen=True)
class _Lost:
    """A parameter that is not finite, and what has updated it."""

    name: str
    parameter: Tensor
    group: dict[str, Any]
    update: LastUpdate

    @property
    def state(self) -> Mapping[str, Any]:
        """What its optimizer keeps of it."""
        return self.update.optimizer.state.get(self.parameter, {})

    @property
    def bad_state(self) -> tuple[str, Tensor] | None:
        """A tensor among that which is not finite, by its name."""
        tensors = ((name, each) for name, each in self.state.items() if isinstance(each, Tensor))
        return next(((name, each) for name, each in tensors if not finite(each)), None)


def _lost(step: Replayable, updates: Iterable[LastUpdate]) -> Iterator[_Lost]:
    """Parameters that are not finite; not those of which each rank has a part."""
    names = {id(each): name for name, each in step.named_tensors().items()}
    for each in updates:
        for group in each.optimizer.param_groups:
            for parameter in group["params"]:
                if not is_sharded(parameter) and not finite(parameter):
                    name = names.get(id(parameter), f"a parameter of {_kind(each.optimizer)}")
                    yield _Lost(name, parameter, group, each)


def _kind(optimizer: Optimizer) -> str:
    return type(optimizer).__name__


def _overflowed(found: Diagnosis, lost: _Lost, name: str, state: Tensor) -> None:
    """The state itself is not finite, of gradients that were."""
    if not bool(torch.isinf(state).any()):
        found.notes.append(
            f"{name} of {lost.name} holds NaN, too: by which operation is not known."
        )
        return
    fmt = formats.lookup(state.dtype)
    found.origin = Origin(f"{name} of {_kind(lost.update.optimizer)}", lost.name.rpartition(".")[0],
                          *_source(lost.update.line), dtype_name(state.dtype))  # fmt: skip
    found.cause = "RANGE_OVERFLOW"
    found.explanation = (
        f"The gradients were finite, and {name} of {lost.name} is not in "
        f"{counted(int(torch.isinf(state).sum()), 'element')}: it is kept in {fmt}, which ends at "
        f"{figure(fmt.max)}."
    )
    _blame(found, lost)
    found.fixes = [_float32_not_tried()] if fmt.bits < 32 else [update.restored()]


def _made_again(found: Diagnosis, models: Sequence[nn.Module], lost: _Lost) -> None:
    """The update made again: if it loses the same elements, by which operation."""
    again = _Again(models, lost)
    seen = update.lost_in(again)
    if seen is None or not again.loses_the_same:
        found.notes.append(
            f"The last update of {lost.name}, made again from the state that it left, "
            f"{'is finite' if seen is None else 'loses other elements'}: whether it made it so "
            "cannot be known, as its gradients are gone."
        )
        return
    update.explain(found, lambda: _Again(models, lost), *seen)
    assert found.origin is not None
    if not (found.origin.line and is_users(found.origin.file)):
        file, line, source = _source(lost.update.line)
        found.origin = replace(found.origin, file=file, line=line, source=source)
    _blame(found, lost)
    found.notes.append(
        f"The gradients of that update are gone. It was made again from the state that it left, "
        f"with {again.gradient} for a gradient, and loses the same "
        f"{counted(int((~torch.isfinite(lost.parameter)).sum()), 'element')}."
    )
    found.fixes = _fixes(models, lost, seen[0])


def _blame(found: Diagnosis, lost: _Lost) -> None:
    found.status, found.phase, found.step = "fault", "optimizer", lost.update.step
    kind = _kind(lost.update.optimizer)
    found.explanation += f" The update of step {lost.update.step}, by {kind}, made it so."


def _source(line: Line) -> tuple[str, int, str]:
    """A line as an origin has it: file, number and text."""
    return line.file, line.line, linecache.getline(line.file, line.line).strip()


def _fixes(models: Sequence[nn.Module], lost: _Lost, root: Root) -> list[Fix]:
    """What may mend it; how close it then is to float64 cannot be known without the gradients."""
    if not update.is_narrow(root):
        return [update.restored()]
    fixes = [_float32_not_tried()]
    if "eps" in lost.group:
        eps, what, how = update.larger_eps(root.outputs[0].dtype)
        again = _Again(models, lost)
        again.groups[0]["eps"] = eps
        again.make()
        held = all(map(finite, again.named.values()))
        cost = "the update is then finite; how far from float64's is not known" if held else (
            "tried: still not finite"
        )  # fmt: skip
        fixes.append(Fix(what, how, verified=False, cost=cost))
    return fixes


def _float32_not_tried() -> Fix:
    cost = "not tried: the gradients of that update are gone"
    return Fix(*update.IN_FLOAT32, verified=False, cost=cost)


class _Again:
    """The last update of one parameter, on copies.

    Attributes
    ----------
    gradient
        What stands for the gradient.
    models, named, groups
        As an `Update` has them.
    """

    def __init__(self, models: Sequence[nn.Module], lost: _Lost) -> None:
        self._lost = lost
        parameter = lost.parameter.detach()
        whole = torch.where(torch.isfinite(parameter), parameter, torch.zeros_like(parameter))
        self._copy = nn.Parameter(whole)
        self._state = {name: _copied(each) for name, each in lost.state.items()}
        if "step" in self._state:
            self._state["step"] -= 1
        self.gradient = next((name for name in _MEANS if name in self._state), "0")
        mean = self._state.get(self.gradient, torch.zeros_like(whole))
        self._copy.grad = mean.to(whole.dtype, copy=True)
        self.models = models
        self.named: Mapping[str, Tensor] = {lost.name: self._copy}
        self.groups = [{**lost.group, "params": [self._copy]}]
        update.one_by_one(self.groups)

    @property
    def loses_the_same(self) -> bool:
        """Whether, once made, it has left the elements bad that are, and no others."""
        return torch.equal(torch.isfinite(self._copy), torch.isfinite(self._lost.parameter))

    def make(self, around: AbstractContextManager[Any] = nullcontext()) -> None:  # noqa: B008
        """Make it: the optimizer has but the copy for that long."""
        optimizer: Any = self._lost.update.optimizer
        before, random_state = Attributes([optimizer]), RandomState.now(self._copy.device)
        try:
            optimizer.param_groups = self.groups
            optimizer.state = defaultdict(dict, {self._copy: self._state})
            with around:
                _own_step(type(optimizer))(optimizer)
        finally:
            before.restore()
            random_state.restore(self._copy.device)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _own_step(kind: type[Optimizer]) -> Any:
    """What a class does in a step, without the hooks that torch has put around it."""
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step
