"""Hugging Face's Trainer: a callback that says what its precision did.

The Trainer keeps its step, its `compute_loss` and its precision (``bf16=True``, ``fp16=True``).
Observed are the optimizer, the scaler, autocast and backward, as by `ampwise run`.

A Trainer tells its callbacks nothing of an error. So that nothing stays behind then,
``Trainer.train`` is wrapped once, when the first callback is made: it ends the observation of the
callbacks of that trainer, whatever happens.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from ampwise.integrations._extra import missing
from ampwise.integrations._observer import Observed, OnFault

try:
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise missing(error, "transformers") from error


class Callback(Observed, TrainerCallback):
    """Logs loss scale, skips, true gradient norm and dtypes; diagnoses the first fault.

    ::

        from ampwise.integrations.transformers import Callback

        trainer = Trainer(model, args, train_dataset=..., callbacks=[Callback()])

    Figures go where the Trainer's own go: its log, its history and its reporters, under the names
    ``amp/loss_scale``, ``amp/grad_norm`` (before clipping, of true gradients), ``amp/found_inf``,
    ``amp/skipped_total`` and ``amp/products/<dtype>``. Losses and parameters are those without it,
    bit for bit.

    Parameters
    ----------
    on_fault
        ``diagnose``: at the first step that is not finite, find the line and the cause, print it,
        and keep it. ``off``: only log.
    folder
        Where the diagnosis is written; default: the Trainer's ``output_dir``.
    """

    def __init__(self, *, on_fault: OnFault = "diagnose", folder: str | Path | None = None) -> None:
        super().__init__("trainer.train()", on_fault, folder)
        _end_with_train()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Observe from here on."""
        self._observer.begin(self._folder or args.output_dir)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step and its schedule are done."""
        self._observer.step_over()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Add figures to the Trainer's own, before its reporters see them."""
        if logs is None or "loss" not in logs:
            return
        figures = self._observer.figures()
        logs.update(figures)
        state.log_history[-1].update(figures)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Observe no longer."""
        self.end()

    def end(self, error: BaseException | None = None) -> None:
        """Observe no longer; called by itself also where training raises."""
        self._observer.end(error)


def _end_with_train() -> None:
    """Have ``Trainer.train`` end what its callbacks observe, whatever happens in it."""
    real = Trainer.train
    if getattr(real, "__module__", "") == __name__:
        return

    @functools.wraps(real)
    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        every = self.callback_handler.callbacks
        own = [each for each in every if isinstance(each, Callback)]
        # First: reporters are told of a log's figures in this order.
        every[:] = [*own, *(each for each in every if each not in own)]
        try:
            return real(self, *args, **kwargs)
        except BaseException as error:
            for each in own:
                each.end(error)
            raise

    train.__module__ = __name__
    Trainer.train = train  # pyright: ignore[reportAttributeAccessIssue] - called as the other is
