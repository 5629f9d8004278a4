"""Patches of code that is running, tried by replays of the failing step in this very process.

A script is not loaded a second time: it may do anything. The patched file is compiled instead, and
for a replay the functions that it changes run its code; after it they are as they were. What the
replay does not run (a loss that is made again from its operations) can only be suggested.
"""

from __future__ import annotations

import gc
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, FunctionType

from ampwise.numerics.observe.reference import reference
from ampwise.numerics.progress import Progress
from ampwise.numerics.remedy import fix
from ampwise.numerics.remedy.candidate import AS_IT_IS, Candidate
from ampwise.numerics.remedy.costs import Cost, Run, cost_of
from ampwise.numerics.remedy.own_source import OwnSource, Tried, add_to, own_source
from ampwise.numerics.remedy.search import Search
from ampwise.numerics.remedy.verify import Outcome
from ampwise.numerics.result import Diagnosis
from ampwise.step.compiled import is_compiled
from ampwise.step.recorder import Stash
from ampwise.step.replayable import Replayable


def add_patches(
    found: Diagnosis, step: Replayable, stash: Stash, roots: Sequence[Path], progress: Progress
) -> None:
    """Try patches of a fault's source, and add them to its fixes: a verified one in front.

    Parameters
    ----------
    roots
        Folders whose code is the user's own.
    """
    source = own_source(found, step, stash, roots)
    if source is None or not (made := source.proposals):
        return
    if why := _cannot(source, step):
        add_to(found, source, [Tried(made[0], f"suggestion: not run: {why}")])
        return
    assert found.origin is not None
    tries = _InPlace(found.origin.file, source.site.source.data, step, stash)
    search = Search(source.site, made, tries, progress)
    try:
        search.run()
    finally:  # `progress` may end it
        add_to(found, source, search.tried)


def _cannot(source: OwnSource, step: Replayable) -> str:
    """Why no replay runs a patch; empty where one does."""
    if is_compiled(step.models):
        return "the model is compiled"
    # Lines that only stand for operations have no names.
    if source.site.function is None or not any(source.site.dtypes.values()):
        return "the step is run again without this line, from the operations that it made"
    return ""


class _InPlace:
    """Tries patches by replays of the step, with the functions that they change in place.

    Where float64 fails, too, a patch is held against its own float64.

    Parameters
    ----------
    file
        As functions say where they are from.
    before
        Its text.
    """

    over = False  # `progress` ends it

    def __init__(self, file: str, before: bytes, step: Replayable, stash: Stash) -> None:
        self._file, self._before = file, before
        self._step, self._stash = step, stash
        self._wanted = reference(step, stash)
        self._weak = fix.judged(step, stash, AS_IT_IS, self._wanted).weak
        self._candidates: dict[int, Candidate] = {}

    def of(self, number: int, data: bytes, beside: Mapping[Path, bytes]) -> Outcome:
        """Run the step again with a patch."""
        assert not beside  # none of `OwnSource.proposals` has another file
        patched = Patched.of(self._file, self._before, data)
        if not patched.functions:
            return Outcome("the function that it changes was not found")
        candidate = self._candidates[number] = Candidate("", "", patched.in_place)
        wanted, own = self._wanted, not self._wanted.finite
        if own:
            with patched.in_place():
                wanted = reference(self._step, self._stash)
        judged = fix.judged(self._step, self._stash, candidate, wanted, weak=self._weak)
        return Outcome(judged.complaint, own, judged.sqnr_db, weakest=judged.weakest)

    def in_words(self, outcome: Outcome) -> str:
        """An outcome, as a status of a patch."""
        if outcome.complaint:
            return f"suggestion: tried in place of the function: {outcome.complaint}"
        return (
            f"verified: step {self._stash.step}, run again with the patched function in its "
            f"place, is finite{outcome.within}; the script goes on without it"
        )

    def cost_of(self, number: int) -> Cost | None:
        """What a patch costs beside the step as it is."""
        original = Run(self._step, self._stash)
        return cost_of(original, replace(original, candidate=self._candidates[number]))


@dataclass(frozen=True)
class Patched:
    """The functions of this process that a patch changes, each with the code that it gives them."""

    functions: Sequence[tuple[FunctionType, CodeType]]

    @classmethod
    def of(cls, file: str, before: bytes, after: bytes) -> Patched:
        """Find what a patch of a file changes.

        Parameters
        ----------
        file
            As functions say where they are from.
        """
        old = _codes(compile(before, file, "exec", dont_inherit=True))
        new = _codes(compile(after, file, "exec", dont_inherit=True))
        changed = {
            key: code for key, code in new.items() if key in old and _text(code) != _text(old[key])
        }
        # By type, not isinstance, which asks objects for their class, and some of them warn.
        alive = (each for each in gc.get_objects() if type(each) is FunctionType)
        own = [each for each in alive if each.__code__.co_filename == file]
        return cls(
            [
                (each, code)
                for each in own
                if (code := changed.get(_key(each.__code__))) is not None
                and code.co_freevars == each.__code__.co_freevars
            ]
        )

    @contextmanager
    def in_place(self) -> Generator[None]:
        """Let the functions run the patched code."""
        before = [each.__code__ for each, _ in self.functions]
        try:
            for each, code in self.functions:
                each.__code__ = code
            yield
        finally:
            for (each, _), code in zip(self.functions, before, strict=True):
                each.__code__ = code


def _key(code: CodeType) -> tuple[str, tuple[str, ...]]:
    """What a function is called, and its arguments: a patch changes neither."""
    arguments = code.co_argcount + code.co_kwonlyargcount
    return code.co_qualname, code.co_varnames[:arguments]


def _codes(of: CodeType) -> Mapping[tuple[str, tuple[str, ...]], CodeType]:
    """All functions of a file; of those that are called alike, the last."""
    found: dict[tuple[str, tuple[str, ...]], CodeType] = {}
    queue = [of]
    while queue:
        code = queue.pop()
        found[_key(code)] = code
        queue += [each for each in code.co_consts if isinstance(each, CodeType)]
    return found


def _text(code: CodeType) -> tuple[object, ...]:
    """What a function does, wherever in the file it is."""
    constants = tuple(
        _text(each) if isinstance(each, CodeType) else (type(each), repr(each))
        for each in code.co_consts
    )
    return code.co_code, code.co_names, code.co_varnames, constants
