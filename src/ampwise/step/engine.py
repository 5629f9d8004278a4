"""The engine of a step: precision, loss scale, guard, decision, telemetry.

    forward     under the policy                                     (`precision`)
    backward    of loss * scale                                      (`hooks`)
    parallel    with several ranks: one sum of what they decide by   (`parallel`)
    guard       norm, found_inf, unscale and clip in one pass        (`gradients`, `guard`)
    optimizer   step or skip, decided on the device                  (`pending`, `optimizers`)
    loss scale  back off or grow                                     (`loss_scale`)
    buffers     put back if the step was skipped                     (`buffers`)
    telemetry   one row on the device                                (`telemetry.ring`)
    host        learns of the outcome when that costs no wait        (`log`)

It has no window, no schedule and no EMA: that is for loops that have their own (a trainer's). The
step that people write loops with, `TrainStep`, is this with these three.

float32 takes the same path as every precision, with a scale of 1 that divides nothing. The comments
say where the host waits for the device; with fused optimizers it nowhere does.

Nothing is changed about models and optimizers, and what belongs to them is read when it is needed
(`members`). What there is of a step between its calls is one thing (`open_step`), and a call that
raises leaves everything as before (`attempt`).
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import TracebackType
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from ampwise.distributed.host_group import beside
from ampwise.errors import UsageError
from ampwise.policy import Policy, Resolution
from ampwise.step import accelerate, arguments, nesting
from ampwise.step import gradients as grads
from ampwise.step.activity import Activity
from ampwise.step.arguments import scalar
from ampwise.step.attempt import Attempt
from ampwise.step.guard import Guard
from ampwise.step.hooks import hooked
from ampwise.step.host import HostFlag
from ampwise.step.log import StepLog
from ampwise.step.loss_scale import LossScale
from ampwise.step.members import Members
from ampwise.step.open_step import OpenStep
from ampwise.step.parallel import OneRank, parallel_of
from ampwise.step.pending import Pending
from ampwise.step.precision import Precision, check_islands, precision_of
from ampwise.step.state import StepState
from ampwise.step.window import Weight, divide
from ampwise.telemetry.ring import Row, StepRecord, Totals, write

_EVERY: AbstractContextManager[None] = nullcontext()
"""Of a backward to all parameters."""


class Engine:
    """Mixed precision for a loop that is somebody else's: parts of a step, right by construction.

    ::

        engine = ampwise.Engine(model, optimizer, policy="fp16", max_grad_norm=1.0)
        with engine.autocast():
            loss = loss_fn(model, batch)
        engine.backward(loss)
        engine.update()

    Parameters
    ----------
    model
        The model, or the models, that are trained; already on their device. Wrapped in DDP or
        sharded by FSDP2 (``fully_shard``), all ranks take the same decisions.
    optimizer
        The optimizer, or optimizers, over their parameters. Fused ones decide on the device; others
        cost one host sync a step on accelerators.
    policy
        A preset or policy, used exactly as asked; ``auto`` or a `Resolution` for what fits the
        device. An engine sees no whole step, so for it ``auto`` is a guess from matrix products; a
        `TrainStep` decides by its first call.
    max_grad_norm
        Clip the global L2 norm of the true gradients to this.
    loss_scale
        Settings of the loss scale, for policies that scale the loss.
    skip
        With several optimizers, on a non-finite gradient: skip ``all`` that update together, or
        only ``each`` that has it. Norm and clipping are over the same set.
    max_skips
        Skipped steps in a row after which training aborts.
    watch_every
        With several ranks, steps between two comparisons of loss scale, step count and a checksum
        of the parameters over ranks; 0 compares nothing. Turn it off where plain parameters differ
        between ranks on purpose.
    strict
        Fail, rather than warn, if the asked precision was not active in the first forward.
    undo
        What an error in backward or in the optimizer takes back. The ``micro-batch`` alone: from
        the second one of a step on that holds a second set of gradients. Or the whole ``window``
        of gradients, which holds none; several ranks always do that.

    Attributes
    ----------
    policy
        The policy in force.
    resolution
        How it came about, when it was resolved rather than named.
    loss_scale
        The loss scale, its state on the device.
    activity
        What the first forward (all those of a first iteration) really ran in; None before that.
    grad_norm
        Global L2 norm of the true gradients of the last step, before clipping; a scalar on the
        device, NaN before the first.

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
        max_grad_norm: float | None = None,
        loss_scale: LossScale | None = None,
        skip: Literal["all", "each"] = "all",
        max_skips: int = 50,
        watch_every: int = 50,
        strict: bool = False,
        undo: Literal["micro-batch", "window"] = "micro-batch",
    ) -> None:
        arguments.check_settings(max_grad_norm, skip, max_skips, watch_every, undo)
        self._members = members = Members(model, optimizer)
        named = members.parameters()
        self.device = arguments.device_of(named)
        self.policy, self.resolution = arguments.policy_for(policy, self.device)
        self._check_parameters(named, members.optimizers)
        accelerate.check_once(members.models, members.optimizers, self.policy)
        self._scale_settings = loss_scale
        self.loss_scale = self._first_loss_scale()
        self.grad_norm = torch.full((), math.nan, device=self.device)
        self.activity: Activity | None = None

        if self.resolution is not None:
            # A typo is one also where this device fell back to a policy without islands.
            check_islands(self.resolution.asked, members.whole)
        self.skip: Literal["all", "each"] = skip
        self._strict = strict
        self._parallel = self._find_parallel(watch_every)
        self._precision = self._in_force()
        self._undoes_micro_batch = undo == "micro-batch" and self._parallel.size == 1
        pending = Pending(
            members,
            self.device,
            max_grad_norm,
            together=skip == "all",
            make_step=self._precision.step,
        )
        self._open = OpenStep(members, pending)
        self._log = StepLog(self.device, max_skips)

    def _first_loss_scale(self) -> LossScale:
        """The policy's loss scale; under ``auto`` settings may turn out to be of no use."""
        decides = self.resolution is not None and self.resolution.guess
        settings = None if decides and not self.policy.loss_scaling else self._scale_settings
        return arguments.loss_scale_for(self.policy, settings, self.device)

    def _in_force(self) -> Precision:
        return precision_of(
            self.policy,
            self.device.type,
            self._members,
            casts=not self._parallel.shards,
            agreed=partial(_first_of, self.group),
        )

    def _adopt(self, resolution: Resolution) -> None:
        """Have another policy in force, as if it had been from the start; no step is open."""
        self.resolution = resolution
        if resolution.policy == self.policy:
            return
        self._precision.close()
        self.policy = resolution.policy
        self.loss_scale = self._first_loss_scale()
        self._precision = self._in_force()
        self._open.pending.make_step = self._precision.step
        self._open.pending.forget_guards()

    def _find_parallel(self, watch_every: int) -> OneRank:
        """The processes that train these models together."""
        return parallel_of(self._members.wrapped, self.device, watch_every)

    # -- what is trained ---------------------------------------------------------------------------

    def _check(self, named: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer]) -> None:
        """Look whether parameters and optimizers, which are others now, can be trained."""
        self._check_parameters(named, optimizers)

    def _check_parameters(
        self, named: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer]
    ) -> None:
        """Look whether parameters can be trained under the policy."""
        arguments.check_parameters(named, optimizers, self.policy)

    @property
    def model(self) -> Any:
        """The model or models, as given; others may be put in place between two steps."""
        return self._members.model

    @model.setter
    def model(self, model: Any) -> None:
        arguments.models_of(model)
        self._members.model = model

    @property
    def optimizer(self) -> Any:
        """The optimizer or optimizers, as given; others may be put in place between two steps."""
        return self._members.optimizer

    @optimizer.setter
    def optimizer(self, optimizer: Any) -> None:
        arguments.optimizers_of(optimizer)
        self._members.optimizer = optimizer

    @property
    def max_grad_norm(self) -> float | None:
        """Limit of the global L2 norm of true gradients; None for no clipping. May be changed."""
        return self._open.pending.max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, max_grad_norm: float | None) -> None:
        arguments.check_norm(max_grad_norm)
        self._open.pending.max_grad_norm = max_grad_norm
        self._open.pending.forget_guards()

    @property
    def models(self) -> tuple[nn.Module, ...]:
        """The models, out of DDP."""
        return self._members.models

    @property
    def whole(self) -> nn.Module:
        """The models, out of DDP, as one module: for what goes by names."""
        return self._members.whole

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The optimizers."""
        return arguments.optimizers_of(self._members.optimizer)

    def parameters(self) -> dict[str, nn.Parameter]:
        """The models' parameters by FQN, which with several models begins with key or position."""
        return self._members.parameters()

    def named_tensors(self) -> dict[str, Tensor]:
        """The same, and those that only an optimizer knows, as ``optimizers.0.5``."""
        return self._members.named()

    # -- the parts of a step -----------------------------------------------------------------------

    def autocast(self) -> AbstractContextManager[None]:
        """Context for forward and loss under the policy; for evaluation too."""
        return _Training(self) if torch.is_grad_enabled() else self._evaluation()

    def backward(
        self,
        loss: Tensor,
        *,
        optimizers: Sequence[Optimizer] | None = None,
        retain_graph: bool = False,
    ) -> None:
        """Backward of the scaled loss; losses of several calls add up.

        Parameters
        ----------
        loss
            Floating-point scalar that requires grad, unscaled; divided as the loop wants it.
        optimizers
            Only the parameters of these receive gradients (of a GAN's discriminator, say).
        retain_graph
            Keep the graph for another backward through it.

        Raises
        ------
        UsageError
            When `loss` is no such scalar, or gradients were already unscaled by `gradients`.
        """
        with self._parallel.telling():
            self._backward(loss, optimizers, None, retain_graph=retain_graph)

    def gradients(self) -> dict[str, Tensor]:
        """True gradients of the step so far, by parameter name, before clipping.

        They are the tensors the optimizer will use: edits count, and are checked like the rest.
        """
        if self._parallel.owes:
            raise UsageError(
                "gradients() in the middle of a window: with several ranks gradients are summed in "
                "its last micro-batch; look at them after that, or pass last=True to it"
            )
        self._look()
        every = self._members.indices(None)
        if self._open.window.position and not self._open.window.agreed:
            self._parallel.agree(self._open.pending.guard(tuple(every)), self._open.window)
        self._open.pending.unscale(self._open.pending.with_gradients(every), self._divisor())
        named = self._members.named()
        return {name: each.grad for name, each in named.items() if each.grad is not None}

    def update(
        self, optimizers: Sequence[Optimizer] | None = None, *, update_scale: bool = True
    ) -> None:
        """Guard, then step or skip, on whatever gradients are there; adapt the scale; record.

        Parameters
        ----------
        optimizers
            Those that step now; default all.
        update_scale
            False for all but the last of several updates in one iteration: the loss scale adapts
            once per iteration, to what all of them found, and one record is written.

        Raises
        ------
        UsageError
            When there was no `backward` since the last step.
        SkippedStepsError
            When too many steps in a row were skipped.
        DivergedRanksError
            On all ranks, when they no longer train one model.
        """
        self._look()
        with self._parallel.telling():
            nesting.refuse("update()", self._members)
            self._decide(optimizers, last=update_scale)
            if update_scale:
                self._close()

    def schedule_holds(self) -> bool:
        """Whether the schedule is to stand still after this step; to be asked once a step.

        After a skipped step it is. On accelerators a skip is known one step late, and the schedule
        then stands still at that step instead: the same number of steps in the end.
        """
        return self._log.skips.holds()

    def discard(self) -> None:
        """Drop what there is of a step: gradients go, buffers are as before its first forward."""
        self._open.buffers.undo()
        self._drop()

    def _drop(self) -> None:
        """Drop what there is of a step; buffers stay as they are."""
        self._parallel.drop_rest()
        self._open.drop()

    def reset(self) -> None:
        """Forget everything but settings, as after going back to an earlier state of the model.

        An open step is dropped as by `discard`, but for the buffers: they are of that earlier
        state, and stay as they are.
        """
        self._drop()
        self._open.window.unit = None
        self.loss_scale = self.loss_scale.fresh(self.device)
        self._precision.load_state_dict({})
        self._log.start_from(Totals())

    def close(self) -> None:
        """Let go of model and optimizer, which are as the user made them; a step is dropped."""
        self.discard()
        self._precision.close()
        self._open.pending.forget_guards()

    # -- for replays -------------------------------------------------------------------------------

    def rewind_buffers(self) -> None:
        """Put buffers back to where an open step began, and leave it open."""
        self._open.buffers.undo()

    def apart(self) -> AbstractContextManager[None]:
        """Context: this process by itself; what is in DDP sums nothing."""
        return self._parallel.apart()

    # -- what happened -----------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Completed steps; skipped ones count."""
        return self._log.steps

    @property
    def stopping(self) -> bool:
        """Whether `ask_to_stop` was called, on this rank or another; the same on all."""
        return self._parallel.stopping

    def ask_to_stop(self) -> None:
        """Have `stopping` become true on all ranks at the same step (alone: at once)."""
        self._parallel.ask_to_stop()

    @property
    def slow_rank(self) -> str | None:
        """The rank that keeps the others waiting, in words, the same on all; None if none does.

        The first rank warns of it, too, once.
        """
        return self._parallel.slow_rank

    @property
    def ranks(self) -> int:
        """Processes that train these models together."""
        return self._parallel.size

    @property
    def group(self) -> ProcessGroup | None:
        """The ranks that train together and take one decision; None for one process."""
        return self._parallel.group

    @property
    def copied_bytes(self) -> int:
        """Memory of 16-bit copies of weights that stay from step to step."""
        return self._precision.held_bytes

    @property
    def left_out(self) -> dict[str, str]:
        """Linear layers that `fp8` leaves in bfloat16, with the reason; none in other policies."""
        self._look()
        return self._precision.left_out

    @property
    def syncs_per_step(self) -> int:
        """Host syncs that a step costs on an accelerator; 0 with fused optimizers."""
        self._look()
        sets = self._open.pending.sets(self._members.indices(None))
        return sum(not self._open.pending.guard(each).folds for each in sets)

    @property
    def history(self) -> list[StepRecord]:
        """What happened in the last 10,000 steps, the oldest first; waits for the device."""
        return self._log.ring.history

    def poll(self) -> list[StepRecord]:
        """Records that have arrived since the last `poll` or `drain`; never waits.

        As `history` does, it goes back 10,000 steps at most.
        """
        return self._log.ring.poll()

    def drain(self) -> list[StepRecord]:
        """All records since the last `poll` or `drain`; waits for the device."""
        return self._log.ring.drain()

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Policy, loss scale, counters and an open step; loads with ``weights_only=True``.

        In the middle of a step it holds the gradients collected so far, and the buffers as they
        were before it.
        """
        totals, skips = self._log.complete_totals(), self._log.skips
        state = StepState(
            policy=self.policy.text,
            loss_scale=self.loss_scale.state_dict(),
            steps=self.steps,
            skipped=totals.skipped,
            growths=totals.growths,
            backoffs=totals.backoffs,
            skipped_in_a_row=skips.in_a_row,
            held=skips.to_hold,
            unit=self._open.window.unit,
            precision=self._precision.state_dict(),
            open=self._open.state(),
        )
        return state.to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was taken; takes a `torch.amp.GradScaler.state_dict` too.

        Whatever the step had open is dropped. A loss scale saved under another precision is taken
        over only if both scale the loss.

        Raises
        ------
        UsageError
            When `state` is neither, or has gradients of parameters that are not there.
        """
        scale = self.loss_scale.fresh(self.device)
        if not isinstance(state, Mapping):
            raise UsageError(f"step state: expected a state_dict(), got {type(state).__name__}")
        if "scale" in state:
            scale.load_state_dict(state)
            self._drop()
            self.loss_scale = scale
            return
        loaded = StepState.from_dict(state)
        self._look()
        named = self._members.named()
        opened = None if loaded.open is None else loaded.open.checked(named)
        if loaded.loss_scale:
            scale.load_state_dict(loaded.loss_scale)
        self.reset()
        self.loss_scale = scale
        totals = Totals(int(loaded.steps), loaded.skipped, loaded.growths, loaded.backoffs)
        self._log.start_from(totals, in_a_row=loaded.skipped_in_a_row, held=loaded.held)
        self._precision.load_state_dict(loaded.precision)
        if self.ranks > 1 and loaded.unit is not None:
            unit = torch.tensor(loaded.unit, dtype=torch.float64, device=self.device)
            self._open.window.unit = unit
        if opened is not None:
            self._open.load(opened, named, self.device)

    def __reduce_ex__(self, _: Any) -> NoReturn:
        """Refuse to be copied or pickled: the copy would share some things, and not others.

        Raises
        ------
        UsageError
            Always.
        """
        raise UsageError(
            f"a {type(self).__name__} cannot be copied or pickled; copy the model, make its "
            "optimizer, and give a new step the state_dict() of this one"
        )

    # -- inside ------------------------------------------------------------------------------------

    def _look(self) -> None:
        """See which optimizers and parameters there are now, and check them if they are new."""
        if self._members.look(self._check):
            self._open.pending.forget_guards()

    def _divisor(self) -> Tensor | None:
        """What the step's gradients must be divided by; None if they are true as they are."""
        total = self._open.window.divisor
        if not isinstance(total, Tensor) and total == 1:
            return self.loss_scale.divisor
        return self.loss_scale.scale * total

    def _backward(
        self,
        loss: Tensor,
        optimizers: Sequence[Optimizer] | None,
        weight: Weight | None,
        *,
        retain_graph: bool,
    ) -> None:
        loss = scalar(loss)
        if self.activity is None:
            self._see_activity(loss)
        self._parallel.end_forward()
        with self._attempting(forward=False) as attempt:
            chosen = self._members.indices(optimizers)
            self._open.pending.make_way(chosen, self._open.window.whose)
            divided_by = self._open.window.add(loss.detach(), weight, chosen)
            counts = self._open.window.counts
            if counts is not False or self.ranks > 1:
                held = self._members.held_by(optimizers)
                attempt.begin_backward(held, exact=self._undoes_micro_batch)
                seed = self._seed(divided_by, loss.dtype)
                with (
                    self._precision,
                    hooked(held, self.loss_scale.divisor, counts),
                    self._only(None if optimizers is None else held) as inputs,
                ):
                    self._propagate(loss, seed, retain_graph, inputs)
                attempt.end_backward()
        self._parallel.end_backward()

    def _propagate(
        self, loss: Tensor, seed: Tensor | None, retain_graph: bool, inputs: list[Tensor] | None
    ) -> None:
        """Backward itself."""
        loss.backward(seed, retain_graph=retain_graph, inputs=inputs)

    def _seed(self, divided_by: Weight, dtype: torch.dtype) -> Tensor | None:
        """What backward starts from; None for 1, which it does by itself with less ceremony."""
        if not self.loss_scale.enabled and not isinstance(divided_by, Tensor) and divided_by == 1:
            return None
        return divide(self.loss_scale.scale, divided_by).to(dtype)

    def _see_activity(self, loss: Tensor) -> None:
        """Learn from the first loss what its forward really ran in."""
        self._note_activity(self._activity_of(loss))

    def _activity_of(self, loss: Tensor) -> Activity:
        live = self.loss_scale.enabled
        return Activity.of(loss, self._members.held, loss_scale_live=live)

    def _note_activity(self, seen: Activity) -> None:
        seen.demand(self.policy, strict=self._strict)
        self.activity = seen

    def _only(self, parameters: list[Tensor] | None) -> AbstractContextManager[list[Tensor] | None]:
        """Context: a backward to some parameters (None: all); what to give it as its inputs.

        FSDP2's leaves are gathered copies, which nobody can name: it goes to all parameters there,
        and what is not wanted is put back.
        """
        if parameters is None:
            return _EVERY
        if not self._parallel.shards:
            return nullcontext([each for each in parameters if each.requires_grad])
        wanted = set(map(id, parameters))
        # Of a model that is gathered just now, modules hold others than its optimizer does.
        all_of_them = (*self.parameters().values(), *self._members.held)
        return grads.put_back(each for each in all_of_them if id(each) not in wanted)

    def _decide(self, optimizers: Sequence[Optimizer] | None, *, last: bool) -> None:
        """Guard, and step or skip, for each set of optimizers; their gradients are used up."""
        if not self._open.begun:
            raise UsageError(
                "update() without a backward() before it: there is nothing to step on; call "
                "step.backward(loss) instead of loss.backward()"
            )
        self._parallel.sum_rest()
        for indices in self._open.pending.sets(self._members.indices(optimizers)):
            self._step_or_skip(indices, last=last)
        if not last:  # else the next forward begins a window
            self._precision.moved(self._members.held_by(optimizers))

    def _step_or_skip(self, indices: tuple[int, ...], *, last: bool) -> None:
        guard = self._open.pending.decide(
            indices,
            self._divisor,
            lambda each: self._parallel.agree(each, self._open.window),
            keep=self._undoes_micro_batch and self._open.attempt is None,  # else the attempt knows
        )
        # A guard writes its flag anew in the next update of this iteration, if there is one.
        flag = guard.flag if last else HostFlag(guard.flag.tensor.clone())
        self._open.pending.note(flag, guard.grad_norm, is_nothing=self._open.window.is_nothing)
        self._open.window.use_up(indices)
        self._decided(guard)

    def _decided(self, guard: Guard) -> None:
        """A guard has decided; for those that keep a record."""

    def _close(self) -> None:
        """End the step."""
        self._follow(self._close_on_host(self._close_on_device(self._log.ring.row)))

    def _close_on_device(self, row: Row) -> HostFlag:
        """End the step on the device: loss scale, buffers, a row of telemetry; its found_inf."""
        whose = self._open.window.whose
        if whose and (left := self._open.pending.with_gradients(whose)):
            # Of optimizers that did not step: the scale they were made under is about to change.
            self._open.pending.unscale(left, self._divisor())
        flag, grad_norm, counts = self._open.pending.outcome()
        self.grad_norm = grad_norm
        loss, scale = self._open.window.loss, self.loss_scale.scale
        before = scale.clone() if self.loss_scale.enabled else scale
        if counts:
            self.loss_scale.update(flag.tensor)
        self._open.buffers.settle(flag)
        if loss is None:  # gradients of earlier steps alone
            loss = torch.full((), torch.nan, device=self.device)
        if flag.on_host and not self.loss_scale.enabled:
            write(row, (loss, 1.0, 1.0, grad_norm, float(flag.read())))
        else:
            write(row, (loss, before, scale, grad_norm, flag.tensor))
        return flag

    def _close_on_host(self, found_inf: HostFlag) -> list[bool]:
        """End the step on the host; what became known of steps, the oldest first."""
        lr = self._members.optimizers[0].param_groups[0].get("lr", math.nan)
        known = self._log.close(lr, found_inf, self._open.buffers.missed)
        self._open.window.close()
        self._parallel.close(self._log.steps, self.loss_scale)
        return known

    def _follow(self, known: Sequence[bool]) -> None:
        """What comes of outcomes on the host."""
        self._log.learn(known)
        self._log.enforce_limit(self.policy)

    def _attempting(self, *, forward: bool) -> Attempt:
        """Context: an error leaves the step as before the outermost one."""
        if self._open.attempt is not None:
            return self._open.attempt
        self._look()
        begins = not self._open.begun
        if begins:
            self._open.drop_earlier_gradients()
        if begins and forward:
            self._precision.begin_window(anew=self._open.buffers.open)
        return self._open.try_call(self.discard, begins=begins, forward=forward)

    def _evaluation(self) -> AbstractContextManager[None]:
        """Context of a forward without backward: nothing to put back, nothing to prove."""
        self._look()
        if self._open.buffers.open:
            return self._beside_window()
        self._precision.begin_window()
        return self._precision.forward()

    @contextmanager
    def _beside_window(self) -> Generator[None]:
        """An evaluation between forwards and backwards, which have 16-bit weights of their own."""
        self._precision.begin_window(anew=True)
        try:
            with self._precision.forward():
                yield
        finally:
            self._precision.begin_window(anew=True)


def _first_of(group: ProcessGroup | None, number: int) -> int:
    """The first rank's number, on all of them."""
    return beside(group).first(lambda: number)


class _Training:
    """Context of a forward that a backward will follow."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __enter__(self) -> None:
        engine = self._engine
        # Within a call of the step that is what an error ends.
        self._attempt = engine._attempting(forward=True) if engine._open.attempt is None else None
        engine._parallel.begin_forward()
        self._forward = engine._precision.forward()
        try:
            self._forward.__enter__()
        except BaseException as error:
            self._end(error)
            raise
        self._entry = nesting.enter(engine._members)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        nesting.leave(self._entry)
        try:
            self._forward.__exit__(kind, error, trace)
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._end(error)

    def _end(self, error: BaseException | None) -> None:
        if self._attempt is not None:
            self._attempt.end(error)
            self._engine._open.buffers.leave()
