"""The user's own source of a fault: its file, the site in it, and patches of it as fixes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import ampwise
from ampwise.numerics.explain.causes import CAUSES
from ampwise.numerics.remedy.costs import Cost
from ampwise.numerics.remedy.patches import Proposal, islands_around, proposals
from ampwise.numerics.remedy.patches.site import Site
from ampwise.numerics.remedy.patches.source import UNREADABLE, SourceFile, dotted, unified
from ampwise.numerics.remedy.probe import called_from, formats_at
from ampwise.numerics.result import Diagnosis, Fix
from ampwise.places import kind_of
from ampwise.step.recorder import Stash
from ampwise.step.replayable import Replayable

_MOST = 16
"""Patches that are tried."""


@dataclass(frozen=True)
class OwnSource:
    """Where a fault is in a file that may be changed.

    Attributes
    ----------
    name
        The path in a diff.
    caller
        Where the same file calls the function of the fault.
    """

    file: Path
    name: str
    site: Site
    caller: Site | None = None

    @property
    def with_caller(self) -> list[Proposal]:
        """`proposals`, and at last an island in the function that calls the one of the fault."""
        return self.proposals + ([] if self.caller is None else islands_around(self.caller))

    @property
    def proposals(self) -> list[Proposal]:
        """What may be written there instead, in the order in which it is tried."""
        return proposals(self.site)[:_MOST]


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
        before, each = source.site.source, self.proposal
        diff = unified(before.data, each.data, source.name, before.encoding)
        fix = Fix(
            each.what, each.why, self.verified, self.status, patch=diff, patch_status=self.status
        )
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
    found: Diagnosis, step: Replayable, stash: Stash, roots: Sequence[Path]
) -> OwnSource | None:
    """The source of a fault; None where it is not the user's, or cannot be read.

    Parameters
    ----------
    roots
        Folders whose code is the user's own; a diff names files from the first that has them.
    """
    file = own_file(found, roots)
    if file is None:
        return None
    root = next(each for each in roots if file.is_relative_to(each))
    assert found.origin is not None
    site = _site(found, file, found.origin.line, step, stash)
    if site is None:
        return None
    line = called_from(step, stash, found.origin.file, found.origin.line)
    caller = None if line is None else _site(found, file, line, step, stash)
    return OwnSource(file, file.relative_to(root).as_posix(), site, caller)


def own_file(found: Diagnosis, roots: Sequence[Path]) -> Path | None:
    """The file of the fault, if it is one of the user's own; no library's, nor one of ours."""
    origin = found.origin
    in_code = found.cause is not None and CAUSES[found.cause].in_code
    if found.status != "fault" or not in_code or origin is None or not origin.line:
        return None
    file = Path(origin.file).resolve()
    ours = Path(ampwise.__file__).parent
    if kind_of(os.fspath(file)) != "user" or file.is_relative_to(ours) or not file.is_file():
        return None
    return file if any(file.is_relative_to(each) for each in roots) else None


def _site(found: Diagnosis, file: Path, line: int, step: Replayable, stash: Stash) -> Site | None:
    """The fault's file at a line; None where that cannot be read."""
    assert found.origin is not None
    origin = found.origin
    try:
        source = SourceFile.of(file, file.read_bytes(), line)
    except (OSError, *UNREADABLE):
        return None
    site = Site(source, line, origin.op, found.cause or "", origin.dtype, step.policy.compute_dtype)
    names = {dotted(each) for each in site.roots} - {""}
    return replace(site, dtypes=formats_at(step, stash, origin.file, line, names))
