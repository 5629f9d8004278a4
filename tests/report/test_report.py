"""One report, four forms: the same figures in each, nothing from outside taken for markup."""

from __future__ import annotations

import copy
import io
import json
import math
import re
from html.parser import HTMLParser

import pytest
import torch

from ampwise.bench import memory
from ampwise.bench.equivalence import Parity
from ampwise.bench.parity import ParityReport
from ampwise.bench.requirements import Thresholds, judge
from ampwise.bench.result import BenchReport, PrecisionResult
from ampwise.bench.verdict import verdict
from ampwise.cli.main import main
from ampwise.errors import UsageError
from ampwise.report import canvas
from ampwise.report.bench import render
from ampwise.report.compare import compare
from ampwise.report.html import to_html
from ampwise.report.markdown import to_markdown
from ampwise.stats import Interval
from ampwise.telemetry.environment import environment
from ampwise_lint.base.console import Console

PARTS = ("parameters", "optimizer state", "activations", "temporary")


def precision(name: str, step_ms: float, peak: int, **given) -> PrecisionResult:
    return PrecisionResult(
        name,
        step_ms=Interval(step_ms, step_ms * 0.98, step_ms * 1.02),
        samples_per_s=8000 / step_ms,
        peak_memory_bytes=peak,
        memory=dict.fromkeys(PARTS, peak // 4),
        host_syncs_per_step=0,
        skipped_steps=0,
        matmul_dtypes={"bfloat16": 6},
        **given,
    )


def report(task: str = "made-up", name: str = "bf16", speedup: float = 1.8) -> BenchReport:
    found = BenchReport(task, "cpu", environment(torch.device("cpu")), unit="samples", rounds=60)
    other = precision(
        name,
        50.0 / speedup,
        40_000_000,
        speedup=Interval(speedup, speedup - 0.05, speedup + 0.05),
        memory_reduction=0.6,
    )
    cut = PrecisionResult("fp16", status="cut short", reason="fp16: its first step took 9 s")
    found.precisions = [precision("fp32", 50.0, 100_000_000), other, cut]
    found.noise = Interval(1.01, 0.99, 1.03)
    found.parity = ParityReport(
        metric="accuracy",
        margin=0.01,
        steps=300,
        seeds=5,
        arms={name: Parity(5, 0.0011, -0.0008, 0.0030, 0.0015, 0.0002, 0.9998, "equivalent")},
        finals={"fp32": [0.97, 0.98], name: [0.972, 0.981]},
        curves={
            each: {"step": [1, 2], "mean": [2.0, 1.5], "low": [1.9, 1.4], "high": [2.1, 1.6]}
            for each in ("fp32", name)
        },
        scales={name: {"step": [1.0, 2.0], "scale": [65536.0, 32768.0], "skipped": [1.0]}},
    )
    for each in found.precisions[1:]:
        each.requirements = judge(each, Thresholds(), found.parity, found.noise)
    found.verdict = verdict(found, Thresholds())
    return found


class Page(HTMLParser):
    """Cells of each table, headings, and what a screen reader needs."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.ids: list[str] = []
        self.headings: list[int] = []
        self.labels: list[str] = []
        self.tags: set[str] = set()
        self._rows: list[list[str]] | None = None
        self._cell = False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.tags.add(tag)
        if "id" in given:
            self.ids.append(given["id"])
        if tag == "table":
            self._rows = self.tables[given["id"]] = []
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._rows[-1].append("")
            self._cell = True
        elif re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if given.get("role") == "img":
            self.labels.append(given.get("aria-label", ""))

    def handle_endtag(self, tag):
        self._cell = self._cell and tag not in ("td", "th")

    def handle_data(self, data):
        if self._cell:
            self._rows[-1][-1] += data


def test_the_page_shows_the_figures_of_the_json():
    data = report().to_json()
    page = Page(to_html(report()))
    rows = {row[0]: row for row in page.tables["speed-table"][1:]}
    for each in data["precisions"]:
        if each["step_ms"]:
            assert float(rows[each["name"]][1]) == pytest.approx(
                each["step_ms"]["median"], abs=5e-3
            )
        if each["speedup"]:
            assert float(rows[each["name"]][3]) == pytest.approx(
                each["speedup"]["median"], abs=5e-4
            )
    rows = {row[0]: row for row in page.tables["memory-table"][1:]}
    for each in data["precisions"]:
        if each["memory"]:
            assert float(rows[each["name"]][-3]) * 1e6 == each["peak_memory_bytes"]
    rows = {row[0]: row for row in page.tables["parity-table"][1:]}
    parity = data["parity"]["arms"]["bf16"]
    assert rows["bf16"][2:4] == ["+0.0011", "-0.0008 to +0.0030"]
    assert float(rows["bf16"][2]) == parity["difference"]
    statuses = [(row[1], row[2]) for row in page.tables["requirements"][1:]]
    assert statuses == [
        (each["name"], requirement["status"])
        for each in data["precisions"]
        for requirement in each["requirements"].values()
    ]


def test_the_page_is_one_file_without_scripts_and_small():
    text = to_html(report())
    assert len(text.encode()) < 2_000_000
    page = Page(text)
    assert not page.tags & {"script", "link", "iframe", "img", "object"}
    outside = re.findall(r'(?:href|src)="(?!#)([^"]*)"|url\((?!#)([^)]*)\)', text)
    assert outside == []
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text


def test_a_screen_reader_finds_its_way():
    page = Page(to_html(report()))
    assert page.headings[0] == 1
    assert page.headings.count(1) == 1
    assert all(b - a <= 1 for a, b in zip(page.headings, page.headings[1:], strict=False))
    assert len(page.labels) == 5
    assert all(len(label) > 20 for label in page.labels)
    assert len(page.ids) == len(set(page.ids))


def contrast(first: str, second: str) -> float:
    """WCAG 2 contrast ratio of two colours."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def test_text_has_enough_contrast_in_light_and_dark():
    text = to_html(report())
    schemes = [dict(re.findall(r"--(\w+): (#\w{6})", part)) for part in text.split("@media")[:2]]
    assert len(schemes) == 2
    for colours in schemes:
        for name in ("ink", "soft", "pass", "fail", "open"):
            for ground in ("page", "card"):
                assert contrast(colours[name], colours[ground]) >= 4.5, (name, ground)


HOSTILE = "<script>alert(1)</script>\"&'|`*"


def test_hostile_names_stay_text():
    text = to_html(report(task=HOSTILE, name=HOSTILE))
    assert "<script>" not in text
    assert "&lt;script&gt;" in text
    marked = to_markdown(report(task=HOSTILE, name=HOSTILE))
    assert "<script>" not in marked.replace("\\<", "")
    assert all(line.count(" | ") in (0, 3, 5) for line in marked.splitlines())


@pytest.mark.parametrize("width", [50, 80, 120])
def test_markup_in_names_is_no_markup_on_a_terminal_nor_in_a_figure(width):
    name = "$\\frac$[/b][car]"
    made = report(task=name, name=name)
    made.parity.metric = name
    assert "<svg" in to_html(made)
    paper = io.StringIO()
    render(made, Console(file=paper, width=width))
    assert "[/b][car]" in paper.getvalue()


def test_small_models_are_measured_in_kilobytes_and_a_loss_nobody_gives_has_no_column():
    made = report()
    for each in made.precisions[:2]:
        each.peak_memory_bytes, each.memory = 8_000, dict.fromkeys(PARTS, 2_000)
    paper = io.StringIO()
    render(made, Console(file=paper, width=80))
    shown = paper.getvalue()
    assert "8.0 kB" in shown
    assert "kB at the peak" in shown
    assert "loss" not in shown.split("kB at the peak")[0]
    rows = Page(to_html(made)).tables["memory-table"]
    assert rows[0][0] == "kB at the peak"
    assert float(rows[1][-3]) == 8.0
    made.precisions[0].loss_after = 1.5
    render(made, Console(file=paper, width=80))
    assert "1.500" in paper.getvalue()


def test_json_comes_back_as_the_same_report():
    written = report().to_json()
    assert BenchReport.from_json(json.loads(json.dumps(written))).to_json() == written
    broken = report()
    broken.precisions[1].loss_after = math.nan
    again = BenchReport.from_json(json.loads(json.dumps(broken.to_json())))
    assert again.precisions[1].loss_after is None  # JSON has no NaN


@pytest.mark.parametrize("data", [{}, {"schema": "ampwise.bench/9"}, {"schema": "ampwise.bench/1"}])
def test_something_else_is_no_report(data):
    with pytest.raises(UsageError):
        BenchReport.from_json(data)


# -- two runs --------------------------------------------------------------------------------------


def test_the_same_run_twice_has_no_regression():
    assert compare(report(), report(), ("a", "b")).regressions == []


def test_slower_larger_and_worse_are_regressions():
    after = report(speedup=1.5)
    after.precisions[1].peak_memory_bytes = 50_000_000
    before = report()
    for each, equivalent in ((before, True), (after, False)):
        each.precisions[1].accuracy = {
            "metric": "accuracy", "difference": -0.02, "equivalent": equivalent,
        }  # fmt: skip
    found = compare(before, after, ("a", "b"))
    assert {each.figure for each in found.regressions} == {
        "speed, vs fp32", "peak MB", "accuracy, vs fp32",
    }  # fmt: skip
    assert compare(after, before, ("b", "a")).regressions == []


def test_a_change_within_its_interval_is_none():
    assert compare(report(speedup=1.80), report(speedup=1.75), ("a", "b")).regressions == []


def test_runs_of_different_tasks_do_not_compare():
    with pytest.raises(UsageError, match="a is of task made-up, b of other"):
        compare(report(), report(task="other"), ("a", "b"))


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path):
    def store(name: str, made: BenchReport):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "bench.json").write_text(json.dumps(made.to_json()))
        return folder

    return store


def test_every_format_of_a_stored_run(stored, capsys):
    folder = stored("run", report())
    assert main(["report", str(folder)]) == 0
    assert "Use bf16" in capsys.readouterr().out
    assert main(["report", str(folder), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == report().to_json()
    assert main(["report", str(folder), "--format", "markdown"]) == 0
    assert capsys.readouterr().out == to_markdown(report())
    assert main(["report", str(folder), "--format", "html"]) == 0
    assert capsys.readouterr().out == f"wrote {folder}/report.html\n"
    assert (folder / "report.html").read_text() == to_html(report())
    assert main(["report", str(folder), "--format", "html"]) == 0
    assert capsys.readouterr().out.startswith("replaced ")


def test_the_gate_of_one_run_and_of_two(stored, capsys):
    good = report()
    good.precisions = good.precisions[:2]
    before, after = stored("before", good), stored("after", report(speedup=1.3))
    assert main(["report", str(before), "--gate"]) == 0
    assert main(["report", str(after), "--gate"]) == 1
    assert main(["report", str(before), str(after), "--gate"]) == 1
    assert main(["report", str(after), str(before), "--gate"]) == 0
    assert "regression" in capsys.readouterr().out


def test_what_cannot_be_shown_is_one_line(stored, tmp_path, capsys):
    (tmp_path / "torn.json").write_text('{"schema": "ampwise.be')
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "trained").mkdir()
    (tmp_path / "trained" / "run.json").write_text('{"command": "bench"}')
    cases = {
        (str(tmp_path / "trained"),): "holds no finished bench run",
        ("nowhere",): "No such file or directory; expected the folder of a run",
        (): "expected one RUN, or two to compare, got 0",
        (str(tmp_path / "torn.json"),): "is no JSON",
        (str(tmp_path / "list.json"),): "expected the result of a run, got a list",
        (str(stored("a", report())), "--format", "pdf"): "expected one of terminal, json, markdown",
        (str(tmp_path / "a"), "--format", "html", "--out", "no/where.html"): "cannot write",
    }
    for arguments, message in cases.items():
        assert main(["report", *arguments]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert message in said, arguments


def test_a_copy_is_not_changed_by_rendering():
    made = report()
    before = copy.deepcopy(made)
    to_html(made)
    assert made == before


def test_the_parts_of_memory_have_one_name_on_a_terminal_and_on_the_page():
    found, file = report(), io.StringIO()
    render(found, Console(file=file, width=80))
    shown = file.getvalue()
    assert max(map(len, shown.splitlines())) <= 80
    for part in PARTS:
        assert all(word in shown for word in part.split())
        assert part in to_html(found)
    assert "casts" not in shown


def test_one_thread_and_one_round_are_not_several():
    found, file = report(), io.StringIO()
    found.environment, found.rounds = {**found.environment, "threads": 1}, 1
    render(found, Console(file=file, width=80))
    for shown in (file.getvalue(), to_html(found), to_markdown(found)):
        assert "1 thread" in shown
        assert "1 round" in shown
        assert "1 threads" not in shown
        assert "1 rounds" not in shown


def test_a_precision_has_one_colour_in_every_figure_and_no_part_has_it():
    presets = ["fp32", "tf32", "bf16", "fp16", "bf16-master", "bf16-pure", "fp8"]
    colours = {each: canvas.colour_of(each) for each in presets}
    assert len(set(colours.values())) == len(presets)
    assert canvas.colour_of("bf16:islands=head") == colours["bf16"]
    assert not set(colours.values()) & set(canvas.SHADES)
    assert len(canvas.SHADES) == len(memory.PARTS)


def test_the_table_of_memory_is_a_table_in_80_columns():
    text = io.StringIO()
    render(report(), Console(file=text, width=80))
    lines = text.getvalue().splitlines()
    head = next(line for line in lines if "at the peak" in line)
    assert head.split()[-2:] == ["fp32", "bf16"]
    places = [
        next(n for n, line in enumerate(lines) if line.startswith(f" {each}")) for each in PARTS
    ]
    assert places == sorted(places)
    assert max(map(len, lines)) <= 80
