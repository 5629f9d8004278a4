"""What `ampwise run` saw, in words: the same on a terminal, as Markdown and on a page."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ampwise.data.feed import SLOW_LOADER, slow_loader
from ampwise.lines import place
from ampwise.numerics.result import percent
from ampwise.observe.result import Finding, Precision, Raced, RunReport
from ampwise.products import in_words
from ampwise.report.curves import series
from ampwise.telemetry import names
from ampwise.telemetry.run import read_steps
from ampwise_lint.base.words import counted, joined

FILE = "observed.json"
"""Where a run's folder has it."""
NOT_ACTIVE = "AMP501"
"""The finding that the headline says already."""
_MOST = 5
"""Steps and lines that are listed one by one."""
_HOW = {
    "fp32": "autocast switched off",
    "tf32": 'torch.set_float32_matmul_precision("high")',
    "bf16": "torch.autocast(..., dtype=torch.bfloat16) around forward and loss, or the trainer's "
    "option for bf16",
    "fp16": "torch.autocast(..., dtype=torch.float16) around forward and loss with a GradScaler, "
    "or the trainer's option for fp16",
}
_PRESETS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass
class ObservedRun:
    """A run as its folder tells it.

    Attributes
    ----------
    steps
        Lines of ``steps.jsonl``; none where there is only the report.
    """

    report: RunReport
    steps: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    @classmethod
    def of(cls, report: RunReport, file: Path) -> ObservedRun:
        """A report that was read from a file, with the steps beside it if that is a run's folder.

        Raises
        ------
        UsageError
            When the steps are damaged.
        """
        return cls(report, read_steps(file.parent) if file.name == FILE else [])

    def to_json(self) -> dict[str, Any]:
        """The report; the steps stay where they are."""
        return self.report.to_json()

    @property
    def headline(self) -> str:
        """What precision was asked for and what ran: the first thing to say."""
        if self.report.steps:
            return _what_ran(self.report.precision)
        return f"No step of an optimizer was seen: {self.report.script} {self.report.ending}"

    @property
    def outcome(self) -> str:
        """How the script ended, after how much."""
        report = self.report
        by = f"; {', '.join(dict.fromkeys(report.optimizers))}" if report.optimizers else ""
        ranks = f"; {report.ranks} ranks, seen from rank 0" if report.ranks > 1 else ""
        return f"{report.script} {report.ending} after {counted(report.steps, 'step')}{by}{ranks}"

    @property
    def exceptions(self) -> list[str]:
        """Lines whose matrix products ran in another dtype than most."""
        return in_words(self.report.precision.exceptions)

    @property
    def rows(self) -> list[tuple[str, str]]:
        """What happened, by name."""
        rows = (
            ("loss", _loss(self.report)),
            ("time", self._time()),
            ("loss scale", _scale(self.report)),
            ("skipped", _skips(self.report)),
            ("float32 products", _float32(self.report.precision)),
            *((f"in {name}", _raced(each)) for name, each in self.report.race.items()),
            *(("not observed", f"{e.what}: {e.why}") for e in self.report.not_observed),
            ("overhead", _overhead(self.report)),
        )
        return [(name, value) for name, value in rows if value]

    @property
    def advice(self) -> list[str]:
        """What follows from the figures."""
        waited = self.waited_share or 0.0
        clean = self.is_clean and not self.report.race
        return [
            *_race_advice(self.report.race),
            *([slow_loader(waited)] if waited >= SLOW_LOADER else []),
            *(["No fault and no mistake was seen."] if clean else []),
        ]

    @property
    def is_clean(self) -> bool:
        """Whether there is nothing that somebody should look at."""
        report = self.report
        trained = report.steps > 0 and report.precision.active and not report.exit_code
        return trained and not (report.faults or report.findings) and _is_finite(report.loss_last)

    @property
    def standing(self) -> str:
        """Class of all this: its colour."""
        report = self.report
        if report.exit_code or objections(report):
            return "fail"
        return "pass" if self.is_clean else "open"

    @property
    def preset(self) -> str:
        """The precision that most products ran in, as a preset; its curves have its colour."""
        usual = _products(self.report.precision).most_common(1)
        return _PRESETS.get(usual[0][0], "fp32") if usual else "fp32"

    @property
    def waited_share(self) -> float | None:
        """Share of the time that was spent waiting for data; the first step's began too early."""
        later = [each for each in self.steps if each["step"] > 1]
        taken = sum(seconds for _, seconds in series(later, names.STEP_S))
        waited = sum(seconds for _, seconds in series(later, names.WAITED_S))
        known = self.report.waited_for_data is not None and taken > 0
        return min(1.0, waited / taken) if known else None

    def _time(self) -> str:
        report, parts = self.report, list[str]()
        if report.step_ms is not None:
            parts.append(f"{_figure(report.step_ms)} ms a step (median)")
        if self.waited_share is not None:
            parts.append(f"{percent(self.waited_share)} of it waiting for data")
        elif report.waited_for_data is not None:
            parts.append(f"waited for data {_figure(report.waited_for_data)} s in all")
        if (several := report.micro_batches_per_step) is not None and several > 1:
            parts.append(f"{several:g} micro-batches a step")
        return ", ".join(parts)


def objections(report: RunReport, *, strict: bool = False) -> list[str]:
    """What speaks against a run: findings that are errors (strictly: any), faults, precision."""
    findings = sum(
        each.code != NOT_ACTIVE and (strict or each.severity == "error") for each in report.findings
    )
    faults = sum(each.status not in ("clean", "benign") for each in report.faults)
    return [
        *([counted(findings, "finding")] if findings else []),
        *([counted(faults, "fault")] if faults else []),
        *([] if report.precision.active else ["the precision asked for was not active"]),
    ]


def title(finding: Finding) -> str:
    """Where, which mistake, and how often."""
    at = place(finding.file, finding.line)
    times = f", {finding.times:,} times" if finding.times > 1 else ""
    return f"{at}: {finding.code} {finding.severity}{times}".removeprefix(": ")


# -- precision -------------------------------------------------------------------------------------


def _products(precision: Precision) -> Counter[str]:
    """Matrix products by dtype, forward and backward."""
    return Counter(precision.ran.forward) + Counter(precision.ran.backward)


def _what_ran(precision: Precision) -> str:
    products = _products(precision)
    total = products.total()
    if not precision.active:
        ran = _most(products) if total else "no autocast region was on"
        return f"Precision asked for, but not active: {_asked(precision)}, {ran}"
    if not total:
        asked = _asked(precision) if precision.asked else "nothing but float32 was asked for"
        return f"{asked[0].upper()}{asked[1:]}; what ran in it was not seen"
    ran = _most(products)
    return f"{ran[0].upper()}{ran[1:]}{_as_asked(precision, products)}"


def _most(products: Counter[str]) -> str:
    """``every matrix product ran in float32``, or how many of them did."""
    [(usual, count)] = products.most_common(1)
    if count == products.total():
        return f"every matrix product ran in {usual}"
    return f"{count:,} of {products.total():,} matrix products ran in {usual}"


def _as_asked(precision: Precision, products: Counter[str]) -> str:
    [(usual, _)] = products.most_common(1)
    if usual not in {each.dtype for each in precision.asked}:
        if precision.asked:
            return f"; {_asked(precision)}"
        return ", and nothing less was asked for" if usual == "float32" else ", cast by hand"
    return f", as asked{_lines(precision, usual)}"


def _asked(precision: Precision) -> str:
    """``float16 was asked for (train.py:41)``."""
    dtypes = dict.fromkeys(each.dtype for each in precision.asked)
    each = (f"{dtype} was asked for{_lines(precision, dtype)}" for dtype in dtypes)
    return joined(each) or "a lower precision was asked for"


def _lines(precision: Precision, dtype: str) -> str:
    found = (place(each.file, each.line) for each in precision.asked if each.dtype == dtype)
    lines = _first([each for each in dict.fromkeys(found) if each])
    return f" ({lines})" if lines else ""


def _float32(precision: Precision) -> str:
    """What PyTorch may make of products in float32; nothing where it leaves them alone."""
    how = precision.float32_products
    return "" if how == "ieee" else f"PyTorch may compute them in {how}, as its settings say"


# -- figures ---------------------------------------------------------------------------------------


def _loss(report: RunReport) -> str:
    if not report.steps or (report.loss_first is None and report.loss_last is None):
        return ""
    first, last = map(_figure, (report.loss_first, report.loss_last))
    return f"{first} at the first step, {last} at the last"


def _scale(report: RunReport) -> str:
    scale = report.loss_scale
    if scale is None:
        return ""
    moves = f"{counted(scale.growths, 'growth')}, {counted(scale.backoffs, 'backoff')}"
    ends = min(scale.first, scale.last)
    lowest = f", {_power(scale.lowest)} lowest" if scale.lowest < ends else ""
    return f"{_power(scale.first)} at first, {_power(scale.last)} at last{lowest}; {moves}"


def _power(scale: float) -> str:
    """A loss scale: mostly a power of two that a person knows."""
    return f"{scale:,.0f}" if 1 <= scale < 1e9 else f"{scale:.4g}"


def _skips(report: RunReport) -> str:
    skips = report.skips
    if not skips:
        return ""
    listed = _first([f"{each.step:,}" for each in skips])
    known = [each for each in skips if each.noticed_by_schedule is not None]
    moved = sum(not each.noticed_by_schedule for each in known)
    schedule = ""
    if known:
        schedule = f"; the schedule moved on in {moved} of them" if moved else "; schedule held"
    return f"{len(skips):,} of {counted(report.steps, 'step')} ({listed}){schedule}"


def _overhead(report: RunReport) -> str:
    seen = report.overhead
    if seen.per_step_ms is None:
        return ""
    share = "" if seen.share is None else f", {percent(seen.share, 1)} of it"
    return f"observing took {_figure(seen.per_step_ms)} ms a step{share}"


def _raced(each: Raced) -> str:
    note = f"; {each.note}" if each.note else ""
    if each.speed is None:
        return f"not measured{note}"
    return f"{each.speed} as fast as the script is, {counted(each.pairs, 'pair')} of steps{note}"


def _race_advice(race: dict[str, Raced]) -> list[str]:
    """Of each precision whether it would pay; of the best one how to have it."""
    speeds = {name: each.speed for name, each in race.items() if each.speed is not None}
    said: list[str] = []
    for name, speed in sorted(speeds.items(), key=lambda each: -each[1].median):
        if speed.low > 1:
            how = f", with {_HOW[name]}" if name in _HOW and not said else ""
            said.append(f"{name} would pay: {speed.median:.2f}x{how}")
        elif speed.high < 1:
            said.append(f"{name} would not pay: {speed.median:.2f}x")
        else:
            said.append(f"{name} makes no difference that was measured: {speed}")
    return said


def _figure(value: float | None) -> str:
    return f"{value:,.4g}" if value is not None and math.isfinite(value) else "not finite"


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _first(words: Sequence[str]) -> str:
    """The first few of a list, and how many more there are."""
    more = len(words) - _MOST
    return ", ".join(words[:_MOST]) + (f" and {more:,} more" if more > 0 else "")
