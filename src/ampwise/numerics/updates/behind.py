"""Updates that are finite, but not what they should be: what stays behind, and on which line.

The task is trained again with a float64 shadow of its updates (`followed`). Where what they add up
to is not within the limits of gradients, the shadow is run with the rounding of one line at a time:
the line that makes most of the error by itself is the origin. A fault is only what some line makes.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ampwise import formats
from ampwise.bench.arm import Arm
from ampwise.numerics.explain.roundings import off_by, out_of_range_words
from ampwise.numerics.observe.gradient_errors import MISSING, GradientErrors
from ampwise.numerics.observe.narrow import makers
from ampwise.numerics.observe.range_losses import RangeLoss, most_of
from ampwise.numerics.observe.shadow import Rounds
from ampwise.numerics.observe.stagnation import Stagnant
from ampwise.numerics.observe.values import at
from ampwise.numerics.progress import Progress
from ampwise.numerics.result import CauseName, Diagnosis, Fix
from ampwise.numerics.updates.followed import (
    LIMIT_S,
    Followed,
    are_torchs,
    follow,
    is_wrong,
    rounds_updates,
)
from ampwise.numerics.updates.kept import PARAMETERS, Change, Rounding
from ampwise.numerics.updates.of_task import Trained
from ampwise.step.replay import Replay
from ampwise_lint.base.words import counted, joined

_LEAST = 0.1
"""Share of the square of the error that a line has to make by itself."""
_MOST_LINES = 8
_MOST_NAMES = 2
ADVICE = Fix("float32 for what updates keep",
             "keep state and averages of weights in float32, and compute updates in it",
             verified=False, cost="not tried")  # fmt: skip
"""What is said as long as no patch does it."""


def wrong_updates(
    trained: Trained, arm: Arm, found: Diagnosis, progress: Progress, *, too_far: bool = False
) -> bool:  # fmt: skip
    """Say in a diagnosis that the updates before are wrong, if they are.

    Parameters
    ----------
    trained
        `steps` of it are made again.
    arm
        What it was.
    too_far
        Whether that is said only where parameters went too far: the step after them failed.
    """
    if not rounds_updates(trained, arm):
        return False
    progress.stage(f"training {trained.steps} steps again, with their updates in float64")
    run = follow(trained, trained.steps)
    wrong = run.wrong()
    # What a single update makes of something may be its copy.
    if not wrong or ((too_far or run.updates == 1) and not run.went_too_far):
        return False
    kind = next(iter(wrong))
    line = _line(trained, run, kind)
    if line is None:
        return False
    changes = [each for each in run.changes if each.kind == kind]
    flushed = _underflow(trained, run, kind, line)
    cause = _cause(changes) if flushed is None else "UNDERFLOW"
    found.status, found.phase, found.cause = "fault", "optimizer", cause
    found.step, found.origin = trained.steps, at(line.place, line.name, line.dtype)
    # Of a step that was skipped because of its loss scale, before these.
    found.path, found.target, found.history = [], "", []
    found.extent = found.measured_scale = None
    found.notes = [] if too_far else found.notes
    why = _why(cause, line) if flushed is None else out_of_range_words(flushed)
    found.explanation = f"{_in_words(run, wrong, changes)} {why}."
    found.fixes = [ADVICE]
    progress.found(found)
    return True


def left_behind(trained: Trained, arm: Arm, still: Stagnant) -> Stagnant | None:
    """Weights that did not move, and on which lines that is; None where nothing is lost by it.

    What rounding loses may be kept in float32 masters or in a compensation, or rounding may go by
    chance: an update of one's own is made again in float64 before anything is said of it.
    """
    if not are_torchs(arm):
        run = follow(trained, trained.steps, also=still.share)
        lost = [each for each in run.changes if each.name in still.share]
        changes = ({each.name: each.actual for each in lost}, {e.name: e.ideal for e in lost})
        if run.is_deliberate or not is_wrong(GradientErrors(*changes)):
            return None
        line = _line(trained, run, PARAMETERS, changes[0])
        share = {name: each for name, each in still.share.items() if name in changes[0]}
        still = replace(still, share=share, by=None if line is None else line.place)
    named, made = Replay(arm.step).named_tensors(), makers(trained.task, trained.settings)
    by_line: Counter[tuple[str, int]] = Counter()
    for name, share in still.share.items():
        if name in made:
            by_line[made[name].place.file_line] += int(share * named[name].numel())
    if not by_line:
        return still
    most = by_line.most_common(1)[0][0]
    on_line = {name: each for name, each in made.items() if each.place.file_line == most}
    return replace(still, made=on_line)


def _line(
    trained: Trained, run: Followed, kind: str, names: Collection[str] = ()
) -> Rounding | None:
    """The line that makes most of the error of a kind by its rounding alone; None if none does.

    Parameters
    ----------
    names
        Parameters in 16 bits that are looked at; none for all of the kind.
    """
    ideal = _ideal(run, kind, names)
    whole = _squared(run.changes, ideal)
    began = time.monotonic()
    harms: list[tuple[float, int]] = []
    lines = run.roundings[-_MOST_LINES:]
    for number, each in enumerate(lines):
        if time.monotonic() - began > LIMIT_S:
            break
        alone = follow(trained, run.steps, rounds=Rounds.on([each.place.file_line]), also=names)
        harms.append((min(1.0, _harm(alone, ideal) / whole), number))
    share, number = max(harms, default=(0.0, 0))
    return lines[number] if share >= _LEAST else None


def _underflow(trained: Trained, run: Followed, kind: str, line: Rounding) -> RangeLoss | None:
    """What became 0 on a line, where that makes most of the line's error; None where it does not.

    Parameters
    ----------
    kind
        Whose error it is.
    """
    ideal, at = _ideal(run, kind), [line.place.file_line]
    whole = follow(trained, run.steps, rounds=Rounds.on(at))
    return most_of(
        _harm(whole, ideal),
        (each for each in whole.range_losses if each.part == "underflow"),
        lambda part: _harm(follow(trained, run.steps, rounds=Rounds.on(at, part)), ideal),
    )


def _ideal(run: Followed, kind: str, names: Collection[str] = ()) -> dict[str, Tensor]:
    """What changes of a kind should be, by name."""
    names = names or {each.name for each in run.changes if each.kind == kind}
    return {each.name: each.ideal for each in run.changes if each.name in names}


def _harm(alone: Followed, ideal: Mapping[str, Tensor]) -> float:
    """Square of the error of changes, in training that rounds on some lines only."""
    rounded = {each.name: each.ideal for each in alone.changes if each.name in ideal}
    return GradientErrors(rounded, ideal).relative(ideal) ** 2


def _squared(changes: Sequence[Change], ideal: Mapping[str, Tensor]) -> float:
    actual = {each.name: each.actual for each in changes if each.name in ideal}
    return GradientErrors(actual, ideal).relative(ideal) ** 2


def _cause(changes: Sequence[Change]) -> CauseName:
    """Why values are wrong: they are 0, they did not move, or they are inexact."""
    if _most([(each.holds == 0, each.should_hold) for each in changes]):
        return "UNDERFLOW"
    if _most([(each.actual == 0, each.ideal) for each in changes]):
        return "STAGNATION"
    return "PRECISION_LOSS"


def _most(parts: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Whether most of a signal is lost, by norm or by its elements."""
    gone = sum(float(torch.where(lost, signal, 0.0).square().sum()) for lost, signal in parts)
    count = sum(int((lost & (signal != 0)).sum()) for lost, signal in parts)
    of = sum(int((signal != 0).sum()) for _, signal in parts)
    return gone > MISSING**2 * _norm([signal for _, signal in parts]) ** 2 or count > MISSING * of


_WHY: Mapping[CauseName, str] = {
    "UNDERFLOW": "most of what it should hold is below the smallest number of {fmt}",
    "STAGNATION": "what a step adds is mostly below half an ULP of {fmt}, and rounds to nothing",
    "PRECISION_LOSS": "{fmt} keeps {bits} bits, and the rounding is as large as what a step adds",
}


def _why(cause: CauseName, line: Rounding) -> str:
    fmt = formats.lookup(getattr(torch, line.dtype))
    why = _WHY[cause].format(fmt=fmt, bits=fmt.mantissa_bits + 1)
    return f"On line {line.place.line}, {why}"


def _in_words(run: Followed, wrong: Mapping[str, GradientErrors], changes: Sequence[Change]) -> str:
    """Which changes are wrong, and how much: of the first kind by their norm."""
    kind, *others = wrong
    few = len(changes) <= _MOST_NAMES
    names = joined(each.name for each in changes) if few else kind
    moved, should = (_norm([e.actual for e in changes]), _norm([e.ideal for e in changes]))
    also = f"; that of {joined(others[:2])} is wrong, too" if others else ""
    which = "update is" if run.steps == 1 else f"{counted(run.steps, 'update')} are"
    return (
        f"The first {which} not what float64 makes of the same "
        f"gradients: the change of {names} is off by {off_by(wrong[kind].sqnr_db)} (it has a norm "
        f"of {moved:.3g}, and should have {should:.3g}){also}."
    )


def _norm(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(each.square().sum()) for each in tensors))
