"""What the callbacks of all trainers are: a watch, its figures for a logger, and a diagnosis."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from ampwise.distributed.launch import launch
from ampwise.errors import in_one_line
from ampwise.numerics.result import Diagnosis
from ampwise.observe.result import RunReport
from ampwise.observe.script import Ending
from ampwise.observe.watch import Watch
from ampwise.report import diagnosis as rendering
from ampwise.telemetry import names
from ampwise_lint.base.console import Console
from ampwise_lint.base.files import atomic_write_text

OnFault = Literal["diagnose", "off"]

_FIGURES = (names.LOSS_SCALE, names.GRAD_NORM, names.FOUND_INF, names.SKIPPED_TOTAL)


def figures_of(metrics: Mapping[str, names.Metric]) -> dict[str, float]:
    """What a trainer's logger gets of a step's metrics: numbers it does not have itself."""
    return {name: float(metrics[name]) for name in _FIGURES if name in metrics}


class Observer:
    """A training whose steps somebody else makes.

    Parameters
    ----------
    name
        What the training is called.
    on_fault
        At the first step that is not finite: find out why, or go on.

    Attributes
    ----------
    diagnosis
        Of the first fault; None before.
    file
        Where it was written; None where it was not.
    """

    def __init__(self, name: str, on_fault: OnFault) -> None:
        self.diagnosis: Diagnosis | None = None
        self.file: Path | None = None
        self._watch = Watch(name, on_fault=on_fault, found=self._tell)
        self._folder = Path()

    @property
    def report(self) -> RunReport | None:
        """All that was seen, once training has ended."""
        return self._watch.report

    def begin(self, folder: str | Path) -> None:
        """Training begins; a diagnosis goes to this folder."""
        self._folder, self.diagnosis, self.file = Path(folder), None, None
        self._watch.begin()

    def step_over(self) -> None:
        """An iteration is over, its schedule included."""
        self._watch.step_over()

    def end(self, error: BaseException | None = None) -> None:
        """Training has ended, maybe with an error; nothing is left of the observation."""
        words = "finished" if error is None else f"raised {type(error).__name__}"
        self._watch.end(Ending(0 if error is None else 1, words))

    def figures(self) -> dict[str, float]:
        """Loss scale, true gradient norm, skips, and products by dtype, as far as known."""
        ran = self._watch.products
        return figures_of(self._watch.metrics) | {
            names.products_name(dtype): float(count) for dtype, count in ran.items()
        }

    def _tell(self, found: Diagnosis) -> None:
        """Print a diagnosis; keep and write the first."""
        if launch().leads:
            rendering.render_short(found, Console(stderr=True))
        if self.diagnosis is None:
            self.diagnosis = found
            if launch().leads:
                self._write(found)

    def _write(self, found: Diagnosis) -> None:
        console, file = Console(stderr=True), self._folder / "diagnosis.json"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            atomic_write_text(file, json.dumps(found.to_json(), indent=2, allow_nan=False) + "\n")
        except OSError as error:
            console.print(f"ampwise: the diagnosis is not written: {in_one_line(error)}")
            return
        self.file = file
        console.print(f"all of it: {file}")


class Observed:
    """What the callbacks of all trainers have; their Parameters say what they take."""

    def __init__(self, name: str, on_fault: OnFault, folder: str | Path | None) -> None:
        self._observer = Observer(name, on_fault)
        self._folder = folder

    @property
    def diagnosis(self) -> Diagnosis | None:
        """Of the first fault; None before."""
        return self._observer.diagnosis

    @property
    def report(self) -> RunReport | None:
        """What was seen, as of ``ampwise run``; None until training has ended."""
        return self._observer.report
