"""Which models and optimizers a step has, read whenever it is needed.

A parameter group that was added, a layer that was unfrozen or replaced, another optimizer: all of
it counts from the next call on, and is checked then as it was at first.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampwise.distributed.layout import unwrapped
from ampwise.errors import UsageError
from ampwise.step import arguments
from ampwise.step.modules import as_one, held_by, in_form, modules_of, several


class Members:
    """The models and optimizers of a step.

    Parameters
    ----------
    model, optimizer
        As the user gave them: one, or a sequence or mapping of several.

    Attributes
    ----------
    optimizers
        The optimizers, as `look` last saw them.
    held
        The parameters they update.
    modules
        All modules of the models, each once.
    version
        Another one each time that any of these are others.
    """

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.model = tuple(model) if isinstance(model, Iterator) else model
        self.optimizer = tuple(optimizer) if isinstance(optimizer, Iterator) else optimizer
        self.version = 0
        self.optimizers: tuple[Optimizer, ...] = arguments.optimizers_of(self.optimizer)
        self.held: list[Tensor] = held_by(self.optimizers)
        self._dtypes = _ends(self.held)
        self._see_modules()

    def _see_modules(self) -> None:
        self._seen = self.model if isinstance(self.model, nn.Module) else None
        self._of_models = self.models
        self.modules: list[nn.Module] = modules_of(self._of_models)
        tables = [each._modules for each in self.modules]
        self._children = [(table, [*table.values()]) for table in tables if table]
        self._childless = [table for table in tables if not table]

    @property
    def wrapped(self) -> tuple[nn.Module, ...]:
        """The models as they are trained, in DDP or sharded."""
        return arguments.models_of(self.model)

    @property
    def models(self) -> tuple[nn.Module, ...]:
        """The models, out of DDP."""
        if isinstance(self.model, nn.Module):
            return (unwrapped(self.model),)
        return tuple(map(unwrapped, self.wrapped))

    @property
    def whole(self) -> nn.Module:
        """The models, out of DDP, as one module: for what goes by names."""
        return as_one(in_form(self.model, unwrapped))

    def parameters(self) -> dict[str, nn.Parameter]:
        """The models' parameters by name."""
        return dict(self.whole.named_parameters())

    def modules_by_name(self) -> dict[str, nn.Module]:
        """The models' modules by name; "" for a single model itself."""
        return dict(self.whole.named_modules())

    def look(
        self, check: Callable[[Mapping[str, nn.Parameter], Sequence[Optimizer]], None]
    ) -> bool:
        """See what there is now; whether optimizers or parameters are new, and were checked.

        In every micro-batch: it compares with what was seen last, and builds nothing anew.
        """
        # A single model that is the same object need not be taken out of DDP to be known again.
        others = self.model is not self._seen and self.models != self._of_models
        if others or not self._has_same_children():
            self._see_modules()
            self.version += 1
        given = self.optimizer
        optimizers = (given,) if isinstance(given, Optimizer) else several(given)
        held = [each for of in optimizers for group in of.param_groups for each in group["params"]]
        same = len(held) == len(self.held) and all(map(operator.is_, held, self.held))
        if same and optimizers == self.optimizers and _ends(held) == self._dtypes:
            return False
        optimizers = arguments.optimizers_of(optimizers)
        check(self.parameters(), optimizers)
        self.optimizers, self.held, self._dtypes = optimizers, held, _ends(held)
        self.version += 1
        return True

    def _has_same_children(self) -> bool:
        for table, children in self._children:
            if [*table.values()] != children:
                return False
        return not any(self._childless)

    def held_by(self, optimizers: Iterable[Optimizer] | None) -> list[Tensor]:
        """The parameters of some optimizers; None: of all."""
        return self.held if optimizers is None else held_by(optimizers)

    def held_at(self, indices: Collection[int]) -> list[Tensor]:
        """The parameters of some optimizers, by their position."""
        if len(indices) == len(self.optimizers):
            return self.held
        return held_by(self.optimizers[index] for index in indices)

    def shares_with(self, other: Members) -> bool:
        """Whether both train some parameter."""
        return not set(map(id, self.held)).isdisjoint(map(id, other.held))

    def indices(self, optimizers: Sequence[Optimizer] | None) -> list[int]:
        """Positions of some optimizers; None: of all."""
        if optimizers is None:
            return list(range(len(self.optimizers)))
        known = {id(each): index for index, each in enumerate(self.optimizers)}
        if not isinstance(optimizers, Iterable):
            given = type(optimizers).__name__
            raise UsageError(f"optimizers: expected several, as in [optimizer], got {given}")
        for each in optimizers:
            if id(each) not in known:
                given = type(each).__name__
                raise UsageError(
                    f"optimizers: expected some of those the step was made with, got {given}"
                )
        return [known[id(each)] for each in optimizers]

    def named(self) -> dict[str, Tensor]:
        """All parameters: the models' by FQN, those that only an optimizer knows by position."""
        named: dict[str, Tensor] = {**self.parameters()}
        known = set(map(id, named.values()))
        for index, optimizer in enumerate(self.optimizers):
            for number, parameter in enumerate(held_by([optimizer])):
                if id(parameter) not in known:
                    known.add(id(parameter))
                    named[f"optimizers.{index}.{number}"] = parameter
        return named


def _ends(held: Sequence[Tensor]) -> list[torch.dtype]:
    """The dtypes of the first and the last: ``model.half()`` changes all of them."""
    return [held[0].dtype, held[-1].dtype] if held else []
