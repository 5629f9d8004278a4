"""What benches and training runs show of their progress."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ampwise_lint.base.progress import Line

if TYPE_CHECKING:
    from ampwise.bench.race import Race
    from ampwise.step import StepRecord


class BenchProgress:
    """Shows a bench: its stages, and in the race rounds, rate, time left and current ratios."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._stage = ""

    def stage(self, what: str) -> None:
        """Something begins."""
        self._stage = what
        self._line.show(f"{what} ...", now=True)

    def round(self, race: Race) -> None:
        """A round of the race ended."""
        rate = race.rounds / (time.monotonic() - race.started)
        state = [f"{self._stage} {race.rounds}/{race.planned}", f"{race.left_s:.0f} s left"]
        self._line.show(_fitted([*state, *_ratios(race), f"{rate:.1f} rounds/s"], self._line.room))

    def seed(self, name: str, seed: int, planned: int) -> None:
        """A precision starts to train under a seed."""
        now = f"{self._stage}: seed {seed} of at most {planned}, {name}"
        self._line.show(f"{now} ...", now=name == "fp32")


class TrainProgress:
    """Shows a training run: step, loss, rate, scale, skips, time left, evaluations."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._first: tuple[int, float] | None = None

    def step(self, record: StepRecord, samples_per_s: float, planned: int | None) -> None:
        """A step is known."""
        now = time.monotonic()
        self._first = self._first or (record.step, now)
        of = f"/{planned}" if planned else ""
        parts = [
            f"step {record.step}{of}",
            f"loss {record.loss:.4f}",
        ]
        if samples_per_s:  # of the first step it is not known
            parts.append(f"{samples_per_s:,.0f} samples/s")
        if record.loss_scale != 1:
            parts.append(f"scale {record.loss_scale:g}")
        if record.skipped_total:
            parts.append(f"{record.skipped_total} skipped")
        made = record.step - self._first[0]
        if planned and made:
            left_s = (now - self._first[1]) / made * (planned - record.step)
            parts.append(f"{left_s:.0f} s left")
        self._line.show(", ".join(parts))

    def evaluated(self, step: int, metrics: dict[str, float]) -> None:
        """An evaluation is known."""
        found = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        self.message(f"step {step}: held-out {found}")

    def message(self, text: str) -> None:
        """Something the user may want to know."""
        self._line.say(text)

    def warning(self, text: str) -> None:
        """Something the user must read."""
        self._line.warn(text)


@contextmanager
def train_progress(*, quiet: bool, mute: bool = False) -> Generator[TrainProgress]:
    """Progress of a training run, cleared at its end; `mute` where another process shows it."""
    line = Line(quiet=quiet, mute=mute)
    try:
        yield TrainProgress(line)
    finally:
        line.clear()


@contextmanager
def bench_progress(*, quiet: bool) -> Generator[BenchProgress]:
    """Progress of a bench, cleared at its end."""
    line = Line(quiet=quiet)
    try:
        yield BenchProgress(line)
    finally:
        line.clear()


def _fitted(parts: list[str], room: int) -> str:
    """As many parts as fit on a line, whole; the first ones matter most."""
    while len(", ".join(parts)) > room and len(parts) > 1:
        parts = parts[:-1]
    return ", ".join(parts)


def _ratios(race: Race) -> list[str]:
    """Speed of each arm but float32's control against the first, over all rounds so far."""
    from ampwise.bench.config import CONTROL

    totals = {name: sum(times) for name, times in race.times_ms.items() if times}
    baseline = totals.get(race.baseline, 0.0)
    others = {n: each for n, each in totals.items() if n not in (race.baseline, CONTROL) and each}
    return [f"{name} {baseline / total:.2f}x" for name, total in others.items()]
