"""Running a window of a `TrainStep` again, exactly, as often as an analysis wants.

A replay is a step of its own over the same models (`Rerun`), under the recorded loss scale or
another, on this process alone. It goes forward and backward and never updates: an iteration with
updates in its middle goes on from what they made when it was recorded. Afterwards parameters,
gradients, buffers, modules' attributes and random state are as before.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    closing,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import replace
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from ampwise.clock import done_at
from ampwise.distributed.layout import is_sharded, unwrapped
from ampwise.policy import Policy
from ampwise.step.activity import Activity
from ampwise.step.attributes import Attributes
from ampwise.step.buffers import Snapshot
from ampwise.step.loss_scale import CEILING, LossScale, UnitLossScale
from ampwise.step.modules import in_form, modules_of
from ampwise.step.parallel import OneRank
from ampwise.step.recorder import (
    MicroBatch,
    NonFiniteLossError,
    RandomState,
    Recorder,
    Stash,
    Windowed,
    copies_of,
    finite,
    stash_for,
)
from ampwise.step.replayable import Replayable, Replayed
from ampwise.step.train_step import TrainStep
from ampwise.step.window import Weight
from ampwise_lint.base.words import power_in_code


class Onlooker(Protocol):
    """Who watches training, and takes what runs for it."""

    def aside(self) -> AbstractContextManager[None]:
        """Context: what runs inside is no training."""
        ...


onlookers: WeakSet[Onlooker] = WeakSet()
"""Who watches what this process trains."""


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
        """The models, out of DDP, as one."""
        return (self._step.whole,)

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
    def least_scale(self) -> float:
        """The floor of its loss scale."""
        return self._step.loss_scale.floor

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

    def rehearsal(self, run: Callable[[Any, Any], Any], batches: Sequence[Any]) -> Stash:
        """A window that has not run: to look at a step without making it.

        Parameters
        ----------
        run
            Runs a batch on a step: a micro-batch of it, or an iteration (whose updates then leave
            parameters as they are).
        """
        stash = stash_for(self._step)
        state = RandomState.now(self.device)
        stash.micro_batches = [MicroBatch(run, batch, state) for batch in batches]
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
        until_bad: bool = False,
    ) -> Replayed:
        """Run a window again; see `Replayable.replay`."""
        result, listener = Replayed(), _Listener(backward=backward, until_bad=until_bad)
        scale = float(stash.scale) if scale is None else scale
        with (
            undisturbed(self),
            self._step.apart(),
            closing(_Replaying(self._step, stash, policy, scale, listener)) as rerun,
        ):
            good = finite_buffers(self.models)
            try:
                with around():
                    for each in stash.micro_batches:
                        each.random_state.restore(self.device)
                        batch = each.batch if change is None else change(each.batch)
                        with suppress(_ForwardDoneError):
                            each.run(rerun, batch)
            except NonFiniteLossError:
                backward = False  # `until_bad`: there are no norms either
            except Exception as error:  # noqa: BLE001 - the caller wants to know what it is
                let_go(error)
                result.error = error
            result.losses, result.forward_s = listener.losses, listener.forward_s
            result.gradients = rerun.collected()  # before norms, which coalesce sparse ones
            if backward and result.error is None:
                result.norms = rerun.norms()
            result.poisoned = poisoned(self.models, good)
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


def finite_buffers(models: Sequence[nn.Module]) -> list[set[str]]:
    """Names of buffers without inf or NaN, for each model."""
    return [{n for n, each in model.named_buffers() if finite(each)} for model in models]


def poisoned(models: Sequence[nn.Module], good: Sequence[set[str]]) -> dict[str, Tensor]:
    """Buffers that were good, by name, and are not."""
    return {
        name: each
        for model, names in zip(models, good, strict=True)
        for name, each in model.named_buffers()
        if name in names and not finite(each)
    }


def gradients_of(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The gradients that parameters have, by name."""
    return {name: each.grad for name, each in parameters.items() if each.grad is not None}


def let_go(error: Exception) -> None:
    """Drop what the frames of an error hold; where it was raised stays known.

    Before torch 2.13 a checkpointed forward that raises leaves its saved-tensor hooks in place for
    as long as its frames live, and the next forward would save into the graph that failed.
    """
    traceback.clear_frames(error.__traceback__)


class Rerun(TrainStep):
    """A step over the models of another one, alone, that is never made.

    Parameters
    ----------
    step
        Whose models they are.
    policy
        Another precision than its own.
    scale
        A loss scale that stays.
    recorder
        Is told of its losses.
    """

    def __init__(
        self,
        step: TrainStep,
        policy: Policy | None = None,
        scale: float = 1.0,
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__(
            step.model if step.ranks == 1 else in_form(step.model, unwrapped),
            step.optimizer,
            policy=policy or step.policy,
            samples=step.samples,
            skip=step.skip,
            undo="window",
        )
        self.recorder = recorder
        # The first window may never have run: a replay is no proof of activity.
        self.activity = Activity({}, {}, loss_scale_live=False, watched=False)
        self._open.window = step._open.window.again()
        fixed: LossScale = UnitLossScale()
        if step.loss_scale.enabled or scale != 1:
            fixed = LossScale(scale, floor=min(scale, 1.0), ceiling=max(scale, 1.0))
        self.loss_scale = fixed.fresh(self.device)

    def _find_parallel(self, watch_every: int) -> OneRank:  # noqa: ARG002
        """Nobody else: one whose part is clean has nothing to add to another's replay."""
        return OneRank()

    def _check(self, named: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer]) -> None:
        """Nothing: the step has."""

    def _check_parameters(
        self, named: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer]
    ) -> None:
        """Nothing, either: they are trained in the step's own precision."""

    def gradient_norms(self, optimizers: Sequence[Optimizer] | None = None) -> list[Tensor]:
        """Norms of the gradients of some optimizers (default: all), as guards read them."""
        sets = self._open.pending.sets(self._members.indices(optimizers))
        return [norm for each in sets for norm in self._open.pending.guard(each).read()]


class _Replaying(Rerun):
    """One window, run again.

    Its `update` steps nothing. In an iteration it takes the gradients that are there, and puts
    parameters to what the recorded update made of them: so what comes after it goes on from there,
    whatever the precision and its gradients.
    """

    def __init__(
        self,
        step: TrainStep,
        stash: Stash,
        policy: Policy | None,
        scale: float,
        listener: _Listener,
    ) -> None:
        super().__init__(step, policy, scale, listener)
        self._log.steps = stash.step - 1
        self._listener, self._stash = listener, stash
        self._among_ranks = step.ranks > 1
        self._updates = iter(stash.updates)
        self._kept: dict[str, Tensor] | None = None
        self._gradients: dict[str, Tensor] = {}
        self._norms: list[Tensor] = []

    def iterate(self, iteration: Callable[[Any, Any], Tensor], batch: Any) -> Tensor:
        """An iteration from where the recorded one began, without its end."""
        self._listener.resume()
        self._kept = self._kept or copies_of(self.named_tensors())
        self._put(self._stash.before)
        self._iterates = True
        try:
            return iteration(self, batch)
        finally:
            self._iterates = False

    def _backward(
        self,
        loss: Tensor,
        optimizers: Sequence[Optimizer] | None,
        weight: Weight | None,
        *,
        retain_graph: bool,
    ) -> None:
        if self._listener.backward:
            super()._backward(loss, optimizers, weight, retain_graph=retain_graph)
        elif not self._iterates:
            raise _ForwardDoneError
        self._listener.resume()

    def _propagate(
        self, loss: Tensor, seed: Tensor | None, retain_graph: bool, inputs: list[Tensor] | None
    ) -> None:
        """Backward without DDP's hooks on parameters.

        A model whose last forward had no backward to its own parameters, as a discriminator's in
        the generator's part, would sum over ranks in the next backward, whoever makes it.
        """
        if not (self._among_ranks and self._iterates):
            super()._propagate(loss, seed, retain_graph, inputs)
            return
        leaves = [each for each in inputs or self._members.held if each.requires_grad]
        found: Any = torch.autograd.grad(
            loss, leaves, seed, retain_graph=retain_graph, allow_unused=True
        )
        for leaf, gradient in zip(leaves, found, strict=True):
            if gradient is not None:
                leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient

    def gradients(self) -> dict[str, Tensor]:
        """True gradients so far; copies, as those that are collected stay scaled."""
        scale, named = self.loss_scale.scale, self.named_tensors()
        return {name: each.grad / scale for name, each in named.items() if each.grad is not None}

    def update(
        self,
        optimizers: Sequence[Optimizer] | None = None,
        *,
        update_scale: bool = True,  # noqa: ARG002 - the scale stays
    ) -> None:
        """Take the gradients, and go on from what the recorded update left."""
        self._norms += self.gradient_norms(optimizers)
        held = set(map(id, self._members.held_by(optimizers)))
        for name, each in self.named_tensors().items():
            if id(each) in held and each.grad is not None:
                before = sum(key.partition(" ")[0] == name for key in self._gradients)
                key = f"{name} (update {before + 1})" if before else name
                self._gradients[key], each.grad = each.grad, None
        self._put(next(self._updates, {}))
        self._open.window.use_up(self._members.indices(optimizers))
        self._listener.resume()

    def collected(self) -> dict[str, Tensor]:
        """Gradients by name: of an iteration those that its updates were given."""
        return gradients_of(self.parameters()) if self._kept is None else self._gradients

    def norms(self) -> list[Tensor]:
        """Norms of the same, as guards read them."""
        return self.gradient_norms() if self._kept is None else self._norms

    def close(self) -> None:
        """Have the parameters be as before, and let go of the models."""
        self._put(self._kept or {})
        super().close()

    @torch.no_grad()
    def _put(self, values: Mapping[str, Tensor]) -> None:
        named = self.named_tensors() if values else {}
        for name, value in values.items():
            named[name].copy_(value)
        self._precision.moved([named[name] for name in values])


class _ForwardDoneError(Exception):
    """The forward of a replay that wants no backward."""


class _Listener(Recorder):
    """Keeps losses and times of a replay's forwards.

    Attributes
    ----------
    backward
        Whether backwards are wanted, too.
    """

    def __init__(self, *, backward: bool, until_bad: bool) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        self.forward_s = 0.0
        self.backward = backward
        self._until_bad = until_bad
        self._began = 0.0

    def resume(self) -> None:
        """A forward may begin now."""
        self._began = time.perf_counter()

    def micro_batch(
        self,
        step: Windowed,  # noqa: ARG002
        run: Callable[[Any, Any], Any],  # noqa: ARG002
        batch: Any,  # noqa: ARG002
    ) -> None:
        """A forward is about to begin."""
        self.resume()

    def loss(self, loss: Tensor) -> None:
        """It is done."""
        self.forward_s += done_at(loss.device) - self._began
        self.losses.append(loss)
        if self._until_bad and not finite(loss):
            raise NonFiniteLossError


@contextmanager
def undisturbed(step: Replayable, others: Iterable[nn.Module] = ()) -> Generator[None]:
    """Gradients, modules and random state as they were, whatever happens inside.

    Of an open window forward has written the buffers already: inside they are as it began. `others`
    are modules beside the models that it uses. Who looks on (`onlookers`) sees nothing of it.
    """
    with ExitStack() as unseen:
        for each in list(onlookers):
            unseen.enter_context(each.aside())
        with _put_back(step, others):
            yield


@contextmanager
def _put_back(step: Replayable, others: Iterable[nn.Module]) -> Generator[None]:
    """Context: what forward and backward change is as before afterwards."""
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
