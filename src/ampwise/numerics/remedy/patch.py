"""From a diagnosis to patches of the user's source, tried until one is verified.

The file and line are those of the origin. What could be written instead (`patches`) is tried in
order (`search`), each in a fresh process (`trial`), until one makes the failing step right and
trains on. All that were tried are in the diagnosis, with what came of it.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from ampwise.errors import UsageError, in_one_line
from ampwise.numerics.observe.reference import reference
from ampwise.numerics.progress import Progress
from ampwise.numerics.remedy import fix, handover
from ampwise.numerics.remedy.candidate import AS_IT_IS
from ampwise.numerics.remedy.choice import enough_db
from ampwise.numerics.remedy.fresh import Fresh, fresh
from ampwise.numerics.remedy.handover import Failing, TaskSource
from ampwise.numerics.remedy.headroom import function_at
from ampwise.numerics.remedy.own_source import Tried, add_to, own_file, own_source
from ampwise.numerics.remedy.search import Search
from ampwise.numerics.remedy.verify import Trials
from ampwise.numerics.result import Diagnosis
from ampwise.step.recorder import finite


def add_patches(found: Diagnosis, failing: Failing, progress: Progress) -> None:
    """Try patches of a fault's source, and add them to its fixes: a verified one in front."""
    if failing.arm.step.ranks > 1:
        return
    roots = _roots(failing.source)
    if own_file(found, roots) is None:
        return
    progress.stage("running the failing step in a fresh process")
    with (
        tempfile.TemporaryDirectory(prefix="ampwise-patches-") as folder,
        fresh(Path(folder), failing.settings.device) as processes,
    ):
        made = [each.place.file_line for each in failing.made.values()]
        step, stash, casts = failing.step, failing.stash, failing.casts
        source = own_source(found, step, stash, roots, made, casts)
        if source is not None and (made := source.with_caller):
            try:
                at = _overflowing(found)
                trials = _trials(Path(folder), source.file, processes, failing, found.step, at)
            except UsageError as error:
                why = f"suggestion: not run: {in_one_line(error)}"
                add_to(found, source, [Tried(made[0], why)])
                return
            search = Search(source.site, made, trials, progress, source.further)
            search.run()
            add_to(found, source, search.tried)


def _trials(
    folder: Path, file: Path, processes: Fresh, failing: Failing, number: int,
    at: tuple[str, str] | None,
) -> Trials:  # fmt: skip
    """What patches are tried with, of the step of this number.

    Raises
    ------
    UsageError
        When trials would say nothing of this step.
    """
    wanted = failing.wanted or reference(failing.step, failing.stash)
    as_it_is = fix.judged(failing.step, failing.stash, AS_IT_IS, wanted)
    silent = all(map(finite, failing.stash.losses)) and not as_it_is.complaint
    weak = () if failing.updates or failing.after else as_it_is.weak
    handover.save(folder / "step.pt", replace(failing, at=at, weak=weak), wanted)
    trials = Trials(
        folder, file, processes, number, silent=silent and not failing.updates,
        enough=enough_db(failing.step.policy.compute_dtype),
    )  # fmt: skip
    if why := trials.control():
        raise UsageError(why)
    return trials


def _overflowing(found: Diagnosis) -> tuple[str, str] | None:
    """File and name of the function in which float16 ended, where it did."""
    origin = found.origin
    if found.cause != "RANGE_OVERFLOW" or origin is None or origin.dtype != "float16":
        return None
    return origin.file, function_at(origin.file, origin.line)


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
