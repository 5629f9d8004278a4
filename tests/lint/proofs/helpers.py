"""A tiny network, its data and the correct training step: what every proof compares a mistake with.

A proof runs its wrong step and a right one through `trained`, which gives both the same weights,
the same batches and a scaler of their own, and reads the harm off the two results. Measured
figures go to pytest's `record_property`; `--junitxml=FILE -o junit_family=xunit1` collects them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

SCALE = 2.0**16
WINDOW = 4

Batch = tuple[torch.Tensor, torch.Tensor]


def network() -> nn.Sequential:
    """16 features to 4 classes, the same weights every time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def batches(count: int, size: int = 32) -> list[Batch]:
    """The same `count` batches every time, labelled by a linear teacher."""
    generator = torch.Generator().manual_seed(1)
    teacher = torch.randn(16, 4, generator=generator)
    inputs = torch.randn(count, size, 16, generator=generator)
    return [(x, (x @ teacher).argmax(1)) for x in inputs]


def vector(model: nn.Module) -> torch.Tensor:
    """All parameters, end to end, in float64."""
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def gradient(model: nn.Module) -> torch.Tensor:
    """All gradients, end to end, in float64."""
    return torch.cat([p.grad.double().flatten() for p in model.parameters()])


def finite(model: nn.Module) -> bool:
    return bool(vector(model).isfinite().all())


class Training:
    """What one training run holds: model, optimizer, scaler, and what happened so far."""

    def __init__(
        self,
        *,
        model: Callable[[], nn.Module] = network,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
        lr: float = 0.1,
        scale: float = SCALE,
        scaled: bool = True,
        dtype: torch.dtype | None = torch.float16,
        loss: Callable[..., torch.Tensor] = F.cross_entropy,
    ) -> None:
        self.model = model()
        self.optimizer = optimizer(self.model.parameters(), lr=lr)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scaled)
        self.dtype = dtype
        self.criterion = loss
        self.start = vector(self.model)
        self.losses: list[float] = []
        self.skips: list[bool] = []

    def autocast(self) -> AbstractContextManager[object]:
        return torch.autocast("cpu", dtype=self.dtype) if self.dtype else nullcontext()

    def loss(self, batch: Batch) -> torch.Tensor:
        x, y = batch
        with self.autocast():
            loss = self.criterion(self.model(x), y)
        self.losses.append(loss.item())
        return loss

    def micro_batches(self, batch: Batch) -> list[Batch]:
        return list(zip(*(each.chunk(WINDOW) for each in batch), strict=True))

    def update_scale(self) -> None:
        """`scaler.update()`; the scale falls if, and only if, the step was skipped."""
        before = self.scaler.get_scale()
        self.scaler.update()
        self.skips.append(self.scaler.get_scale() < before)

    @property
    def movement(self) -> float:
        """L2 distance of the parameters from where they started."""
        return (vector(self.model) - self.start).norm().item()


Step = Callable[[Training, Batch], None]


def right_step(run: Training, batch: Batch) -> None:
    run.optimizer.zero_grad()
    run.scaler.scale(run.loss(batch)).backward()
    run.scaler.step(run.optimizer)
    run.update_scale()


def right_window(run: Training, batch: Batch) -> None:
    """One optimizer step from `WINDOW` micro-batches."""
    run.optimizer.zero_grad()
    for micro_batch in run.micro_batches(batch):
        run.scaler.scale(run.loss(micro_batch) / WINDOW).backward()
    run.scaler.step(run.optimizer)
    run.update_scale()


def trained(step: Step, steps: int = 50, **settings: object) -> Training:
    run = Training(**settings)
    for batch in batches(steps):
        step(run, batch)
    return run


class OpCounter(TorchDispatchMode):
    """Counts aten operations by name; `_local_scalar_dense` is a read by the host."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[torch.dtype]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        dtypes = [each.dtype for each in args if isinstance(each, torch.Tensor)]
        self.calls.append((func.overloadpacket.__name__, dtypes))
        return func(*args, **(kwargs or {}))

    def count(self, name: str) -> int:
        return sum(called == name for called, _ in self.calls)

    @property
    def host_syncs(self) -> int:
        return self.count("_local_scalar_dense")
