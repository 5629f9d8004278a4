"""Patches held against the failing step, each in a process of its own (`trial`)."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ampwise.document import read
from ampwise.numerics.observe.gradient_errors import NOISE_DB
from ampwise.numerics.remedy.costs import Cost
from ampwise.numerics.remedy.fresh import LATE, Fresh, log_of
from ampwise_lint.base.words import counted

CONTROL, PATCH, COST = "control", "patch", "cost"
NEXT_STEPS, MOST_STEPS = 5, 25
"""Steps after the failing one that have to train; and those that are made where they are quick."""
_SKIPPED = 0.2
"""Share of these that may be skipped once one was made, as a loss scale finds its place."""
TIMEOUT_S = 120.0
"""Seconds for one trial; a step that takes longer is not tried."""
NEARER_DB, _LESS_DB = 10.0, 6.0
"""What a patch of a silent loss has to gain; and where the step is then as exact as layers let it
be."""
BUDGET_S = 300.0
"""Seconds after which no further trial is begun."""


@dataclass(frozen=True)
class Outcome:
    """What became of a trial.

    Attributes
    ----------
    complaint
        Why the failing step is not mended; empty if it is.
    own_reference
        Whether the step was held against float64 of the patched source, the original being wrong in
        float64, too.
    sqnr_db
        Of its gradients against that reference, and of those by themselves that were wrong before
        (`fix.Judgement`): the least; None where that is exact, or not to be had.
    weakest
        The parameter whose gradient this is, where it is that of one.
    next_steps
        Steps that trained after it.
    next_complaint
        What was wrong with the one after these; empty if all trained.
    next_db
        As `sqnr_db`, of the next steps as float64 would make them (`ahead`).
    cost
        What the patch costs beside the original; None where that was not measured.
    of_update
        Whether it was the step's update that failed, and is held against float64.
    left
        What is still wrong in the failing step, though its gradients are right.
    near
        What is left near the end of float16, in the function of the fault.
    updates
        How many steps' updates together failed, and are held against float64.
    """

    complaint: str
    own_reference: bool = False
    sqnr_db: float | None = None
    next_steps: int = 0
    next_complaint: str = ""
    next_db: list[float] = field(default_factory=list[float])
    cost: Cost | None = None
    of_update: bool = False
    left: str = ""
    near: str = ""
    updates: int = 0
    weakest: str = ""

    @property
    def verified(self) -> bool:
        """Whether the patched source mends the step, and trains."""
        return not self.complaint and not self.next_complaint

    def followed_by(self, made: int, complaint: str, skipped: int) -> Outcome:
        """The same, with what came after the step: how many steps, and how many were left out."""
        left = self.left
        if skipped > _SKIPPED * made:
            left = left or f"{counted(skipped, 'step')} between them were skipped"
        return replace(self, next_steps=made, next_complaint=complaint, left=left)

    def in_words(self, step: int) -> str:
        """The outcome, as a status of a patch."""
        if self.complaint:
            return f"suggestion: tried in a fresh process: {self.complaint}"
        if self.next_complaint:
            return (
                f"suggestion: the failing step is mended, but step {step + self.next_steps + 1} "
                f"is not right: {self.next_complaint}"
            )
        if self.updates:
            assert self.sqnr_db is not None
            return (
                f"verified: the patched source, in a fresh process, makes the updates of "
                f"{counted(self.updates, 'step')} as float64 does ({self.sqnr_db:.0f} dB), and the "
                f"next {counted(self.next_steps, 'step')} train"
            )
        if self.of_update:
            return (
                f"verified: the patched source, in a fresh process, makes the update of step "
                f"{step} as float64 does, and the next {counted(self.next_steps, 'step')} train"
            )
        left = f"; but {self.left}" if self.left else ""
        return (
            f"verified: the patched source, in a fresh process, makes step {step} finite"
            f"{self.within}, and the next {counted(self.next_steps, 'step')} train{left}"
        )

    @property
    def within(self) -> str:
        """How near to its reference it is, as part of a sentence; empty where that is not known."""
        if self.sqnr_db is None or self.sqnr_db <= 0:  # a gradient that is 0
            return ""
        whose = "the patched source in float64" if self.own_reference else "float64"
        which = f"gradients {self.sqnr_db:.0f} dB from {whose}"
        if self.weakest:
            which = (
                f"gradient of {self.weakest}, which was wrong, {self.sqnr_db:.0f} dB from {whose}"
            )
        near = f", its {which}"
        if self.next_db and not self.own_reference:
            steps = counted(len(self.next_db), "step")
            near += f" (on the next {steps}, {in_db(min(self.next_db))} at worst)"
        return near


def in_db(value: float) -> str:
    """An SQNR in words."""
    return f"{value:.0f} dB" if math.isfinite(value) else "exact" if value > 0 else "not finite"


def write_texts(folder: Path, name: str, texts: Mapping[Path, bytes]) -> None:
    """Write the texts of files for a trial."""
    for index, data in enumerate(texts.values()):
        (folder / f"{name}.{index}.py").write_bytes(data)
    (folder / f"{name}.files").write_text(json.dumps([str(each) for each in texts]))


def read_texts(folder: Path, name: str) -> dict[Path, bytes]:
    """What `write_texts` wrote."""
    files = json.loads((folder / f"{name}.files").read_text())
    return {
        Path(each): (folder / f"{name}.{index}.py").read_bytes() for index, each in enumerate(files)
    }


class Trials:
    """Trials of one failing step, in a folder that holds it (`handover`).

    Parameters
    ----------
    processes
        What runs them.
    step
        Number of the step.
    silent
        Whether the step is within the limits of `fix` as it is, and only less exact than it could
        be.
    enough
        SQNR of gradients in which only layers round.
    """

    def __init__(
        self, folder: Path, file: Path, processes: Fresh, step: int, *, silent: bool = False,
        enough: float = math.inf,
    ) -> None:  # fmt: skip
        self._folder, self._processes, self._silent, self._step = folder, processes, silent, step
        self._unmended: Outcome | None = None
        self._began = time.monotonic()
        self._file, self._enough = file, enough

    @property
    def over(self) -> bool:
        """Whether the time for trials is."""
        return time.monotonic() - self._began > BUDGET_S

    def control(self) -> str:
        """Why trials of this step say nothing; empty where it does here what it did."""
        outcome = self._unmended = self._run(CONTROL)
        if not outcome.complaint and not (self._silent and outcome.sqnr_db is not None):
            return "in a fresh process the step is right without a patch"
        return outcome.complaint if outcome.complaint.startswith("no outcome") else ""

    def of(self, number: int, data: bytes, beside: Mapping[Path, bytes] | None = None) -> Outcome:
        """What becomes of the step with another text of the file, and of others beside it."""
        name = f"{PATCH}-{number}"
        write_texts(self._folder, name, {self._file: data, **(beside or {})})
        outcome = self._run(name)
        if outcome.complaint:
            return outcome
        before = self._unmended
        # An error is no fault of values: what overflows beside it did so before.
        left = "" if before is not None and before.complaint.startswith("raises") else outcome.left
        return replace(outcome, complaint=self._no_gain(outcome), left=left)

    def _no_gain(self, outcome: Outcome) -> str:
        """Why a step that holds is not clearly nearer to float64 than without a patch; else empty.

        It has to be where the step holds without one, too, and where its gradients are noise still.
        """
        now, before = outcome.sqnr_db, None if self._unmended is None else self._unmended.sqnr_db
        if now is None or before is None:
            return ""
        if now >= before + (_LESS_DB if now >= self._enough - _LESS_DB else NEARER_DB):
            return ""
        if self._unmended is not None and self._unmended.complaint and now >= NOISE_DB:
            return ""
        return (
            f"its gradients are hardly nearer to float64 ({now:.0f} dB, {before:.0f} dB without it)"
        )

    def in_words(self, outcome: Outcome) -> str:
        """An outcome, as a status of a patch."""
        return outcome.in_words(self._step)

    def cost_of(self, number: int) -> Cost | None:
        """What a patch costs that was tried; None where that was not measured."""
        if self._unmended is not None and self._unmended.updates:
            return Cost("2 more bytes for each number kept in 16 bits; its time is in the update")
        return self._run(f"{COST}-{number}").cost

    def _run(self, name: str) -> Outcome:
        ended = self._processes.run(name, TIMEOUT_S)
        if (outcome := self._told(name)) is not None:
            return outcome
        if ended == LATE:
            return Outcome(f"no outcome after {TIMEOUT_S:.0f} s")
        return Outcome(f"no outcome: the process ended with {ended}: {self._last_words(name)}")

    def _last_words(self, name: str) -> str:
        try:
            said = log_of(self._folder, name).read_text(errors="replace")
        except FileNotFoundError:  # it did not begin
            return ""
        return said.strip().rpartition("\n")[2]

    def _told(self, name: str) -> Outcome | None:
        """What a process has written, if it came so far."""
        try:
            return read(Outcome, json.loads((self._folder / f"{name}.json").read_text()))
        except (OSError, ValueError):
            return None
