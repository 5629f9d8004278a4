"""The training step: one path for every precision, from a micro-batch to updated parameters.

    forward     autocast forward and loss                        (`precision`)
    backward    of loss * scale * share of the window            (`window`, `hooks`)
    consensus   with several ranks: one sum of what they decide by  (`distributed.consensus`)
    guard       norm, found_inf, unscale and clip in one pass    (`gradients`, `guard`)
    optimizer   step or skip, decided on the device              (`optimizers`, `master`)
    loss scale  back off or grow                                 (`loss_scale`)
    buffers     put back if the step was skipped                 (`buffers`)
    telemetry   one row on the device                            (`telemetry.ring`)
    host        scheduler, EMA and patience follow the outcome   (`host`, `patience`)

float32 takes the same path, with a scale of 1 that divides nothing. The comments say where the host
waits for the device; with fused optimizers it nowhere does.
"""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from ampwise.distributed.checksum import Compared
from ampwise.distributed.consensus import Consensus
from ampwise.distributed.layout import GradientSync, group_of, is_sharded, unwrapped
from ampwise.distributed.watch import Unwatched, Watch, forward_waits
from ampwise.errors import UsageError
from ampwise.policy import Policy, Resolution, resolve
from ampwise.step import gradients as grads
from ampwise.step import optimizers as optim
from ampwise.step.activity import Activity, watched
from ampwise.step.buffers import BufferGuard
from ampwise.step.capture import CapturedStep
from ampwise.step.guard import Guard
from ampwise.step.hooks import true_gradients
from ampwise.step.host import HostFlag, Outcomes
from ampwise.step.loss_scale import LossScale, UnitLossScale
from ampwise.step.master import MasterWeights
from ampwise.step.patience import Patience, explain
from ampwise.step.precision import Float32Mode, Forward, islands_of, keep_islands
from ampwise.step.recorder import Recorder
from ampwise.step.samples import samples_in
from ampwise.step.warn import warn_user
from ampwise.step.window import Weight, Window, divide
from ampwise.telemetry.ring import COLUMNS, Ring, StepRecord

Batch = TypeVar("Batch")

HISTORY = 10_000
"""Records that `TrainStep.history` keeps."""


class TrainStep:
    """A training step that is right by construction, in any loop.

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
        device.
    accumulate
        Micro-batches in an accumulation window.
    max_grad_norm
        Clip the global L2 norm of the true gradients to this.
    scheduler
        Learning-rate scheduler, stepped after each optimizer step, held on skipped ones. On
        accelerators it learns of a skipped step one step late, and then holds.
    ema
        Averaged model of (the first) model, updated after each optimizer step, held on skipped
        ones; one host sync a step on accelerators.
    samples
        Samples (or tokens) in a batch: its weight in the window, over all ranks. Default: length of
        the first dimension of the first tensor.
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
    on_fault
        At the first skipped step that a lower loss scale would not mend: ``diagnose`` finds out
        why, warns, and keeps the result in `diagnosis`; a function is given the `Diagnosis`
        instead of the warning, and stops training by raising. Training goes on otherwise. Needs
        steps of the form ``step(loss_fn, batch)``.

    Attributes
    ----------
    policy
        The policy in force.
    resolution
        How it came about, when it was resolved rather than named.
    steps
        Completed windows; skipped steps count.
    boundary
        Whether the last call completed an optimizer step, made or skipped.
    loss_scale
        The loss scale, its state on the device.
    activity
        What the first forward really ran in; None before it.
    recorder
        Flight recorder; None when nobody armed one.
    diagnosis
        What `on_fault` found; None before.
    stopping
        Whether `ask_to_stop` was called, on this rank or another; the same on all.

    Raises
    ------
    UsageError
        For arguments that cannot work; the message names what was expected.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | Sequence[Optimizer],
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
        on_fault: Literal["diagnose"] | Callable[[Any], object] | None = None,
    ) -> None:
        _check_settings(accumulate, max_grad_norm, skip, max_skips, watch_every)
        if not (on_fault is None or on_fault == "diagnose" or callable(on_fault)):
            raise UsageError(f"on_fault: expected 'diagnose' or a function, got {on_fault!r}")
        self.model = model
        self.optimizer = optimizer
        wrapped = (model,) if isinstance(model, nn.Module) else tuple(model)
        self._models = tuple(unwrapped(each) for each in wrapped)
        self._optimizers = (optimizer,) if isinstance(optimizer, Optimizer) else tuple(optimizer)
        for each in self._optimizers:
            optim.check(each)
        self._names = _parameters_by_name(self._models)
        self.device = _device_of(self._names)
        self.policy, self.resolution = _policy_for(policy, self.device)
        self.loss_scale = _loss_scale_for(self.policy, loss_scale).to(self.device)
        self.steps = 0
        self.boundary = False
        self.activity: Activity | None = None
        self.recorder: Recorder | None = None if on_fault is None else Recorder()
        self.diagnosis: Any = None
        self.stopping = False

        group = group_of(wrapped)
        self._ranks = None if group is None else Consensus(group, self.device)
        self._sync = None if group is None else GradientSync(wrapped)
        self._held_back: Callable[[], object] | None = None  # sums what only this rank has
        self._strict = strict
        self._on_fault = on_fault
        self._samples = samples or samples_in
        self._scheduler = scheduler
        self._ema = ema
        self._float32_mode = Float32Mode(self.policy, self.device.type)
        self._forward = Forward(self.policy, self.device.type, self._float32_mode)
        self._owned = [_held_by(each) for each in self._optimizers]
        self._master = self._install_policy()
        self._watch = Unwatched()
        if group is not None and watch_every:
            compared = Compared(wrapped, self._master.of, self.device)
            self._watch = Watch(
                group, self.device, watch_every, compared, forward_waits=forward_waits(wrapped)
            )

        self._window = Window(accumulate, None if self._ranks is None else self._ranks.first)
        self._buffers = BufferGuard(self._models)
        self._skip_together = skip == "all"
        self._max_grad_norm = max_grad_norm
        self._guards: dict[tuple[int, ...], Guard] = {}
        self._true: set[int] = set()  # optimizers (by index) whose gradients are unscaled already
        self._norms: list[Tensor] = []
        self._found: list[HostFlag] = []  # found_inf of each decision in this iteration
        self._outcomes = Outcomes(self.device, at_once=ema is not None)
        self._stops = Outcomes(self.device)
        self._held = 0  # scheduler steps to leave out, for skipped steps
        self._patience = Patience(max_skips)
        self._ring = Ring(self.device)
        self._history: deque[StepRecord] = deque(maxlen=HISTORY)
        self._unread: list[StepRecord] = []

    # -- the whole step ----------------------------------------------------------------------------

    def __call__(
        self,
        loss_fn: Callable[[Any, Batch], Tensor],
        batch: Batch,
        *,
        weight: Weight | None = None,
        last: bool = False,
    ) -> Tensor:
        """One micro-batch: forward, loss, backward, and at the window's end the optimizer step.

        Parameters
        ----------
        loss_fn
            ``loss_fn(model, batch)`` returns the mean loss of the batch, a scalar with grad.
        batch
            Anything `loss_fn` takes, on the model's device.
        weight
            Samples (or tokens) in the batch, instead of counting them.
        last
            Close the window with this micro-batch even if it is not full.

        Returns
        -------
        Tensor
            The unscaled, undivided loss of this micro-batch, detached, on the device.

        Raises
        ------
        UsageError
            When the loss is not a floating-point scalar with a gradient.
        SkippedStepsError
            When too many steps in a row were skipped.
        DivergedRanksError
            On all ranks, when they no longer train one model.
        """
        last = last or self._window.fills
        if self._sync is not None:
            self._sync.switch(last)
            self._held_back = None if last else lambda: self._sum_with(loss_fn, batch)
        loss = self._micro_batch(loss_fn, batch, weight)
        if last:
            self.update()
        return loss

    def flush(self) -> None:
        """Close a window that is only partly filled, as at the end of an epoch; else do nothing.

        With several ranks this costs a micro-batch, to sum the gradients; ``last=True`` with the
        last one costs nothing.
        """
        if self._window.position:
            self.update()

    def ask_to_stop(self) -> None:
        """Have `stopping` become true on all ranks at the same step (alone: at once)."""
        if self._ranks is None:
            self.stopping = True
        else:
            self._ranks.stop_wanted = True

    def captured(self, loss_fn: Callable[[Any, Batch], Tensor]) -> Callable[[Batch], Tensor]:
        """The whole step as one CUDA graph: call the result with each batch, as the step itself.

        The first three calls are ordinary steps. On other devices all are, with a warning.

        Raises
        ------
        UsageError
            When the step cannot be captured: it accumulates, or an optimizer or the EMA needs the
            host's decision, or a scheduler changes a learning rate that is no tensor.
        """
        if self._ranks is not None:
            raise UsageError("captured: expected one process; several have not been tried")
        if self._window.accumulate > 1:
            raise UsageError("captured: expected accumulate=1; a window of several cannot be one")
        if self.syncs_per_step:
            raise UsageError(
                "captured: the host decides in each step (an optimizer that is not fused, or an "
                "EMA); expected fused optimizers and no EMA"
            )
        rates = [group["lr"] for each in self._optimizers for group in each.param_groups]
        if self._scheduler is not None and not all(isinstance(each, Tensor) for each in rates):
            raise UsageError(
                "captured: the graph keeps a learning rate that is a number; with a scheduler give "
                "the optimizer lr=torch.tensor(...)"
            )

        def on_device(batch: Batch, row: Tensor) -> tuple[Tensor, HostFlag]:
            loss = self._micro_batch(loss_fn, batch, None)
            self._decide(None, last=True)
            return loss, self._close_on_device(row)

        def on_host(row: Tensor, found_inf: HostFlag) -> None:
            self._ring.row.copy_(row)
            self._close_on_host(found_inf)

        row = torch.zeros(COLUMNS, device=self.device)
        return CapturedStep(lambda batch: self(loss_fn, batch), on_device, on_host, row)

    # -- its parts ---------------------------------------------------------------------------------

    def autocast(self) -> AbstractContextManager[None]:
        """Context for forward and loss under the policy; for evaluation too."""
        if not torch.is_grad_enabled():  # evaluation: nothing to put back, nothing to prove
            return self._forward
        self._buffers.remember()
        self._watch.begin_forward()
        return self._forward if self.activity is not None else self._watched()

    @contextmanager
    def _watched(self) -> Generator[None]:
        """The first forward: see what it really runs in."""
        with self._forward, watched(self._models) as seen:
            yield
        held = [self._master.of(each) for owned in self._owned for each in owned]
        self.activity = seen.activity(held, loss_scale_live=self.loss_scale.enabled)
        self.activity.demand(self.policy, strict=self._strict)

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
            When `loss` is no such scalar, gradients were already unscaled by `gradients`, or
            weights of losses for different optimizers would be mixed.
        """
        loss = _scalar(loss)
        chosen = self._indices(optimizers)
        if self._true.intersection(chosen):
            raise UsageError(
                "backward() after gradients() in one window: those gradients are unscaled already; "
                "call update() first, or look at gradients after the last backward of the window"
            )
        self.boundary = False
        self._watch.end_forward()
        divided_by = self._window.add(loss.detach(), weight, chosen)
        seed = divide(self.loss_scale.scale, divided_by)
        is_one = seed is self.loss_scale.scale and not self.loss_scale.enabled
        leaves = (each for index in chosen for each in self._owned[index] if each.requires_grad)
        inputs = None if optimizers is None else list(leaves)
        if self._sync is not None and self._sync.on and self._sync.owes:
            self._master.give_back_gradients()
            self._sync.owes = False
        with self._float32_mode, true_gradients(inputs or leaves, self.loss_scale.divisor):
            # A seed of 1 is what backward starts from by itself, with less ceremony.
            seed = None if is_one else seed.to(loss.dtype)
            with self._only(inputs) as named:
                loss.backward(seed, retain_graph=retain_graph, inputs=named)
        self._master.take_gradients()
        self._watch.end_backward()

    def gradients(self) -> dict[str, Tensor]:
        """True gradients of the window so far, by parameter name, before clipping.

        They are the tensors the optimizer will use: edits count, and are checked like the rest.
        """
        if self._held_back is not None:
            raise UsageError(
                "gradients() in the middle of a window: with several ranks gradients are summed in "
                "its last micro-batch; look at them after that, or pass last=True to it"
            )
        if self._ranks is not None and not self._window.agreed:
            self._agree(self._guard(tuple(range(len(self._optimizers)))))
        divisor = self._divisor()
        there = [
            i
            for i, owned in enumerate(self._owned)
            if any(p.grad is not None for p in map(self._master.of, owned))
        ]
        missing = [i for i in there if i not in self._true]
        if divisor is not None and missing:
            self._guard(tuple(missing)).divide_(divisor)
        self._true.update(missing)
        held = ((name, self._master.of(parameter)) for name, parameter in self._names.items())
        return {name: tensor.grad for name, tensor in held if tensor.grad is not None}

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
        if not self._window.position:
            raise UsageError("update() without a backward() before it: there is nothing to step on")
        if self._on_fault is not None and self._outcomes.last_skipped():
            # An accelerator's last step, known while it works on this one's backward; nothing has
            # changed since, so it can still be replayed.
            self._examine()
        if self._held_back is not None:
            self._held_back()
        self._decide(optimizers, last=update_scale)
        if update_scale:
            self._close_on_host(self._close_on_device(self._ring.row))

    # -- what happened -----------------------------------------------------------------------------

    @property
    def position(self) -> int:
        """Micro-batches in the open window."""
        return self._window.position

    @property
    def slow_rank(self) -> str | None:
        """The rank that keeps the others waiting, in words, the same on all; None if none does.

        The first rank warns of it, too, once.
        """
        return self._watch.slow_rank

    @property
    def ranks(self) -> int:
        """Processes that train these models together."""
        return 1 if self._ranks is None else self._ranks.size

    @property
    def can_replay(self) -> bool:
        """Whether this process can run a window by itself: not where it has only a part of it."""
        return not any(map(is_sharded, self._names.values()))

    @property
    def group(self) -> ProcessGroup | None:
        """The ranks that train together and take one decision; None for one process."""
        return None if self._ranks is None else self._ranks.group

    @property
    def syncs_per_step(self) -> int:
        """Host syncs that a step costs on an accelerator; 0 with fused optimizers and no EMA."""
        guards = [self._guard(indices) for indices in self._sets(None)]
        return sum(not guard.folds for guard in guards) + (self._ema is not None)

    @property
    def history(self) -> list[StepRecord]:
        """What happened in the last 10,000 steps, the oldest first; waits for the device."""
        self._unread = self.drain()
        return list(self._history)

    def poll(self) -> list[StepRecord]:
        """Records that have arrived since the last `poll` or `drain`; never waits."""
        return self._take(self._ring.poll())

    def drain(self) -> list[StepRecord]:
        """All records since the last `poll` or `drain`; waits for the device."""
        return self._take(self._ring.drain())

    def state_dict(self) -> dict[str, Any]:
        """Policy, loss scale, counters and window; loads with ``weights_only=True``.

        In the middle of a window it holds the gradients collected so far, too.
        """
        self._learn(self._outcomes.drain())
        self._unread = self.drain()
        totals = self._ring.totals
        state: dict[str, Any] = {
            "policy": self.policy.text,
            "loss_scale": self.loss_scale.state_dict(),
            "steps": self.steps,
            "skipped": totals.skipped,
            "growths": totals.growths,
            "backoffs": totals.backoffs,
            "skipped_in_a_row": self._patience.in_a_row,
            "held": self._held,
            "unit": self._window.unit,
        }
        if self._window.position:
            held = ((name, self._master.of(each)) for name, each in self._names.items())
            state["window"] = self._window.state_dict()
            state["gradients"] = {n: t.grad.clone() for n, t in held if t.grad is not None}
            state["true"] = sorted(self._true)
            state["found"] = [each.tensor.clone() for each in self._found]
            state["norms"] = [each.clone() for each in self._norms]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was taken; takes a `torch.amp.GradScaler.state_dict` too.

        A loss scale saved under another precision is taken over only if both scale the loss.

        Raises
        ------
        UsageError
            When `state` is neither.
        """
        if "scale" in state:
            self.loss_scale.load_state_dict(state)
            return
        if missing := [key for key in ("policy", "loss_scale", "steps") if key not in state]:
            raise UsageError(
                f"step state lacks {', '.join(missing)}: expected TrainStep.state_dict() or that "
                "of an enabled torch.amp.GradScaler"
            )
        if state["loss_scale"]:
            self.loss_scale.load_state_dict(state["loss_scale"])
        self.steps = self._ring.totals.steps = int(state["steps"])
        self._ring.totals.skipped = int(state["skipped"])
        self._ring.totals.growths = int(state["growths"])
        self._ring.totals.backoffs = int(state["backoffs"])
        self._patience.in_a_row = int(state["skipped_in_a_row"])
        self._held = int(state["held"])
        if self._ranks is not None and state.get("unit") is not None:
            self._window.unit = torch.tensor(state["unit"], dtype=torch.float64, device=self.device)
        if "window" in state:
            self._window.load_state_dict(state["window"])
            self._true = set(state["true"])
            self._found = [HostFlag(each.to(self.device)) for each in state["found"]]
            self._norms = [each.to(self.device) for each in state["norms"]]
            if self._sync is not None:
                self._sync.owes = True
            for name, gradient in state["gradients"].items():
                tensor = self._master.of(self._names[name])
                tensor.grad = gradient.to(tensor.device).clone()

    # -- inside ------------------------------------------------------------------------------------

    def _install_policy(self) -> MasterWeights:
        """Islands and master weights: what the policy changes about the models, once."""
        if self.resolution is not None:
            # A typo is one also where this device fell back to a policy without islands.
            for module in self._models:
                islands_of(module, self.resolution.asked_islands)
        islands = [
            layer
            for module in self._models
            for layer in keep_islands(module, self.policy.islands, self.device.type)
        ]
        dtype = getattr(torch, self.policy.param_dtype)
        if self._sync is not None:
            dtype = self._sync.master_dtype(dtype)
        kept = [each for layer in islands for each in layer.parameters()]
        return MasterWeights(self._models, self._optimizers, dtype, kept)

    def _indices(self, optimizers: Sequence[Optimizer] | None) -> list[int]:
        """Positions of some optimizers among the step's own."""
        if optimizers is None:
            return list(range(len(self._optimizers)))
        known = {id(each): index for index, each in enumerate(self._optimizers)}
        if any(id(each) not in known for each in optimizers):
            raise UsageError("optimizers: expected some of those the step was made with")
        return [known[id(each)] for each in optimizers]

    def _sets(self, optimizers: Sequence[Optimizer] | None) -> list[tuple[int, ...]]:
        """The sets of optimizers that decide together: all in one, or each in its own."""
        chosen = self._indices(optimizers)
        return [tuple(chosen)] if self._skip_together else [(each,) for each in chosen]

    def _guard(self, indices: tuple[int, ...]) -> Guard:
        if indices not in self._guards:
            together = [self._optimizers[index] for index in indices]
            self._guards[indices] = Guard(together, self.device, self._max_grad_norm)
        return self._guards[indices]

    def _divisor(self) -> Tensor | None:
        """What the window's gradients must be divided by; None if they are true as they are."""
        scale, total = self.loss_scale.divisor, self._window.divisor
        if not isinstance(total, Tensor) and total == 1:
            return scale
        return self.loss_scale.scale * total

    def _micro_batch(
        self, loss_fn: Callable[[Any, Batch], Tensor], batch: Batch, weight: Weight | None
    ) -> Tensor:
        """Forward, loss and backward; the loss, detached."""
        if self.recorder is not None:
            self.recorder.micro_batch(self, loss_fn, batch, weight)
        with self._float32_mode:
            with self.autocast():
                loss = loss_fn(self.model, batch)
            if weight is None and self._window.weighs:
                weight = self._samples(batch)
            if self.recorder is not None:
                self.recorder.loss(_scalar(loss).detach())
            self.backward(loss, weight=weight)
        return loss.detach()

    @contextmanager
    def _only(self, parameters: list[Tensor] | None) -> Generator[list[Tensor] | None]:
        """Context: a backward to some parameters (None: all); what to give it as its inputs.

        FSDP2's leaves are gathered copies, which nobody can name: it goes to all parameters there,
        and what is not wanted is put back.
        """
        if parameters is None or self._sync is None or not self._sync.shards:
            yield parameters
            return
        wanted = set(map(id, parameters))
        with grads.put_back(each for each in self._names.values() if id(each) not in wanted):
            yield None

    def _decide(self, optimizers: Sequence[Optimizer] | None, *, last: bool) -> None:
        """Guard, and step or skip, for each set of optimizers; the gradients are used up."""
        for indices in self._sets(optimizers):
            found_inf = self._step_or_skip(indices)
            # A guard writes its flag anew in the next update of this iteration, if there is one.
            self._found.append(found_inf if last else HostFlag(found_inf.tensor.clone()))
        self._master.write_back()
        self._window.use_up(self._indices(optimizers))
        for index in self._indices(optimizers):
            for parameter in _held_by(self._optimizers[index]):
                parameter.grad = None

    def _step_or_skip(self, indices: tuple[int, ...]) -> HostFlag:
        """Guard and optimizers of one set that decides together; its found_inf."""
        guard, are_true = self._guard(indices), self._true.intersection(indices)
        if are_true and (divisor := self._divisor()) is not None:
            for index in indices:
                if index not in self._true:
                    self._guard((index,)).divide_(divisor)
        self._true.difference_update(indices)
        if self._ranks is not None:
            self._agree(guard)
        guard.step(None if are_true else self._divisor())
        if self.recorder is not None:
            self.recorder.norms(guard.norms)
        self._norms.append(guard.grad_norm)
        return guard.flag

    def _agree(self, guard: Guard) -> None:
        """Have all ranks know the same norm, shares, losses and wishes to stop."""
        ranks, window = self._ranks, self._window
        assert ranks is not None
        assert window.loss_sum is not None
        squares = grads.square(grads.spread_of(guard.optimizers, ranks.size), self.device)
        row = ranks.sums(squares, window.share, window.loss_sum)
        norm, bad, shares, losses, stops = row.unbind()
        # A window in which nothing counts has no gradient: it is skipped, like one that is NaN.
        guard.agree(torch.where((bad > 0) | ~(shares > 0), torch.inf, norm.sqrt()))
        window.agree((shares / ranks.size).float(), (losses / ranks.size).float())
        self._stop_flag = HostFlag((stops > 0).float())

    def _sum_with(self, loss_fn: Callable[[Any, Batch], Tensor], batch: Batch) -> None:
        """Sum over ranks gradients that each has collected: by a micro-batch that counts nothing.

        DDP and FSDP2 sum in backward only, and every rank must take part in the same way.
        """
        assert self._sync is not None
        self._sync.switch(True)
        self._held_back = None
        with self._buffers.kept():
            self._micro_batch(loss_fn, batch, 0)

    def _close_on_device(self, row: Tensor) -> HostFlag:
        """End the window on the device: loss scale, buffers, a row of telemetry; its found_inf."""
        flag, grad_norm = self._found[0], self._norms[0]
        if len(self._found) > 1:
            flag = HostFlag(torch.stack([each.tensor for each in self._found]).amax())
            grad_norm = torch.linalg.vector_norm(torch.stack(self._norms))
        self._found, self._norms = [], []
        found_inf, scale, loss = flag.tensor, self.loss_scale.scale, self._window.loss
        before = scale.clone() if self.loss_scale.enabled else scale
        self.loss_scale.update(found_inf)
        self._buffers.settle(found_inf)
        assert loss is not None
        torch.stack((loss, before, scale, grad_norm, found_inf), out=row)
        return flag

    def _close_on_host(self, found_inf: HostFlag) -> None:
        """End the window on the host, which learns of the decision when that costs no wait."""
        self._ring.written(self._optimizers[0].param_groups[0]["lr"])
        self._window.close()
        self.steps += 1
        self.boundary = True
        if self.recorder is not None:
            self.recorder.close()
        if self._on_fault is not None and found_inf.on_host and found_inf.read():
            self._examine()
        if self._ranks is not None:
            self.stopping |= any(self._stops.settle(self._stop_flag))
        known = self._outcomes.settle(found_inf)  # and so the device is done with the step before
        self._watch_ranks()
        self._follow(known)

    def _watch_ranks(self) -> None:
        """Compare ranks now and then, and say once which keeps the others waiting."""
        said = self._watch.slow_rank
        self._watch.close(self.steps, self.loss_scale.fingerprint)
        slow = self._watch.slow_rank
        if slow is not None and slow != said and self._ranks is not None and not self._ranks.rank:
            warn_user(slow)

    def _examine(self) -> None:
        """Ask why the last window was skipped; the first abnormal answer is the last question."""
        # In the layer above this one, and loaded only when a step fails.
        numerics = importlib.import_module("ampwise.numerics.fault")
        on_fault, self._on_fault = self._on_fault, None
        found = numerics.examine(self)
        if found is None:  # the loss scale settling
            self._on_fault = on_fault
            return
        self.diagnosis, self.recorder = found, None
        if callable(on_fault):
            on_fault(found)
        else:
            warn_user(numerics.summary(found))

    def _follow(self, known: list[bool]) -> None:
        """Scheduler and EMA make a step, unless one was skipped; too many skips abort."""
        self._learn(known)
        if self._ema is not None and not known[-1]:
            self._ema.update_parameters(self._models[0])
        if self._held:
            self._held -= 1
        elif self._scheduler is not None:
            self._scheduler.step()
        if self._patience.exhausted:
            in_a_row = self._patience.in_a_row
            raise explain(self.history, in_a_row, scaled=self.loss_scale.enabled)

    def _learn(self, known: list[bool]) -> None:
        for skipped in known:
            self._held += skipped
            self._patience.note(skipped)

    def _take(self, records: list[StepRecord]) -> list[StepRecord]:
        self._history.extend(records)
        unread, self._unread = self._unread, []
        return unread + records


def _check_settings(
    accumulate: int, max_grad_norm: float | None, skip: str, max_skips: int, watch_every: int
) -> None:
    if accumulate < 1:
        raise UsageError(f"accumulate: expected a window of 1 or more, got {accumulate}")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise UsageError(f"max_grad_norm: expected a norm above 0, or None, got {max_grad_norm}")
    if skip not in ("all", "each"):
        raise UsageError(f"skip: expected 'all' or 'each', got {skip!r}")
    if max_skips < 1:
        raise UsageError(f"max_skips: expected 1 or more, got {max_skips}")
    if watch_every < 0:
        raise UsageError(f"watch_every: expected a number of steps, or 0, got {watch_every}")


def _parameters_by_name(models: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """Parameters by FQN; with several models the model's position comes first (``0.weight``)."""
    if len(models) == 1:
        return dict(models[0].named_parameters())
    return {
        f"{index}.{name}": parameter
        for index, model in enumerate(models)
        for name, parameter in model.named_parameters()
    }


def _device_of(parameters: Mapping[str, nn.Parameter]) -> torch.device:
    if not parameters:
        raise UsageError("model: it has no parameters, so there is nothing to train")
    return next(iter(parameters.values())).device


def _held_by(optimizer: Optimizer) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _policy_for(
    request: str | Policy | Resolution, device: torch.device
) -> tuple[Policy, Resolution | None]:
    """A named policy is taken at its word; ``auto`` is resolved for the model's device."""
    if isinstance(request, Policy):
        return request, None
    if isinstance(request, str) and request.strip().lower() != "auto":
        return Policy.parse(request), None
    resolution = request if isinstance(request, Resolution) else resolve(request, device)
    return resolution.policy, resolution


def _loss_scale_for(policy: Policy, settings: LossScale | None) -> LossScale:
    return (settings or LossScale()) if policy.loss_scaling else UnitLossScale()


def _scalar(loss: Any) -> Tensor:
    """The loss as a 0-dimensional tensor of at least float32.

    A 16-bit loss is raised first: multiplied by the scale in its own format it would be inf.
    """
    if not isinstance(loss, Tensor):
        raise UsageError(f"loss: expected a scalar tensor, got {type(loss).__name__}")
    if loss.numel() != 1 or not loss.is_floating_point():
        raise UsageError(
            f"loss: expected a floating-point scalar, got {loss.dtype} of shape "
            f"{tuple(loss.shape)}; reduce it with .mean()"
        )
    if not loss.requires_grad:
        raise UsageError(
            "loss: it does not require grad; compute it from the model's output, outside "
            "torch.no_grad(), without .item() or .detach()"
        )
    if loss.dtype in (torch.float16, torch.bfloat16):
        loss = loss.float()
    return loss.reshape(()) if loss.dim() else loss
