"""Whatever a run's folder holds: a report, or one line; and what was written reads back the same."""

from __future__ import annotations

import copy
import io
import json
import math
import os
import re
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ampwise.bench.result import BenchReport
from ampwise.cli.main import main
from ampwise.document import MAX_BYTES, Document, read
from ampwise.errors import UsageError
from ampwise.numerics.result import Diagnosis, Finding, Fix, OpError, Origin, Values
from ampwise.observe.result import RunReport
from ampwise.report import stored
from ampwise.report.compare import compare
from ampwise.report.train import TrainedRun
from ampwise.step import Activity
from ampwise.training.config import TrainResult
from ampwise.tune.result import Tried, Tuned
from ampwise_lint.base.console import Console
from tests.report.observed import observed
from tests.report.test_report import report
from tests.report.test_scaling import scaling_report as scaled
from tests.report.test_stored import verification
from tests.test_neutral import HOSTILE, TEXTS, harmless

QUICK = settings(
    max_examples=150, derandomize=True, deadline=None, database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)  # fmt: skip
FEW = settings(QUICK, max_examples=20)


def diagnosis() -> Diagnosis:
    values = Values("self", "float16", [2, 3], 3.0, 0.5, 0.0, 0.1, 0.0)
    origin = Origin(
        "aten::mm", "net", "a.py", 3, "q @ k", "float16", inputs=[values], outputs=[values]
    )
    fix = Fix("scale", "q / 8", verified=True, cost="1 %", step_time_ratio=1.01)
    return Diagnosis(
        "fault", "t", "fp16", "cpu", 3, "forward", origin, "RANGE_OVERFLOW", "too large", [fix],
        [Finding("UNDERFLOW", "small", "backward", origin, [fix])], ["net", "loss"], "loss", 1.0, 8.0,
        [OpError("mm", "net", "a.py", 3, "forward", "float16", None, 30.0, 0.1)],
        {"net": {"-3": 0.5, "inf": 0.1}}, ["note"],
    )  # fmt: skip


def tuned() -> Tuned:
    tried = Tried("bf16", "bf16", ["head"], "holds", 3, math.inf, 1.2)
    return Tuned("t", "cpu", 20.0, [tried], "bf16", ["Use it."], report(), finished=True)


def trained() -> dict:
    activity = Activity({"bfloat16": 3}, {"float32": 2}, loss_scale_live=True, watched=True)
    result = TrainResult("t", "bf16", "runs/t", steps=3, loss=math.nan, metrics={"acc": 0.5},
                         activity=activity, messages=["said"])  # fmt: skip
    return {
        "command": "train", "result": result.to_json(), "environment": report().environment,
        "config": {"seed": 0, "hyperparameters": [{"lr": 1}], "changes": ["x"]}, "task": {"a": 1},
        "policy": {"reasons": ["because"]}, "status": "finished",
    }  # fmt: skip


def written(made: Document) -> dict:
    return json.loads(json.dumps(made.to_json(), allow_nan=False))


REPORTS = {
    "bench": lambda: written(report()),
    "diagnosis": lambda: written(diagnosis()),
    "observed": lambda: written(observed(faults=[diagnosis()])),
    "scaling": lambda: written(scaled()),
    "tune": lambda: written(tuned()),
    "verify": lambda: written(verification()),
    "run": lambda: json.loads(json.dumps(trained())),
}
STEPS = "".join(
    json.dumps({"step": n, "train/loss": 1.0 / n, "train/step_s": 0.1, "train/data_wait_s": 0.05, "amp/loss_scale": 2.0**n, "amp/grad_norm": 0.5,
                "eval/loss": 2.0, "amp/found_inf": n == 2}) + "\n"
    for n in (1, 2, 3)
)  # fmt: skip


def folder_of(folder, name: str, data, steps: str = STEPS):
    folder.mkdir(exist_ok=True)
    for each in folder.iterdir():
        each.unlink()
    (folder / f"{name}.json").write_text(json.dumps(data))
    (folder / "steps.jsonl").write_text(steps)
    return folder


def shown(folder, *, html: bool) -> None:
    """Read a run and show it in every form; a `UsageError` is the one that may come."""
    try:
        run = stored.load(folder)
        forms = stored.forms_of(run)
        json.dumps(run.to_json())
        harmless(forms.to_markdown(run))
        paper = io.StringIO()
        forms.render(run, Console(file=paper, width=80))
        harmless(paper.getvalue())
        if isinstance(run, BenchReport):
            json.dumps(compare(run, run, ("a", "b")).to_json(), allow_nan=False)
        if html:
            page = harmless(forms.to_html(run))
            assert "<script" not in page
    except UsageError as refused:
        said = harmless(str(refused))
        assert "\n" not in said


# -- reading back ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REPORTS)
def test_what_was_written_reads_back_the_same(tmp_path, name):
    data = REPORTS[name]()
    folder = folder_of(tmp_path / "run", name, data)
    found = stored.load(folder).to_json()
    if name == "run":
        assert found.pop("steps") == [json.loads(line) for line in STEPS.splitlines()]
    assert found == data
    shown(folder, html=True)


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.mark.parametrize(
    "name", ["charlm-base-cpu", "charlm-base-cpu-avx512bf16", "scaling-charlm-cpu"]
)
def test_reports_of_earlier_versions_are_read(tmp_path, name):
    """Measured weeks ago, by what there was then."""
    content = json.loads((RESULTS / f"{name}.json").read_text())
    data = content.get("report", content)
    shown(folder_of(tmp_path / "run", "bench", data), html=True)
    run = stored.load(tmp_path / "run")
    assert run.to_json()["task"] == data["task"]


@QUICK
@given(TEXTS, st.floats(allow_nan=False, allow_infinity=False) | st.none(), st.integers(0, 2**62))
def test_generated_reports_read_back_the_same(text, number, integer):
    made = report(task=text)
    made.left_out, made.notes, made.environment["cuda"] = {text: text}, [text], number
    made.precisions[1].peak_memory_bytes = integer
    made.precisions[1].accuracy = {
        "metric": text,
        "difference": 0.5,
        "seeds": 5,
        "equivalent": None,
    }
    data = written(made)
    assert written(BenchReport.from_json(data)) == data
    found = diagnosis()
    found.path, found.histograms = [text], {text: {text: 0.5}}
    assert Diagnosis.from_json(written(found)) == found


def test_nan_is_null_in_reports_and_a_word_in_searches():
    made = report()
    made.precisions[0].loss_after = math.inf
    made.parity.curves["bf16"]["mean"] = [math.nan, 1.0]
    again = BenchReport.from_json(written(made))
    assert again.precisions[0].loss_after is None
    assert math.isnan(again.parity.curves["bf16"]["mean"][0])
    assert written(tuned())["tried"][0]["gradient_db"] == "inf"
    assert Tuned.from_json(written(tuned())) == tuned()


def test_the_keys_on_disk_are_the_fields():
    """The schema, spelled once more: what other programs read."""
    data = written(report())
    assert list(data) == ["schema", *(name for name in asdict(report()))]
    assert data["schema"] == "ampwise.bench/1"
    assert data["precisions"][0]["step_ms"].keys() == {"median", "low", "high"}
    assert written(tuned())["bench"] == data
    extra = {"score": 0.5, "passed": 1, "applicable": 2, "decision": "PASS"}
    assert written(verification()) == {
        "schema": "ampwise.verify/1", **asdict(verification()), **extra,
    }  # fmt: skip


def test_keys_of_a_newer_version_are_left_alone():
    data = written(report()) | {"newer": [1]}
    assert BenchReport.from_json(data) == BenchReport.from_json(written(report()))


# -- what does not fit ------------------------------------------------------------------------------


def changed(name: str, path: tuple, value) -> dict:
    data = REPORTS[name]()
    place = data
    for key in path[:-1]:
        place = place[key]
    if value is KeyError:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return data


MISFITS = [
    ("bench", ("precisions", 1, "step_ms", "median"), None,
     "precisions[1].step_ms.median: expected a number, got null"),
    ("bench", ("precisions", 1, "step_ms"), [], "precisions[1].step_ms: expected an object, got a list"),
    ("bench", ("precisions", 1, "speedup", "low"), KeyError,
     "precisions[1].speedup.low: expected a value, got nothing"),
    ("bench", ("precisions", 1, "peak_memory_bytes"), 10**400,
     "precisions[1].peak_memory_bytes: expected an integer, got one that is too large"),
    ("bench", ("precisions", 1, "samples_per_s"), 10**400,
     "precisions[1].samples_per_s: expected a number, got one that is too large"),
    ("bench", ("precisions", 1, "requirements", "speedup", "status"), "maybe",
     "precisions[1].requirements.speedup.status: expected one of pass, fail, not measured, got 'maybe'"),
    ("bench", ("environment", "device_name"), 3,
     "environment.device_name: expected a string, got an integer"),
    ("bench", ("parity", "curves", "bf16", "step"), KeyError,
     "parity.curves.bf16.step: expected a value, got nothing"),
    (
        "bench",
        ("precisions", 1, "accuracy"),
        {"difference": 0.5},
        "precisions[1].accuracy.metric: expected a value, got nothing",
    ),
    ("bench", ("rounds",), True, "rounds: expected an integer, got true or false"),
    ("bench", ("schema",), "ampwise.bench/9", "schema ampwise.bench/1, got 'ampwise.bench/9'"),
    ("bench", ("schema",), {}, "expected a report of schema ampwise.bench/1, got an object"),
    ("diagnosis", ("status",), "odd", "status: expected one of fault, clean"),
    ("diagnosis", ("origin", "inputs", 0, "shape", 1), "3",
     "origin.inputs[0].shape[1]: expected an integer, got a string"),
    ("observed", ("findings", 0, "severity"), "fatal",
     "findings[0].severity: expected one of error, warning, info, got 'fatal'"),
    ("observed", ("precision", "ran", "forward", "float32"), 0.5,
     "precision.ran.forward.float32: expected an integer, got a number"),
    ("observed", ("race", "bf16", "speed", "low"), KeyError,
     "race.bf16.speed.low: expected a value, got nothing"),
    ("observed", ("faults", 0, "schema"), "ampwise.diagnosis/2",
     "faults[0].schema: expected ampwise.diagnosis/1, got 'ampwise.diagnosis/2'"),
    ("observed", ("script",), KeyError, "script: expected a value, got nothing"),
    ("scaling", ("results", 0, "held_bytes"), None, "results[0].held_bytes: expected a list, got null"),
    ("tune", ("bench", "precisions"), {}, "bench.precisions: expected a list, got an object"),
    ("tune", ("bench", "schema"), "ampwise.bench/2", "bench.schema: expected ampwise.bench/1"),
    ("verify", ("findings", 0, "critical"), 1, "findings[0].critical: expected true or false, got an"),
    ("run", ("result", "metrics", "acc"), [], "result.metrics.acc: expected a number, got a list"),
    ("run", ("config", "changes"), "x", "config.changes: expected a list, got a string"),
    ("run", ("result",), KeyError, "result: expected a value, got nothing"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "path", "value", "message"), MISFITS)
def test_a_misfit_is_one_line_with_its_place(tmp_path, capsys, name, path, value, message):
    folder = folder_of(tmp_path / "run", name, changed(name, path, value))
    assert main(["report", str(folder)]) == 2
    said = capsys.readouterr().err
    assert f"{name}.json: " in said
    assert message in said
    assert said.count("\n") == 1


def nested(levels: int) -> str:
    return '{"schema": "ampwise.bench/1", "task": ' + "[" * levels + "]" * levels + "}"


CONTENTS = {
    "invalid UTF-8": (b'{"task": "\xff\xfe"}', "is no JSON"),
    "nothing": (b"", "is no JSON"),
    "deep": (nested(200).encode(), "nested too deeply"),
    "deeper": (nested(200_000).encode(), "nested too deeply"),
    "NaN": (b'{"schema": "ampwise.bench/1", "rounds": NaN}', "NaN is no value"),
    "many digits": (b'{"rounds": 1' + b"0" * 5000 + b"}", "is no JSON"),
    "null": (b"null", "expected the result of a run, got null"),
    "number": (b"1e400", "expected the result of a run, got a number"),
}


@pytest.mark.parametrize("file", ["bench.json", "run.json"])
@pytest.mark.parametrize("name", CONTENTS)
def test_content_that_is_no_report_is_one_line(tmp_path, capsys, name, file):
    content, message = CONTENTS[name]
    (tmp_path / file).write_bytes(content)
    for target in (tmp_path, tmp_path / file):
        assert main(["report", str(target)]) == 2
        said = capsys.readouterr().err
        assert message in said
        assert said.count("\n") == 1


def sparse(path) -> None:
    with path.open("wb") as file:
        file.truncate(2_000_000_000)


THINGS = {
    "pipe": (os.mkfifo, "expected a file, got a folder, pipe or device"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "expected a file, got a folder, pipe"),
    "folder": (lambda path: path.mkdir(), "expected a file, got a folder, pipe or device"),
    "loop": (lambda path: path.symlink_to(path.name), "holds no run"),
    "sparse": (sparse, f"more than {MAX_BYTES // 1_000_000} MB"),
}


@pytest.mark.parametrize("file", ["bench.json", "run.json"])
@pytest.mark.parametrize("name", THINGS)
@pytest.mark.timeout(60)
def test_what_is_no_file_is_one_line_and_never_waited_for(tmp_path, capsys, name, file):
    make, message = THINGS[name]
    make(tmp_path / file)
    assert main(["report", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert main(["report", str(tmp_path / file), str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "bug" not in said


STEP_FILES = {
    "torn in the middle": ('{"step": 1}\n{"st\n{"step": 3}\n', "line 2"),
    "a list": ("[]\n", "line 1"),
    "no number": ('{"step": "1"}\n', "line 1"),
    "too large": (f'{{"step": {10**30}}}\n', "line 1"),
    "no line": ("\0" * 1_100_000, "line 1"),
    "deep": ('{"step": 1, "x": ' + "[" * 100 + "]" * 100 + "}\n", "line 1"),
}


@pytest.mark.parametrize("kind", ["run", "observed"])
@pytest.mark.parametrize("name", STEP_FILES)
def test_steps_that_are_none_are_one_line(tmp_path, capsys, name, kind):
    steps, place = STEP_FILES[name]
    folder = folder_of(tmp_path / "run", kind, REPORTS[kind](), steps)
    assert main(["report", str(folder)]) == 2
    said = capsys.readouterr().err
    assert f"{place} is damaged: expected an object with a step and its metrics" in said
    assert said.count("\n") == 1


def test_steps_that_are_a_pipe_are_one_line(tmp_path, capsys):
    folder = folder_of(tmp_path / "run", "run", trained())
    (folder / "steps.jsonl").unlink()
    os.mkfifo(folder / "steps.jsonl")
    assert main(["report", str(folder)]) == 2
    assert "expected a file, got a folder, pipe" in capsys.readouterr().err


def test_figures_that_cannot_be_drawn_are_left_out(tmp_path):
    odd = '{"step": 1, "train/loss": "nan", "amp/grad_norm": 1e308, "amp/loss_scale": "inf"}\n'
    run = TrainedRun.load(folder_of(tmp_path / "run", "run", trained(), odd))
    assert "<svg" not in stored.forms_of(run).to_html(run)


# -- anything at all --------------------------------------------------------------------------------

JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS
    | st.sampled_from([10**400, -1, 0, 1e308, -1e308, "", "nan", "inf", HOSTILE, "ampwise.tune/1"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


def places(data, path=()):
    """Paths of everything inside a document."""
    items = (
        data.items()
        if isinstance(data, dict)
        else enumerate(data)
        if isinstance(data, list)
        else ()
    )
    for key, each in items:
        yield (*path, key)
        yield from places(each, (*path, key))


MUTATIONS = {name: sorted(places(make()), key=str) for name, make in REPORTS.items()}


@st.composite
def mutated(draw) -> tuple[str, dict]:
    name = draw(st.sampled_from(sorted(REPORTS)))
    data = REPORTS[name]()
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(MUTATIONS[name]))
        place = data
        try:
            for key in path[:-1]:
                place = place[key]
            if draw(st.booleans()):
                place[path[-1]] = draw(JUNK)
            else:
                del place[path[-1]]
        except (KeyError, IndexError, TypeError):
            pass  # an earlier change took it away
    return name, data


@QUICK
@given(mutated())
def test_a_changed_report_is_shown_or_refused_in_one_line(tmp_path, change):
    shown(folder_of(tmp_path / "run", *change), html=False)


@FEW
@given(mutated())
def test_a_page_of_a_changed_report_is_drawn_or_refused(tmp_path, change):
    shown(folder_of(tmp_path / "run", *change), html=True)


@QUICK
@given(st.sampled_from([BenchReport, Diagnosis, RunReport, Tuned, TrainResult]), JUNK)
def test_anything_else_is_refused(kind, data):
    for given_ in (data, {"schema": kind.schema, "result": data}):
        with pytest.raises(UsageError):
            kind.from_json(given_)


@FEW
@given(TEXTS)
def test_names_from_outside_are_harmless_in_every_form(tmp_path, text):
    for name, make in REPORTS.items():
        data = json.loads(json.dumps(make()), object_hook=lambda each: renamed(each, text))
        shown(
            folder_of(tmp_path / "run", name, data),
            html=name in ("diagnosis", "observed", "verify"),
        )


def renamed(each: dict, text: str) -> dict:
    """An object whose free texts are another one."""
    free = {"task", "reason", "how", "what", "source", "file", "module", "op", "evidence", "requirement",
            "name", "explanation", "cause", "device_name", "torch", "folder", "unit", "cost",
            "script", "ending", "message", "dtype", "why", "note", "code", "float32_products"}  # fmt: skip
    return {
        key: text if key in free and isinstance(value, str) else value
        for key, value in each.items()
    }


def test_figures_hold_names_as_they_are(tmp_path):
    made = report(name=HOSTILE)
    made.parity.metric = HOSTILE
    forms = stored.forms_of(made)
    page = harmless(forms.to_html(made))
    assert "<script" not in page
    assert page.count("\\x1b[31mred") > 5
    found = diagnosis()
    found.histograms = {HOSTILE: {"0": 1.0}}
    assert "\\x1b[31mred" in harmless(stored.forms_of(found).to_html(found))
    assert not re.search("[\ud800-\udfff]", page)


def test_reading_knows_what_a_type_says():
    assert read(list[int], [1, 2]) == [1, 2]
    with pytest.raises(UsageError, match=r"^the report: \[1\]: expected an integer, got a string"):
        read(list[int], [1, "2"])
    assert copy.deepcopy(read(dict[str, float | None], {"a": None, "b": 1})) == {"a": None, "b": 1}


def test_a_record_without_its_command_is_one_line(tmp_path, capsys):
    for content, message in (
        ({}, "command: expected a value"),
        ({"command": []}, "command: expected a"),
    ):
        (tmp_path / "run.json").write_text(json.dumps(content))
        assert main(["report", str(tmp_path)]) == 2
        said = capsys.readouterr().err
        assert message in said
        assert said.count("\n") == 1
