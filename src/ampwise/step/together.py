"""Several optimizers as one, for what goes by parameter groups: schedules, checkpoints, records."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ampwise.step import arguments
from ampwise.step.modules import held_by


def as_one_optimizer(given: Any) -> Optimizer:
    """The optimizer that was given, or `Together` of several."""
    optimizers = arguments.optimizers_of(given)
    return optimizers[0] if len(optimizers) == 1 else Together(optimizers)


class Together(Optimizer):
    """Several optimizers as one, whose groups are theirs, the first one's first.

    It holds nothing of its own: what is changed here is changed there. Its state has the form that
    every optimizer's has, parameters numbered through.
    """

    _opt_called = True  # schedules ask whether `step` was called: those inside are

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = tuple(optimizers)
        self.defaults: dict[str, Any] = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Those of all."""
        return [group for each in self.optimizers for group in each.param_groups]

    @property
    def state(self) -> defaultdict[Tensor, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Those of all, by parameter."""
        return defaultdict(dict, {p: s for each in self.optimizers for p, s in each.state.items()})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Step with all."""
        del closure
        for each in self.optimizers:
            each.step()

    def state_dict(self) -> dict[str, Any]:
        """Those of all as one."""
        whole: dict[str, Any] = {"state": {}, "param_groups": []}
        for each, first in zip(self.optimizers, self._firsts(), strict=True):
            own = each.state_dict()
            whole["state"] |= {first + number: value for number, value in own["state"].items()}
            whole["param_groups"] += [_moved(group, first) for group in own["param_groups"]]
        return whole

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give each its part."""
        groups = list(state_dict["param_groups"])
        for each, first in zip(self.optimizers, self._firsts(), strict=True):
            count = len(held_by([each]))
            own = {n - first: v for n, v in state_dict["state"].items() if 0 <= n - first < count}
            mine = [_moved(groups.pop(0), -first) for _ in each.param_groups]
            each.load_state_dict({"state": own, "param_groups": mine})
        if groups:
            raise ValueError(f"{len(groups)} parameter groups too many")

    def _firsts(self) -> list[int]:
        """The number of each one's first parameter."""
        counts = [len(held_by([each])) for each in self.optimizers]
        return [sum(counts[:index]) for index in range(len(counts))]


def _moved(group: dict[str, Any], by: int) -> dict[str, Any]:
    return {**group, "params": [number + by for number in group["params"]]}
