"""A diagnosis in the middle of training, at a step that was skipped."""

from __future__ import annotations

from ampwise.errors import AmpwiseError
from ampwise.lines import users_line
from ampwise.numerics import across_ranks
from ampwise.numerics.examine import Examiner
from ampwise.numerics.result import Diagnosis
from ampwise.numerics.updates.of_state import LastUpdate, in_last_update
from ampwise.numerics.updates.update import last_update
from ampwise.step.recorder import Stash
from ampwise.step.replay import Replay
from ampwise.step.train_step import TrainStep


def examine(step: TrainStep) -> Diagnosis | None:
    """Why the last window of a step was skipped; None if only the loss scale was too high.

    Nothing about the training changes: parameters, gradients, buffers, random state and loss scale
    are as they were.

    Raises
    ------
    AmpwiseError
        When the window was not recorded, as in loops that call `backward` themselves.
    """
    replay = Replay(step)
    stash = replay.closed
    if stash is None:
        raise AmpwiseError(
            "on_fault: the skipped step cannot be replayed; it needs steps of the form "
            "step(loss_fn, batch) or step.iterate(iteration, batch)"
        )
    examiner = Examiner(replay, "training")
    found = across_ranks.examined(
        examiner, stash, lambda: None if examiner.settling(stash) else examiner.failure(stash)
    )
    if found is not None and found.cause == "BAD_PARAMETER":
        in_last_update(found, replay, _last_updates(step, stash))
    return None if found is not None and found.status == "benign" else found


def _last_updates(step: TrainStep, stash: Stash) -> list[LastUpdate]:
    """The last update of each optimizer before a skipped window; in it, where that updates."""
    made = (e.step for e in reversed(step.history) if e.step < stash.step and not e.skipped)
    number, line = last_update(stash, next(made, 0)), users_line()
    return [LastUpdate(each, number, line) for each in step.optimizers if number]


def summary(found: Diagnosis) -> str:
    """A diagnosis in a few sentences."""
    cause = found.cause or "its loss is not finite"
    where = ""
    if found.origin is not None and found.origin.line:
        where = f" at {found.origin.file}:{found.origin.line}, {found.origin.source!r}"
    fixes = [f"{each.what} ({each.how})" for each in found.fixes if each.verified]
    mended = f" Verified fix: {fixes[0]}." if fixes else ""
    what = "broke a parameter" if found.phase == "optimizer" else "was skipped"
    return f"step {found.step} {what}: {cause}{where}. {found.explanation}{mended}"
