"""The training step: one call from a micro-batch to updated parameters, in any loop.

batch -> window      its share of the accumulation window          (`window`)
      -> engine      forward, backward, guard, optimizer, scale    (`engine`)
      -> followers   schedule and EMA, unless it was skipped       (`skips`)
      -> recorder    what a replay would need, if one is armed     (`recorder`)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

import ampwise
from ampwise.data.move import changed
from ampwise.errors import UsageError
from ampwise.policy import Policy, Resolution
from ampwise.step import arguments, nesting
from ampwise.step.activity import Activity
from ampwise.step.arguments import scalar
from ampwise.step.capture import CapturedStep
from ampwise.step.engine import Engine
from ampwise.step.guard import Guard
from ampwise.step.host import HostFlag
from ampwise.step.iteration import iteration_on, micro_batch_on, reported, warn_of_rest
from ampwise.step.loss_scale import LossScale
from ampwise.step.recorder import Recorder
from ampwise.step.samples import samples_in
from ampwise.step.skips import Followers
from ampwise.step.state import StepState
from ampwise.step.warn import warn_user
from ampwise.step.window import Weight, Window
from ampwise.telemetry.ring import COLUMNS, write

Batch = TypeVar("Batch")
Returned = TypeVar("Returned", bound=Tensor | tuple[Any, ...])
"""What a `loss_fn` returns: the loss, or a tuple that begins with it."""


class TrainStep(Engine):
    """A training step that is right by construction, in any loop.

    Arguments that are not listed here are those of `Engine`.

    Under ``policy="auto"`` the first call ``step(loss_fn, batch)`` races the precisions that the
    device has on that very step, which takes a few seconds and leaves no trace in training, and
    `resolution` then says which is used, with the figures (`ampwise.step.race`). Loops that use the
    step's parts keep the guess that it begins with.

    Parameters
    ----------
    accumulate
        Micro-batches in an accumulation window.
    scheduler
        Learning-rate scheduler, stepped after each optimizer step, held on skipped ones. On
        accelerators it learns of a skipped step one step late, and then holds. One of timm's that
        counts updates (``t_in_epochs=False``) gets their number. One that needs more than that
        (`ReduceLROnPlateau`) is refused: call it where you have what it needs.
    ema
        Averaged model of (the first) model, updated after each optimizer step, held on skipped
        ones; one host sync a step on accelerators.
    samples
        Samples (or tokens) in a batch: its weight in the window, over all ranks. Default: length of
        the first dimension of the first tensor.
    on_fault
        At the first skipped step that a lower loss scale would not mend: ``diagnose`` finds out
        why, warns, and keeps the result in `diagnosis`; a function is given the `Diagnosis`
        instead of the warning, and stops training by raising. Training goes on otherwise. Needs
        steps of the form ``step(loss_fn, batch)`` or ``step.iterate(iteration, batch)``.

    Attributes
    ----------
    boundary
        Whether the last call completed an optimizer step, made or skipped.
    recorder
        Flight recorder; None when nobody armed one.
    diagnosis
        What `on_fault` found; None before.

    Raises
    ------
    UsageError
        For arguments that cannot work; the message names what was expected.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
        optimizer: Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer],
        *,
        policy: str | Policy | Resolution = "auto",
        accumulate: int = 1,
        max_grad_norm: float | None = None,
        scheduler: LRScheduler | None = None,
        ema: AveragedModel | None = None,
        samples: Callable[[Any], Weight] | None = None,
        loss_scale: LossScale | None = None,
        skip: Literal["all", "each"] = "all",
        max_skips: int = 50,
        watch_every: int = 50,
        strict: bool = False,
        undo: Literal["micro-batch", "window"] = "micro-batch",
        on_fault: Literal["diagnose"] | Callable[[Any], object] | None = None,
    ) -> None:
        accumulate = arguments.whole_number("accumulate", accumulate, 1, "micro-batches")
        arguments.check_callable("samples", samples, "a function from a batch to its samples")
        if on_fault != "diagnose":
            arguments.check_callable("on_fault", on_fault, "'diagnose' or a function")
        super().__init__(
            model, optimizer, policy=policy, max_grad_norm=max_grad_norm, loss_scale=loss_scale,
            skip=skip, max_skips=max_skips, watch_every=watch_every, strict=strict, undo=undo,
        )  # fmt: skip
        self.boundary = False
        self._undecided = self.resolution is not None and self.resolution.guess
        self.recorder: Recorder | None = None if on_fault is None else Recorder()
        self.diagnosis: Any = None
        self._on_fault = on_fault
        self._iterates, self._seen = False, list[Activity]()
        self.samples = samples or samples_in
        self._followers = Followers(scheduler, ema, self._members, self.optimizers)
        ranks = self._parallel
        self._open.window = Window(accumulate, ranks.first_weight, over_ranks=ranks.size > 1)
        self._log.outcomes.at_once |= ema is not None

    # -- the whole step ----------------------------------------------------------------------------

    def __call__(
        self,
        loss_fn: Callable[[Any, Batch], Returned],
        batch: Batch,
        *,
        weight: Weight | None = None,
        last: bool = False,
    ) -> Returned:
        """One micro-batch: forward, loss, backward, and at the window's end the optimizer step.

        Parameters
        ----------
        loss_fn
            ``loss_fn(model, batch)`` returns the mean loss of the batch, a scalar with grad; or a
            tuple of it and whatever else is wanted of forward (logits for a metric, say).
        batch
            Anything `loss_fn` takes, on the model's device.
        weight
            Samples (or tokens) in the batch, instead of counting them; 0 counts nothing.
        last
            Close the window with this micro-batch even if it is not full.

        Returns
        -------
        Tensor or tuple
            The unscaled, undivided loss of this micro-batch, detached, on the device. With what
            `loss_fn` returned beside it, whose tensors are detached, too.

        Raises
        ------
        UsageError
            When the loss is not a floating-point scalar with a gradient.
        SkippedStepsError
            When too many steps in a row were skipped.
        DivergedRanksError, LostRankError
            On all ranks, when they no longer train one model; on those left, when one has failed.
        """
        if not callable(loss_fn):
            raise UsageError(
                f"loss_fn: expected a function of (model, batch), got {type(loss_fn).__name__}; "
                "the call is step(loss_fn, batch)"
            )
        if self._iterates:
            self._refuse_iterating("step()")
        nesting.refuse("step()", self._members)
        last = last or self._open.window.fills
        with self._parallel.telling():
            if self._undecided:
                self._race(loss_fn, batch, weight)
            with self._attempting(forward=True):
                again = partial(self._count_nothing, loss_fn, batch)
                with self._parallel.collecting(last, again):
                    returned = self.micro_batch(loss_fn, batch, weight)
                if last:
                    self._decide(None, last=True)
            self.boundary = False
            if last:
                self._close()
        return returned

    def micro_batch(
        self, loss_fn: Callable[[Any, Batch], Returned], batch: Batch, weight: Weight | None = None
    ) -> Returned:
        """Forward, loss and backward, without the optimizer step at the window's end.

        Parameters and what is returned are as for the step itself; `update` or `flush` follows.
        """
        if self.recorder is not None:
            again = partial(micro_batch_on, loss_fn=loss_fn, weight=weight)
            self.recorder.micro_batch(self, again, batch)
        with self._precision:  # around forward, too: what both change is changed once
            with self.autocast():
                returned = loss_fn(self.model, batch)
            loss: Any = returned[0] if isinstance(returned, tuple) and returned else returned
            if weight is None and self._open.window.weighs:
                weight = self.samples(batch)
            if self.recorder is not None:
                self.recorder.loss(scalar(loss).detach())
            self._backward(loss, None, weight, retain_graph=False)
        self._undecided = False
        return changed(returned, _detached)

    def iterate(self, iteration: Callable[[Any, Batch], Tensor], batch: Batch) -> Tensor:
        """One iteration of a loop with several models, losses or optimizers, by the step's parts.

        ::

            def iteration(step, real):
                g, d = step.model["generator"], step.model["discriminator"]
                of_g, of_d = step.optimizer["generator"], step.optimizer["discriminator"]
                with step.autocast():
                    fake = g(torch.randn(len(real), 64, device=real.device))
                    loss = softplus(d(fake.detach())).mean() + softplus(-d(real)).mean()
                step.backward(loss, optimizers=[of_d])
                step.update([of_d])
                with step.autocast():
                    loss = softplus(-d(fake)).mean()
                step.backward(loss, optimizers=[of_g])
                step.update([of_g])
                return loss

            step.iterate(iteration, batch)

        However many updates it makes, it is one step: one record, with the loss that it returns;
        the loss scale stays the same in it and adapts at its end (`update_scale` says nothing
        here). It can be replayed (`on_fault`), where it depends on nothing but its arguments,
        random numbers, and what models and optimizers hold.

        Parameters
        ----------
        iteration
            ``iteration(step, batch)`` calls `backward` and `update` at least once, and returns the
            loss to report, a scalar.
        batch
            Anything that `iteration` takes, on the models' device.

        Returns
        -------
        Tensor
            The loss to report, detached; over several ranks their mean.

        Raises
        ------
        UsageError
            When it makes no update, returns no scalar, or the step accumulates. An error inside
            drops what is open; updates that came before it stay.
        """
        if self._iterates:
            self._refuse_iterating("iterate()")
        nesting.refuse("iterate()", self._members)
        if self._open.window.accumulate > 1:
            raise UsageError(
                f"iterate: an iteration updates by itself, so expected a step with accumulate=1, "
                f"got {self._open.window.accumulate}; several backward() before an update() add up"
            )
        if self.recorder is not None:
            again = partial(iteration_on, iteration=iteration)
            self.recorder.micro_batch(self, again, batch)
            self.recorder.began(self.named_tensors())
        self.boundary = False
        self._iterates, self._seen = True, list[Activity]()
        try:
            with self._parallel.telling():
                loss = iteration(self, batch)
            loss = reported(loss, updated=self._open.pending.has_decided)
            if self._seen:
                self._note_activity(reduce(operator.add, self._seen))
            if left := self._open.pending.with_gradients(self._open.window.whose):
                warn_of_rest([type(self.optimizers[index]).__name__ for index in left], left)
        except BaseException:
            self.discard()
            raise
        finally:
            self._iterates = False
        with self._parallel.telling():
            loss = self._parallel.mean(loss.detach().to(self.device, torch.float32).reshape(()))
            self._open.window.report(loss)
            self._close()
        return loss

    def flush(self) -> None:
        """Close a window that is only partly filled, as at the end of an epoch; else do nothing.

        With several ranks this costs a micro-batch, to sum the gradients; ``last=True`` with the
        last one costs nothing.
        """
        if self._open.window.position:
            self.update()

    def captured(self, loss_fn: Callable[[Any, Batch], Returned]) -> Callable[[Batch], Returned]:
        """The whole step as one CUDA graph: call the result with each batch, as the step itself.

        The first three calls are ordinary steps. On other devices all are, with a warning.

        Raises
        ------
        UsageError
            When the step cannot be captured: it accumulates, or an optimizer or the EMA needs the
            host's decision, or a scheduler changes a learning rate that is no tensor.
        """
        if self.ranks > 1:
            raise UsageError("captured: expected one process; several have not been tried")
        if self._open.window.accumulate > 1:
            raise UsageError("captured: expected accumulate=1; a window of several cannot be one")
        if self.syncs_per_step:
            raise UsageError(
                "captured: the host decides in each step (an optimizer that is not fused, or an "
                "EMA); expected fused optimizers and no EMA"
            )
        rates = [group["lr"] for each in self.optimizers for group in each.param_groups]
        if self.scheduler is not None and not all(isinstance(each, Tensor) for each in rates):
            raise UsageError(
                "captured: the graph keeps a learning rate that is a number; with a scheduler give "
                "the optimizer lr=torch.tensor(...)"
            )

        def on_device(batch: Batch, row: Tensor) -> tuple[Returned, HostFlag]:
            returned = self.micro_batch(loss_fn, batch)
            self._decide(None, last=True)
            return returned, self._close_on_device(row)

        def on_host(row: Tensor, found_inf: HostFlag) -> None:
            write(self._log.ring.row, row.unbind())
            self._follow(self._close_on_host(found_inf))

        row = torch.zeros(COLUMNS, device=self.device)
        return CapturedStep(lambda batch: self(loss_fn, batch), on_device, on_host, row)

    # -- its parts ---------------------------------------------------------------------------------

    def backward(
        self,
        loss: Tensor,
        *,
        optimizers: Sequence[Optimizer] | None = None,
        weight: Weight | None = None,
        retain_graph: bool = False,
    ) -> None:
        """Backward of the scaled loss, by its share of the window.

        Parameters
        ----------
        loss
            Floating-point scalar that requires grad, unscaled and undivided.
        optimizers
            Only the parameters of these receive gradients (of a GAN's discriminator, say).
        weight
            Samples (or tokens) it is the mean of, among those for the same optimizers. Default: it
            counts ``1 / accumulate``, and several losses add up.
        retain_graph
            Keep the graph for another backward through it.

        Raises
        ------
        UsageError
            When `loss` is no such scalar, gradients were already unscaled by `gradients`, a weight
            is negative or not finite, only some losses have one, or weights of losses for
            different optimizers would be mixed.
        """
        with self._parallel.telling():
            if self._iterates and self.recorder is not None:
                self.recorder.loss(scalar(loss).detach())
            self._backward(loss, optimizers, weight, retain_graph=retain_graph)
        self.boundary = self._undecided = False

    def update(
        self, optimizers: Sequence[Optimizer] | None = None, *, update_scale: bool = True
    ) -> None:
        """Guard, then step or skip; see `Engine.update`. In `iterate` the step ends with that."""
        super().update(optimizers, update_scale=update_scale and not self._iterates)
        if self._iterates and self.recorder is not None:
            held = set(map(id, self._members.held_by(optimizers)))
            named = self.named_tensors()
            self.recorder.updated({n: each for n, each in named.items() if id(each) in held})

    def discard(self) -> None:
        """Drop an open window: its gradients go, buffers are as before its first forward."""
        super().discard()
        self.boundary = False

    # -- what happened -----------------------------------------------------------------------------

    @property
    def position(self) -> int:
        """Micro-batches in the open window."""
        return self._open.window.position

    @property
    def syncs_per_step(self) -> int:
        """Host syncs that a step costs on an accelerator; 0 with fused optimizers and no EMA."""
        return super().syncs_per_step + (self.ema is not None)

    @property
    def scheduler(self) -> Any:
        """The schedule; another one may be put in place, after a new optimizer has been."""
        return self._followers.scheduler

    @scheduler.setter
    def scheduler(self, scheduler: Any) -> None:
        self._followers = Followers(scheduler, self.ema, self._members, self.optimizers)

    @property
    def ema(self) -> AveragedModel | None:
        """The average of the first model's parameters; another one may be put in place."""
        return self._followers.ema

    @ema.setter
    def ema(self, ema: AveragedModel | None) -> None:
        self._followers = Followers(self.scheduler, ema, self._members, self.optimizers)
        self._log.outcomes.at_once |= ema is not None

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Policy, loss scale, counters and an open window; loads with ``weights_only=True``.

        In the middle of a window it holds the gradients collected so far, and the buffers as they
        were before it.
        """
        return super().state_dict() | {"undecided": self._undecided}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was taken; takes a `torch.amp.GradScaler.state_dict` too.

        Whatever the step had open is dropped. A loss scale saved under another precision is taken
        over only if both scale the loss. Under ``auto`` the policy is that of the state.

        Raises
        ------
        UsageError
            When `state` is neither, or has gradients of parameters that are not there.
        """
        if self._undecided and isinstance(state, Mapping) and "scale" not in state:
            self._take_over(state)
        super().load_state_dict(state)

    def _take_over(self, state: Mapping[str, Any]) -> None:
        """Go on in the precision of a state, if that was decided on when it was taken."""
        assert self.resolution is not None
        policy = Policy.parse(StepState.from_dict(state).policy)
        if not state.get("undecided"):
            said = ("as in the state that was loaded",)
            self._adopt(replace(self.resolution, policy=policy, reasons=said, guess=False))
            self._undecided = False

    # -- inside ------------------------------------------------------------------------------------

    def _race(self, loss_fn: Callable[[Any, Any], Any], batch: Any, weight: Weight | None) -> None:
        """Have ``auto`` become what this step is fastest in."""
        self._look()
        self._adopt(ampwise.race_precisions(self, loss_fn, batch, weight))

    def _check(self, named: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer]) -> None:
        super()._check(named, optimizers)
        self._followers.check(optimizers)

    def _refuse_iterating(self, what: str) -> None:
        """Refuse what is a step of its own within an iteration."""
        raise UsageError(
            f"{what} inside an iteration, which is one step already; expected its parts there: "
            "autocast(), backward() and update()"
        )

    def _see_activity(self, loss: Tensor) -> None:
        """Of an iteration, the forwards of all its losses are one."""
        if self._iterates:
            self._seen.append(self._activity_of(loss))
        else:
            super()._see_activity(loss)

    def _count_nothing(self, loss_fn: Callable[[Any, Batch], Any], batch: Batch) -> None:
        """A micro-batch that sums over ranks what was collected, and counts nothing itself."""
        with self._open.buffers.kept():
            self.micro_batch(loss_fn, batch, 0)

    def _decide(self, optimizers: Sequence[Optimizer] | None, *, last: bool) -> None:
        if self._on_fault is not None and self._log.outcomes.last_skipped():
            # An accelerator's last step, known while it works on this one's backward; nothing has
            # changed since, so it can still be replayed.
            self._examine()
        super()._decide(optimizers, last=last)

    def _decided(self, guard: Guard) -> None:
        if self.recorder is not None:
            self.recorder.norms(guard.norms)

    def _close_on_host(self, found_inf: HostFlag) -> list[bool]:
        self.boundary = True
        if self.recorder is not None:
            self.recorder.close()
        return super()._close_on_host(found_inf)

    def _follow(self, known: Sequence[bool]) -> None:
        """Schedule and EMA make a step, unless one was skipped; too many skips abort."""
        self._log.learn(known)
        skipped = self._log.outcomes.at_once and bool(known) and known[-1]
        scheduled = None if self.schedule_holds() else self._log.skips.scheduled(self._log.steps)
        self._followers.follow(scheduled, skipped=skipped)
        if self._on_fault is not None and skipped:
            self._examine()
        self._log.enforce_limit(self.policy)

    def _examine(self) -> None:
        """Ask why the last window was skipped; the first abnormal answer is the last question."""
        on_fault, self._on_fault = self._on_fault, None
        found, summary = ampwise.examine_fault(self)
        if found is None:  # the loss scale settling
            self._on_fault = on_fault
            return
        self.diagnosis, self.recorder = found, None
        if callable(on_fault):
            on_fault(found)
        else:
            warn_user(summary)


def _detached(each: Any) -> Any:
    """Without its graph, if it has one."""
    return each.detach() if isinstance(each, Tensor) else each
