"""A scaling report in every form, whatever its figures are."""

from __future__ import annotations

import io

import pytest

from ampwise.bench.scaling_report import Scaled, ScalingReport
from ampwise.errors import UsageError
from ampwise.report.scaling import render, to_html, to_markdown
from ampwise.stats import Interval
from ampwise_lint.base.console import Console
from tests.report.test_report import HOSTILE, Page


def scaling_report(task: str = "small") -> ScalingReport:
    environment = {
        "device_name": "a",
        "architecture": "b",
        "threads": 1,
        "torch": "2",
        "ampwise": "0",
    }
    share = Interval(0.95, 0.9, 1.01)
    return ScalingReport(
        task,
        "cpu",
        environment,
        processes=16,
        threads=[1] * 16,
        cores=16,
        results=[
            Scaled("bf16-master", 1, "", "", 9, Interval(10, 9, 11), 1e6, None, None, None, [7], [6]),
            Scaled(
                "bf16-master", 16, "fsdp", "", 9, Interval(12345.6, 9, 11), 1234567, share, share,
                Interval(-0.02, -0.05, 0.01), [10_000_000] * 15 + [12_000_000], [5_000_000] * 16,
            ),
            Scaled("fp16", 1, reason="fp16: no kernel"),
            Scaled("fp16", 16, "fsdp", reason="fp16: no kernel"),
        ],
        left_out={"tf32": "emulated"},
        notes=["all share the memory"],
    )  # fmt: skip


def drawn(report: ScalingReport, width: int) -> str:
    paper = io.StringIO()
    render(report, Console(file=paper, width=width))
    return paper.getvalue()


def test_it_comes_back_from_json_and_nothing_else_does() -> None:
    report = scaling_report()
    assert ScalingReport.from_json(report.to_json()) == report
    with pytest.raises(UsageError, match=r"of schema ampwise\.scaling/1"):
        ScalingReport.from_json({"schema": "ampwise.bench/1"})
    with pytest.raises(UsageError, match="task: expected a value, got nothing"):
        ScalingReport.from_json({"schema": "ampwise.scaling/1"})


@pytest.mark.parametrize("width", [40, 80])
def test_it_fits_a_terminal(width: int) -> None:
    text = drawn(scaling_report(), width)
    assert max(map(len, text.splitlines())) <= width
    assert "95% [90, 101]" in text
    assert "-2% [-5, 1]" in text
    assert "10.0 to 12.0" in text  # the least to the most over the ranks
    assert text.count("fp16: no kernel") == 1
    flat = " ".join(text.split())
    assert "16 processes train 15.20x [14.40, 16.16] as many samples a second as one" in flat


def test_every_form_says_the_same_and_stays_text() -> None:
    report = scaling_report(HOSTILE)
    page = to_html(report)
    Page(page)
    assert "<script>alert" not in page
    for text in (page, to_markdown(report)):
        assert "1,234,567" in text
        assert "-2%" in text
    report.results, report.interrupted = [], True
    assert "Interrupted; the figures are of what there was" in drawn(report, 80)
    assert "held between steps" not in to_markdown(report) + to_html(report)
