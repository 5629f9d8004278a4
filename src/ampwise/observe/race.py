"""The race: every other step of a script in another precision, paired with steps of its own.

Steps are dealt out in turns, a round holding one of each precision and one of the script's own, in
an order that is drawn for each round and the same on all ranks. A turn is one step; on accelerators
it is several, with a sync before and after. What counts is the ratio of two turns of one round, as
in `bench`: machines drift, and scripts do, too.

In a turn of another precision every autocast region that the script enters is in that one. Where it
enters none, autocast is on around modules called from outside of modules, and what they return is
float32 as ever, so that a loss need not know. Backward keeps what autograd recorded.

A precision falls out at its first loss that is not finite while those of the script's own steps
are. Nothing is updated with it: the parameters are everybody's. Beside a loss scaler gradients may
be so, as its scale settles.

Batches differ from turn to turn, and so may the times; shuffling keeps that from favouring anyone,
and the interval shows it. Time waited for a loader is left out on CPUs, as `bench` leaves it out;
on accelerators nobody can tell how much of it the device stood still.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from ampwise.bench.race import (
    FAILURES,
    GPU_BLOCK,
    MAX_WARM_UP,
    Race,
    decided,
    speedups,
    steady,
    why_it_fell_out,
)
from ampwise.bench.trial import HOPELESS
from ampwise.clock import done_at
from ampwise.errors import UsageError
from ampwise.lines import Line
from ampwise.observe.autocast import Autocasts
from ampwise.observe.listener import Listener
from ampwise.observe.modules import Modules
from ampwise.observe.optimizers import gradients_of
from ampwise.observe.result import Raced
from ampwise.observe.script import Ending, Stopped
from ampwise.observe.session import Session
from ampwise.observe.steps import Step, is_bad
from ampwise.policy import PRESETS, Policy
from ampwise.step.precision import Float32Mode, raised
from ampwise_lint.base.words import counted

MAX_ROUNDS = 200
BUDGET_S = 120.0

_OWN = "own"
_BEGINS_AFTER = 3
"""The first step makes optimizer state, the second is looked at; the third may still be."""
_FEWEST = 5
"""Pairs that an interval needs."""
_SWITCHED = ("fp32", "tf32", "fp16", "bf16")


def racers(text: str) -> list[Policy]:
    """The precisions of a comma-separated list.

    Raises
    ------
    UsageError
        For one that autocast and the float32 mode alone cannot bring about.
    """
    names = [each.strip() for each in text.split(",")]
    found = [PRESETS.get(each) for each in names if each in _SWITCHED]
    odd = next((each for each in names if each not in _SWITCHED), None)
    if odd is not None:
        raise UsageError(
            f"--race {odd!r}: a script can be switched between {', '.join(_SWITCHED)} while it "
            "runs; for any other precision: ampwise bench"
        )
    if len(set(names)) < len(names):
        raise UsageError(f"--race {text}: a precision is named twice")
    return [each for each in found if each is not None]


class Racing(Listener):
    """Deals out the steps, and takes their times.

    Parameters
    ----------
    policies
        What the script's own precision is raced with.
    ranks
        How many processes train together. They cannot agree that all is decided, as a script's
        collectives are its own.
    until_decided
        Whether the script is stopped when the race is over.
    """

    def __init__(
        self,
        policies: Sequence[Policy],
        session: Session,
        autocasts: Autocasts,
        modules: Modules,
        *,
        ranks: int = 1,
        until_decided: bool = True,
    ) -> None:
        self._policies = {each.name: each for each in policies}
        self._session, self._autocasts, self._modules = session, autocasts, modules
        self._alone, self._until_decided = ranks == 1, until_decided
        self._names = [_OWN, *self._policies]
        self._race = Race(baseline=_OWN, times_ms={name: [] for name in self._names})
        self._warm_up: dict[str, list[float]] | None = {name: [] for name in self._names}
        self._turn, self._length = _OWN, 1
        self._device = torch.device("cpu")
        self._inside = ExitStack()
        self._since = self._waited_s = 0.0
        self._spoilt = self._by_script = False
        self._lost, self._fell_in = False, 0
        self._round: dict[str, float | None] = {}
        self._over, self._ended_in = False, _OWN
        self._steps: Counter[str] = Counter()
        self._switched: Counter[str] = Counter()

    # -- turns -------------------------------------------------------------------------------------

    def step_ends(self, step: Step) -> None:
        """The turn may be over."""
        if self._over:
            return
        self._by_script = False
        self._steps[self._turn] += 1
        self._judge(step)
        if step.number < _BEGINS_AFTER:
            return
        done, within = divmod(step.number - _BEGINS_AFTER, self._length)
        if step.number == _BEGINS_AFTER:
            self._prepare(step)
        else:
            self._waited_s += sum(each.waited_s for each in step.segments)
            self._spoilt |= step.watched or any(each.skipped is True for each in step.attempts)
            if within:
                return
            self._take(self._milliseconds())
            if self._is_over(done):
                self.leave()
                raise Stopped
        self._begin(done)

    def gradients_ready(self, optimizer: Optimizer) -> None:
        """Without a scaler, what is not finite would spoil everybody's parameters."""
        segment = self._session.segment
        # Of several ranks all have to see the same, as they do of summed gradients.
        loss_is_bad = self._alone and any(map(is_bad, segment.losses))
        if not (loss_is_bad or is_bad(segment.norm)):
            return
        if not self._session.raced:
            self._lost = True
        elif not self._lost:
            self._is_lost("loss" if loss_is_bad else "gradient norm", self._session.step.number)
            torch._foreach_zero_(gradients_of(optimizer))

    def _judge(self, step: Step) -> None:
        """Look at the losses of a step that is over: with a scaler, gradients say nothing."""
        losses = [each for segment in step.segments for each in segment.losses]
        if not self._alone or step.number == self._fell_in or not any(map(is_bad, losses)):
            return
        if not self._session.raced:
            self._lost = True
        elif not self._lost:
            self._is_lost("loss", step.number)

    def _is_lost(self, what: str, number: int) -> None:
        """The turn's precision falls out."""
        self._fell_in = number
        self._fell_out(self._turn, f"its {what} is not finite in step {number}")
        self._switch(self._turn)

    def leave(self) -> None:
        """The script computes in its own precision from now on."""
        if not self._over:
            self._over, self._ended_in = True, self._turn
            self._switch(_OWN)

    def _prepare(self, step: Step) -> None:
        """Look at what is trained, and where."""
        self._race.started = time.monotonic()
        parameters = step.attempts[0].optimizer.param_groups[0]["params"]
        self._device = parameters[0].device
        self._length = 1 if self._device.type == "cpu" else GPU_BLOCK
        if parameters[0].dtype in (torch.float16, torch.bfloat16):
            for name in self._policies:
                self._fell_out(name, f"parameters are in {parameters[0].dtype} by themselves")

    def _begin(self, turn: int) -> None:
        number, place = divmod(turn, len(self._names))
        self._switch(random.Random(number).sample(self._names, len(self._names))[place])
        self._spoilt, self._waited_s = False, 0.0
        self._since = done_at(self._device)

    def _switch(self, name: str) -> None:
        """Compute as `name` does; those that fell out leave their turns to the script's own."""
        self._inside.close()
        self._modules.around = None
        self._turn = name
        self._session.raced = name != _OWN and name not in self._race.fell_out
        if not self._session.raced:
            return
        policy = self._policies[name]
        mode = Float32Mode(policy, self._device.type)
        mode.enter()
        self._inside.callback(mode.leave)
        self._inside.enter_context(self._autocasts.overridden(_dtype(policy)))
        self._modules.around = self._call

    def autocast_entered(
        self, device: str, dtype: torch.dtype, line: Line, *, enabled: bool
    ) -> None:
        """The script sees to autocast itself."""
        if enabled and torch.is_grad_enabled():
            self._by_script = True
            self._switched[self._turn] += 1

    def _call(
        self,
        call: Callable[..., Any],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call a module in the turn's precision, unless the script has said in which."""
        parameter = next(module.parameters(), None)
        if self._by_script or parameter is None or not torch.is_grad_enabled():
            return call(module, args, kwargs)
        self._switched[self._turn] += 1
        dtype = _dtype(self._policies[self._turn])
        try:
            with self._autocasts.within(parameter.device.type, dtype):
                output = call(module, args, kwargs)
        except FAILURES as failed:
            error = failed
        else:
            return tree_map(raised, output)
        # Once more in its own: if that raises as well, it was not the race.
        output = call(module, args, kwargs)
        self._fell_out(self._turn, why_it_fell_out(error))
        self._switch(self._turn)
        return output

    # -- times -------------------------------------------------------------------------------------

    def _milliseconds(self) -> float | None:
        """Of a step of this turn; None where it does not count."""
        if self._spoilt:
            return None
        waited = self._waited_s if self._device.type == "cpu" else 0.0
        return 1e3 * (done_at(self._device) - self._since - waited) / self._length

    def _take(self, milliseconds: float | None) -> None:
        """Note a turn's time, and the round if it was the last."""
        self._round[self._turn] = milliseconds
        if len(self._round) < len(self._names):
            return
        times, self._round = self._round, {}
        kept = {name: each for name, each in times.items() if each is not None}
        if len(kept) < len(times):
            return
        into = self._race.times_ms if self._warm_up is None else self._warm_up
        for name in self._running:
            into[name].append(kept[name])
        if self._warm_up is not None:
            self._warm(self._warm_up)

    def _warm(self, times: dict[str, list[float]]) -> None:
        """See whether all are warm; those that are hopelessly slow fall out."""
        running = [times[name] for name in self._running]
        if len(running[0]) < MAX_WARM_UP and not all(map(steady, running)):
            return
        self._warm_up = None
        own = statistics.median(times[_OWN])
        for name in self._running[1:]:
            slower = statistics.median(times[name]) / own
            if slower > HOPELESS:
                self._fell_out(name, f"{slower:.0f} times slower in its first steps")

    def _is_over(self, turns: int) -> bool:
        if not self._until_decided:
            return False
        rounds = turns // len(self._names)
        if not self._alone:
            return rounds >= MAX_ROUNDS
        late = time.monotonic() - self._race.started > BUDGET_S
        last = len(self._running) == 1 or rounds >= MAX_ROUNDS or late
        return last or (not self._round and self._warm_up is None and decided(self._race))

    @property
    def _running(self) -> list[str]:
        return [name for name in self._names if name not in self._race.fell_out]

    def _fell_out(self, name: str, why: str) -> None:
        self._race.fell_out[name] = why

    # -- afterwards --------------------------------------------------------------------------------

    def results(self, ending: Ending, *, scaled: bool, withheld: int) -> dict[str, Raced]:
        """What each precision would gain.

        Parameters
        ----------
        scaled
            Whether the script has a live loss scaler.
        withheld
            How many checkpoints were not written.
        """
        found = speedups(self._race, _OWN) if self._race.rounds >= _FEWEST else {}
        pairs = {name: len(self._race.times_ms[name]) for name in self._policies}
        raced: dict[str, Raced] = {}
        for name, policy in self._policies.items():
            speed = found.get(name) if self._switched[name] else None
            note = "; ".join(self._notes(policy, ending, scaled=scaled, withheld=withheld))
            raced[name] = Raced(speed, pairs[name], note)
            withheld = 0  # said once
        return raced

    def _notes(
        self, policy: Policy, ending: Ending, *, scaled: bool, withheld: int
    ) -> Iterator[str]:
        name, race = policy.name, self._race
        if ending.words.startswith("raised") and self._ended_in == name:
            yield f"the script {ending.words} in a step that the race ran in {name}"
        if name in race.fell_out:
            yield f"fell out: {race.fell_out[name]}"
        elif self._steps[name] and not self._switched[name]:
            yield "nothing was switched: its steps called no module and entered no autocast region"
        elif race.rounds < _FEWEST:
            yield f"too few pairs to tell: {race.rounds}, of {_FEWEST} at least; let it run longer"
        if policy.loss_scaling and not scaled:
            yield "without a loss scaler: its times hold, its gradients may have vanished"
        yield f"{self._steps[name]} of {counted(self._steps.total(), 'step')} ran in {name}"
        if withheld:
            yield f"{counted(withheld, 'checkpoint')} not written (--keep-checkpoints writes them)"


def _dtype(policy: Policy) -> torch.dtype | None:
    """What autocast computes in; None where it is off."""
    return getattr(torch, policy.compute_dtype) if policy.autocast else None
