"""What a step runs, as a recorder keeps it; and what an iteration returns, checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ampwise.errors import UsageError
from ampwise.step.warn import warn_user
from ampwise.step.window import Weight


def micro_batch_on(
    step: Any, batch: Any, *, loss_fn: Callable[[Any, Any], Any], weight: Weight | None
) -> None:
    """A micro-batch on a step, as it is replayed."""
    step.micro_batch(loss_fn, batch, weight)


def iteration_on(step: Any, batch: Any, *, iteration: Callable[[Any, Any], Tensor]) -> None:
    """An iteration on a step, as it is replayed."""
    step.iterate(iteration, batch)


def reported(loss: Any, *, updated: bool) -> Tensor:
    """What an iteration returned, if that is a loss to report.

    Raises
    ------
    UsageError
        When it is no scalar tensor, or nothing was updated.
    """
    if not updated:
        raise UsageError(
            "iteration: it returned without step.update(), so nothing was trained; call "
            "step.backward(loss) and then step.update()"
        )
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        given = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise UsageError(
            f"iteration: expected it to return a scalar tensor, the loss to report, got {given}"
        )
    return loss


def warn_of_rest(kinds: Sequence[str], positions: Sequence[int]) -> None:
    """Warn of optimizers whose gradients an iteration leaves: the next would add to them."""
    named = ", ".join(f"{kind} at {at}" for kind, at in zip(kinds, positions, strict=True))
    warn_user(
        f"iteration: it ends with gradients that no update used, for {named} of the optimizers; "
        "they are added to the next iteration's: give backward(loss, optimizers=[...]) those that "
        "the loss is for"
    )
