"""A diagnosis in the middle of training, at a step that was skipped."""

from __future__ import annotations

from ampwise.errors import AmpwiseError
from ampwise.numerics import across_ranks
from ampwise.numerics.examine import Examiner
from ampwise.numerics.result import Diagnosis
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
    return None if found is not None and found.status == "benign" else found


def summary(found: Diagnosis) -> str:
    """A diagnosis in a few sentences."""
    cause = found.cause or "its loss is not finite"
    where = ""
    if found.origin is not None and found.origin.line:
        where = f" at {found.origin.file}:{found.origin.line}, {found.origin.source!r}"
    fixes = [f"{each.what} ({each.how})" for each in found.fixes if each.verified]
    mended = f" Verified fix: {fixes[0]}." if fixes else ""
    return f"step {found.step} was skipped: {cause}{where}. {found.explanation}{mended}"
