"""Drawing for the pages: SVG as text, by matplotlib.

Text stays text, and whatever is black becomes ``currentColor``, so that one figure reads on light
and dark pages alike. Colours are those that the colour-blind can tell apart (Okabe and Ito).
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from ampwise_lint.base import neutral

COLOURS = ("#8a8f98", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
SHADES = ("#5b7083", "#8aa0b4", "#b9c7d3", "#d9c8a9", "#b79f6b", "#8a6f3c")
"""For the parts of a whole, where a colour of the above would be taken for a precision."""
_OF_PRECISIONS = ("fp32", "bf16", "fp16", "bf16-master", "tf32", "bf16-pure", "fp8")
INK = "#010101"
_LONGEST = 48
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": INK,
    "grid.alpha": 0.12,
    "legend.frameon": False,
    "text.parse_math": False,  # a $ in a name is a dollar
}


def short(name: str) -> str:
    """A name beside an axis or in a legend: it takes no more room than there is, and is a line."""
    name = neutral.line(name)
    return name if len(name) <= _LONGEST else f"{name[:_LONGEST]}..."


def colour_of(precision: str) -> str:
    """The colour of a precision, the same in every figure of every report; by its preset."""
    preset = precision.partition(":")[0]
    place = _OF_PRECISIONS.index(preset) if preset in _OF_PRECISIONS else 0
    return COLOURS[place]


def log_scale(axes: Any, base: float) -> None:
    """A logarithmic vertical axis; its numbers plain, as mathematics is not typeset here."""
    from matplotlib.ticker import NullFormatter

    axes.set_yscale("log", base=base)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


@contextmanager
def _without_backend() -> Generator[None]:
    """A notebook names its backend in the environment, where ours may not have it installed.

    Nothing here needs one, and matplotlib would refuse to be imported.
    """
    backend = os.environ.pop("MPLBACKEND", None)
    try:
        yield
    finally:
        if backend is not None:
            os.environ["MPLBACKEND"] = backend


def svg(name: str, draw: Callable[[Any], None], *, height: float) -> str:
    """One figure, 7 inches wide, that scales with the page."""
    with _without_backend():
        import matplotlib as mpl
        from matplotlib.figure import Figure

    # The salt makes ids the same in every run, and different in every figure of a page.
    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(7, height), layout="constrained")
        figure.patch.set_alpha(0)
        axes: Any = figure.add_subplot()
        axes.patch.set_alpha(0)
        draw(axes)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    drawn = text.getvalue()
    drawn = drawn[drawn.index("<svg") :].replace(INK, "currentColor")
    # matplotlib numbers its ids from 1 in every figure; on one page they must differ.
    return re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", drawn)
