"""Patches tried in order: until one holds, some that could be better, then without idle edits.

Where they are tried is not known here: in fresh processes (`verify`), or in the script that waits
(`live`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from ampwise.numerics.progress import Progress
from ampwise.numerics.remedy.choice import (
    Held,
    best_of,
    enough_db,
    is_as_good,
    is_noisy,
    is_poor,
    may_win,
    why,
)
from ampwise.numerics.remedy.costs import Cost
from ampwise.numerics.remedy.own_source import Tried
from ampwise.numerics.remedy.patches import Proposal
from ampwise.numerics.remedy.patches.site import Site
from ampwise.numerics.remedy.verify import Outcome, in_db
from ampwise.numerics.result import HOLDS_TOO

_MORE, _MANY_MORE = 3, 8
"""Patches that are tried after one holds, if they could be better; and while all that hold leave
something wrong, or noise."""
_MOST_PARTS = 12
"""Parts of a patch up to which it is tried without each."""


class Tries(Protocol):
    """What patches of a file are tried with."""

    @property
    def over(self) -> bool:
        """Whether no further one is to be tried."""
        ...

    def of(self, number: int, data: bytes, beside: Mapping[Path, bytes]) -> Outcome:
        """What becomes of the step with another text of the file, and of others beside it."""
        ...

    def cost_of(self, number: int) -> Cost | None:
        """What a patch costs that was tried; None where that was not measured."""
        ...

    def in_words(self, outcome: Outcome) -> str:
        """An outcome, as a status of a patch."""
        ...


class Search:
    """Tries proposals for a site, and knows at any time what came of them.

    Parameters
    ----------
    further
        Those that are tried where none of `found` keeps enough on all steps.
    """

    def __init__(
        self,
        site: Site,
        found: Sequence[Proposal],
        tries: Tries,
        progress: Progress,
        further: Sequence[Proposal] = (),
    ) -> None:
        self._found, self._tries, self._progress = found, tries, progress
        self._further = further
        self._most_tried = len(found) + len(further)
        self._before, self._most = site.source.data, enough_db(site.compute_dtype)
        self._failed: list[Held] = []
        self._held: list[Held] = []
        self._least: Held | None = None
        self._cost: Cost | None = None

    def run(self) -> None:
        """Try them."""
        self._try()
        self._reach()
        if self._held:
            self._least = self._without_idle(self._best)
            self._cost = self._tries.cost_of(self._least.number)

    @property
    def tried(self) -> list[Tried]:
        """Each with its status; last the one that is taken, if one holds."""
        words = self._tries.in_words
        tried = [Tried(each.proposal, words(each.outcome)) for each in self._failed]
        if not self._held:
            return tried
        best = self._best
        kept = f"where the one taken keeps {in_db(best.worst())}"
        tried += [
            Tried(each.proposal, f"{HOLDS_TOO}: {in_db(each.worst())} at worst, {kept}")
            for each in self._held
            if each is not best
        ]
        least, reason = self._least or best, why(best, self._held, self._most, self._before)
        status = words(least.outcome) + (f"; {reason}" if reason else "")
        return [*tried, Tried(least.proposal, status, self._cost)]

    @property
    def _best(self) -> Held:
        return best_of(self._held, self._most, self._before)

    def _try(self) -> None:
        """Until one holds, then a few that could be better."""
        more = 0
        for number, each in enumerate(self._found, 1):
            wrong = all(other.outcome.left for other in self._held)
            wrong = wrong or is_noisy(self._best)
            if self._tries.over or more == (_MANY_MORE if wrong else _MORE):
                return
            if self._held and not may_win(each, self._best, self._most):
                continue
            more += bool(self._held)
            self._try_one(number, each)

    def _reach(self) -> None:
        """From further back, where nothing holds, or not well: see `is_poor`."""
        tried = [_texts(each.proposal) for each in (*self._held, *self._failed)]
        for number, each in enumerate(self._further, len(self._found) + 1):
            if self._tries.over or (self._held and not is_poor(self._best)):
                return
            if _texts(each) not in tried:
                self._try_one(number, each)

    def _try_one(self, number: int, each: Proposal) -> None:
        self._progress.stage(f"patch {number} of at most {self._most_tried}: {each.what}")
        tried = Held(number, each, self._tries.of(number, each.data, each.beside))
        (self._held if tried.outcome.verified else self._failed).append(tried)

    def _without_idle(self, best: Held) -> Held:
        """A patch without the parts that nothing is lost without: of an island, from its ends."""
        whole, kept = best.proposal, set(range(best.proposal.parts))
        if whole.only is None or not best.measured or len(kept) > _MOST_PARTS:
            return best
        needed: set[int] = set()
        for part in (*reversed(range(whole.parts)), *range(whole.parts)):
            if self._tries.over:
                break
            less = whole.only(kept - {part}) if part in kept - needed else None
            if less is None or _texts(less) == (self._before, {}):
                continue
            self._progress.stage(f"the patch without one of its edits: {whole.what}")
            number = self._most_tried + 1 + part
            outcome = self._tries.of(number, less.data, less.beside)
            coarse = best.outcome.updates or part >= whole.parts - whole.statements
            most = self._most if coarse else math.inf
            if is_as_good(outcome, best, most):
                best = Held(number, less, outcome)
                kept.remove(part)
            else:
                needed.add(part)
        return best


def _texts(each: Proposal) -> tuple[bytes, Mapping[Path, bytes]]:
    """What a proposal makes of the files that it changes."""
    return each.data, each.beside
