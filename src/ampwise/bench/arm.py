"""One precision in the race: its own model from the same initial weights, and whole steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ampwise.data import to_device
from ampwise.places import placing
from ampwise.policy import Policy
from ampwise.products import CountProducts, OddProduct, odd_ones
from ampwise.step import TrainStep
from ampwise.step.compiled import eager
from ampwise.step.modules import as_one
from ampwise.step.together import as_one_optimizer
from ampwise.tasks import Task
from ampwise.tasks.checks import build
from ampwise.tasks.evaluation import held_out
from ampwise.tasks.iteration import Iteration


@dataclass(frozen=True)
class Settings:
    """What every arm shares."""

    device: torch.device
    seed: int = 0
    accumulate: int = 1
    max_grad_norm: float | None = None


class Arm:
    """What a task trains, and a `TrainStep` under one policy.

    Parameters
    ----------
    spread
        Puts what it trains on several ranks.

    Attributes
    ----------
    model, optimizer
        What is trained, and what trains it; several as one.
    iteration
        Iterations of the task.
    """

    def __init__(
        self,
        task: Task,
        policy: Policy,
        settings: Settings,
        spread: Callable[[Any], Any] | None = None,
    ) -> None:
        self.name = policy.text
        model, optimizer = build(task, settings.device, settings.seed, spread)
        self.model, self.optimizer = as_one(model), as_one_optimizer(optimizer)
        self.iteration = Iteration(task, settings.accumulate)
        self.step = TrainStep(
            model,
            optimizer,
            policy=policy,
            accumulate=settings.accumulate,
            max_grad_norm=settings.max_grad_norm,
            samples=task.samples,
            undo="window",  # an error ends the arm
        )
        self._task = task

    def run(self, batch: Any) -> None:
        """A whole step: data to the device, forward, backward, guard, optimizer."""
        self.iteration(self.step, to_device(batch, self.step.device))

    def held_out(self) -> dict[str, float]:
        """The task's metrics on held-out data, under the arm's autocast."""
        return held_out(self._task, self.step)

    def count_host_syncs(self, batch: Any) -> int:
        """Values read back to the host in one more step."""
        if self.step.device.type == "cuda":
            return self._count_cuda_syncs(batch)
        with eager([self.model]), _Reads() as reads:
            self.run(batch)
        return reads.count

    def odd_products(self, batch: Any) -> list[OddProduct]:
        """Products of one more step that ran in another dtype than the policy's, by line."""
        with placing([self.model]) as places, CountProducts(places) as products:
            self.run(batch)
        policy = self.step.policy
        return odd_ones(products.found, (policy.compute_dtype, policy.compute_format))

    def _count_cuda_syncs(self, batch: Any) -> int:
        import warnings

        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                self.run(batch)
        finally:
            torch.cuda.set_sync_debug_mode(before)
        return sum("synchroniz" in str(each.message) for each in caught)


@dataclass(frozen=True)
class Variant:
    """What an arm is made of: a task, maybe with levers, under a policy; and what it is called."""

    name: str
    task: Task
    policy: Policy

    @classmethod
    def plain(cls, task: Task, policy: Policy) -> Variant:
        """A task as it is."""
        return cls(policy.text, task, policy)

    def arm(self, settings: Settings) -> Arm:
        """A fresh one."""
        made = Arm(self.task, self.policy, settings)
        made.name = self.name
        return made


class _Reads(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count += func._overloadpacket.__name__ == "_local_scalar_dense"
        return func(*args, **(kwargs or {}))
