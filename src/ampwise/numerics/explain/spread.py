"""Lines whose rounding makes the error of a gradient, where no single operation stands out.

Of the lines that make it (`observe.budget`) those are tried in float32, and where the gradient is
clearly better by it, that is said: as a fault where the gradient is mostly noise, else in a note.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ampwise import formats
from ampwise.numerics.explain.lost import Lost, note
from ampwise.numerics.observe.budget import Carrier, carriers
from ampwise.numerics.observe.gradient_errors import NOISE_DB, GradientErrors
from ampwise.numerics.observe.operation_errors import FROM_NUMBERS, RIGHT_DB, OperationError
from ampwise.numerics.observe.shadow import ShadowRun
from ampwise.numerics.remedy.candidate import Candidate
from ampwise.numerics.remedy.precision import in_float32, lines_in_float32
from ampwise.numerics.result import percent
from ampwise.products import is_product
from ampwise.step.recorder import Stash
from ampwise.step.replayable import Replayable
from ampwise_lint.base.words import joined

_ENOUGH_DB, _ALIKE_DB = 50.0, 6.0
"""SQNR above which an island is as good as any; and how far below the best one a smaller is."""
_MOST = 0.5
"""Share of the error that one number makes, from which on it is no noise."""
_TRIED = 3
"""Lines that are tried one by one."""


@dataclass(frozen=True)
class _Gradient:
    """How good a gradient is, as a whole and of its worst matrix, in dB."""

    whole: float
    matrix: float

    @classmethod
    def of(cls, errors: GradientErrors) -> _Gradient:
        return cls(errors.sqnr_db, errors.worst_db)

    def is_below(self, limit: _Gradient) -> bool:
        return self.whole < limit.whole or self.matrix < limit.matrix

    def gain(self, better: _Gradient) -> float:
        """What another has more: as a whole, unless only a matrix is weak."""
        if self.whole >= _NOTED.whole:
            return min(better.matrix, _ENOUGH_DB) - self.matrix
        return min(better.whole, _ENOUGH_DB) - self.whole

    def is_mended_by(self, better: _Gradient) -> bool:
        """Whether another shows that a line makes what is wrong with this one."""
        pairs = ((self.whole, better.whole, _FAULT.whole, _NOTED.whole),
                 (self.matrix, better.matrix, _FAULT.matrix, _NOTED.matrix))  # fmt: skip
        return any(
            min(mended, _ENOUGH_DB) - now >= _needed_db(now, fault, noted)
            for now, mended, fault, noted in pairs
        )


def _needed_db(now: float, fault: float, noted: float) -> float:
    """What a line in float32 has to gain for a fault: the more, the better the gradient is."""
    if now >= noted:
        return math.inf
    share = max(0.0, (now - fault) / (noted - fault))
    return _MENDED_DB + share * (_ALL_OF_IT_DB - _MENDED_DB)


_NOTED, _GAINED_DB = _Gradient(25.0, 10.0), 6.0
"""Below which lines are looked for, and what float32 on one has to gain for a note."""
_FAULT, _MENDED_DB = _Gradient(NOISE_DB, 4.0), 10.0
"""The same for a fault. Of 1,200 sound random networks one comes to 11 and 5 dB."""
_ALL_OF_IT_DB = 25.0
"""The same for a gradient that is barely noted: the line has to make all of the error."""


def is_noise(errors: GradientErrors) -> bool:
    """Whether a gradient is so bad that it is a fault, if float32 on a line mends it."""
    return _Gradient.of(errors).is_below(_FAULT)


def of_lines(
    step: Replayable, stash: Stash, run: ShadowRun, errors: GradientErrors, damage: str
) -> list[Lost]:
    """The lines that make the error of a gradient, which float32 there mends; none if sound.

    Parameters
    ----------
    damage
        What is wrong with the step; empty where it trains as it is.
    """
    now = _Gradient.of(errors)
    if not now.is_below(_NOTED):
        return []
    only_weak = now.whole >= _NOTED.whole
    weak = list(errors.noisy(_NOTED.matrix)) if only_weak else list(run.gradients)
    found = carriers(step, stash, run, weak)
    tried = [(each, _kept(step, stash, run, each)) for each in _candidates(step, found)]
    if not tried:
        return []
    most = max(now.gain(kept) for _, kept in tried)
    island, best = next(each for each in tried if now.gain(each[1]) >= most - _ALIKE_DB)
    grave = bool(damage) or now.is_below(_FAULT) or _is_biased(now, found)
    worst = _origin(found, run)
    severe = (
        now.gain(best) >= _MENDED_DB
        if grave
        else now.is_mended_by(best) and _is_formula(step, worst, found)
    )
    if not severe and now.gain(best) < _GAINED_DB:
        return []
    words = f"{_lines(found)}: {_quality(now, errors)}"
    if now.gain(best) >= _GAINED_DB:
        words = f"{words}. With {island.what}, tried on this step, {_better(now, best)}"
    if not severe:
        return [note(f"{words}.")]
    wrong = f" Silently wrong: {damage}." if damage else ""
    return [Lost("PRECISION_LOSS", f"{words}.{wrong}", worst.place, worst.name, worst.dtype,
                 severe=True)]  # fmt: skip


def _is_biased(now: _Gradient, found: Sequence[Carrier]) -> bool:
    """Whether most of an error is that of one number of the code: it is the same in every step."""
    constant = found[0].worst.name in (*FROM_NUMBERS, "tensor")
    return now.whole < RIGHT_DB and constant and found[0].share > _MOST


def _is_formula(step: Replayable, worst: OperationError, found: Sequence[Carrier]) -> bool:
    """Whether an error is that of a formula: layers round as much as the precision is meant to.

    A formula may be on another line that makes as much of it alone.
    """
    most = (each.worst for each in found if each.share >= _MOST * found[0].share)
    return worst.enlarges or any(_is_own(step, each) for each in (worst, *most))


def _is_own(step: Replayable, each: OperationError) -> bool:
    modules = dict(named for model in step.models for named in model.named_modules())
    of_layer = type(modules.get(each.place.module)).__module__.startswith("torch.nn.")
    return each.name != "_to_copy" and not (of_layer and is_product(each.name))


def _candidates(step: Replayable, found: Sequence[Carrier]) -> Iterator[Candidate]:
    """Islands of these lines: each by itself, its function, its module; then all together."""
    for each in found[:_TRIED]:
        yield from in_float32(step, each.place, ())
    yield from lines_in_float32(step, [each.place for each in found])


def _kept(step: Replayable, stash: Stash, run: ShadowRun, island: Candidate) -> _Gradient:
    result = step.replay(stash, around=island.around)
    if result.error is not None or not result.clean:
        return _Gradient(-math.inf, -math.inf)
    return _Gradient.of(GradientErrors(result.gradients, run.gradients))


def _origin(found: Sequence[Carrier], run: ShadowRun) -> OperationError:
    """Of these lines the one that makes a small error large, if one does; else the largest."""
    for each in found:
        at = each.place.file, each.place.line
        here = (e for e in run.errors if (e.place.file, e.place.line) == at and e.enlarges)
        if (shows := next(here, None)) is not None:
            return shows
    return found[0].worst


def _lines(found: Sequence[Carrier]) -> str:
    """Where it is rounded, and what each of these lines makes of the error."""
    made = (f"line {each.place.line} ({_rounding(each)}, {percent(each.share)})"
            for each in found[:_TRIED])  # fmt: skip
    return f"The error of the gradient is made by rounding on {joined(made)}"


def _rounding(line: Carrier) -> str:
    fmt = formats.lookup(line.worst.dtype)
    return f"{line.worst.name} in {fmt}" if line.alone else f"in {fmt}"


def _quality(now: _Gradient, errors: GradientErrors) -> str:
    words = f"the gradient has an SQNR of {now.whole:z.0f} dB against float64"
    if not (weak := errors.noisy(_NOTED.matrix)):
        return words
    worst = min(weak, key=lambda name: weak[name])
    return f"{words}, that of {worst} {weak[worst]:z.0f} dB"


def _better(now: _Gradient, best: _Gradient) -> str:
    if now.matrix < _NOTED.matrix:
        return f"it has {best.whole:.0f} dB, and no matrix less than {best.matrix:.0f} dB"
    return f"it has {best.whole:.0f} dB"
