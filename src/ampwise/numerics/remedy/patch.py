"""From a diagnosis to patches of the user's source, tried until one is verified.

The file and line are those of the origin. What could be written instead (`patches`) is tried in
order, each in a fresh process (`trial`), up to the first that makes the failing step right and
trains on. All that were tried are in the diagnosis, with what came of it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from ampwise.errors import UsageError, in_one_line
from ampwise.numerics.observe.reference import reference
from ampwise.numerics.progress import Progress
from ampwise.numerics.remedy import fix, handover
from ampwise.numerics.remedy.candidate import AS_IT_IS
from ampwise.numerics.remedy.fresh import Fresh, fresh
from ampwise.numerics.remedy.handover import Failing, TaskSource
from ampwise.numerics.remedy.own_source import Tried, add_to, own_file, own_source
from ampwise.numerics.remedy.patches import Proposal
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
        source = own_source(found, failing.step, failing.stash, roots)
        if source is not None:
            trials = partial(_trials, Path(folder), source.file, processes, failing)
            tried = _tried(source.with_caller, trials, failing.stash.step, progress)
            add_to(found, source, tried)


def _tried(
    found: Sequence[Proposal], begin: Callable[[], Trials], step: int, progress: Progress
) -> Iterator[Tried]:
    """Each proposal with its status and its cost, up to the first that is verified."""
    if not found:
        return
    try:
        trials = begin()
    except UsageError as error:
        yield Tried(found[0], f"suggestion: not run: {in_one_line(error)}")
        return
    for number, each in enumerate(found, 1):
        if trials.over:
            return
        progress.stage(f"patch {number} of at most {len(found)}: {each.what}")
        outcome = trials.of(number, each.data, each.beside)
        yield Tried(each, outcome.in_words(step), outcome.cost)
        if outcome.verified:
            return


def _trials(folder: Path, file: Path, processes: Fresh, failing: Failing) -> Trials:
    """What patches are tried with.

    Raises
    ------
    UsageError
        When trials would say nothing of this step.
    """
    wanted = failing.wanted or reference(failing.step, failing.stash)
    silent = all(map(finite, failing.stash.losses)) and not (
        fix.judged(failing.step, failing.stash, AS_IT_IS, wanted).complaint
    )
    handover.save(folder / "step.pt", failing, wanted)
    trials = Trials(folder, file, processes, silent=silent)
    if why := trials.control():
        raise UsageError(why)
    return trials


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
