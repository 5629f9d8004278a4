"""A run read back from its folder, and the forms it can be shown in."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from ampwise.bench.result import BenchReport
from ampwise.bench.scaling_report import ScalingReport
from ampwise.errors import UsageError
from ampwise.numerics.result import Diagnosis
from ampwise.numerics.search import Tuned
from ampwise.report import bench, diagnosis, html, markdown, scaling, train, tune, verify
from ampwise.report.train import TrainedRun
from ampwise.verify.result import Verification
from ampwise.words import counted

Run = BenchReport | Diagnosis | ScalingReport | TrainedRun | Tuned | Verification


class Forms(NamedTuple):
    """How one kind of run is shown; each takes the run."""

    render: Callable[[Any, Console], None]
    to_markdown: Callable[[Any], str]
    to_html: Callable[[Any], str]


_FORMS: Mapping[type[Run], Forms] = {
    BenchReport: Forms(bench.render, markdown.to_markdown, html.to_html),
    Diagnosis: Forms(diagnosis.render, diagnosis.to_markdown, diagnosis.to_html),
    ScalingReport: Forms(scaling.render, scaling.to_markdown, scaling.to_html),
    TrainedRun: Forms(train.render_run, train.to_markdown, train.to_html),
    Tuned: Forms(tune.render, tune.to_markdown, tune.to_html),
    Verification: Forms(verify.render, verify.to_markdown, verify.to_html),
}

_FILES: Mapping[str, Callable[[Mapping[str, Any]], Run]] = {
    "bench.json": BenchReport.from_json,
    "diagnosis.json": Diagnosis.from_json,
    "scaling.json": ScalingReport.from_json,
    "tune.json": Tuned.from_json,
    "verify.json": Verification.from_json,
}
"""Result files that a run's folder may hold, or ``--json`` may have written, and how each is read.

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
    content = _content(file)
    if file.name == "run.json":
        if content["command"] == "train":
            return TrainedRun.load(file.parent)
        content = content["result"]
    schema = str(content.get("schema"))
    read = _FILES.get(f"{schema.removeprefix('ampwise.').partition('/')[0]}.json")
    try:
        return (read or BenchReport.from_json)(content)
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from None


def forms_of(run: Run) -> Forms:
    """How to show a run."""
    return _FORMS[type(run)]


def _result_file(folder: Path) -> Path:
    record = folder / "run.json"
    # A train run may hold the diagnosis of one of its steps, too.
    trained = record.exists() and _content(record).get("command") == "train"
    for name in () if trained else _FILES:
        if (folder / name).exists():
            return folder / name
    if not record.exists():
        raise UsageError(
            f"{folder} holds no run: expected the folder of a bench, verify, diagnose, tune or "
            "train run, such as runs/bench-digits-1"
        )
    content = _content(record)
    command = content.get("command")
    if command != "train" and "result" not in content:
        made = content.get("steps")
        steps = f" after {counted(made, 'step')}" if isinstance(made, int) else ""
        known = f"it is {content['status']}{steps}" if "status" in content else "no result is there"
        raise UsageError(f"{folder} holds no finished {command} run: {known}")
    return record


def _content(file: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(file.read_text())
    except OSError as error:
        raise UsageError(
            f"{file}: {error.strerror}; expected the folder of a run, such as runs/bench-digits-1"
        ) from None
    except ValueError as error:
        raise UsageError(f"{file} is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{file}: expected the result of a run, got a {type(content).__name__}")
    return content  # pyright: ignore[reportUnknownVariableType]
