"""From a diagnosis to patches of the user's source, tried until one is verified.

The file and line are those of the origin. What could be written instead (`patches`) is tried in
order, each in a fresh process (`trial`), up to the first that makes the failing step right and
trains on. All that were tried are in the diagnosis, with what came of it.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import ampwise
from ampwise.errors import UsageError, in_one_line
from ampwise.numerics.explain.causes import CAUSES
from ampwise.numerics.observe.places import kind_of
from ampwise.numerics.observe.reference import reference
from ampwise.numerics.progress import Progress
from ampwise.numerics.remedy import fix, handover
from ampwise.numerics.remedy.candidate import AS_IT_IS
from ampwise.numerics.remedy.costs import Cost
from ampwise.numerics.remedy.handover import Failing, TaskSource
from ampwise.numerics.remedy.patches import Proposal, proposals
from ampwise.numerics.remedy.patches.site import Site
from ampwise.numerics.remedy.patches.source import UNREADABLE, SourceFile, dotted, unified
from ampwise.numerics.remedy.probe import formats_at
from ampwise.numerics.remedy.verify import Trials
from ampwise.numerics.result import Diagnosis, Fix

_MOST = 12
"""Patches that are tried."""


def add_patches(found: Diagnosis, failing: Failing, progress: Progress) -> None:
    """Try patches of a fault's source, and add them to its fixes: a verified one in front."""
    file = _own_file(found, failing.source)
    if file is None or failing.arm.step.ranks > 1:
        return
    site = _site(found, file, failing)
    if site is None:
        return
    name, before = _shown_name(file, failing.source), site.source
    fixes: list[Fix] = []
    for each, status, cost in _tried(proposals(site)[:_MOST], file, failing, progress):
        diff = unified(before.data, each.data, name, before.encoding)
        verified = status.startswith("verified")
        fix = Fix(each.what, each.why, verified, status, patch=diff, patch_status=status)
        fixes.append((cost or Cost("cost not measured")).of(fix) if verified else fix)
    found.fixes = [
        *(each for each in fixes if each.verified),
        *found.fixes,
        *(each for each in fixes if not each.verified),
    ]


def _site(found: Diagnosis, file: Path, failing: Failing) -> Site | None:
    """The place of the fault in its source; None where that cannot be read."""
    assert found.origin is not None
    origin = found.origin
    try:
        source = SourceFile.of(file, file.read_bytes(), origin.line)
    except (OSError, *UNREADABLE):
        return None
    site = Site(
        source, origin.line, origin.op, found.cause or "", origin.dtype,
        failing.step.policy.compute_dtype,
    )  # fmt: skip
    names = {dotted(each) for each in site.roots} - {""}
    seen = formats_at(failing.step, failing.stash, origin.file, origin.line, names)
    return replace(site, dtypes=seen)


def _tried(
    found: Sequence[Proposal], file: Path, failing: Failing, progress: Progress
) -> Iterator[tuple[Proposal, str, Cost | None]]:
    """Each proposal with its status and its cost, up to the first that is verified."""
    if not found:
        return
    with tempfile.TemporaryDirectory(prefix="ampwise-patches-") as folder:
        progress.stage("running the failing step in a fresh process")
        try:
            trials = _trials(Path(folder), file, failing)
        except UsageError as error:
            yield found[0], f"suggestion: not run: {in_one_line(error)}", None
            return
        for number, each in enumerate(found, 1):
            if trials.over:
                return
            progress.stage(f"patch {number} of at most {len(found)}: {each.what}")
            outcome = trials.of(number, each.data)
            yield each, outcome.in_words(failing.stash.step), outcome.cost
            if outcome.verified:
                return


def _trials(folder: Path, file: Path, failing: Failing) -> Trials:
    """What patches are tried with.

    Raises
    ------
    UsageError
        When trials would say nothing of this step.
    """
    wanted = reference(failing.step, failing.stash)
    as_it_is = fix.complaint(failing.step, failing.stash, AS_IT_IS, wanted, -math.inf)
    handover.save(folder / "step.pt", failing, wanted)
    trials = Trials(folder, file, silent=not as_it_is)
    if why := trials.control():
        raise UsageError(why)
    return trials


# -- whose file -----------------------------------------------------------------------------------


def _own_file(found: Diagnosis, source: TaskSource) -> Path | None:
    """The file of the fault, if it is one of the task's own; no library's, nor one of ours."""
    origin = found.origin
    in_code = found.cause is not None and CAUSES[found.cause].in_code
    if found.status != "fault" or not in_code or origin is None or not origin.line:
        return None
    file = Path(origin.file).resolve()
    ours = Path(ampwise.__file__).parent
    if kind_of(str(file)) != "user" or file.is_relative_to(ours) or not file.is_file():
        return None
    return file if any(file.is_relative_to(each) for each in _roots(source)) else None


def _roots(source: TaskSource) -> list[Path]:
    """Folders whose code is the task's own: the working directory, and that of the task's file."""
    place = source.spec.rpartition(".py")
    roots = [Path.cwd()]
    if place[1]:
        folder = Path(place[0]).expanduser().resolve().parent
        while (folder / "__init__.py").is_file():
            folder = folder.parent
        roots.append(folder)
    return roots


def _shown_name(file: Path, source: TaskSource) -> str:
    """The path in a diff: from the working directory, or else from the task's folder."""
    root = next(each for each in _roots(source) if file.is_relative_to(each))
    return os.fspath(file.relative_to(root).as_posix())
