"""One iteration of a task on a step: the one place that knows what a task gives.

Everybody who trains a task calls an `Iteration`, and need not ask whether it is made of a loss or
of the step's own parts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from ampwise.errors import UsageError
from ampwise.step import TrainStep
from ampwise.step.iteration import iteration_on, micro_batch_on
from ampwise.tasks.checks import mark
from ampwise.tasks.task import Task


class Iteration:
    """Iterations of a task; its errors are marked as its own, `TrainStep` checks what it returns.

    Parameters
    ----------
    accumulate
        Micro-batches in an accumulation window of the step.

    Attributes
    ----------
    makes_updates
        Whether the task decides by itself what is updated when.
    again
        ``again(step, batch)``: the same as a replay runs it, without the update that ends a window.

    Raises
    ------
    UsageError
        For more than one, where the task updates by itself.
    """

    def __init__(self, task: Task, accumulate: int = 1) -> None:
        given, name = (task.iteration, "iteration") if task.loss is None else (task.loss, "loss")
        assert given is not None  # or there would be no such task
        self.makes_updates = task.loss is None
        self._function = run = _marked(given, f"the task's {name}()")
        self.again: Callable[[TrainStep, Any], None] = (
            partial(iteration_on, iteration=run)
            if self.makes_updates
            else partial(micro_batch_on, loss_fn=run, weight=None)
        )
        if self.makes_updates and accumulate > 1:
            raise UsageError(
                f"accumulate={accumulate}: task {task.name or 'task'} gives an iteration, which "
                "makes its own updates: expected 1; in it, several step.backward() before "
                "step.update() add up"
            )

    def __call__(
        self, step: TrainStep, batch: Any, *, counts: bool = True, last: bool = False
    ) -> Tensor:
        """Train on a batch that is on the device; the loss to report.

        Parameters
        ----------
        counts
            False for a batch that only keeps this rank in step with others.
        last
            Close the accumulation window with it.
        """
        if self.makes_updates:
            return step.iterate(self._function, batch)
        return step(self._function, batch, weight=None if counts else 0, last=last)


def _marked(function: Callable[[Any, Any], Tensor], what: str) -> Callable[[Any, Any], Tensor]:
    def marked(subject: Any, batch: Any) -> Tensor:
        try:  # not `user_code`: this runs every step, and try costs nothing
            return function(subject, batch)
        except Exception as error:
            mark(error, what)
            raise

    return marked
