"""Which of the patches that hold a reviewer would take.

Measured first: what each keeps on the failing step and on the next ones. What is beyond the digits
of the format is the rounding of the rest of the model, and no merit of a patch: that does not
count. Of the patches that are about as near as the nearest, the one of the lowest `Grade` is
taken, then the one that changes the fewest lines.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from ampwise.numerics.remedy.patches import Grade, Proposal
from ampwise.numerics.remedy.verify import Outcome, in_db
from ampwise_lint.base.words import joined

_ENOUGH_DB = {"float16": 50.0, "bfloat16": 32.0}
"""SQNR that gradients have where only products of matrices round."""
_ALIKE_DB = 6.0
_COARSE_DB = 10.0
"""The same, where the nearer patch has a whole function in float32, or a limit."""
_SOUND_DB = 19.0
"""A stable formula that keeps this on all steps is taken, whatever float32 around it would add; and
layers in float32 are not looked at where another patch does."""
_STEPS_A_KINK = 10
"""Steps of which one may be worse, where a patch would put layers in float32 for it."""
_WIDER = (Grade.FLOAT32, Grade.STATEMENTS, Grade.FUNCTION)
"""Patches that put float32 in place of float16."""
_MANY_CASTS = 4
"""Casts of a patch above which one statement that casts the names is rather taken."""
_NAMED = 2
"""Patches of a reason that are named."""
_NO_LESS_DB = 1.0
"""What an edit may add, and still be superfluous."""


@dataclass(frozen=True)
class Held:
    """A patch that was tried, and what came of it.

    Attributes
    ----------
    number
        Of its trial.
    """

    number: int
    proposal: Proposal
    outcome: Outcome

    @property
    def measured(self) -> bool:
        """Whether it can be compared: held against float64 of the original, which is not 0."""
        kept = self.outcome.sqnr_db
        return not self.outcome.own_reference and kept is not None and kept > 0

    @property
    def steps_db(self) -> list[float]:
        """What it keeps on the failing step, and on the next ones."""
        return [self.outcome.sqnr_db or 0.0, *self.outcome.next_db]

    def worst(self, most: float = math.inf) -> float:
        """The least of these, and no more than a limit."""
        return min(most, *self.steps_db)

    @property
    def usual(self) -> float:
        """The least of these; of ten, but for one: any rounding turns a gradient at a kink."""
        return sorted(self.steps_db)[len(self.steps_db) // _STEPS_A_KINK]

    def mean(self, most: float) -> float:
        """Their mean, with none above a limit."""
        return fmean(max(0.0, min(each, most)) for each in self.steps_db)

    def lines(self, before: bytes) -> int:
        """How many lines it changes."""
        beside = [(path.read_bytes(), new) for path, new in self.proposal.beside.items()]
        return sum(_changed(*each) for each in ((before, self.proposal.data), *beside))


def _changed(before: bytes, after: bytes) -> int:
    """Lines that change; one in place of another is one."""
    old, new = (each.decode(errors="replace").splitlines() for each in (before, after))
    steps = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    return sum(max(j - i, m - n) for tag, i, j, n, m in steps if tag != "equal")


def enough_db(dtype: str) -> float:
    """SQNR above which a patch in a format is as good as any."""
    return _ENOUGH_DB.get(dtype, _ENOUGH_DB["bfloat16"])


def may_win(each: Proposal, best: Held, most: float) -> bool:
    """Whether a proposal that was not tried could be taken in place of the best so far."""
    if best.outcome.left:
        return True
    if _is_narrow(best) and each.grade in _WIDER:
        return True
    if not best.measured:
        return False
    if _is_sound_formula(best) or (_has_layers(each) and _is_sound_without_layers(best)):
        return False
    return each.grade < best.proposal.grade or best.worst() < most - _ALIKE_DB


def best_of(held: Sequence[Held], most: float, before: bytes) -> Held:
    """The patch to take: one that leaves nothing wrong, if there is one."""
    held = [each for each in held if not each.outcome.left] or held
    if not all(each.measured for each in held):
        return held[0]
    held = _without_layers(held)
    nearest = max(held, key=lambda each: each.worst(most) + each.mean(most))
    coarse = nearest.proposal.grade >= Grade.FUNCTION
    within = _COARSE_DB if coarse else _ALIKE_DB
    alike = [
        each
        for each in held
        if _is_sound_formula(each)
        or (
            each.worst(most) >= nearest.worst(most) - within
            and each.mean(most) >= nearest.mean(most) - within
        )
    ]
    taken = _least(alike, before)
    if _is_narrow(taken):  # what is beside it grows, too
        wider = [each for each in held if each.proposal.grade in _WIDER and not each.outcome.near]
        near = [each for each in wider if each.worst(most) >= taken.worst(most) - within]
        return _least(near, before) if near else taken
    return taken


def _without_layers(held: Sequence[Held]) -> Sequence[Held]:
    """Those that leave layers alone, where one of them is sound: float32 there is always nearer."""
    if not any(map(_is_sound_without_layers, held)):
        return held
    return [each for each in held if not _has_layers(each.proposal)]


def _has_layers(each: Proposal) -> bool:
    return each.has_layers or each.grade is Grade.LAYERS


def _is_sound_without_layers(each: Held) -> bool:
    without = each.proposal.grade <= Grade.FUNCTION and not _has_layers(each.proposal)
    return without and each.usual >= _SOUND_DB and not _is_narrow(each)


def _least(some: Sequence[Held], before: bytes) -> Held:
    return min(some, key=lambda each: (_grade(each), each.lines(before), each.number))


def _grade(each: Held) -> int:
    """How much it changes: many casts are as much as a statement that casts their names."""
    grade = each.proposal.grade
    return max(grade, Grade.STATEMENTS) if each.proposal.parts > _MANY_CASTS else grade


def is_noisy(each: Held) -> bool:
    """Whether most of a gradient's digits are lost on some step still."""
    return each.measured and each.worst() < _SOUND_DB


def is_poor(each: Held) -> bool:
    """Whether a patch leaves something wrong, or has a whole function in float32 for it."""
    return is_noisy(each) or bool(each.outcome.left) or each.proposal.grade >= Grade.FUNCTION


def _is_narrow(each: Held) -> bool:
    """Whether it widens something, and leaves its neighbour near the end of the format."""
    return bool(each.outcome.near) and each.proposal.grade in _WIDER


def _is_sound_formula(each: Held) -> bool:
    return each.proposal.grade == Grade.FORMULA and each.worst() >= _SOUND_DB


def is_as_good(less: Outcome, best: Held, most: float) -> bool:
    """Whether nothing below a limit is lost with a part of a patch left out."""
    pairs = zip(Held(0, best.proposal, less).steps_db, best.steps_db, strict=False)
    same_length = len(less.next_db) == len(best.outcome.next_db)
    return (
        less.verified
        and less.left == best.outcome.left
        and (not less.near or bool(best.outcome.near))
        and same_length
        and all(min(a, most) >= min(b, most) - _NO_LESS_DB for a, b in pairs)
    )


def why(taken: Held, held: Sequence[Held], most: float, before: bytes) -> str:
    """Why one was taken before the others."""
    reasons: dict[str, list[str]] = {}
    for each in held:
        if each is not taken:
            name = f"{each.proposal.what} ({in_db(each.worst())} at worst)"
            reasons.setdefault(_before(taken, each, most, before), []).append(name)
    return "; ".join(f"taken before {_some(names)}: {why}" for why, names in reasons.items())


def _some(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = len(names) - _NAMED
    return joined(names) if more <= 0 else joined([*names[:_NAMED], f"{more} more"])


def _before(taken: Held, other: Held, most: float, before: bytes) -> str:
    if other.outcome.left and not taken.outcome.left:
        return f"there {other.outcome.left}"
    if other.outcome.near and not taken.outcome.near:
        return f"there {other.outcome.near}"
    if _has_layers(other.proposal) and _is_sound_without_layers(taken):
        return "what its function calls is in float32 there, too"
    if taken.worst(most) > other.worst(most) + _ALIKE_DB:
        return "it is nearer"
    if taken.mean(most) > other.mean(most) + _ALIKE_DB:
        return "it is nearer on most steps"
    if _grade(taken) < _grade(other):
        return f"about as near, and {_merit(taken, other)}"
    if _grade(taken) > _grade(other) or not _is_less(taken, other, before):
        return "it is nearer"
    if taken.lines(before) < other.lines(before):
        return "about as near, and fewer lines change"
    return "about as near and as small"


def _merit(taken: Held, other: Held) -> str:
    many = _grade(other) > other.proposal.grade
    return "there are fewer casts" if many else _MERIT[taken.proposal.grade]


def _is_less(one: Held, other: Held, before: bytes) -> bool:
    return _least([one, other], before) is one


_MERIT = {
    Grade.FORMULA: "the formula itself is stable",
    Grade.FLOAT32: "float32 is only where it is needed",
    Grade.CONSTANT: "only a constant changes",
    Grade.STATEMENTS: "fewer lines leave autocast",
    Grade.FUNCTION: "it changes nothing that is computed",
}
