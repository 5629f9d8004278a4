"""The flight recorder: what it takes to run a window again, exactly.

A skipped step leaves parameters and buffers as they were, so a window is replayed from its
micro-batches (kept by reference), the random state before each of them, and the loss scale. That
costs no copy of data or weights, and no host sync. An iteration with updates of its own
(`TrainStep.iterate`) has changed parameters before it fails: they are copied as it begins, and
after each update. Batches whose memory the loader uses again, or a loss that depends on anything
else, show as a replay that does not reproduce.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ampwise.step.loss_scale import LossScale


class Windowed(Protocol):
    """What a recorder asks of a step: where it is, and the scale its window has."""

    device: torch.device
    loss_scale: LossScale

    @property
    def steps(self) -> int:
        """Completed steps; skipped ones count."""
        ...

    @property
    def position(self) -> int:
        """Micro-batches in the open window."""
        ...


class RandomState(NamedTuple):
    """State of every generator that a forward may draw from; of Python and NumPy if it does."""

    python: tuple[Any, ...] | None
    numpy: Any
    torch: Tensor
    device: Tensor | None

    @classmethod
    def now(cls, device: torch.device, *, host: bool = True) -> RandomState:
        """The state at this moment; of `device` beside the CPU's.

        Parameters
        ----------
        host
            Whether Python's and NumPy's generators are wanted, which take ten times as long.
        """
        of_device = None
        if device.type not in ("cpu", "meta"):
            of_device = torch.get_device_module(device).get_rng_state(device)
        python = random.getstate() if host else None
        numpy = np.random.get_state() if host else None
        return cls(python, numpy, torch.get_rng_state(), of_device)

    def restore(self, device: torch.device) -> None:
        """Put the generators back."""
        if self.python is not None:
            random.setstate(self.python)
            np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        if self.device is not None:
            torch.get_device_module(device).set_rng_state(self.device, device)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One micro-batch, or the batch of an iteration, and the random state it began with.

    Attributes
    ----------
    run
        Runs it: ``run(step, batch)`` of a `TrainStep`, ``run(models, batch)`` of a script's step.
    """

    run: Callable[[Any, Any], Any]
    batch: Any
    random_state: RandomState


@dataclass(slots=True)
class Stash:
    """A window as it was recorded.

    Attributes
    ----------
    step
        Number of its optimizer step, from 1.
    scale
        Loss scale of the window, a scalar on the device.
    micro_batches
        What it consists of, in order.
    losses
        Loss of each, detached; empty for a window that has not run yet. An iteration has as many as
        it makes backwards.
    norms
        What the guard read off its gradients (`Guard.norms`): with the losses, what a replay has to
        give again to the bit. Empty until it did, and where it went by what all ranks agreed on.
    before, updates
        Of an iteration, whose updates change parameters in its middle: all of them as it began, and
        those of each update after it, by name.
    """

    step: int
    scale: Tensor
    micro_batches: list[MicroBatch] = field(default_factory=list[MicroBatch])
    losses: list[Tensor] = field(default_factory=list[Tensor])
    norms: list[Tensor] = field(default_factory=list[Tensor])
    before: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    updates: list[dict[str, Tensor]] = field(default_factory=list[dict[str, Tensor]])

    def cut(self, count: int) -> None:
        """Keep so many micro-batches at most."""
        del self.micro_batches[count:], self.losses[count:]


def finite(tensor: Tensor) -> bool:
    """Whether every value is (waits for the device)."""
    if tensor.is_sparse:
        tensor = tensor._values()
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    low, high = torch.aminmax(tensor.detach())  # carries NaN along, and is one pass
    return bool(torch.isfinite(low) & torch.isfinite(high))


class Recorder:
    """Keeps the open window, and the one before it until its outcome is known."""

    def __init__(self) -> None:
        self.open: Stash | None = None
        self.closed: Stash | None = None

    def micro_batch(self, step: Windowed, run: Callable[[Any, Any], Any], batch: Any) -> None:
        """A forward, or a whole iteration, is about to begin."""
        if self.open is None or not step.position:
            self.open = stash_for(step)
        self.open.cut(step.position)  # one that raised left the step as before, but not this
        self.open.micro_batches.append(MicroBatch(run, batch, RandomState.now(step.device)))

    def began(self, parameters: Mapping[str, Tensor]) -> None:
        """An iteration begins with these."""
        if self.open is not None:
            self.open.before = copies_of(parameters)

    def updated(self, parameters: Mapping[str, Tensor]) -> None:
        """An update in the middle of an iteration left these."""
        if self.open is not None:
            self.open.updates.append(copies_of(parameters))

    def loss(self, loss: Tensor) -> None:
        """The forward of the last micro-batch gave this (detached)."""
        if self.open is not None:
            self.open.losses.append(loss)

    def norms(self, norms: list[Tensor]) -> None:
        """A guard read these off gradients."""
        if self.open is not None:
            self.open.norms += norms

    def close(self) -> None:
        """The window's step was made or skipped."""
        self.closed, self.open = self.open, None


def copies_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The values of tensors as they are now."""
    return {name: each.detach().clone() for name, each in tensors.items()}


class NonFiniteLossError(Exception):
    """A loss that is not finite, where nobody wants its backward."""


class UntilBad(Recorder):
    """Ends a window at the first loss that is not finite: backward would only carry it along.

    Reading the loss is a host sync. The window stays open.
    """

    def loss(self, loss: Tensor) -> None:
        """Keep it; and that is all, if it is not finite."""
        super().loss(loss)
        if not finite(loss):
            raise NonFiniteLossError


def stash_for(step: Windowed) -> Stash:
    """An empty stash for the step that comes next."""
    return Stash(step.steps + 1, step.loss_scale.scale.clone())
