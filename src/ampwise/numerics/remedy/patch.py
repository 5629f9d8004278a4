"""From a diagnosis to patches of the user's source, tried until one is verified.

The file and line are those of the origin. What could be written instead (`patches`) is tried in
order, each in a fresh process (`trial`), up to the first that makes the failing step right and
trains on; then some more, where one of them could be better (`choice`). What is taken is tried
without each of its edits, and what nothing is lost without is left out. All that were tried are in
the diagnosis, with what came of it.
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
from ampwise.numerics.remedy.choice import Held, best_of, enough_db, is_as_good, may_win, why
from ampwise.numerics.remedy.fresh import Fresh, fresh
from ampwise.numerics.remedy.handover import Failing, TaskSource
from ampwise.numerics.remedy.own_source import OwnSource, Tried, add_to, own_file, own_source
from ampwise.numerics.remedy.patches import Proposal
from ampwise.numerics.remedy.verify import Trials, in_db
from ampwise.numerics.result import Diagnosis
from ampwise.step.recorder import finite

_MORE, _MANY_MORE = 3, 8
"""Patches that are tried after one holds, if they could be better; and while all that hold leave
something wrong."""
_MOST_PARTS = 10
"""Edits of a patch up to which it is tried without each."""


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
            tried = _tried(source.with_caller, trials, source, failing.stash.step, progress)
            add_to(found, source, tried)


def _tried(
    found: Sequence[Proposal],
    begin: Callable[[], Trials],
    source: OwnSource,
    step: int,
    progress: Progress,
) -> Iterator[Tried]:
    """Each proposal with its status; of those that hold, the one that is taken with its cost."""
    if not found:
        return
    try:
        trials = begin()
    except UsageError as error:
        yield Tried(found[0], f"suggestion: not run: {in_one_line(error)}")
        return
    before, most = source.site.source.data, enough_db(source.site.compute_dtype)
    held: list[Held] = []
    for each in _held(found, trials, partial(best_of, most=most, before=before), most, progress):
        if each.outcome.verified:
            held.append(each)
        else:
            yield Tried(each.proposal, each.outcome.in_words(step))
    if not held:
        return
    best = best_of(held, most, before)
    for each in held:
        if each is not best:
            yield Tried(each.proposal, f"suggestion: tried in a fresh process: it holds, too: "
                        f"{in_db(each.worst())} at worst, where the one taken keeps "
                        f"{in_db(best.worst())}")  # fmt: skip
    reason = why(best, held, most)
    least = _least(best, trials, len(found), progress)
    words = least.outcome.in_words(step) + (f"; {reason}" if reason else "")
    yield Tried(least.proposal, words, trials.cost_of(least.number))


def _held(
    found: Sequence[Proposal],
    trials: Trials,
    best: Callable[[Sequence[Held]], Held],
    most: float,
    progress: Progress,
) -> Iterator[Held]:
    """What is tried: until one holds, then a few that could be better."""
    held: list[Held] = []
    since: list[Held] = []
    for number, each in enumerate(found, 1):
        wrong = all(each.outcome.left for each in held)
        if trials.over or len(since) == (_MANY_MORE if wrong else _MORE):
            return
        if held and not may_win(each, best(held), most):
            continue
        progress.stage(f"patch {number} of at most {len(found)}: {each.what}")
        tried = Held(number, each, trials.of(number, each.data, each.beside))
        since += [tried] if held else []
        if tried.outcome.verified:
            held.append(tried)
        yield tried


def _least(best: Held, trials: Trials, tried: int, progress: Progress) -> Held:
    """A patch without the edits that nothing is lost without."""
    only, kept = best.proposal.only, list(range(best.proposal.parts))
    if only is None or not best.measured or len(kept) > _MOST_PARTS:
        return best
    for part in reversed(range(best.proposal.parts)):
        if len(kept) == 1 or trials.over:
            break
        fewer = [each for each in kept if each != part]
        progress.stage(f"the patch without one of its edits: {best.proposal.what}")
        less, number = only(fewer), tried + 1 + part
        outcome = trials.of(number, less.data, less.beside)
        if is_as_good(outcome, best):
            best, kept = Held(number, less, outcome), fewer
    return best


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
