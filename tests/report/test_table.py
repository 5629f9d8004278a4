"""Tables keep names as they are, and become lists where there is no room."""

from __future__ import annotations

import io

import pytest
from rich.text import Text

from ampwise.numerics.result import Diagnosis, OpError
from ampwise.report.canvas import log_scale, svg
from ampwise.report.diagnosis import to_html
from ampwise.report.page import breakable
from ampwise.report.table import new_table
from ampwise_lint.base import neutral
from ampwise_lint.base.console import Console
from ampwise_lint.base.words import size

NAME = "[car] acc$\\frac$[/b] :smile:"


def drawn(width: int, *names: str) -> str:
    table = new_table()
    table.add_column("[red]precision", no_wrap=True)
    table.add_column("why")
    table.add_column("empty")
    for name in names or (NAME,):
        table.add_row(name, f"because of {name}", "")
    table.caption = f"about {NAME}"
    paper = io.StringIO()
    Console(file=paper, width=width).print(table)
    return paper.getvalue()


@pytest.mark.parametrize("width", [40, 60, 100])
def test_brackets_dollars_and_colons_are_text(width):
    text = " ".join(drawn(width).split())
    assert text.count(NAME) == 3
    assert "[red]precision" in text


@pytest.mark.parametrize(("width", "listed"), [(40, True), (69, True), (70, False), (100, False)])
def test_narrow_terminals_get_names_and_values(width, listed):
    text = drawn(width, "bf16")
    assert ("  why: because of bf16\n" in text) == listed
    assert ("empty:" in text) is False
    assert max(map(len, text.splitlines())) <= width


def test_a_name_that_would_push_the_rest_out_makes_a_list():
    name = "bf16:islands=" + ",".join(f"layers.{index}" for index in range(12))
    assert "  why: because of" in drawn(80, name)
    assert "…" not in drawn(80, name)


def test_figures_take_a_dollar_for_a_dollar():
    def draw(axes):
        log_scale(axes, base=10)
        axes.plot([1, 2], [1, 1000], label=NAME)
        axes.set_xlabel(NAME)
        axes.legend()

    text = svg("figure", draw, height=2.0)
    assert text.count("acc$\\frac$") >= 2
    assert ">1000<" in text
    assert "mathdefault" not in text


@pytest.mark.parametrize(
    ("count", "text"),
    [(8_000, "8.0 kB"), (999_949, "999.9 kB"), (1e6, "1.0 MB"), (2.5e9, "2,500.0 MB")],
)
def test_sizes_are_never_zero_for_being_small(count, text):
    assert size(count) == text


def test_an_indented_text_is_indented_on_every_line():
    paper = io.StringIO()
    console = Console(file=paper, width=40)
    console.print(Text.assemble(("  verified: ", "green"), "line 13 in float32 (1.05x the time)"))
    console.print("    ok")
    console.print("not indented, and longer than the line is")
    assert [line.rstrip() for line in paper.getvalue().splitlines()] == [
        "  verified: line 13 in float32 (1.05x",
        "  the time)",
        "    ok",
        "not indented, and longer than the line",
        "is",
    ]


@pytest.mark.parametrize("text", ["  " + NAME * 9, "   ", "  ::error::x " * 9])
def test_what_is_indented_is_whole_and_does_nothing(text):
    paper = io.StringIO()
    Console(file=paper, width=30).print(text)
    lines = paper.getvalue().splitlines()
    assert max(map(len, lines)) <= 30
    assert "".join("".join(lines).split()) == "".join(neutral.line(text).split())


def test_a_long_name_on_a_page_may_go_on_below_and_does_nothing():
    assert breakable("_flash_for_cpu.x") == "_flash_<wbr>for_<wbr>cpu.<wbr>x"
    assert breakable("<b>_\x1b[1m") == "&lt;b&gt;_<wbr>\\x1b[1m"
    op = OpError(
        "_flash_backward", "blocks.0", "model.py", 3, "backward", "bfloat16", 31.0, 30.7, 0.0
    )
    found = Diagnosis("clean", "t", "bf16", "cpu", 1, worst_ops=[op])
    assert "_flash_<wbr>backward" in to_html(found)
