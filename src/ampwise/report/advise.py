"""Draws an `AdviseReport` on a terminal, in 80 columns, without colours where there is none."""

from __future__ import annotations

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ampwise.advice import AdviseReport, DeviceAdvice
from ampwise.capability import FLOAT8, FormatSupport, ratio
from ampwise.policy import PRESETS, Policy
from ampwise.report.table import new_table
from ampwise_lint.base.console import Console
from ampwise_lint.base.words import counted

_STYLES = {"native": "green", "emulated": "yellow", "unsupported": "red"}


def render(report: AdviseReport, console: Console) -> None:
    """Print one table a device, each followed by what to use there."""
    for advice in report.devices:
        _render_device(advice, report, console)
    if report.note:
        console.print(Text(f"{report.note}."))


def _render_device(advice: DeviceAdvice, report: AdviseReport, console: Console) -> None:
    hardware = advice.capability.hardware
    threads = f", {counted(report.threads, 'thread')}" if hardware.kind == "cpu" else ""
    console.print(Text(f"{hardware.device}: {hardware.name}", style="bold"))
    when = "measured earlier (--refresh measures anew)" if advice.capability.cached else "measured"
    facts = f"{hardware.architecture}{threads}, torch {report.torch_version}, {when}"
    console.print(Text(facts.removeprefix(", "), style="dim"))
    console.print(_table(advice))
    for support in advice.capability.formats.values():
        if support.verdict == "unsupported" and support.format != FLOAT8:
            console.print(Padding(Text(support.reason), (0, 0, 0, 2)))
    console.print(Text(advice.sentence, style="bold"))
    console.print(Text(advice.on_float8))
    console.print()


def _table(advice: DeviceAdvice) -> Table:
    table = new_table()
    table.add_column("format", no_wrap=True)
    table.add_column("presets")
    table.add_column("unit", no_wrap=True)
    table.add_column("speedup", justify="right", no_wrap=True)
    table.add_column("range", justify="right", no_wrap=True)
    table.add_column("N", justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_row("float32", "fp32", "", "1x", "", "", "baseline")
    for support in advice.capability.formats.values():
        presets = [name for name, p in PRESETS.items() if _shown(p, support)]
        table.add_row(
            _name(support, advice.capability.kind),
            ", ".join(presets),
            {None: "unknown", "": "none"}.get(support.unit, support.unit),
            *_figures(support),
            Text(_verdict(support), style=_STYLES[support.verdict]),
        )
    table.caption = "speedup of an N x N matmul over float32: median and range of paired rounds"
    table.caption_justify = "left"
    return table


def _shown(policy: Policy, support: FormatSupport) -> bool:
    """Whether a preset stands beside a format: not one that changes what a model holds."""
    return policy.compute_format == support.format and not policy.pure


def _name(support: FormatSupport, kind: str) -> str:
    """The format in few columns; on a CPU, the ``tf32`` preset means oneDNN's bf16 math."""
    if support.format == "tf32" and kind == "cpu":
        return "bf16 math"
    return support.format.partition("_")[0]


def _verdict(support: FormatSupport) -> str:
    if support.verdict != "native" or support.gains or support.measured.speedup is None:
        return support.verdict
    return "no gain"


def _figures(support: FormatSupport) -> tuple[str, str, str]:
    """Median ratio, its range over the rounds, and the matrix size."""
    measured = support.measured
    if measured.speedup is None or measured.low is None or measured.high is None:
        return "-", "", ""
    spread = f"{ratio(measured.low)[:-1]}-{ratio(measured.high)[:-1]}"
    return ratio(measured.speedup), spread, str(measured.size)
