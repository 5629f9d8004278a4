"""Patches of code that is running, tried by replays of the failing step in this very process.

A script is not loaded a second time: it may do anything. The patched file is compiled instead, and
for a replay the functions that it changes run its code; after it they are as they were. What the
replay does not run (a loss that is made again from its operations) can only be suggested.
"""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, FunctionType

from ampwise.numerics.observe.reference import Reference, reference
from ampwise.numerics.progress import Progress
from ampwise.numerics.remedy import fix
from ampwise.numerics.remedy.candidate import Candidate
from ampwise.numerics.remedy.costs import Run, cost_of
from ampwise.numerics.remedy.own_source import OwnSource, Tried, add_to, own_source
from ampwise.numerics.remedy.patches import Proposal
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
    if source is None:
        return
    tried: list[Tried] = []
    try:
        tried.extend(_tried(found, source, step, stash, progress))
    finally:  # `progress` may end it
        add_to(found, source, tried)


def _tried(
    found: Diagnosis, source: OwnSource, step: Replayable, stash: Stash, progress: Progress
) -> Iterator[Tried]:
    """Each proposal with its status, up to the first that is verified."""
    assert found.origin is not None
    made = source.proposals
    if made and (why := _cannot(source, step)):
        yield Tried(made[0], f"suggestion: not run: {why}")
        return
    wanted = reference(step, stash)
    for number, each in enumerate(made, 1):
        progress.stage(f"patch {number} of at most {len(made)}: {each.what}")
        patched = Patched.of(found.origin.file, source.site.source.data, each.data)
        tried = _judged(each, patched, step, stash, wanted)
        yield tried
        if tried.verified:
            return


def _cannot(source: OwnSource, step: Replayable) -> str:
    """Why no replay runs a patch; empty where one does."""
    if is_compiled(step.models):
        return "the model is compiled"
    # Lines that only stand for operations have no names.
    if source.site.function is None or not any(source.site.dtypes.values()):
        return "the step is run again without this line, from the operations that it made"
    return ""


def _judged(
    proposal: Proposal, patched: Patched, step: Replayable, stash: Stash, wanted: Reference
) -> Tried:
    """A patch held against the step; where float64 fails, too, against its own float64."""
    if not patched.functions:
        return Tried(proposal, "suggestion: not run: the function that it changes was not found")
    candidate, whose = Candidate(proposal.what, "", patched.in_place), "float64"
    if not wanted.finite:
        whose = "the patched source in float64"
        with patched.in_place():
            wanted = reference(step, stash)
    judged = fix.judged(step, stash, candidate, wanted)
    if judged.complaint:
        return Tried(proposal, f"suggestion: tried in place of the function: {judged.complaint}")
    sqnr_db = judged.sqnr_db
    known = sqnr_db is not None and sqnr_db > 0  # not of a gradient that is 0
    near = f", its gradients {sqnr_db:.0f} dB from {whose}" if known else ""
    original = Run(step, stash)
    return Tried(
        proposal,
        f"verified: step {stash.step}, run again with the patched function in its place, is finite"
        f"{near}; the script goes on without it",
        cost_of(original, replace(original, candidate=candidate)),
    )


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
