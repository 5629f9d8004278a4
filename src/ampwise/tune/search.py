"""The smallest set of modules under which some windows are right: delta debugging over replays.

Starting from all modules in which something is computed, what is not needed is removed (Zeller and
Hildebrandt, 2002), the least suspicious first, until no module can be left out. Islands of one
parent are merged where one switch of precision is measured to cost less than several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from ampwise.numerics.observe.reference import gradient_errors, reference
from ampwise.numerics.observe.shadow import shadow
from ampwise.numerics.observe.trace import watch
from ampwise.numerics.remedy import fix
from ampwise.numerics.remedy import interventions as change
from ampwise.numerics.remedy.candidate import Candidate
from ampwise.numerics.remedy.costs import time_ratio
from ampwise.step.recorder import Stash
from ampwise.step.replayable import Replayable


class Search:
    """Looks for islands under which some windows are right.

    Attributes
    ----------
    replays
        Steps replayed so far.
    complaint
        What was wrong the last time.
    """

    def __init__(self, step: Replayable, windows: Sequence[Stash], least_db: float) -> None:
        self.step = step
        self.replays = 0
        self.complaint = ""
        self._least_db = least_db
        self.windows = [each for each in windows if step.replay(each).error is None]
        self._wanted = [reference(step, each) for each in self.windows]
        self._modules = {
            name: module for model in step.models for name, module in model.named_modules() if name
        }

    def smallest(self) -> list[str] | None:
        """Names of the modules to keep, none if none is needed; None if all of them do not help."""
        if self.holds([]):
            return []
        ranked = self._ranked()
        if not self.holds(ranked):
            return None
        return self._merged(minimal(ranked, self.holds))

    def holds(self, names: Sequence[str]) -> bool:
        """Whether every window is right with these modules in float32."""
        candidate = self._candidate(names)
        for window, wanted in zip(self.windows, self._wanted, strict=True):
            self.replays += 1
            judged = fix.judged(self.step, window, candidate, wanted, self._least_db)
            self.complaint = judged.complaint
            if self.complaint:
                return False
        return True

    def quality_db(self) -> float:
        """Least SQNR of the gradients over the windows, as the step is."""
        return min(
            gradient_errors(self.step.replay(window), wanted, float(window.scale)).sqnr_db
            for window, wanted in zip(self.windows, self._wanted, strict=True)
        )

    def _candidate(self, names: Sequence[str]) -> Candidate:
        modules = [self._modules[name] for name in names]
        return Candidate("", "", partial(change.in_float32, modules, self.step.device.type))

    def _ranked(self) -> list[str]:
        """Modules in which something is computed, the most suspicious first."""
        blame: dict[str, float] = {}
        for error in shadow(self.step, self.windows[0]).errors:
            name = error.place.module
            blame[name] = min(blame.get(name, float("inf")), error.local_db)
        trace = watch(self.step, self.windows[0])
        for root in trace.roots.values():
            blame[root.place.module] = float("-inf")
        return [
            name for name in sorted(blame, key=lambda each: blame[each]) if name in self._modules
        ]

    def _merged(self, names: list[str]) -> list[str]:
        """Siblings under one parent as one island, where that is no slower."""
        for parent, children in _families(names):
            together = [parent, *(each for each in names if each not in children)]
            if parent in self._modules and self.holds(together):
                window = self.windows[0]
                one = time_ratio(self.step, window, self._candidate([parent]))
                several = time_ratio(self.step, window, self._candidate(children))
                if one is not None and several is not None and one.median <= several.median:
                    names = together
        return names


def _families(names: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    parents = dict.fromkeys(name.rpartition(".")[0] for name in names if "." in name)
    for parent in parents:
        children = [name for name in names if name.startswith(f"{parent}.")]
        if len(children) > 1:
            yield parent, children


def minimal(names: Sequence[str], holds: Callable[[Sequence[str]], bool]) -> list[str]:
    """A 1-minimal part of `names` that still holds, by delta debugging.

    Parameters
    ----------
    names
        All of them together hold.
    """
    kept, parts = list(names), 2
    while len(kept) > 1:
        size = max(1, len(kept) // parts)
        chunks = [kept[i : i + size] for i in range(0, len(kept), size)]
        for chunk in chunks:
            if len(chunk) < len(kept) and holds(chunk):
                kept, parts = chunk, 2
                break
        else:
            for chunk in reversed(chunks):  # the least suspicious go first
                rest = [each for each in kept if each not in chunk]
                if rest and holds(rest):
                    kept, parts = rest, max(parts - 1, 2)
                    break
            else:
                if size == 1:
                    return kept
                parts = min(len(kept), parts * 2)
    return kept
