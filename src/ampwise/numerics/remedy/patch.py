"""From a diagnosis to patches of the user's source, tried until one is verified.

The file and line are those of the origin. What could be written instead (`patches`) is tried in
order, each in a fresh process (`trial`), up to the first that makes the failing step right and
trains on. All that were tried are in the diagnosis, with what came of it.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from ampwise.errors import UsageError, in_one_line
from ampwise.numerics.observe.reference import reference
from ampwise.numerics.progress import Progress
from ampwise.numerics.remedy import fix, handover
from ampwise.numerics.remedy.candidate import AS_IT_IS
from ampwise.numerics.remedy.handover import Failing, TaskSource
from ampwise.numerics.remedy.own_source import Tried, add_to, own_source
from ampwise.numerics.remedy.patches import Proposal
from ampwise.numerics.remedy.verify import Trials
from ampwise.numerics.result import Diagnosis


def add_patches(found: Diagnosis, failing: Failing, progress: Progress) -> None:
    """Try patches of a fault's source, and add them to its fixes: a verified one in front."""
    if failing.arm.step.ranks > 1:
        return
    source = own_source(found, failing.step, failing.stash, _roots(failing.source))
    if source is not None:
        tried = _tried(source.proposals, source.file, failing, progress)
        add_to(found, source, tried)


def _tried(
    found: Sequence[Proposal], file: Path, failing: Failing, progress: Progress
) -> Iterator[Tried]:
    """Each proposal with its status and its cost, up to the first that is verified."""
    if not found:
        return
    with tempfile.TemporaryDirectory(prefix="ampwise-patches-") as folder:
        progress.stage("running the failing step in a fresh process")
        try:
            trials = _trials(Path(folder), file, failing)
        except UsageError as error:
            yield Tried(found[0], f"suggestion: not run: {in_one_line(error)}")
            return
        for number, each in enumerate(found, 1):
            if trials.over:
                return
            progress.stage(f"patch {number} of at most {len(found)}: {each.what}")
            outcome = trials.of(number, each.data)
            yield Tried(each, outcome.in_words(failing.stash.step), outcome.cost)
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
