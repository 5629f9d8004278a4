"""Where it broke: a diagnosis at the first step that is not finite, while the script waits.

A step that a scaler skipped, or that is about to be made with gradients that are not finite, has
left parameters as they were, so it can be run again as often as an analysis wants (`replay`). Each
of few different faults is examined once and then only counted. Training does not notice: what is
run again is put back, bit for bit.
"""

from __future__ import annotations

import gc
import sys
import time
import warnings
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from ampwise.distributed.layout import is_up
from ampwise.lines import Line
from ampwise.numerics.across_ranks import would_talk
from ampwise.numerics.examine import Examiner
from ampwise.numerics.observe.trace import watch
from ampwise.numerics.progress import Silent
from ampwise.numerics.result import Diagnosis
from ampwise.numerics.updates.of_state import LastUpdate, in_last_update
from ampwise.observe.autocast import Autocasts
from ampwise.observe.calls import Calls
from ampwise.observe.listener import Listener
from ampwise.observe.others import Others
from ampwise.observe.patches import Patches
from ampwise.observe.programs import Programs
from ampwise.observe.replay import Observed, Recorded
from ampwise.observe.result import NotObserved
from ampwise.observe.script import Stopped
from ampwise.observe.session import Session
from ampwise.observe.spots import spots_here
from ampwise.observe.steps import Attempt, Step, is_bad
from ampwise.observe.unknown import Seen, unknown
from ampwise.step.modules import held_by
from ampwise.step.recorder import finite
from ampwise_lint.base.words import counted

_MOST_FAULTS = 3
"""Different faults that are examined."""
_MOST_LOOKS = 24
"""Bad steps that are looked at."""
_LIMIT_S = 60.0
"""Time for one fault after which no more fixes are tried."""


@dataclass
class Fault:
    """A fault, and how often it was met."""

    diagnosis: Diagnosis
    times: int = 1

    @property
    def line(self) -> tuple[str, int]:
        """Where it begins."""
        origin = self.diagnosis.origin
        return ("", 0) if origin is None else (origin.file, origin.line)


class Faults(Listener):
    """Steps that are not finite, and why.

    Parameters
    ----------
    stop
        End the script after the first diagnosis, before an update is made.

    Attributes
    ----------
    found
        What was diagnosed, in order.
    benign
        Skips after which the loss scale settles by itself.
    unseen
        Bad steps that were not looked at any more.
    """

    what = "code that is compiled outside of modules"

    def __init__(
        self, session: Session, autocasts: Autocasts, script: str, *, stop: bool = False
    ) -> None:
        self.found: list[Fault] = []
        self.benign = 0
        self.unseen = 0
        self._session, self._autocasts, self._script = session, autocasts, script
        self._stop = stop
        self._calls = Calls()
        self._programs = Programs()
        self._looks = 0
        self._looked, self._again = False, False
        self._others = Others()
        self._unguarded = False
        self._scaler: GradScaler | None = None
        self._hurt: list[weakref.ref[Optimizer]] = []
        self._updates: weakref.WeakKeyDictionary[Optimizer, tuple[int, Line]]
        self._updates = weakref.WeakKeyDictionary()

    @property
    def diagnoses(self) -> list[Diagnosis]:
        """What was found; what could not be run again only where nothing else was found."""
        faults = [each for each in self.found if each.diagnosis.status == "fault"] or self.found
        for each in faults:
            if each.times > 1:
                each.diagnosis.notes.append(f"Met in {each.times} steps, and examined in one.")
                each.times = 1
        return [each.diagnosis for each in faults]

    def install(self, patches: Patches) -> None:
        """See what is compiled that is no module: while it runs there must be no mode of ours."""

        def compiles(real: Any, model: Any = None, *args: Any, **kwargs: Any) -> Any:
            self._session.tell("compiled", kwargs)
            owner = getattr(model, "__self__", model)
            if model is not None and not isinstance(owner, nn.Module | Optimizer):
                self._programs.compiles = True
            return real(model, *args, **kwargs)

        patches.wrap(torch, "compile", compiles)

    def spare_compiled(self) -> None:
        """For training that begins late: what was compiled before must run under no mode either."""
        self._programs.compiles |= _compiled_already()

    # -- while the script runs ---------------------------------------------------------------------

    def batch(self, batch: Any) -> None:
        """A loader gave a batch."""
        self._calls.batch(batch)

    def call_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module is called."""
        self._programs.call_begins()
        self._calls.begin(module, args, kwargs)

    def call_ends(self, module: nn.Module, output: Any) -> None:
        """It returned."""
        self._programs.call_ends(self._calls.end(output), self._calls.device)

    def autocast_entered(
        self, device: str, dtype: torch.dtype, line: Line, *, enabled: bool
    ) -> None:
        """An autocast region begins."""
        known = self._calls.device
        half = dtype in (torch.float16, torch.bfloat16)
        if enabled and half and (known is None or known.type == device):
            self._calls.entered = dtype

    def backward_begins(self, loss: Tensor | None, scaler: GradScaler | None) -> None:
        """The calls so far end in a loss."""
        self._scaler = scaler
        ended = self._calls.backward(loss, spots_here(sys._getframe(1)))
        self._programs.backward_begins(ended, loss, self._calls)

    def backward_ends(self) -> None:
        """The next pass begins."""
        self._programs.backward_ends()

    def gradients_ready(self, optimizer: Optimizer) -> None:
        """Without a scaler a bad update is made; before that its step can be run again."""
        self._unguarded = True
        norm = self._session.segment.norm
        if is_bad(norm) or self._lost:
            self._bad(optimizer, None, self._number(optimizer))

    def stepped(self, optimizer: Optimizer, *, by_scaler: bool) -> None:
        """A scaler looks at gradients alone: a loss that is not finite may have finite ones."""
        if by_scaler and self._scaler is not None and self._lost:
            self._bad(optimizer, float(self._scaler.get_scale()), self._number(optimizer))
            self._looked = True

    def attempted(self, attempt: Attempt) -> None:
        """With one it was skipped, and nothing has changed."""
        if attempt.skipped is True and attempt.scale is not None and not self._looked:
            self._bad(attempt.optimizer, float(attempt.scale), self._session.step.number)
        self._looked = False
        if attempt.skipped is not True:
            self._updates[attempt.optimizer] = (self._session.step.number, attempt.line)
        self._programs.updated(attempt.optimizer, self._calls.passes)
        self._calls.draws, self._calls.losses_known = self._programs.draws, self._programs.known
        self._calls.updated()
        if self._again:
            self._again = False
            self._programs.look_again()
            self._calls.draws, self._calls.losses_known = True, False

    def step_ends(self, step: Step) -> None:
        """What came before it is not needed any more."""
        self._calls.step_ends()

    def finish(self) -> None:
        """The script has ended."""
        self._programs.stop()

    def not_observed(self) -> list[NotObserved]:
        """What was not looked at, and why."""
        found: list[NotObserved] = []
        if self.unseen:
            why = "they follow from an update that was made, or enough steps were looked at"
            found.append(NotObserved(f"the cause of {counted(self.unseen, 'bad step')}", why))
        device = self._calls.device
        if device is not None and device.type != "cpu" and self._unguarded:
            why = f"on {device.type} it would cost a host sync a step; with a GradScaler it is seen"
            found.append(NotObserved("the first step that is not finite", why))
        return found

    # -- a bad step --------------------------------------------------------------------------------

    @property
    def _lost(self) -> bool:
        """Whether a loss since the last update is not finite."""
        return any(is_bad(each.loss) for each in self._calls.passes)

    def _number(self, optimizer: Optimizer) -> int:
        """Of the step that an optimizer is about to update in: a second time is in the next."""
        step = self._session.step
        return step.number + any(each.optimizer is optimizer for each in step.attempts)

    def _bad(self, optimizer: Optimizer, scale: float | None, number: int) -> None:
        """Look at a step that is not finite, unless enough was looked at, or it is the race's."""
        if self._session.raced:
            return
        enough = len(self.found) >= _MOST_FAULTS or self._looks >= _MOST_LOOKS
        if enough or self._follows():
            self.unseen += 1
            self._others.first(None)
            return
        if scale is None:
            self._hurt.append(weakref.ref(optimizer))
        self._looks += 1
        self._session.watched()
        with self._waiting():
            fault = self._look(self._recorded(optimizer, scale, number))
            answer = self._others.first(None if fault is None else fault.diagnosis)
        if fault is None or answer is not fault.diagnosis:
            fault = None if answer is None else self._as_known(Fault(answer))
        if fault is None:
            return
        self.found.append(fault)
        self._again = fault.diagnosis.status != "fault"
        if self._stop and not self._again:
            raise Stopped

    def _follows(self) -> bool:
        """Whether it follows from a bad update that was made: parameters are not finite."""
        hurt = [each() for each in self._hurt]
        return any(each is not None and _broken(each) for each in hurt)

    @contextmanager
    def _waiting(self) -> Generator[None]:
        """The script waits, and what happens inside is not seen."""
        self._programs.pause()
        with self._session.aside(), _disable_current_modes(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield

    def _look(self, recorded: Recorded) -> Fault | None:
        """A fault that was not known; None for a known one, and for a scale that settles."""
        reproduced = self._reproduced(recorded)
        if not isinstance(reproduced, Observed):
            diagnosis = unknown(recorded, reproduced, self._script)
            self._by_update(diagnosis, Observed(recorded, self._autocasts, None))
            return self._as_known(Fault(diagnosis))
        stash = reproduced.closed
        patience = _Patience()
        examiner = Examiner(reproduced, self._script, patience)
        if examiner.settling(stash):
            self.benign += 1
            return None
        if any(each.diagnosis.status == "fault" for each in self.found):
            origin = watch(reproduced, stash, once=True).origin
            if origin is not None and self._meets(origin.place.file_line):
                return None
        try:
            diagnosis = examiner.failure(stash)
        except _OutOfTimeError:
            assert patience.diagnosis is not None
            diagnosis = patience.diagnosis
            diagnosis.notes.append(
                f"No fix was tried: finding the cause took more than {_LIMIT_S:g} s."
            )
        if diagnosis.cause == "BAD_PARAMETER":
            self._by_update(diagnosis, reproduced)
        elif diagnosis.status == "fault":
            self._patch(diagnosis, reproduced, patience)
        return None if diagnosis.status == "benign" else self._as_known(Fault(diagnosis))

    def _by_update(self, diagnosis: Diagnosis, step: Observed) -> None:
        """Say which update has left a parameter that is not finite, if there is one."""
        made = [LastUpdate(each, *at) for each, at in self._updates.items()]
        in_last_update(diagnosis, step, made)
        if diagnosis.phase == "optimizer":
            self._hurt += map(weakref.ref, self._updates)

    def _patch(self, diagnosis: Diagnosis, step: Observed, patience: _Patience) -> None:
        """Add patches of the script's own source, as far as there is time for them."""
        from ampwise.numerics.remedy import live  # loads libcst

        roots = [Path.cwd(), Path(self._script).resolve().parent]
        try:
            live.add_patches(diagnosis, step, step.closed, roots, patience)
        except _OutOfTimeError:
            diagnosis.notes.append(
                f"Not every patch was tried: this fault has taken more than {_LIMIT_S:g} s."
            )

    def _as_known(self, fault: Fault) -> Fault | None:
        """A fault, unless it is one of those that were met before."""
        for each in self.found:
            same = each.diagnosis.cause == fault.diagnosis.cause and each.line == fault.line
            if same:
                each.times += 1
                return None
        return fault

    def _meets(self, line: tuple[str, int]) -> bool:
        """Count a fault that begins on a line, if it is known."""
        known = next((each for each in self.found if each.line == line), None)
        if known is not None:
            known.times += 1
        return known is not None

    def _recorded(self, optimizer: Optimizer, scale: float | None, number: int) -> Recorded:
        calls = self._calls
        states = [call.autocast for each in calls.passes for call in each.calls]
        on = [each.dtype for each in states if each.enabled]
        return Recorded(
            step=number,
            passes=list(calls.passes),
            earlier=list(calls.earlier),
            optimizer=optimizer,
            device=calls.device or torch.device("cpu"),
            dtype=on[0] if on else calls.entered,
            scale=scale,
        )

    def _reproduced(self, recorded: Recorded) -> Observed | Seen:
        """The step as one that can be run again and fails again; else what was seen of it."""
        seen = Seen(self._programs.why_not)
        if complaint := _cannot(recorded):
            return replace(seen, why=complaint)
        programs = self._programs.of(recorded.optimizer, recorded.passes)
        if is_up():
            alone = Observed(recorded, self._autocasts, programs)
            if would_talk(alone, alone.closed):
                return replace(seen, why="it talks to other ranks, which do not take part")
            if alone.replay(alone.closed).clean:
                return replace(seen, why="by itself it is finite; what is not came from elsewhere")
        if programs is not None:
            step = Observed(recorded, self._autocasts, programs)
            if _fails_alike(step, recorded):
                return step
            seen = replace(
                seen,
                why="computed as in the steps before it is another one, or does not fail; it "
                "depends on more than the batch and the modules",
            )
        return _without_loss(recorded, self._autocasts, seen)


def _without_loss(recorded: Recorded, autocasts: Autocasts, seen: Seen) -> Observed | Seen:
    """The module calls by themselves, if that is where it fails."""
    step = Observed(recorded, autocasts, None)
    result = step.replay(step.closed)
    if result.error is not None:
        return replace(seen, why=f"run again it raises {type(result.error).__name__}")
    if not step.outputs_finite:
        return Observed(recorded, autocasts, None, of_outputs=True)
    lost = [each for each in step.closed.losses if not finite(each)]
    fed = [each.gradient for of in recorded.passes for call in of.calls for each in call.incoming]
    bad = [each for each in fed if each is not None and not finite(each)]
    if lost or bad:
        return replace(seen, reached="loss" if lost else "backward of the loss")
    return step if _fails_alike(step, recorded) else seen


def _cannot(recorded: Recorded) -> str:
    """Why a step cannot be run again at all; empty if nothing speaks against it."""
    if not any(each.calls for each in recorded.passes):
        return "no call of a module was seen in it"
    if not all(each.complete for each in recorded.passes):
        return "it has more calls of modules than are kept"
    if any(call.changed_in_place for each in recorded.passes for call in each.calls):
        return "an argument of a module was changed in place afterwards"
    return ""


def _fails_alike(step: Observed, recorded: Recorded) -> bool:
    """Whether a replay gives the recorded losses, and gradients as bad as the recorded ones."""
    result = step.replay(step.closed)
    if result.error is not None or len(result.losses) != len(step.closed.losses):
        return False
    for again, loss in zip(result.losses, step.closed.losses, strict=True):
        if not torch.equal(torch.nan_to_num(again, 7.0), torch.nan_to_num(loss, 7.0)):
            return False
    named = step.parameters()
    bad = {id(named[name]) for name, each in result.gradients.items() if not finite(each)}
    held: list[Tensor] = held_by([recorded.optimizer])
    recorded_bad = {id(e) for e in held if e.grad is not None and not finite(e.grad)}
    return bool(bad & recorded_bad) or not recorded_bad


def _compiled_already() -> bool:
    """Whether something that is no module was given to ``torch.compile`` before."""
    # By type, not isinstance, which asks objects for their class, and some of them warn.
    functions = (vars(each) for each in gc.get_objects() if type(each) is FunctionType)
    return any(
        "_torchdynamo_orig_callable" in each and not each.get("_torchdynamo_disable")
        for each in functions
    )


def _broken(optimizer: Optimizer) -> bool:
    """Whether parameters hold inf or NaN themselves."""
    return not all(map(finite, held_by([optimizer])))


class _OutOfTimeError(Exception):
    """Finding the cause took so long that no fix is tried."""


class _Patience(Silent):
    """Lets a diagnosis go on until its time is over."""

    def __init__(self) -> None:
        self.diagnosis: Diagnosis | None = None
        self._until = time.monotonic() + _LIMIT_S

    def found(self, diagnosis: Diagnosis) -> None:
        """Keep what is known."""
        self.diagnosis = diagnosis

    def stage(self, what: str) -> None:
        """Something begins."""
        if self.diagnosis is not None and time.monotonic() > self._until:
            raise _OutOfTimeError
