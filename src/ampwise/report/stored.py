"""A run read back from its folder, and the forms it can be shown in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Required, TypedDict

from ampwise.bench.result import BenchReport
from ampwise.bench.scaling_report import ScalingReport
from ampwise.document import Document, read
from ampwise.document import load as load_file
from ampwise.errors import UsageError
from ampwise.numerics.result import Diagnosis
from ampwise.observe.result import RunReport
from ampwise.report import bench, diagnosis, html, markdown, run, scaling, train, tune, verify
from ampwise.report.observed import ObservedRun
from ampwise.report.train import TrainedRun
from ampwise.tune.result import Tuned
from ampwise.verify.result import Verification
from ampwise_lint.base.console import Console
from ampwise_lint.base.words import counted

Run = BenchReport | Diagnosis | ObservedRun | ScalingReport | TrainedRun | Tuned | Verification


class Forms(NamedTuple):
    """How one kind of run is shown; each takes the run."""

    render: Callable[[Any, Console], None]
    to_markdown: Callable[[Any], str]
    to_html: Callable[[Any], str]


_FORMS: Mapping[type[Run], Forms] = {
    BenchReport: Forms(bench.render, markdown.to_markdown, html.to_html),
    Diagnosis: Forms(diagnosis.render, diagnosis.to_markdown, diagnosis.to_html),
    ObservedRun: Forms(run.render, run.to_markdown, run.to_html),
    ScalingReport: Forms(scaling.render, scaling.to_markdown, scaling.to_html),
    TrainedRun: Forms(train.render_run, train.to_markdown, train.to_html),
    Tuned: Forms(tune.render, tune.to_markdown, tune.to_html),
    Verification: Forms(verify.render, verify.to_markdown, verify.to_html),
}

_KINDS: Mapping[str, type[Document]] = {
    "bench": BenchReport,
    "diagnosis": Diagnosis,
    "observed": RunReport,
    "scaling": ScalingReport,
    "tune": Tuned,
    "verify": Verification,
}
"""By the name of the result file that a run's folder may hold, and of the schema in it.

The results of ``train``, and of ``bench`` under torchrun, are in ``run.json`` itself.
"""


def load(path: Path) -> Run:
    """The run in a folder, or in one of its files.

    Raises
    ------
    UsageError
        When there is none, or it is damaged.
    """
    if path.name == "run.json":
        path = path.parent
    file = _result_file(path) if path.is_dir() else path
    content = load_file(file)
    if file.name == "run.json":
        if content.get("command") == "train":
            return TrainedRun.load(file.parent)
        content = content["result"]
    found: Any = _kind_of(content).from_json(content, file)
    return ObservedRun.of(found, file) if isinstance(found, RunReport) else found


def forms_of(run: Run) -> Forms:
    """How to show a run."""
    return _FORMS[type(run)]


class _Started(TypedDict, total=False):
    """What is in ``run.json`` from the beginning, and at the end of some runs."""

    command: Required[str]
    status: str
    steps: int
    result: Any


def _kind_of(content: Any) -> type[Document]:
    """The kind whose schema it names; of something else, one that says so."""
    schema = content.get("schema") if isinstance(content, dict) else None
    return next((each for each in _KINDS.values() if each.schema == schema), BenchReport)


def _result_file(folder: Path) -> Path:
    record = folder / "run.json"
    # A train run may hold the diagnosis of one of its steps, too.
    trained = record.exists() and load_file(record).get("command") == "train"
    for name in () if trained else _KINDS:
        if (folder / f"{name}.json").exists():
            return folder / f"{name}.json"
    if not record.exists():
        raise UsageError(
            f"{folder} holds no run: expected the folder of a bench, verify, diagnose, tune, train "
            "or observed run, such as runs/bench-digits-1"
        )
    content = read(_Started, load_file(record), record)
    if not trained and "result" not in content:
        steps = f" after {counted(content['steps'], 'step')}" if "steps" in content else ""
        known = f"it is {content['status']}{steps}" if "status" in content else "no result is there"
        kind = "observed" if content["command"] == "run" else content["command"]
        raise UsageError(f"{folder} holds no finished {kind} run: {known}")
    return record
