"""Figures of a bench report; a series keeps its colour from figure to figure."""

from __future__ import annotations

import math
from typing import Any

from ampwise.bench.memory import PARTS
from ampwise.bench.result import BenchReport
from ampwise.report.canvas import COLOURS, INK, SHADES, colour_of, log_scale, short, svg
from ampwise_lint.base.words import size_unit


def speed(report: BenchReport) -> str:
    """Speed relative to float32, with intervals, the threshold and the noise floor."""
    rows = [each for each in report.precisions if each.speedup is not None]
    if not rows:
        return ""

    def draw(axes: Any) -> None:
        for place, each in enumerate(reversed(rows)):
            found = each.speedup
            assert found is not None
            reach = _reach(found.low, found.median, found.high)
            colour = colour_of(each.name)
            axes.barh(place, found.median, color=colour, alpha=0.85, height=0.55)
            axes.errorbar(found.median, place, xerr=reach, color=INK, capsize=4, linewidth=1.2)
            axes.annotate(
                f"{found.median:.2f}x", (found.high, place), (6, 0), textcoords="offset points",
                va="center",
            )  # fmt: skip
            threshold = each.requirements.get("speedup")
            if threshold is not None:
                axes.axvline(threshold.threshold, color=INK, linestyle=":", linewidth=1)
        axes.axvline(1.0, color=INK, linewidth=1)
        if report.noise is not None:
            axes.axvspan(report.noise.low, report.noise.high, color=COLOURS[0], alpha=0.35)
        axes.set_yticks(range(len(rows)), [short(each.name) for each in reversed(rows)])
        axes.set_xlabel("times as fast as fp32 (line: 1; dotted: required; band: fp32 twice)")
        asked = [found.threshold for each in rows if (found := each.requirements.get("speedup"))]
        furthest = [1.0, *asked, *(each.speedup.high for each in rows if each.speedup)]
        axes.set_xlim(0, max(furthest) * 1.15)

    return svg("speed", draw, height=0.9 + 0.5 * len(rows))


def memory(report: BenchReport) -> str:
    """Peak memory, stacked by its parts."""
    rows = [each for each in report.precisions if each.memory]
    if not rows:
        return ""

    unit, one = size_unit(max(sum(each.memory.values()) for each in rows))

    def draw(axes: Any) -> None:
        starts = [0.0] * len(rows)
        for index, part in enumerate(PARTS):
            sizes = [each.memory.get(part, 0) / one for each in reversed(rows)]
            if any(sizes):
                axes.barh(
                    range(len(rows)), sizes, left=starts, height=0.55, label=part,
                    color=SHADES[index],
                )  # fmt: skip
            starts = [a + b for a, b in zip(starts, sizes, strict=True)]
        for place, end in enumerate(starts):
            axes.annotate(f"{end:,.1f} {unit}", (end, place), (6, 0), textcoords="offset points",
                          va="center")  # fmt: skip
        axes.set_yticks(range(len(rows)), [short(each.name) for each in reversed(rows)])
        axes.set_xlabel(f"{unit} of live tensors at the peak")
        axes.set_xlim(0, max(starts) * 1.18)
        axes.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize=9)

    return svg("memory", draw, height=1.5 + 0.5 * len(rows))


def losses(report: BenchReport) -> str:
    """Training loss over steps: mean over seeds, and the range as a band."""
    curves = {} if report.parity is None else report.parity.curves
    if not any(each["step"] for each in curves.values()):
        return ""

    def draw(axes: Any) -> None:
        for name, curve in curves.items():
            colour = colour_of(name)
            columns = [curve[each] for each in ("step", "low", "high", "mean")]
            length = min(map(len, columns))
            steps, low, high, mean = (each[:length] for each in columns)
            axes.fill_between(steps, low, high, color=colour, alpha=0.2, lw=0)
            axes.plot(steps, mean, color=colour, label=short(name), linewidth=1.6)
        axes.set_xlabel("step")
        axes.set_ylabel("training loss (mean, range over seeds)")
        axes.legend()

    return svg("losses", draw, height=3.2)


def parity(report: BenchReport) -> str:
    """Differences from float32 with their 95 % intervals, and the margin."""
    found = report.parity
    rows = {} if found is None else {n: p for n, p in found.arms.items() if math.isfinite(p.low)}
    if found is None or not rows:
        return ""

    def draw(axes: Any) -> None:
        for place, (name, each) in enumerate(reversed(rows.items())):
            reach = _reach(each.low, each.difference, each.high)
            axes.errorbar(each.difference, place, xerr=reach, fmt="o", capsize=5,
                          color=colour_of(name), linewidth=2)  # fmt: skip
        axes.axvspan(-found.margin, found.margin, color=COLOURS[3], alpha=0.15)
        axes.axvline(0, color=INK, linewidth=1)
        axes.set_yticks(range(len(rows)), [short(each) for each in reversed(rows)])
        axes.set_ylim(-0.6, len(rows) - 0.4)
        relative = "relative " if found.relative else ""
        axes.set_xlabel(
            f"{relative}difference of {short(found.metric)} from fp32 (band: the margin)"
        )

    return svg("parity", draw, height=1.0 + 0.5 * len(rows))


def scale(report: BenchReport) -> str:
    """Loss scale over steps, and which steps were skipped."""
    scales = {} if report.parity is None else report.parity.scales
    if not scales:
        return ""

    def draw(axes: Any) -> None:
        for name, each in scales.items():
            colour = colour_of(name)
            length = min(len(each["step"]), len(each["scale"]))
            points = each["step"][:length], each["scale"][:length]
            axes.step(*points, where="post", color=colour, label=short(name))
            for index, step in enumerate(each["skipped"]):
                label = f"skipped ({short(name)})" if index == 0 else None
                axes.axvline(step, color=colour, alpha=0.4, linewidth=1, label=label)
        log_scale(axes, base=2)
        axes.set_xlabel("step")
        axes.set_ylabel("loss scale")
        axes.legend()

    return svg("scale", draw, height=2.4)


def _reach(low: float, middle: float, high: float) -> list[list[float]]:
    """How far an interval reaches to either side; it need not hold its middle."""
    return [[max(0.0, middle - low)], [max(0.0, high - middle)]]
