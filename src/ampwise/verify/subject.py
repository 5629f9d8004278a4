"""What is verified: a task under a policy, with losses spoiled, and in a loop without ampwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ampwise.bench.arm import Settings
from ampwise.bench.result import BenchReport
from ampwise.data import to_device
from ampwise.policy import Policy
from ampwise.step import TrainStep
from ampwise.step.arguments import optimizers_of
from ampwise.step.modules import held_by
from ampwise.step.window import Weight
from ampwise.tasks import Task
from ampwise.tasks.checks import build, endless
from ampwise.tasks.iteration import Iteration
from ampwise.tasks.seeding import seed_all

NO_BENCH = "left out (--no-bench)"


@dataclass
class Subject:
    """What is verified.

    Attributes
    ----------
    policy
        The precision to hold to the requirements.
    scaled
        A policy that scales the loss, for what concerns loss scaling.
    track
        Trackers whose logs are read back.
    bench
        The bench of task and policy; None if there is none.
    no_bench
        Why there is none.
    """

    task: Task
    settings: Settings
    policy: Policy
    scaled: Policy
    track: tuple[str, ...] = ("csv",)
    bench: BenchReport | None = None
    no_bench: str = NO_BENCH

    def step(self, policy: Policy, **options: Any) -> Spoiled:
        """A fresh model of the task and a step over it; fused or not, as the task says."""
        model, optimizer = build(self.task, self.settings.device, self.settings.seed)
        options.setdefault("max_grad_norm", self.settings.max_grad_norm)
        return Spoiled(model, optimizer, policy=policy, **options)

    def batches(self) -> Iterator[Any]:
        """Batches on the device, epoch after epoch, the same ones each time."""
        seed_all(self.settings.seed)
        for batch in endless(self.task):
            yield to_device(batch, self.settings.device)

    @property
    def iteration(self) -> Iteration:
        """Iterations of the task."""
        return Iteration(self.task)


class Spoiled(TrainStep):
    """A step whose losses are multiplied by a factor: inf and NaN to see what a bad step does."""

    factor = 1.0

    def _backward(
        self,
        loss: Tensor,
        optimizers: Sequence[Optimizer] | None,
        weight: Weight | None,
        *,
        retain_graph: bool,
    ) -> None:
        loss = loss if self.factor == 1.0 else loss * self.factor
        super()._backward(loss, optimizers, weight, retain_graph=retain_graph)


class Plain:
    """The parts of a step as a loop without ampwise has them, in float32: `Iteration` runs on it.

    Parameters
    ----------
    model, optimizer
        One, or several.

    Attributes
    ----------
    squares
        Sum of the squares of all gradients that it stepped on.
    """

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer
        self.squares = 0.0
        self._optimizers = optimizers_of(optimizer)

    def __call__(self, loss_fn: Callable[[Any, Any], Tensor], batch: Any, **_: Any) -> Tensor:
        """A whole step."""
        loss = loss_fn(self.model, batch)
        self.backward(loss)
        self.update()
        return loss

    def iterate(self, iteration: Callable[[Any, Any], Tensor], batch: Any) -> Tensor:
        """An iteration."""
        return iteration(self, batch)

    def autocast(self) -> AbstractContextManager[None]:
        """Nothing."""
        return nullcontext()

    def backward(
        self,
        loss: Tensor,
        *,
        optimizers: Sequence[Optimizer] | None = None,
        weight: Any = None,  # noqa: ARG002 - of one loss it changes nothing
        retain_graph: bool = False,
    ) -> None:
        """To all parameters, or to those of some optimizers."""
        inputs = None if optimizers is None else held_by(optimizers)
        loss.backward(retain_graph=retain_graph, inputs=inputs)

    def update(
        self,
        optimizers: Sequence[Optimizer] | None = None,
        *,
        update_scale: bool = True,  # noqa: ARG002 - there is none
    ) -> None:
        """Step with some optimizers, or all."""
        for each in self._optimizers if optimizers is None else optimizers:
            gradients = (held.grad for held in held_by([each]) if held.grad is not None)
            self.squares += sum(float(gradient.double().square().sum()) for gradient in gradients)
            each.step()
            each.zero_grad()
