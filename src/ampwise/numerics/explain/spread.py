"""Lines whose rounding makes the error of a gradient, where no single operation stands out.

Of the lines that make it (`observe.budget`) those are tried in float32, and where the gradient is
clearly better by it, that is said: as a fault where the gradient is mostly noise, else in a note.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ampwise import formats
from ampwise.numerics.explain.lost import Lost, note
from ampwise.numerics.explain.roundings import (
    Began,
    began,
    left_range,
    showing,
)
from ampwise.numerics.observe.ancestry import CANCELLED_DB, DIFFERENCES, back_from
from ampwise.numerics.observe.budget import Carrier, carriers, harm_of, out_of_range
from ampwise.numerics.observe.gradient_errors import NOISE_DB, GradientErrors
from ampwise.numerics.observe.operation_errors import FROM_NUMBERS, RIGHT_DB, OperationError
from ampwise.numerics.observe.shadow import ShadowRun, shadow
from ampwise.numerics.remedy.candidate import Candidate
from ampwise.numerics.remedy.precision import in_float32, lines_in_float32
from ampwise.numerics.result import percent
from ampwise.places import Place
from ampwise.products import is_product
from ampwise.step.recorder import Stash
from ampwise.step.replayable import Replayable
from ampwise_lint.base.words import joined

_ENOUGH_DB, _ALIKE_DB = 50.0, 6.0
"""SQNR above which an island is as good as any; and how far below the best one a smaller is."""
_MOST = 0.5
"""Share of the error that one number makes, from which on it is no noise."""
_COARSE_DB = 30.0
"""SQNR of a difference below which it is worth a word, in any format."""
_TRIED = 3
"""Lines that are tried one by one."""
_MANY = 4
"""Roundings one upon another from which on it is they that add up."""


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
    worst = _origin(step, stash, run, found)
    severe = (
        now.gain(best) >= _MENDED_DB
        if grave
        else now.is_mended_by(best) and _is_formula(step, worst, found)
    )
    if not severe and now.gain(best) < _GAINED_DB:
        return []
    mended = f"With {island.what}, tried on this step, {_better(now, best)}"
    if not severe:
        words = f"{_lines(found)}: {_quality(now, errors)}"
        return [note(f"{words}. {mended}." if now.gain(best) >= _GAINED_DB else f"{words}.")]
    told = _told(step, stash, run, worst, found[0])
    words = f"{told.explanation}.{_beside(found)} By this {damage or _quality(now, errors)}"
    return [replace(told, explanation=f"{words}. {mended}.")]


def _told(
    step: Replayable, stash: Stash, run: ShadowRun, worst: OperationError, most: Carrier
) -> Lost:
    """What the rounding on a line does, and to which values.

    Parameters
    ----------
    worst
        Where it is: the operation that shows it, or that rounds.
    most
        The line that makes most of the error.
    """
    if (gone := out_of_range(step, stash, run, worst.place)) is not None:
        return left_range(gone, stash)
    on_its_line = worst.place.file_line == most.place.file_line
    rounding, how = _rounding_of(step, stash, run, worst if on_its_line else most.worst)
    how = how or Began(f"{_rounding(most)} rounds")
    shows = worst if worst.enlarges and worst is not rounding else _difference_after(run, rounding)
    at = rounding if on_its_line else worst
    if shows is None:
        return Lost("PRECISION_LOSS", how.words, at.place, at.name, at.dtype, severe=True)
    chained = _one_upon_another(step, stash, rounding, shows) >= _MANY
    again = ", again and again, each time of what it gave before" if chained else ""
    words = f"{how.words}{again}. {showing(shows, rounding.place)}"
    cause = "PRECISION_LOSS" if chained else how.cause(shows.name)
    return Lost(cause, words, at.place, at.name, at.dtype, severe=True)


def _one_upon_another(
    step: Replayable, stash: Stash, rounding: OperationError, shows: OperationError
) -> int:
    """How often a value was rounded by one operation before another, each time of what it gave."""
    at = (shows.name, shows.place, shows.occurrence)
    makers = shadow(step, stash, errors=False, at=at).makers
    same = (rounding.name, rounding.place)
    last = next((each for maker in makers for each in back_from(maker)
                 if (each.name, each.place) == same), None)  # fmt: skip
    return sum((each.name, each.place) == same for each in back_from(last))


def _rounding_of(
    step: Replayable, stash: Stash, run: ShadowRun, some: OperationError
) -> tuple[OperationError, Began | None]:
    """Of the operations of forward on a line the one whose rounding does most harm, and how.

    A sum that loses small terms tells more than what does about as much.
    """
    line = some.place.file_line
    first: dict[str, OperationError] = {}
    for each in run.errors:
        here = each.place.file_line == line and each.place.phase == "forward"
        if here and each.local_db < math.inf:
            first.setdefault(each.name, each)
    if len(first) < 2:
        only = next(iter(first.values()), some)
        return only, began(step, stash, only)
    harm = {name: harm_of(step, stash, run, [some.place], name) for name in first}
    names = sorted(harm, key=lambda name: -harm[name])
    most = [first[name] for name in names if harm[name] >= _MOST * harm[names[0]]]
    how = [began(step, stash, each) for each in most]
    absorbs = (at for at, each in enumerate(how) if each is not None and each.absorbs)
    at = next(absorbs, 0)
    return most[at], how[at]


def _difference_after(run: ShadowRun, rounding: OperationError) -> OperationError | None:
    """The first difference after a rounding, in its function, in which digits cancel.

    Of one that is taken again and again, the largest: one of a number and itself is always lost.
    """
    here = rounding.place.file, rounding.place.function
    largest: dict[Place, OperationError] = {}
    for each in run.errors:
        inside = (each.place.file, each.place.function) == here and each.place.phase == "forward"
        if each.name in DIFFERENCES and inside and each.index > rounding.index:
            known = largest.setdefault(each.place, each)
            largest[each.place] = max(known, each, key=lambda one: one.exact_amax)
    coarse = (each for each in largest.values() if each.propagated_db < _COARSE_DB)
    return next((e for e in coarse if e.inputs_db - e.propagated_db > CANCELLED_DB), None)


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


def _origin(
    step: Replayable, stash: Stash, run: ShadowRun, found: Sequence[Carrier]
) -> OperationError:
    """Of these lines the one that makes a small error large, if one does; else the largest.

    Layers round as much as the precision is meant to: what takes the difference of two of their
    results, and finds few digits in it, is at fault.
    """
    for each in found:
        at = each.place.file_line
        here = (e for e in run.errors if e.place.file_line == at and e.enlarges)
        if (shows := next(here, None)) is not None:
            return shows
    worst = found[0].worst
    if _is_own(step, worst):
        return worst
    return _difference_of(step, stash, run, found[0]) or worst


def _difference_of(
    step: Replayable, stash: Stash, run: ShadowRun, line: Carrier
) -> OperationError | None:
    """The difference of two values that both come from one line, and that is mostly its error."""
    at = line.place.file_line
    for each in run.errors:
        if not each.enlarges or each.name not in DIFFERENCES or not each.place.file:
            continue
        makers = shadow(
            step, stash, errors=False, at=(each.name, each.place, each.occurrence)
        ).makers
        from_it = [any(e.place.file_line == at for e in back_from(maker))
                   for maker in makers]  # fmt: skip
        if len(from_it) > 1 and all(from_it):
            return each
    return None


def _beside(found: Sequence[Carrier]) -> str:
    """The other lines whose rounding makes as much of the error."""
    others = [each for each in found[1:_TRIED] if each.share >= _MOST * found[0].share]
    lines = joined(each.place.line_from(found[0].place) for each in others)
    return f" Rounding on {lines} makes as much of it." if others else ""


def _lines(found: Sequence[Carrier]) -> str:
    """Where it is rounded, and what each of these lines makes of the error."""
    first = found[0].place
    made = (f"{each.place.line_from(first)} ({_rounding(each)}, {percent(each.share)})"
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
        return f"the gradient has {best.whole:.0f} dB, no matrix less than {best.matrix:.0f} dB"
    return f"the gradient has {best.whole:.0f} dB"
