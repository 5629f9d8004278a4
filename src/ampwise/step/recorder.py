"""The flight recorder: what it takes to run a window again, exactly, and the replay itself.

A skipped step leaves parameters and buffers as they were, so a window is replayed from its
micro-batches (kept by reference), the random state before each of them, and the loss scale. That
costs no copy of data or weights, and no host sync. Batches whose memory the loader uses again, or a
loss that depends on anything else, show as a replay that does not reproduce.
"""

from __future__ import annotations

import random
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ampwise.policy import Policy
from ampwise.step.activity import Activity
from ampwise.step.attributes import Attributes
from ampwise.step.loss_scale import LossScale, UnitLossScale
from ampwise.step.precision import Float32Mode, Forward
from ampwise.step.window import Weight

if TYPE_CHECKING:
    from ampwise.step.train_step import TrainStep


@dataclass(frozen=True, slots=True)
class RandomState:
    """State of every generator that a forward may draw from."""

    python: tuple[Any, ...]
    numpy: Any
    torch: Tensor
    device: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        """The state at this moment; of `device` beside the CPU's."""
        of_device = None
        if device.type not in ("cpu", "meta"):
            of_device = torch.get_device_module(device).get_rng_state(device)
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), of_device)

    def restore(self, device: torch.device) -> None:
        """Put the generators back."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        if self.device is not None:
            torch.get_device_module(device).set_rng_state(self.device, device)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One micro-batch, and the random state its forward began with."""

    loss_fn: Callable[[Any, Any], Tensor]
    batch: Any
    weight: Weight | None
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
        Loss of each, detached; empty for a window that has not run yet.
    norms
        What the guard read off its gradients (`Guard.norms`): with the losses, what a replay has to
        give again to the bit. Empty until it did, and where it went by what all ranks agreed on.
    """

    step: int
    scale: Tensor
    micro_batches: list[MicroBatch] = field(default_factory=list[MicroBatch])
    losses: list[Tensor] = field(default_factory=list[Tensor])
    norms: list[Tensor] = field(default_factory=list[Tensor])


@dataclass(slots=True)
class Replayed:
    """What a replay gave.

    Attributes
    ----------
    losses
        Unscaled loss of each micro-batch, detached.
    gradients
        Gradients by parameter name, still scaled.
    norms
        Of the gradients, as a guard reads them; empty without backward, or where it raised.
    poisoned
        Buffers that forward left with inf or NaN in them, and that had none before.
    error
        What forward or backward raised, if it did; the rest is then what came before.
    forward_s
        Time of the forwards, in seconds.
    """

    losses: list[Tensor] = field(default_factory=list[Tensor])
    gradients: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    norms: list[Tensor] = field(default_factory=list[Tensor])
    poisoned: list[str] = field(default_factory=list[str])
    error: Exception | None = None
    forward_s: float = 0.0

    @property
    def clean(self) -> bool:
        """Whether it ran to its end and every loss and gradient is finite."""
        return self.error is None and all(map(finite, (*self.losses, *self.gradients.values())))


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

    def micro_batch(
        self, step: TrainStep, loss_fn: Callable[..., Tensor], batch: Any, weight: Weight | None
    ) -> None:
        """A forward is about to begin."""
        if self.open is None:
            self.open = stash_for(step)
        self.open.micro_batches.append(
            MicroBatch(loss_fn, batch, weight, RandomState.now(step.device))
        )

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


class _ForwardDoneError(Exception):
    """The forward of a replay that wants no backward."""


class _Listener(Recorder):
    """Times the forwards of a replay, and ends it there if that is all that is wanted."""

    def __init__(self, *, backward: bool) -> None:
        super().__init__()
        self.forward_s = 0.0
        self._backward = backward
        self._began = 0.0

    def micro_batch(
        self, step: TrainStep, loss_fn: Callable[..., Tensor], batch: Any, weight: Weight | None
    ) -> None:
        """A forward is about to begin."""
        super().micro_batch(step, loss_fn, batch, weight)
        self._began = time.perf_counter()

    def loss(self, loss: Tensor) -> None:
        """It is done."""
        if loss.device.type != "cpu":
            torch.accelerator.synchronize(loss.device)
        self.forward_s += time.perf_counter() - self._began
        super().loss(loss)
        if not self._backward:
            raise _ForwardDoneError


def stash_for(step: TrainStep) -> Stash:
    """An empty stash for the step that comes next."""
    return Stash(step.steps + 1, step.loss_scale.scale.clone())


def rehearsal(
    step: TrainStep, loss_fn: Callable[[Any, Any], Tensor], batches: Sequence[Any]
) -> Stash:
    """A window that has not run: to look at a step without making it."""
    stash = stash_for(step)
    state = RandomState.now(step.device)
    stash.micro_batches = [MicroBatch(loss_fn, batch, None, state) for batch in batches]
    return stash


def replay(
    step: TrainStep,
    stash: Stash,
    *,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    policy: Policy | None = None,
    scale: float | None = None,
    change: Callable[[Any], Any] | None = None,
    backward: bool = True,
) -> Replayed:
    """Run a window again, forward and backward; nothing about the step or the model changes.

    Parameters
    ----------
    around
        Makes a context to run forward and backward in.
    policy
        Another policy of the same parameter dtype; its islands are not installed.
    scale
        Another loss scale.
    change
        Applied to each batch first.
    backward
        False for the forwards alone.
    """
    result, listener = Replayed(), _Listener(backward=backward)
    named = [pair for model in step._models for pair in model.named_buffers()]
    good = [(name, buffer) for name, buffer in named if finite(buffer)]
    with _undisturbed(step), _swapped(step, policy, stash.scale if scale is None else scale):
        step.recorder = listener
        try:
            with around():
                for each in stash.micro_batches:
                    each.random_state.restore(step.device)
                    batch = each.batch if change is None else change(each.batch)
                    with suppress(_ForwardDoneError):
                        step._micro_batch(each.loss_fn, batch, each.weight)
        except Exception as error:  # noqa: BLE001 - the caller wants to know what it is
            let_go(error)
            result.error = error
        result.losses = [] if listener.open is None else listener.open.losses
        result.forward_s = listener.forward_s
        held = ((name, step._master.of(each)) for name, each in step._names.items())
        result.gradients = {name: each.grad for name, each in held if each.grad is not None}
        if backward and result.error is None:
            guards = map(step._guard, step._sets(None))
            result.norms = [norm for guard in guards for norm in guard.read()]
        result.poisoned = [name for name, buffer in good if not finite(buffer)]
    return result


def let_go(error: Exception) -> None:
    """Drop what the frames of an error hold; where it was raised stays known.

    Before torch 2.13 a checkpointed forward that raises leaves its saved-tensor hooks in place for
    as long as its frames live, and the next forward would save into the graph that failed.
    """
    traceback.clear_frames(error.__traceback__)


_UNWATCHED = Activity({}, {}, loss_scale_live=False, watched=False)


@contextmanager
def _swapped(step: TrainStep, policy: Policy | None, scale: Tensor | float) -> Generator[None]:
    """Another policy and loss scale, for a while."""
    before = (step._forward, step._float32_mode, step.policy, step.loss_scale)
    if policy is not None:
        step._float32_mode = Float32Mode(policy, step.device.type)
        step._forward = Forward(policy, step.device.type, step._float32_mode)
        step.policy = policy
    value = float(scale)
    scaled = step.loss_scale.enabled or value != 1
    loss_scale = UnitLossScale()
    if scaled:
        loss_scale = LossScale(value, floor=min(value, 1.0), ceiling=max(value, 1.0))
    step.loss_scale = loss_scale.to(step.device)
    try:
        yield
    finally:
        step._forward, step._float32_mode, step.policy, step.loss_scale = before


@contextmanager
def _undisturbed(step: TrainStep) -> Generator[None]:
    """Gradients, modules, window and random state as they were, whatever happens inside."""
    random_state = RandomState.now(step.device)
    held = [step._master.of(each) for each in step._names.values()]
    tensors = {id(each): each for each in (*step._names.values(), *held)}.values()
    gradients = [each.grad for each in tensors]
    for each in tensors:
        each.grad = None
    buffers = [each for model in step._models for each in model.buffers()]
    copies = [each.clone() for each in buffers]
    attributes = Attributes(step._models)
    window, remembered, boundary = step._window, step._buffers._copies, step.boundary
    # Each rank by itself: one whose window is clean has nothing to add to another's replay.
    together = step.model, step._ranks, step._sync, step._held_back
    apart = ExitStack()
    if step._ranks is not None and step._sync is not None:
        apart.enter_context(step._sync.apart())
        models = step._models
        step.model = models[0] if isinstance(step.model, nn.Module) else models
        step._ranks = step._sync = step._held_back = None
    activity, recorder, true = step.activity, step.recorder, step._true
    # Of an open window, forward has written the buffers already: replay from where it began.
    step._buffers.undo()
    step._window, step._buffers._copies = window.again(), []
    step.recorder, step._true = None, set()
    nesting = _autocast_nesting()
    if activity is None:  # a window that never ran: the replay is no proof of activity
        step.activity = _UNWATCHED
    try:
        yield
    finally:
        step._window, step._buffers._copies, step.boundary = window, remembered, boundary
        step.activity, step.recorder, step._true = activity, recorder, true
        apart.close()
        step.model, step._ranks, step._sync, step._held_back = together
        attributes.restore()
        with torch.no_grad():
            for buffer, copy in zip(buffers, copies, strict=True):
                buffer.copy_(copy)
        for each, gradient in zip(tensors, gradients, strict=True):
            each.grad = gradient
        random_state.restore(step.device)
        _leave_autocast(nesting)


def _autocast_nesting() -> int:
    """How many autocast regions are entered."""
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return nesting


def _leave_autocast(nesting: int) -> None:
    """Leave regions that an error in compiled code has left open.

    As long as one is, PyTorch keeps the casts of weights, and would compute with old ones from then
    on.
    """
    for _ in range(_autocast_nesting() - nesting):
        torch.autocast_decrement_nesting()
    if not nesting:
        torch.clear_autocast_cache()
