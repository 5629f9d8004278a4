"""Mistakes as they happen, each on the user's own line.

Those that `ampwise lint` knows, too, have its rule's code. AMP501 and on only a run can show.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ampwise.formats import dtype_name
from ampwise.lines import NOWHERE, Line, users_line
from ampwise.observe.listener import Listener
from ampwise.observe.modules import bare, name_of
from ampwise.observe.result import Finding, Precision, ScaleSeen, Severity, Skip
from ampwise.observe.scalers import Scalers, is_unscaled
from ampwise.observe.session import Session
from ampwise.observe.steps import Attempt
from ampwise.step.modules import held_by
from ampwise_lint.base.words import counted, joined

_HALF = (torch.float16, torch.bfloat16)
_COLLAPSED = 1.0
"""A loss scale below this makes gradients smaller, where it was to lift them."""
_REMADE = 3
"""Scalers made on one line from which on it is a loop's."""


@dataclass(slots=True)
class _Seen:
    """A finding in the making."""

    severity: Severity
    message: str
    evidence: str = ""
    times: int = 0


@dataclass(slots=True)
class _Forward:
    """How a module was called: what autocast it was under, or entered, the first time."""

    dtypes: frozenset[str]
    line: Line


class Misuse(Listener):
    """What is found."""

    def __init__(self, session: Session, scalers: Scalers) -> None:
        self._session, self._scalers = session, scalers
        self._found: dict[tuple[str, Line], _Seen] = {}
        self._scaler_of: dict[int, int] = {}
        self._looked: set[int] = set()
        self._made: Counter[Line] = Counter()
        self._loaded: dict[str, Line] = {}
        self._stepped_at = NOWHERE
        self._scheduled_at: Line | None = None
        self._updated_at = NOWHERE
        self._half_at: Line | None = None
        self._calls: dict[tuple[int, bool], _Forward] = {}
        self._entered: set[str] | None = None
        self._names: dict[int, str] = {}

    # -- autocast ----------------------------------------------------------------------------------

    def autocast_entered(
        self, device: str, dtype: torch.dtype, line: Line, *, enabled: bool
    ) -> None:
        """Note what a call enters; and float16, in training."""
        if enabled and self._entered is not None:
            self._entered.add(dtype_name(dtype))
        if enabled and dtype is torch.float16 and torch.is_grad_enabled():
            self._half_at = line

    def call_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Under which autocast is it called, the first time?"""
        self._entered = None
        if (id(bare(module)), torch.is_grad_enabled()) in self._calls:
            return
        self._entered = {
            dtype_name(torch.get_autocast_dtype(each)) for each in _devices(args, kwargs)
        }

    def call_ends(self, module: nn.Module, output: Any) -> None:
        """Keep what there was of the first call in training, and of the first in evaluation."""
        entered, self._entered = self._entered, None
        if entered is None or output is None:
            return
        trains, inside = torch.is_grad_enabled(), bare(module)
        if trains != inside.training:
            return
        self._names[id(inside)] = name_of(module)
        self._calls[id(inside), trains] = _Forward(frozenset(entered), users_line())

    def backward_begins(self, loss: Tensor | None, scaler: GradScaler | None) -> None:
        """Is autocast still on?"""
        device = "cpu" if loss is None else loss.device.type
        if torch.is_autocast_enabled(device):
            self._note(
                "AMP201", "warning",
                "backward runs inside the autocast region: its operations are then cast a second "
                "time; leave the region after the loss",
            )  # fmt: skip

    # -- scalers -----------------------------------------------------------------------------------

    def scaler_made(self, scaler: GradScaler) -> None:
        """Once, or again and again?"""
        line = users_line()
        self._made[line] += 1
        if self._made[line] >= _REMADE and self._stepped_at is not NOWHERE:
            self._note(
                "AMP110", "warning",
                "GradScaler is made anew in the loop: its scale starts over each time; make it "
                "once, before training",
            )  # fmt: skip

    def unscaled(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """A second time?"""
        self._owner(scaler, optimizer)
        if is_unscaled(scaler, optimizer):
            self._note(
                "AMP103", "error",
                "unscale_ is called twice for one optimizer before update(): PyTorch raises; call "
                "it once, on the last micro-batch",
            )  # fmt: skip

    def scaler_steps(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """With gradients that it scaled?"""
        self._owner(scaler, optimizer)
        segment = self._session.segment
        if segment.plain and not segment.scaled:
            self._note(
                "AMP104", "error",
                "the optimizer is stepped through the scaler, but its loss was not scaled: "
                "gradients are divided by a scale they never had; backward belongs to "
                "scaler.scale(loss)",
                f"loss scale {_shown(scaler)}",
            )  # fmt: skip

    def clipped(self, what: str, scale: Tensor | None) -> None:
        """While they are scaled?"""
        if scale is not None:
            self._note(
                "AMP101", "error",
                f"{what} sees gradients that are still multiplied by the loss scale: call "
                "scaler.unscale_(optimizer) first",
                f"loss scale {_host(scale)}",
            )  # fmt: skip

    def stepped(self, optimizer: Optimizer, *, by_scaler: bool) -> None:
        """Past the scaler?"""
        segment = self._session.segment
        if by_scaler or not segment.scaled or segment.plain:
            return
        factor = self._scalers.factor(held_by([optimizer]))
        how = "without its check for inf and NaN" if factor is None else "with scaled gradients"
        self._note(
            "AMP105", "error",
            f"the optimizer steps by itself under a live scaler, {how}: call "
            "scaler.step(optimizer) instead",
            "" if factor is None else f"loss scale {_host(factor)}",
        )  # fmt: skip

    def updated(self, scaler: GradScaler) -> None:
        """Without a step?"""
        if self._session.segment.scaled:
            self._note(
                "AMP107", "error",
                "update() is called before the window's step: the scale may change between "
                "micro-batches whose gradients are added up; call it once, after step",
            )  # fmt: skip

    def attempted(self, attempt: Attempt) -> None:
        """In float16, and unscaled?"""
        self._updated_at = attempt.line
        if attempt.scale is not None:
            self._stepped_at = attempt.line
        half_at, self._half_at = self._half_at, None
        segment = self._session.step.segments[-1]
        scaled = attempt.scale is not None or segment.scaled or segment.by_hand
        if half_at is not None and not scaled:
            self._note(
                "AMP205", "error",
                "float16 autocast trains without a loss scale: small gradients are flushed to "
                "zero; use torch.amp.GradScaler, or bfloat16",
                at=half_at,
            )  # fmt: skip

    def loaded(self, what: Any) -> None:
        """The optimizer's state, or the scaler's?"""
        kind = "scaler" if isinstance(what, GradScaler) else "optimizer"
        self._loaded.setdefault(kind, users_line())

    def schedule_stepped(self) -> None:
        """Where? Schedulers step once when they are made, too."""
        begun = self._session.step.number > 1 or self._session.step.attempts
        if begun and self._scheduled_at is None:
            self._scheduled_at = users_line()

    # -- at the end --------------------------------------------------------------------------------

    def findings(
        self, precision: Precision, scale: ScaleSeen | None, skips: Iterable[Skip]
    ) -> list[Finding]:
        """All of it, the gravest first."""
        self._not_active(precision)
        self._evaluated_otherwise()
        if scale is not None:
            self._about_the_scale(scale, precision)
        ignored = sum(each.noticed_by_schedule is False for each in skips)
        if ignored:
            self._note(
                "AMP112", "info", "the schedule moves on in steps that are skipped",
                counted(ignored, "skipped step"), at=self._scheduled_at or self._updated_at,
            )  # fmt: skip
        order: tuple[Severity, ...] = ("error", "warning", "info")
        made = [
            Finding(code, each.severity, *line, each.message, each.evidence, each.times)
            for (code, line), each in self._found.items()
        ]
        return sorted(made, key=lambda each: order.index(each.severity))

    def _not_active(self, precision: Precision) -> None:
        if precision.active or not precision.asked:
            return
        asked = precision.asked[0]
        ran = precision.ran.forward
        evidence = ", ".join(f"{count} in {dtype}" for dtype, count in ran.items())
        self._note(
            "AMP501", "error",
            f"{asked.dtype} was asked for and is not active: most matrix products ran in another "
            "format",
            f"products in forward: {evidence}" if evidence else "autocast was never on",
            at=Line(asked.file, asked.line),
        )  # fmt: skip

    def _evaluated_otherwise(self) -> None:
        for (key, trains), evaluated in self._calls.items():
            trained = self._calls.get((key, True))
            if trains or trained is None or trained.dtypes == evaluated.dtypes:
                continue
            self._note(
                "AMP203", "warning",
                f"{self._names[key]} is evaluated in {_of(evaluated)} and trained in "
                f"{_of(trained)}: what is measured is not what is trained",
                at=evaluated.line,
            )  # fmt: skip

    def _about_the_scale(self, scale: ScaleSeen, precision: Precision) -> None:
        if scale.lowest < _COLLAPSED <= scale.first:
            self._note(
                "AMP502", "error",
                "the loss scale collapsed: no scale makes these gradients finite; the first fault "
                "says where they break",
                f"from {scale.first:,.10g} to {scale.lowest:,.10g} in "
                f"{counted(scale.backoffs, 'backoff')}",
                at=self._stepped_at,
            )  # fmt: skip
        on = {each.dtype for each in precision.regions if each.enabled}
        if on == {"bfloat16"}:
            self._note(
                "AMP204", "info",
                "a loss scale beside bfloat16 autocast: bfloat16 has float32's range and needs "
                "none", at=next(iter(self._made), self._stepped_at),
            )  # fmt: skip
        if "optimizer" in self._loaded and "scaler" not in self._loaded:
            self._note(
                "AMP111", "warning",
                "the optimizer's state is loaded and the scaler's is not: the loss scale starts "
                "over; save and load scaler.state_dict(), too",
                at=self._loaded["optimizer"],
            )  # fmt: skip

    def _owner(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """Note a second scaler on an optimizer, and parameters that no scaler is for."""
        first = self._scaler_of.setdefault(id(optimizer), id(scaler))
        if first != id(scaler) and any(id(each) == first for each in self._scalers.live):
            self._note(
                "AMP503", "error",
                f"a second scaler works on the same {type(optimizer).__name__}: each keeps a scale "
                "of its own; use one scaler",
            )  # fmt: skip
        if id(optimizer) in self._looked:
            return
        self._looked.add(id(optimizer))
        dtypes = {each.dtype for each in held_by([optimizer])} & set(_HALF)
        if dtypes:
            names = joined(sorted(map(dtype_name, dtypes)))
            self._note(
                "AMP504", "error",
                f"the scaler works on {names} parameters: keep parameters in float32 and let "
                "autocast compute in 16 bits (AMP206)",
            )  # fmt: skip

    def _note(
        self, code: str, severity: Severity, message: str, evidence: str = "",
        at: Line | None = None,
    ) -> None:  # fmt: skip
        line = users_line() if at is None else at
        seen = self._found.setdefault((code, line), _Seen(severity, message, evidence))
        seen.times += 1


def _devices(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Devices of tensors in a call that autocast is on for."""
    given = (each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
    kinds = {each.device.type for each in given} or {"cpu", "cuda"}
    return [each for each in kinds if torch.is_autocast_enabled(each)]


def _of(forward: _Forward) -> str:
    return joined(sorted(forward.dtypes)) or "float32"


def _shown(scaler: GradScaler) -> str:
    return "" if scaler._scale is None else _host(scaler._scale)


def _host(scale: Tensor) -> str:
    """A loss scale in words; it waits for the device, once for each mistake."""
    return f"{float(scale):,.10g}"
