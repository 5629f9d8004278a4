"""The user's own source of a fault: its file, the site in it, and patches of it as fixes."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, takewhile
from pathlib import Path

import libcst as cst

import ampwise
from ampwise.formats import HALF
from ampwise.numerics.explain.causes import CAUSES
from ampwise.numerics.remedy.costs import Cost
from ampwise.numerics.remedy.headroom import function_around
from ampwise.numerics.remedy.patches import (
    Grade,
    Proposal,
    around,
    as_made,
    back_from,
    casts_in,
    given_to_helpers,
    made_by,
    proposals,
    softmaxes_in,
)
from ampwise.numerics.remedy.patches.calls import CallSite
from ampwise.numerics.remedy.patches.constants import assigned
from ampwise.numerics.remedy.patches.site import Site
from ampwise.numerics.remedy.patches.source import (
    UNREADABLE,
    SourceFile,
    dotted,
    encoding_of,
    parts_with,
    unified,
    walk,
)
from ampwise.numerics.remedy.precision import runs_with
from ampwise.numerics.remedy.probe import Led, Wanted, formats_at, led_to
from ampwise.numerics.result import HOLDS_TOO, Diagnosis, Fix
from ampwise.places import kind_of
from ampwise.step.recorder import Stash
from ampwise.step.replayable import Replayable

_MOST = 16
"""Patches of the function of a fault that are tried."""
_MOST_BEYOND = 8
"""Patches elsewhere that are tried."""
_MOST_CALLERS = 3
_MOST_BEFORE = 2
_MOST_CASTING = 3
_MOST_OTHERS = 6


@dataclass(frozen=True)
class OwnSource:
    """Where a fault is in files that may be changed.

    Attributes
    ----------
    root
        The folder from which a diff names them.
    callers
        Where the function of the fault is called, the innermost call first.
    chains
        Runs of functions of the user's own with that of the fault among them.
    others
        Other parts of the user's files that write a 16-bit format, where an update is at fault;
        else None.
    before
        Functions of the user's own that ran before that of the fault, and no layers, the nearest
        first.
    makers
        Those that its function calls for what the line computes with.
    casting
        Functions that ran before it, and cast something, the nearest first.
    helpers
        Where calls end, in the file of the fault, of functions of the user's own without layers.
    parameter_lines
        Lines that make parameters of the fault in 16 bits, where that is known.
    """

    root: Path
    site: Site
    callers: Sequence[CallSite] = ()
    chains: Sequence[Sequence[Site]] = ()
    others: Sequence[Site] | None = None
    before: Sequence[Site] = ()
    makers: Sequence[Site] = ()
    casting: Sequence[Site] = ()
    helpers: frozenset[tuple[int, int]] = frozenset()
    parameter_lines: Sequence[Site] = ()

    @property
    def file(self) -> Path:
        """The file of the fault."""
        return self.site.source.path

    @property
    def with_caller(self) -> list[Proposal]:
        """`proposals`, and at last changes where the function of the fault is called."""
        casts = () if self.others is None else casts_in(self.site, self.others)
        if self.makes_parameters:
            return [*self.proposals, *islice(casts, _MOST_BEYOND)]
        beyond = around(self.site, self.callers, self.chains)
        return [
            *self.proposals,
            *islice(casts, _MOST_BEYOND),
            *islice(beyond, _MOST_BEYOND),
        ]

    @property
    def further(self) -> list[Proposal]:
        """Changes that reach back to what the line computes with, where those at it are too few."""
        return list(islice(back_from(self.site, self.before), _MOST_BEYOND))

    @property
    def makes_parameters(self) -> bool:
        """Whether the line of the fault is one that makes parameters."""
        own = self.site.source.path, self.site.line
        return any((each.source.path, each.line) == own for each in self.parameter_lines)

    @property
    def proposals(self) -> list[Proposal]:
        """What may be written there instead, in the order in which it is tried."""
        if self.makes_parameters:
            return list(as_made(self.site, self.parameter_lines))[:_MOST]
        first = list(as_made(self.site, self.parameter_lines)) if self.parameter_lines else []
        first += softmaxes_in(self.site, self.before)
        # What a helper only asks for its format is not cast.
        made = islice(made_by(self.site, [*self.makers, *self.casting]), _MOST_BEYOND)
        given = given_to_helpers(CallSite(self.site, (0, 0), helpers=self.helpers))
        own = [*first, *proposals(self.site)][:_MOST]
        formulas = list(takewhile(lambda each: each.grade is Grade.FORMULA, own[len(first) :]))
        at = len(first) + len(formulas)
        return [*own[:at], *made, *given, *own[at:]]

    def diff(self, proposal: Proposal) -> str:
        """A proposal as a unified diff."""
        before, own = self.site.source, proposal.data
        parts = [unified(before.data, own, self._name(before.path), before.encoding)]
        for file, after in proposal.beside.items():
            now = file.read_bytes()
            parts.append(unified(now, after, self._name(file), encoding_of(now)))
        return "".join(parts)

    def _name(self, file: Path) -> str:
        return file.relative_to(self.root).as_posix()


@dataclass(frozen=True)
class Tried:
    """A patch, what became of it, and what it costs."""

    proposal: Proposal
    status: str
    cost: Cost | None = None

    @property
    def verified(self) -> bool:
        """Whether it was run, and mends the step."""
        return self.status.startswith("verified")

    def as_fix(self, source: OwnSource) -> Fix:
        """The same as a diagnosis says it."""
        each, diff = self.proposal, source.diff(self.proposal)
        said = self.status.removeprefix(f"{HOLDS_TOO}: ")
        fix = Fix(each.what, each.why, self.verified, said, patch=diff, patch_status=self.status)
        return (self.cost or Cost("cost not measured")).of(fix) if self.verified else fix


def add_to(found: Diagnosis, source: OwnSource, tried: Iterable[Tried]) -> None:
    """Add patches to the fixes of a diagnosis: a verified one in front."""
    fixes = [each.as_fix(source) for each in tried]
    found.fixes = [
        *(each for each in fixes if each.verified),
        *found.fixes,
        *(each for each in fixes if not each.verified),
    ]


def own_source(
    found: Diagnosis, step: Replayable, stash: Stash, roots: Sequence[Path],
    parameter_lines: Sequence[tuple[str, int]] = (), casts: Iterable[tuple[str, int]] = (),
) -> OwnSource | None:  # fmt: skip
    """The source of a fault; None where it is not the user's, or cannot be read.

    Parameters
    ----------
    roots
        Folders whose code is the user's own; a diff names files from the first that has them.
    parameter_lines
        Lines that make parameters in 16 bits.
    casts
        Those that cast float32 for it.
    """
    file = own_file(found, roots)
    if file is None:
        return None
    assert found.origin is not None
    origin = found.origin
    root = next(each for each in roots if file.is_relative_to(each))
    fault = origin.file, origin.line
    led = led_to(step, stash, *fault, lambda each: _is_own(Path(each), [root]))
    callers = led.calls[:_MOST_CALLERS]
    runs = [] if led.at is None else runs_with(led.functions, led.at)
    first = _site(found, file, origin.line, step)
    if first is None:
        return None
    before, made = led.before[::-1][:_MOST_BEFORE], _makers(first, origin.file, led)
    cast = [each for each in reversed(led.earlier) if each not in made and _casts(*each)]
    cast = cast[:_MOST_CASTING]
    at_callers = [(each.file, each.line) for each in callers]
    places = list(dict.fromkeys([fault, *at_callers, *chain(*runs), *before, *made, *cast]))
    sites = dict(zip(places, _sites(found, places, step, stash), strict=True))
    site = sites[fault]
    if site is None:
        return None
    site = _with_casts(site, casts)
    at_calls = [
        CallSite(at, each.end, each.among_layers, frozenset(led.helpers.get(each.file, ())))
        for each in callers
        if (at := sites[each.file, each.line]) is not None
    ]
    several = [[sites[each] for each in run] for run in runs]
    whole = [[each for each in run if each is not None] for run in several if None not in run]
    others = _others(found, root, site, step) if found.phase == "optimizer" else None
    others = others and [_with_casts(each, casts) for each in others]
    earlier = [at for each in before if (at := sites[each]) is not None]
    makers = [at for each in made if (at := sites[each]) is not None]
    casting = [at for each in cast if (at := sites[each]) is not None]
    helpers = frozenset(led.helpers.get(origin.file, ()))
    lines = _parameter_lines(found, step, root, fault, parameter_lines)
    return OwnSource(root, site, at_calls, whole, others, earlier, makers, casting, helpers, lines)


def _with_casts(site: Site, casts: Iterable[tuple[str, int]]) -> Site:
    own = [line for file, line in casts if Path(file).resolve() == site.source.path]
    return replace(site, casts_of_float32=own)


def _parameter_lines(
    found: Diagnosis, step: Replayable, root: Path, fault: tuple[str, int],
    lines: Sequence[tuple[str, int]],
) -> list[Site]:  # fmt: skip
    """Lines of the user's that make parameters; that of the fault first."""
    own = [each for each in dict.fromkeys(lines) if _is_own(Path(each[0]), [root])]
    own.sort(key=lambda each: each != fault)
    sites = [_site(found, Path(file).resolve(), line, step) for file, line in own]
    return [each for each in sites if each is not None]


def _makers(site: Site, file: str, led: Led) -> list[tuple[str, int]]:
    """Functions that are called for what the line computes with, the nearest first."""
    made = [*site.expressions, *(value for _, value in assigned(site))]
    calls = dict.fromkeys(call for each in made for call in walk(each, cst.Call))
    ends = [(file, site.source.end(each)) for each in calls]
    return list(dict.fromkeys(led.called[end] for end in ends if end in led.called))


def _casts(file: str, line: int) -> bool:
    """Whether the function around a line has a cast in it."""
    around = function_around(file, line)
    nodes = [] if around is None else ast.walk(around)
    return any(isinstance(each, ast.Attribute) and each.attr in _CASTS for each in nodes)


_CASTS = ("to", "half", "bfloat16", "type_as", "type")


def _others(found: Diagnosis, root: Path, site: Site, step: Replayable) -> list[Site]:
    """Other parts of the user's files that write a 16-bit format: classes, functions, statements.

    Where state is made is no place of the update that shows what it loses.
    """
    loaded = {getattr(each, "__file__", None) for each in list(sys.modules.values())}
    files = sorted(Path(each).resolve() for each in loaded if each and each.endswith(".py"))
    places = [
        (each, first)
        for each in dict.fromkeys([site.source.path, *files])
        if _is_own(each, [root])
        for first, last in _parts_with_casts(each)
        if not (each == site.source.path and first <= site.line <= last)
    ]
    sites = [_site(found, *each, step) for each in places[:_MOST_OTHERS]]
    return [each for each in sites if each is not None]


def _parts_with_casts(file: Path) -> list[tuple[int, int]]:
    try:
        return list(parts_with(file.read_bytes(), (*HALF, "half")))
    except (OSError, *UNREADABLE):
        return []


def own_file(found: Diagnosis, roots: Sequence[Path]) -> Path | None:
    """The file of the fault, if it is one of the user's own; no library's, nor one of ours."""
    origin = found.origin
    in_code = found.cause is not None and CAUSES[found.cause].in_code
    if found.status != "fault" or not in_code or origin is None or not origin.line:
        return None
    file = Path(origin.file).resolve()
    return file if _is_own(file, roots) else None


def _is_own(file: Path, roots: Sequence[Path]) -> bool:
    """Whether a file is in some folders, and neither a library's nor one of ours."""
    file, ours = file.resolve(), Path(ampwise.__file__).parent
    if kind_of(os.fspath(file)) != "user" or file.is_relative_to(ours) or not file.is_file():
        return False
    return any(file.is_relative_to(each) for each in roots)


def _sites(
    found: Diagnosis, places: Sequence[tuple[str, int]], step: Replayable, stash: Stash
) -> list[Site | None]:
    """Files at some lines; None where one cannot be read."""
    sites = [_site(found, Path(file).resolve(), line, step) for file, line in places]
    wanted = [
        Wanted(file, line, {dotted(each) for each in site.roots} - {""} if site is not None else ())
        for (file, line), site in zip(places, sites, strict=True)
    ]
    seen = formats_at(step, stash, wanted)
    return [
        None if site is None else replace(site, dtypes=dtypes)
        for site, dtypes in zip(sites, seen, strict=True)
    ]


def _site(found: Diagnosis, file: Path, line: int, step: Replayable) -> Site | None:
    assert found.origin is not None
    origin = found.origin
    try:
        source = SourceFile.of(file, file.read_bytes(), line)
    except (OSError, *UNREADABLE):
        return None
    return Site(source, line, origin.op, found.cause or "", origin.dtype, step.policy.compute_dtype)
