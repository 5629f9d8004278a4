"""A `Diagnosis` on a terminal, as Markdown and as a page."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from rich.text import Text

from ampwise import formats
from ampwise.lines import place
from ampwise.numerics.observe.extent import in_words
from ampwise.numerics.result import Diagnosis, Fix, Origin, Passed, Values, percent
from ampwise.policy import Policy
from ampwise.report import page as pages
from ampwise.report.canvas import COLOURS, INK, short, svg
from ampwise.report.page import cell, number, page, prose, table
from ampwise.report.table import new_table
from ampwise_lint.base import neutral
from ampwise_lint.base.console import Console
from ampwise_lint.base.words import counted, figure

_STYLES = {"fault": "bold red", "clean": "bold green", "benign": "bold yellow"}
_MOST_ROWS = 24
_FAR = 60
_SIGNS = {"+": "green", "-": "red", "@": "cyan"}
_POWER = re.compile(r"-?\d{1,4}")


def headline(found: Diagnosis) -> str:
    """The cause, and where, in one line."""
    if found.status == "clean":
        return f"No fault in {counted(found.step, 'step')} of {found.task} in {found.precision}"
    if found.status == "not_reproduced":
        return f"Step {found.step} of {found.task} in {found.precision}: not reproduced"
    return f"{found.cause} at step {found.step}, {found.phase}: {_where(found.origin)}"


def render(found: Diagnosis, console: Console) -> None:
    """Print cause, evidence, findings and fixes."""
    render_cause(found, console)
    render_fixes(found, console)


def render_cause(found: Diagnosis, console: Console) -> None:
    """Print what is known before fixes are tried: the cause line, then the evidence."""
    _render_place(found, console)
    origin = found.origin
    if origin is not None and origin.inputs:
        drawn = new_table()
        for name in ("tensor", "dtype", "shape", "largest", "smallest", "zero", "not finite"):
            drawn.add_column(name, no_wrap=True, justify="left" if name == "tensor" else "right")
        for each in (*origin.inputs[:6], *origin.outputs[:2]):
            drawn.add_row(*_cells(each))
        console.print(drawn)
    for fact in _facts(found):
        console.print(Text(fact))
    if len(found.path) > 1:
        console.print(Text(f"The bad value went {_path(found)}.", style="dim"))


def render_short(found: Diagnosis, console: Console) -> None:
    """Print the cause, its line, and the best fix."""
    _render_place(found, console)
    _print_fixes(found.fixes[:1], console)


def _render_place(found: Diagnosis, console: Console) -> None:
    console.print()
    console.print(Text(headline(found), style=_STYLES.get(found.status, "bold")))
    if found.explanation:
        console.print(Text(found.explanation))
    origin = found.origin
    if origin is not None and origin.source:
        console.print(Text(f"  {place(origin.file, origin.line)}", style="dim"))
        console.print(Text(f"    {origin.source}"))
    if origin is not None and origin.library:
        console.print(Text(f"  inside {origin.library}", style="dim"))


def render_fixes(found: Diagnosis, console: Console) -> None:
    """Print the fixes, the verified first, and what else was found."""
    if found.fixes:
        console.print()
        console.print(Text("Fixes, each tried on the failing step", style="bold"))
        _print_fixes(found.fixes, console)
    for each in found.findings:
        console.print()
        console.print(Text(f"Also {each.cause}: {_where(each.origin)}", style="bold yellow"))
        console.print(Text(each.explanation))
        _print_fixes(each.fixes[:3], console)
    for note in found.notes:
        console.print(Text(note, style="dim"))


def _print_fixes(fixes: list[Fix], console: Console) -> None:
    for each in fixes:
        style = "green" if each.verified else "dim"
        outcome = (f"  {each.outcome}: ", style)
        console.print(Text.assemble(outcome, (each.what, "bold"), f" ({each.cost})"))
        console.print(Text(f"    {each.how}", style="" if each.verified else "dim"))
        if each.patch_status and not each.patch_status.endswith(each.cost):
            console.print(Text(f"    {each.patch_status}", style="dim"))
        for line in patch_lines(each):
            style = _SIGNS.get(line[:1], "")
            console.print(Text(f"    {line}", style=style), soft_wrap=True)  # a patch is copied


def patch_lines(fix: Fix) -> list[str]:
    """Lines of a patch that is worth reading: not of one that was tried and did not mend."""
    refuted = fix.patch_status.startswith("suggestion: tried")
    return [] if fix.patch is None or refuted else fix.patch.splitlines()


def to_markdown(found: Diagnosis) -> str:
    """Headline, explanation, origin, fixes and findings."""
    lines = [f"# {cell(headline(found))}", "", *body(found)]
    lines += [f"- {prose(f'{each.cause}: {each.explanation}')}" for each in found.findings]
    lines += [f"- {prose(each)}" for each in found.notes]
    return "\n".join(lines).rstrip() + "\n"


def body(found: Diagnosis) -> list[str]:
    """Explanation, origin and fixes, as lines of Markdown."""
    lines = [prose(found.explanation), ""]
    for fact in _facts(found):
        lines += [prose(fact), ""]
    if found.origin is not None and found.origin.source:
        source = neutral.line(found.origin.source).replace("```", "'''")
        lines += [prose(place(found.origin.file, found.origin.line)), "", "```", source, "```", ""]
    if found.fixes:
        fixes = ((e.what, e.how, e.outcome, e.cost) for e in found.fixes)
        lines += [*table(("fix", "how", "outcome", "cost"), fixes), ""]
    for each in found.fixes:
        if patch := patch_lines(each):
            lines += [prose(each.patch_status), "", *_fenced(patch), ""]
    return lines


def _fenced(patch: list[str]) -> list[str]:
    """A patch as a block that none of its lines can end."""
    ticks = max((len(run) for line in patch for run in re.findall("`+", line)), default=0)
    fence = "`" * max(3, ticks + 1)
    return [f"{fence}diff", *map(neutral.line, patch), fence]


def to_html(found: Diagnosis) -> str:
    """The page: cause, evidence, fixes, path, exponents by module, errors by operation."""
    return page(
        "diagnosis.html",
        found=found,
        headline=headline(found),
        standing={"fault": "fail", "clean": "pass"}.get(found.status, "open"),
        where=_where,
        path=_path(found),
        told=_facts(found),
        largest=_largest,
        number=number,
        percent=percent,
        patch_lines=patch_lines,
        tensors=[*found.origin.inputs, *found.origin.outputs] if found.origin else [],
        histogram=pages.figure(
            _histogram(found),
            "Exponents of what each module returns, by share of its values; lines: the limits of "
            "the format",
        ),
    )


def _where(origin: Origin | None) -> str:
    if origin is None:
        return "nowhere in particular"
    op = origin.op or "gradients"
    op += f" (in it {origin.inside})" if origin.inside else ""
    place = f" in {origin.module}" if origin.module else ""
    call = f" (call {origin.call + 1})" if origin.call else ""
    line = f", line {origin.line}" if origin.line else ""
    return f"{op}{place}{call}{line}"


def _facts(found: Diagnosis) -> list[str]:
    """Which part broke, and how it came to that, as sentences."""
    facts: list[str] = []
    if found.extent is not None and found.extent.of > 1:
        facts.append(f"Broken: {in_words(found.extent)}.")
    if found.history:
        here = "" if found.origin is None else found.origin.file
        passed = (_passed(each, here) for each in found.history)
        facts.append(f"How it came to that: {' -> '.join(passed)}.")
    return facts


def _passed(each: Passed, here: str) -> str:
    """An operation that a value came through, with its file where that is not the origin's."""
    where = f" (line {each.line})" if each.file == here else f" ({place(each.file, each.line)})"
    where = where if each.line else ""
    exact = " in float64" if each.dtype == "float64" else ""
    return f"{each.op}{where} {figure(each.extreme)}{exact}"


def _path(found: Diagnosis) -> str:
    shown = found.path if len(found.path) <= 7 else [*found.path[:4], "...", *found.path[-2:]]
    target = "the loss" if found.target == "loss" else f"the gradient of {found.target}"
    return f"{' -> '.join(shown)}, as far as {target}"


def _largest(each: Values) -> str:
    """The value of the largest magnitude, with its sign where that is known."""
    ends = [end for end in (each.high, each.low) if end is not None]
    largest = max(ends, key=abs, default=each.amax)
    return "" if largest is None else figure(largest)


def _cells(each: Values) -> tuple[str, ...]:
    return (
        each.name,
        each.dtype,
        "x".join(map(str, each.shape)) or "scalar",
        _largest(each),
        number(each.min_nonzero, ".3g"),
        percent(each.zero),
        percent(each.non_finite),
    )


def _histogram(found: Diagnosis) -> str:
    """A row for each module, an exponent for each column, darker where more values are."""
    rows = dict(list(found.histograms.items())[:_MOST_ROWS])
    powers = [int(power) for each in rows.values() for power in each if _POWER.fullmatch(power)]
    if not powers:
        return ""
    fmt = formats.lookup(_compute_dtype(found.precision))
    limits = {"max": fmt.max, "min normal": fmt.min_normal, "min": fmt.min_subnormal}
    exponents = {name: math.frexp(value)[1] - 1 for name, value in limits.items()}
    shown = [power for power in exponents.values() if abs(power) < _FAR]  # float32's are far away
    low, high = max(min(powers + shown) - 1, -50), min(max(powers + shown) + 2, 40)

    def draw(axes: Any) -> None:
        for height, (_, shares) in enumerate(reversed(rows.items())):
            for power, share in _within(shares, low, high):
                axes.barh(height, 1, left=power, height=0.8, color=COLOURS[1],
                          alpha=min(1.0, 0.08 + max(0.0, share) * 3))  # fmt: skip
            if "inf" in shares:
                text = f"inf or NaN {percent(shares['inf'])}"
                axes.annotate(text, (high, height), color=COLOURS[2], va="center")
        for name, power in exponents.items():
            if low <= power <= high:
                axes.axvline(power, color=INK, linestyle=":", linewidth=1)
                axes.annotate(name, (power, len(rows) - 0.4), fontsize=8, ha="center")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_yticks(range(len(rows)), [short(each) for each in reversed(rows)])
        axes.set_xlim(low, high + 4)
        axes.set_xlabel(f"binary exponent of the values (limits of {fmt})")

    return svg("exponents", draw, height=1.2 + 0.28 * len(rows))


def _within(shares: dict[str, float], low: int, high: int) -> Iterator[tuple[int, float]]:
    for power, share in shares.items():
        if _POWER.fullmatch(power) and low <= int(power) <= high:
            yield int(power), share


def _compute_dtype(precision: str) -> str:
    return Policy.parse(precision).compute_dtype
