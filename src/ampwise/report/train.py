"""A training run on a terminal, as Markdown and as a page, at its end or from its folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from rich.table import Table
from rich.text import Text

from ampwise.data.feed import SLOW_LOADER, slow_loader
from ampwise.document import load as load_file
from ampwise.document import read
from ampwise.report import curves
from ampwise.report.canvas import colour_of
from ampwise.report.page import cell, figure, page, prose, table
from ampwise.telemetry import names
from ampwise.telemetry.run import read_steps
from ampwise.training.config import TrainResult
from ampwise_lint.base.console import Console, plain
from ampwise_lint.base.words import counted


class _Config(TypedDict, total=False):
    hyperparameters: list[dict[str, Any]]
    changes: list[str]


class _Policy(TypedDict, total=False):
    reasons: list[str]


@dataclass
class _Record:
    """What is read of a run's ``run.json``."""

    result: TrainResult
    config: _Config = field(default_factory=_Config)
    task: dict[str, Any] = field(default_factory=dict[str, Any])
    policy: _Policy = field(default_factory=_Policy)
    environment: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass
class TrainedRun:
    """A run as its folder tells it.

    Attributes
    ----------
    record
        Content of ``run.json``.
    steps
        Lines of ``steps.jsonl``.
    """

    result: TrainResult
    record: dict[str, Any] = field(default_factory=dict[str, Any])
    steps: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    @classmethod
    def load(cls, folder: Path) -> TrainedRun:
        """The run in a folder, finished or not.

        Raises
        ------
        UsageError
            When there is none, or its files are damaged.
        """
        file = folder / "run.json"
        content = load_file(file)
        return cls(read(_Record, content, file).result, content, read_steps(folder))

    @property
    def task(self) -> str:
        """Name of the task."""
        return self.result.task

    @property
    def precision(self) -> str:
        """The policy, as text."""
        return self.result.precision

    @property
    def outcome(self) -> str:
        """How it ended, in a sentence."""
        result = self.result
        return f"{result.status}: {counted(result.steps, 'step')}{_skipped(result)}"

    @property
    def standing(self) -> str:
        """Class of how it ended: its colour."""
        return {"finished": "pass", "failed": "fail"}.get(self.result.status, "open")

    @property
    def rows(self) -> list[tuple[str, str]]:
        """What is to be said about it, by name."""
        return _rows(self.result)

    @property
    def messages(self) -> list[str]:
        """What was said during the run, and what its figures say."""
        waited = self.result.data_wait_fraction
        return [*self.result.messages, *([slow_loader(waited)] if waited >= SLOW_LOADER else [])]

    @property
    def environment(self) -> Mapping[str, Any]:
        """Machine and versions."""
        return self.record.get("environment", {})

    @property
    def config(self) -> Mapping[str, Any]:
        """Settings of the run, and facts about its task."""
        config = dict(self.record.get("config", {}))
        groups = enumerate(config.pop("hyperparameters", ()), start=1)
        optimizer = {f"parameter group {number}": values for number, values in groups}
        config |= {"task_info": None, "changes": "; ".join(config.get("changes", ())) or None}
        return {**config, **optimizer, **self.record.get("task", {})}

    @property
    def reasons(self) -> Sequence[str]:
        """Why it trained in this precision."""
        return self.record.get("policy", {}).get("reasons", [])

    def to_json(self) -> dict[str, Any]:
        """``run.json``, with the steps."""
        return {**self.record, "steps": self.steps}


def render(result: TrainResult, console: Console) -> None:
    """Print how a run ended, what ran, and where its files are."""
    console.print()
    console.print(Text(f"{result.task} in {result.precision}: {result.status}", style="bold"))
    grid = Table.grid(padding=(0, 2))
    grid.add_column()
    grid.add_column(overflow="fold")  # a path is shown whole
    for name, value in _rows(result):
        grid.add_row(plain(name), plain(value))
    console.print(grid)
    if result.data_wait_fraction >= SLOW_LOADER:
        console.print(Text(slow_loader(result.data_wait_fraction), style="yellow"))


def render_run(run: TrainedRun, console: Console) -> None:
    """`render` of a run read back."""
    render(run.result, console)


def to_markdown(run: TrainedRun) -> str:
    """Outcome and figures as a table."""
    lines = [f"# {cell(run.task)} in {cell(run.precision)}", "", prose(run.outcome), ""]
    lines += table(("", ""), run.rows)
    lines += ["", *(f"- {prose(each)}" for each in (*run.messages, *run.reasons))]
    return "\n".join(lines).rstrip() + "\n"


def to_html(run: TrainedRun) -> str:
    """The page: outcome, curves of loss, loss scale and grad norm, settings, environment."""
    colour = colour_of(run.precision)
    skipped = [each["step"] for each in run.steps if each.get(names.FOUND_INF)]
    drawn = {
        "loss": curves.loss(run.steps, colour),
        "scale": curves.scale(run.steps, colour, skipped),
        "norm": curves.norm(run.steps, colour),
    }
    return page("train.html", run=run, figure=lambda name, caption: figure(drawn[name], caption))


def _rows(result: TrainResult) -> list[tuple[str, str]]:
    rows = [("steps", f"{result.steps:,}{_skipped(result)}")]
    if result.loss is not None:
        rows.append(("loss, last step", f"{result.loss:.4f}"))
    rows += [(f"held-out {name}", f"{value:.4f}") for name, value in result.metrics.items()]
    if result.activity is not None:
        rows.append(("what ran", str(result.activity)))
        if result.activity.loss_scale_live:
            rows.append(("loss scale", f"{result.loss_scale:g}"))
    if result.samples_per_s:
        rows.append(("rate", f"{result.samples_per_s:,.0f} samples/s"))
    rows.append(("folder", str(result.folder)))
    return rows


def _skipped(result: TrainResult) -> str:
    return f", {result.skipped_steps:,} of them skipped" if result.skipped_steps else ""
