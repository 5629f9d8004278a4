r"""What may be changed in a user's source at the line of a fault, the gentlest first.

Each kind of change is a file with a function from a `Site` to `Edit`\ s, and a row in `KINDS`, with
the `Grade` that it has for a reviewer:

==============  =================================================================================
primitives      a function of torch's in place of a formula (`log_softmax`, `rms_norm`, `var`, ...)
attention       scores scaled before the product, masks after it, the fused kernel
constants       a mask that the format holds
domain          a second `where`, a clamp into the domain
inner           a gradient that forward asks for, of a multiple of the value
reach           float32 for a softmax that made what the line computes with
dtypes          float32 for an operand; a cast that is left out, or put in
constants       an eps that the format holds
inner           what such a gradient is of, and itself, outside of autocast
island          one of several layers in a statement, or all of it, outside of autocast; then
                the function, by its arguments; then the statements beside it, or the function
                outside of autocast
domain          at last a clamp, where the formula is right and only the format is not
==============  =================================================================================

A line that makes parameters in 16 bits is changed by `parameters` (`as_made`).

Where what holds is noise on some step, `reach` changes what the operands are made by. Where none of
these mends it, what `calls` gives to helpers is in float32, and `islands_in` has
several functions in float32.

Nothing is known here of whether a change helps: each is tried (`remedy.trial`).
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path

import libcst as cst

from ampwise.numerics.remedy.patches import (
    attention,
    calls,
    constants,
    domain,
    dtypes,
    inner,
    island,
    parameters,
    primitives,
    reach,
)
from ampwise.numerics.remedy.patches.edit import Edit
from ampwise.numerics.remedy.patches.site import Site
from ampwise.numerics.remedy.patches.source import UNREADABLE, SourceFile
from ampwise_lint.base.words import joined

Kind = Callable[[Site], Iterator[Edit]]


class Grade(IntEnum):
    """What a reviewer would rather take, where both are as good: the lower."""

    FORMULA = 0
    FLOAT32 = 1
    CONSTANT = 2
    STATEMENTS = 3
    FUNCTION = 4
    LIMIT = 5
    LAYERS = 6


KINDS: tuple[tuple[Kind, Grade], ...] = (
    (primitives.edits, Grade.FORMULA),
    (attention.edits, Grade.FORMULA),
    (constants.masks, Grade.FORMULA),
    (domain.edits, Grade.FORMULA),
    (inner.scaled, Grade.FORMULA),
    (reach.softmaxes, Grade.FLOAT32),
    (dtypes.edits, Grade.FLOAT32),
    (constants.guards, Grade.CONSTANT),
    (inner.islands, Grade.STATEMENTS),
    (island.elements, Grade.STATEMENTS),
    (island.statement, Grade.STATEMENTS),
    (island.arguments, Grade.STATEMENTS),
    (island.adjacent, Grade.STATEMENTS),
    (island.function, Grade.FUNCTION),
    (domain.clamps, Grade.LIMIT),
)

_SEVERAL = 2

FORMULAS: tuple[Kind, ...] = (primitives.edits, domain.edits, domain.clamps)
"""What may also be needed in a function that is in float32 altogether."""


@dataclass(frozen=True)
class Proposal:
    """A changed file.

    Attributes
    ----------
    what, why
        What is done, in a few words, and a sentence about why.
    data
        The whole file of the fault with the change made.
    parts, only
        Of how many parts it is that may be left out, and the proposal of some of them; None where
        there is none.
    statements
        How many of the parts, the last ones, are statements of an island.
    beside
        Other files that change, too, or in its place.
    has_layers
        It is an island with layers in it that need not be there.
    """

    what: str
    why: str
    data: bytes
    grade: Grade = Grade.FORMULA
    parts: int = 0
    only: Callable[[Collection[int]], Proposal | None] | None = None
    statements: int = 0
    beside: Mapping[Path, bytes] = field(default_factory=dict[Path, bytes])
    has_layers: bool = False


def proposals(site: Site) -> list[Proposal]:
    """Every change that fits, in order, each text once; formulas in a float32 function, too."""
    found = [each for kind, grade in KINDS for each in _of_kind(site, kind, grade)]
    formulas = [each for kind in FORMULAS for each in _made(site, kind, Grade.FUNCTION)]
    found += [more for each in formulas for more in _also_float32(site, each)]
    by_text = {each.data: each for each in reversed(found) if each.data != site.source.data}
    return [each for each in found if by_text.get(each.data) is each]


def around(
    site: Site, callers: Sequence[calls.CallSite], chains: Sequence[Sequence[Site]]
) -> Iterator[Proposal]:
    """Changes that reach beyond the function of a fault.

    What helpers are given where they are called, the nearest call first; then islands: a caller
    that runs no layers, several functions, a caller whose layers are in float32, too.

    Parameters
    ----------
    chains
        Runs of functions with that of the fault among them.
    """
    for caller in callers:
        at_call: Kind = lambda _, at=caller: calls.edits(at)  # noqa: E731
        for each in _made(caller.site, at_call, Grade.STATEMENTS):
            yield _in_caller(each, site, caller.site)
    for among_layers in (False, True):
        for caller in (each.site for each in callers if each.among_layers is among_layers):
            what = f"the calling function, line {caller.line}, in float32, outside of autocast"
            grade = Grade.LAYERS if among_layers else Grade.FUNCTION
            for each in _made(caller, island.function, grade):
                yield replace(_in_caller(each, site, caller), what=what)
        if not among_layers:
            kinds = (reach.function, island.function)
            islands = (islands_in(each, site, kind) for each in chains for kind in kinds)
            yield from (each for each in islands if each is not None)


def as_made(site: Site, sites: Sequence[Site]) -> Iterator[Proposal]:
    """Parameters in float32 where they are made in 16 bits.

    Parameters
    ----------
    sites
        Lines that make some, the one to be changed first in front; then all of them are.
    """
    own = [
        each if sites[0].source.path == site.source.path else _in_caller(each, site, sites[0])
        for each in _made(sites[0], parameters.edits, Grade.FLOAT32)
    ]
    yield from own[:1]
    if len(sites) > 1 and (
        made := _several(
            lambda changed: f"parameters in float32 on {len(changed)} lines that make them",
            parameters.WHY, Grade.FLOAT32, site, sites, parameters.edits,
        )
    ):  # fmt: skip
        yield made
    yield from own[1:]


def given_to_helpers(at: calls.CallSite) -> Iterator[Proposal]:
    """What helpers are given that make what the line of the fault computes with, in float32."""
    yield from _made(at.site, lambda _: calls.given_here(at), Grade.FLOAT32)


def softmaxes_in(site: Site, before: Sequence[Site]) -> Iterator[Proposal]:
    """Softmaxes in float32 of helpers that ran before the function of the fault."""
    for each in before:
        for made in _made(each, reach.all_softmaxes, Grade.FLOAT32):
            yield _in_caller(made, site, each)


def made_by(site: Site, helpers: Sequence[Site]) -> Iterator[Proposal]:
    """Formats that are written in helpers which give the line what it computes with."""
    for each in helpers:
        for made in _made(each, reach.formats, Grade.FLOAT32):
            yield _in_caller(made, site, each)


def back_from(site: Site, before: Sequence[Site]) -> Iterator[Proposal]:
    """Changes that reach back to where the operands were made, where those at the line are too few.

    In the function of the fault: the formula from further above, the statements from there on; and
    then the function, by its arguments and products, alone and together with helpers that ran
    before it, the nearest first.

    Parameters
    ----------
    before
        Such helpers, the nearest first.
    """
    yield from _made(site, reach.operands, Grade.FLOAT32)
    yield from _made(site, reach.statements, Grade.STATEMENTS)
    yield from _made(site, reach.function, Grade.STATEMENTS)
    for number in range(1, len(before) + 1):
        several = before[:number]
        for some in dict.fromkeys([(several[-1],), tuple(several)]):
            places, grade = (*some, site), Grade.FUNCTION
            if made := _several(_functions, island.WHY, grade, site, places, reach.function):
                yield made
    yield from _made(site, island.function, Grade.FUNCTION)


def _functions(changed: Sequence[Site]) -> str:
    names = [each.function.name.value for each in changed if each.function is not None]
    return f"{joined(names)} in float32"


def _casts(changed: Sequence[Site]) -> str:
    several = f", in {len(changed)} parts" if len(changed) > 1 else ""
    return f"casts to float32 in place of 16 bits{several}"


def casts_in(site: Site, others: Sequence[Site]) -> Iterator[Proposal]:
    """Copies in place of casts to 16 bits; no such casts in another part of files than the fault's.

    In one of them, and in all; first of the file of the fault, then of others.
    """
    yield from _made(site, dtypes.copied, Grade.FLOAT32)
    own = [each for each in others if each.source.path == site.source.path]
    for several in (own, [each for each in others if each not in own]):
        for other in several:
            for each in _made(other, dtypes.in_part, Grade.FLOAT32):
                yield _in_caller(each, site, other)
        within = own if several is own else others
        parts = [each for each in (site, *within) if any(dtypes.in_part(each))]
        if len(parts) > 1 and several:
            made = _several(_casts, dtypes.FLOAT32, Grade.FLOAT32, site, parts, dtypes.in_part)
            yield from () if made is None else (made,)


def islands_in(several: Sequence[Site], site: Site, kind: Kind) -> Proposal | None:
    """Functions of a chain in float32, each by itself; None where one of them cannot be.

    They may be in several files.
    """
    outside = ", outside of autocast" if kind is island.function else ""

    def what(changed: Sequence[Site]) -> str:
        lines = joined(f"{each.source.path.name}:{each.line}" for each in changed)
        return f"the function{'s' * (len(changed) > 1)} at {lines} in float32{outside}"

    return _several(what, island.WHY, Grade.FUNCTION, site, several, kind)


def _several(
    what: Callable[[Sequence[Site]], str],
    why: str,
    grade: Grade,
    site: Site,
    places: Sequence[Site],
    kind: Kind,
) -> Proposal | None:
    """The first change of a kind at each of several places; None where one has none.

    In a file the last one is changed first: lines above it stay. A place is left as it is where
    none of the parts of its change are kept; `what` says it of those that are changed.
    """
    upwards = sorted(places, key=lambda each: each.line, reverse=True)

    def made(keeps: Callable[[int], bool]) -> Proposal | None:
        files: dict[Path, tuple[Site, bytes]] = {}
        changed: list[Site] = []
        parts = 0
        for each in upwards:
            path = each.source.path
            now = each if path not in files else each.of(files[path][1])
            whole = None if now is None else next(_made(now, kind, grade), None)
            if whole is None:
                return None
            own = whole.parts - whole.statements
            kept = {
                number for number in range(whole.parts) if number >= own or keeps(parts + number)
            }
            parts += own
            less = whole if whole.only is None or len(kept) == whole.parts else whole.only(kept)
            if less is not None:
                files[path] = each, less.data
                changed.append(each)
        said = what([each for each in places if each in changed])
        found = _of_files(said, why, grade, site, dict(files.values()))
        return replace(found, parts=parts, only=lambda some: made(some.__contains__))

    return made(lambda _: True)


def _of_files(
    what: str, why: str, grade: Grade, site: Site, changed: Mapping[Site, bytes]
) -> Proposal:
    """A proposal of files that may be others than that of the fault."""
    files = {each.source.path: data for each, data in changed.items()}
    own = files.pop(site.source.path, site.source.data)
    return Proposal(what, why, own, grade, beside=files)


def _in_caller(made: Proposal, site: Site, caller: Site) -> Proposal:
    """What was proposed for a caller, as a proposal for the file of the fault."""
    found = _of_files(made.what, made.why, made.grade, site, {caller: made.data})
    only = made.only
    if only is None:
        return found

    def fewer(kept: Collection[int]) -> Proposal | None:
        less = only(kept)
        return None if less is None else _in_caller(less, site, caller)

    return replace(found, parts=made.parts, only=fewer, statements=made.statements)


def _of_kind(site: Site, kind: Kind, grade: Grade) -> Iterator[Proposal]:
    among: Mapping[Kind, tuple[cst.CSTNode | None, int]] = {
        island.function: (site.function, 1),
        island.statement: (site.statement, _SEVERAL),
    }
    node, least = among.get(kind, (None, 0))
    layers = node is not None and len(island.layers_called(site, node)) >= least
    yield from (replace(each, has_layers=layers) for each in _made(site, kind, grade))


def _made(site: Site, kind: Kind, grade: Grade) -> Iterator[Proposal]:
    for edit in kind(site):
        try:
            yield _proposal(site, edit, grade)
        except UNREADABLE:
            continue


def _proposal(site: Site, edit: Edit, grade: Grade) -> Proposal:
    """The file with an edit made."""
    data = site.source.edited(edit.changes)
    ast.parse(data)
    fewer = edit.fewer
    if fewer is None:
        return Proposal(edit.what, edit.why, data, grade)

    def only(kept: Collection[int]) -> Proposal | None:
        less = fewer(kept)
        return None if less is None else _proposal(site, less, grade)

    return Proposal(edit.what, edit.why, data, grade, edit.parts, only, edit.statements)


def _also_float32(site: Site, first: Proposal) -> Iterator[Proposal]:
    """A change, and its function in float32 on top."""
    if site.function is None:
        return
    line = site.source.start(site.function)[0]
    inner = replace(site, source=SourceFile.of(site.source.path, first.data, line), line=line)
    for each in _made(inner, island.function, Grade.FUNCTION):
        why = f"{first.why} {each.why}"
        yield Proposal(f"{first.what}, {each.what}", why, each.data, Grade.FUNCTION)
