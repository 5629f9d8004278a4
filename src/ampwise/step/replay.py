"""Running a window of a `TrainStep` again, exactly, as often as an analysis wants.

A replay is a step of its own over the same models (`_Rerun`), under the recorded loss scale or
another, on this process alone. It goes forward and backward and never updates. Afterwards
parameters, gradients, buffers, modules' attributes and random state are as before.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from ampwise.distributed.layout import is_sharded
from ampwise.policy import Policy
from ampwise.step.activity import Activity
from ampwise.step.attributes import Attributes
from ampwise.step.buffers import Snapshot
from ampwise.step.loss_scale import CEILING, LossScale, UnitLossScale
from ampwise.step.modules import modules_of
from ampwise.step.parallel import OneRank
from ampwise.step.recorder import (
    MicroBatch,
    RandomState,
    Recorder,
    Stash,
    Windowed,
    finite,
    stash_for,
)
from ampwise.step.replayable import Replayable, Replayed
from ampwise.step.train_step import TrainStep
from ampwise.step.window import Weight
from ampwise_lint.base.words import power_in_code


class Replay:
    """A `TrainStep` that can be run again: the one public door for whoever does.

    Parameters
    ----------
    step
        What is run again. Its recorder keeps the windows.
    """

    def __init__(self, step: TrainStep) -> None:
        self._step = step

    @property
    def models(self) -> Sequence[nn.Module]:
        """The models, out of DDP."""
        return self._step.models

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """What updates them."""
        return self._step.optimizers

    @property
    def policy(self) -> Policy:
        """The precision it runs in."""
        return self._step.policy

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self._step.device

    @property
    def scales_loss(self) -> bool:
        """Whether a loss scale is in force."""
        return self._step.loss_scale.enabled

    @property
    def steps(self) -> int:
        """Completed steps; skipped ones count."""
        return self._step.steps

    @property
    def open(self) -> Stash | None:
        """The window that is not over yet; None without a recorder."""
        return None if self._step.recorder is None else self._step.recorder.open

    @property
    def closed(self) -> Stash | None:
        """The window before it; None without a recorder."""
        return None if self._step.recorder is None else self._step.recorder.closed

    @property
    def ranks(self) -> int:
        """Processes that train these models together."""
        return self._step.ranks

    @property
    def group(self) -> ProcessGroup | None:
        """These ranks; None for one process."""
        return self._step.group

    @property
    def can_replay(self) -> bool:
        """Whether this process can run a step by itself: not where it has only a part of it."""
        return not any(map(is_sharded, self.parameters().values()))

    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The models' parameters by FQN."""
        return self._step.parameters()

    def named_tensors(self) -> Mapping[str, Tensor]:
        """The same, and those that only an optimizer knows."""
        return self._step.named_tensors()

    def rewind_buffers(self) -> None:
        """Put buffers back to where an open window began, and leave it open."""
        self._step.rewind_buffers()

    def rehearsal(self, loss_fn: Callable[[Any, Any], Tensor], batches: Sequence[Any]) -> Stash:
        """A window that has not run: to look at a step without making it."""
        stash = stash_for(self._step)
        state = RandomState.now(self.device)
        stash.micro_batches = [MicroBatch(loss_fn, batch, None, state) for batch in batches]
        return stash

    def replay(
        self,
        stash: Stash,
        *,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
        policy: Policy | None = None,
        scale: float | None = None,
        change: Callable[[Any], Any] | None = None,
        backward: bool = True,
    ) -> Replayed:
        """Run a window again; see `Replayable.replay`."""
        result, listener = Replayed(), _Listener(backward=backward)
        scale = float(stash.scale) if scale is None else scale
        with undisturbed(self), self._step.apart():
            rerun = _Rerun(self._step, policy, scale, listener)
            good = finite_buffers(rerun.models)
            try:
                with around():
                    for each in stash.micro_batches:
                        each.random_state.restore(self.device)
                        batch = each.batch if change is None else change(each.batch)
                        with suppress(_ForwardDoneError):
                            rerun.micro_batch(each.loss_fn, batch, each.weight)
            except Exception as error:  # noqa: BLE001 - the caller wants to know what it is
                let_go(error)
                result.error = error
            result.losses, result.forward_s = listener.losses, listener.forward_s
            result.gradients = gradients_of(rerun.parameters())
            if backward and result.error is None:
                result.norms = rerun.gradient_norms()
            result.poisoned = [name for name, buffer in good if not finite(buffer)]
            rerun.close()
        return result

    def how(self, policy: Policy) -> str:
        """What to write for another policy."""
        return f"--precision {policy.text}, or TrainStep(policy='{policy.text}')"

    def how_in_float32(self, *modules: str) -> str:
        """What to write to keep modules in float32."""
        if not self.policy.autocast:
            return self.how(self.policy)
        return self.how(replace(self.policy, islands=(*self.policy.islands, *modules)))

    def how_scaled(self, scale: float) -> str:
        """What to write for a loss scale that begins with this."""
        written = power_in_code(scale)
        ceiling = f", ceiling={written}" if scale > CEILING else ""
        return f"TrainStep(loss_scale=LossScale(init_scale={written}{ceiling}))"


def finite_buffers(models: Sequence[nn.Module]) -> list[tuple[str, Tensor]]:
    """Buffers without inf or NaN, with their names."""
    named = [pair for model in models for pair in model.named_buffers()]
    return [(name, buffer) for name, buffer in named if finite(buffer)]


def gradients_of(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The gradients that parameters have, by name."""
    return {name: each.grad for name, each in parameters.items() if each.grad is not None}


def let_go(error: Exception) -> None:
    """Drop what the frames of an error hold; where it was raised stays known.

    Before torch 2.13 a checkpointed forward that raises leaves its saved-tensor hooks in place for
    as long as its frames live, and the next forward would save into the graph that failed.
    """
    traceback.clear_frames(error.__traceback__)


class _Rerun(TrainStep):
    """A step over the models of another one, alone, for one window."""

    def __init__(
        self, step: TrainStep, policy: Policy | None, scale: float, recorder: Recorder
    ) -> None:
        alone = step.model if step.ranks == 1 else step.models
        if isinstance(step.model, nn.Module) and not isinstance(alone, nn.Module):
            alone = alone[0]
        super().__init__(
            alone,
            step.optimizer,
            policy=policy or step.policy,
            samples=step._samples,
            skip=step.skip,
            undo="window",
        )
        self.recorder = recorder
        # The first window may never have run: a replay is no proof of activity.
        self.activity = Activity({}, {}, loss_scale_live=False, watched=False)
        self._window = step._window.again()
        fixed: LossScale = UnitLossScale()
        if step.loss_scale.enabled or scale != 1:
            fixed = LossScale(scale, floor=min(scale, 1.0), ceiling=max(scale, 1.0))
        self.loss_scale = fixed.fresh(self.device)

    def _find_parallel(self, watch_every: int) -> OneRank:  # noqa: ARG002
        """Nobody else: one whose part is clean has nothing to add to another's replay."""
        return OneRank()

    def _check(self, named: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer]) -> None:
        """Nothing: the step has."""

    def gradient_norms(self) -> list[Tensor]:
        """Norms of the gradients, as guards read them."""
        sets = self._pending.sets(self._members.indices(None))
        return [norm for each in sets for norm in self._pending.guard(each).read()]


class _ForwardDoneError(Exception):
    """The forward of a replay that wants no backward."""


class _Listener(Recorder):
    """Keeps losses and times of a replay's forwards, and ends it there if they are all."""

    def __init__(self, *, backward: bool) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        self.forward_s = 0.0
        self._backward = backward
        self._began = 0.0

    def micro_batch(
        self,
        step: Windowed,  # noqa: ARG002
        loss_fn: Callable[..., Any],  # noqa: ARG002
        batch: Any,  # noqa: ARG002
        weight: Weight | None,  # noqa: ARG002
    ) -> None:
        """A forward is about to begin."""
        self._began = time.perf_counter()

    def loss(self, loss: Tensor) -> None:
        """It is done."""
        if loss.device.type != "cpu":
            torch.accelerator.synchronize(loss.device)
        self.forward_s += time.perf_counter() - self._began
        self.losses.append(loss)
        if not self._backward:
            raise _ForwardDoneError


@contextmanager
def undisturbed(step: Replayable, others: Iterable[nn.Module] = ()) -> Generator[None]:
    """Gradients, modules and random state as they were, whatever happens inside.

    Of an open window forward has written the buffers already: inside they are as it began. `others`
    are modules beside the models that it uses.
    """
    random_state = RandomState.now(step.device)
    gradients = [(each, each.grad) for each in step.named_tensors().values()]
    for each, _ in gradients:
        each.grad = None
    modules = modules_of((*step.models, *others))
    buffers, attributes = Snapshot(modules), Attributes(modules)
    step.rewind_buffers()
    nesting = _autocast_nesting()
    try:
        yield
    finally:
        attributes.restore()
        buffers.put_back()
        for each, gradient in gradients:
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
