"""Curves over the steps of a run, drawn from the lines of ``steps.jsonl``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ampwise.report.canvas import INK, SHADES, log_scale, short, svg
from ampwise.telemetry import names

_POINTS = 600
"""Points of a curve; more than that cannot be told apart on a page."""

Steps = Sequence[Mapping[str, Any]]


def loss(steps: Steps, colour: str) -> str:
    """Loss over training steps, and held-out losses where there are some."""
    found = series(steps, names.LOSS)
    evaluated = dict.fromkeys(name for each in steps for name in each if name.startswith("eval/"))
    held_out = [name for name in evaluated if "loss" in name]

    def draw(axes: Any) -> None:
        _curve(axes, found, colour, "training")
        for index, name in enumerate(held_out):
            shade = SHADES[(3 * index) % len(SHADES)]
            points = zip(*series(steps, name), strict=True)
            axes.plot(*points, "o-", color=shade, label=short(name))
        _label(axes, "loss")
        axes.legend()

    return svg("loss", draw, height=3.2) if found else ""


def scale(steps: Steps, colour: str, skipped: Sequence[int]) -> str:
    """Loss scale, with the steps that were skipped; nothing where none was ever scaled."""
    scales = series(steps, names.LOSS_SCALE)
    if len({scale for _, scale in scales}) < 2 and all(scale == 1 for _, scale in scales):
        return ""

    def draw(axes: Any) -> None:
        axes.step(*zip(*scales, strict=True), where="post", color=colour, label="loss scale")
        for index, step in enumerate(skipped[:_POINTS]):
            label = f"skipped ({len(skipped)})" if index == 0 else None
            axes.axvline(step, color=INK, alpha=0.5, linewidth=1, label=label)
        log_scale(axes, base=2)
        _label(axes, "loss scale")
        axes.legend()

    return svg("scale", draw, height=2.4)


def norm(steps: Steps, colour: str) -> str:
    """Norm of the true gradients."""
    norms = [(step, value) for step, value in series(steps, names.GRAD_NORM) if value > 0]

    def draw(axes: Any) -> None:
        _curve(axes, norms, colour, "grad norm")
        if max(norms, key=_value)[1] > 10 * min(norms, key=_value)[1]:
            log_scale(axes, base=10)  # within a decade its axis would have no numbers
        _label(axes, "grad norm")

    return svg("norm", draw, height=2.4) if norms else ""


def times(steps: Steps, colour: str) -> str:
    """Time of each step, and what of it was waiting for data."""
    taken = _in_ms(steps, names.STEP_S)
    waited = _in_ms(steps, names.WAITED_S)

    def draw(axes: Any) -> None:
        _curve(axes, taken, colour, "whole step")
        if any(value for _, value in waited):
            _curve(axes, waited, SHADES[4], "waiting for data")
            axes.legend()
        axes.set_ylim(bottom=0)
        _label(axes, "ms")

    return svg("times", draw, height=2.4) if taken else ""


def series(steps: Steps, name: str) -> list[tuple[int, float]]:
    """Step and value of a metric, where it can be drawn: NaN, inf and what is close cannot."""
    points = ((each["step"], each.get(name)) for each in steps)
    return [
        (at, value) for at, value in points if isinstance(value, float | int) and abs(value) < 1e100
    ]


def _in_ms(steps: Steps, name: str) -> list[tuple[int, float]]:
    """A time without the first step's, in which all there is before training is."""
    return [(step, 1e3 * seconds) for step, seconds in series(steps, name) if step > 1]


def _value(point: tuple[int, float]) -> float:
    return point[1]


def _label(axes: Any, what: str) -> None:
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel(what)


def _curve(axes: Any, points: Sequence[tuple[int, float]], colour: str, label: str) -> None:
    """Mean and range of neighbouring steps, at most `_POINTS` of them."""
    width = math.ceil(len(points) / _POINTS)
    groups = [points[start : start + width] for start in range(0, len(points), width)]
    steps = [group[-1][0] for group in groups]
    values = [[value for _, value in group] for group in groups]
    if width > 1:
        low, high = [min(each) for each in values], [max(each) for each in values]
        axes.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)
    means = [sum(each) / len(each) for each in values]
    axes.plot(steps, means, color=colour, linewidth=1.4, label=label)
