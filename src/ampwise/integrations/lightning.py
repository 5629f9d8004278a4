"""Lightning: a precision plugin that makes the step, and a callback that only looks.

`Precision` is an `Engine` behind Lightning's hooks; Lightning keeps loop, accumulation, schedule,
logging and checkpoints:

    train_step_context   engine.autocast()           forward and loss
    backward             engine.backward(loss)       the loss as Lightning has divided it
    optimizer_step       engine.update()             guard, step or skip, loss scale
    lr_scheduler_step    left out after a skip       for schedulers with ``interval="step"``
    state_dict           engine.state_dict()         in Lightning's checkpoint

`Callback` is for those who keep ``Trainer(precision=...)``: Lightning makes the step, and what it
does is observed as by `ampwise run`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampwise.distributed.layout import unwrapped
from ampwise.errors import UsageError
from ampwise.integrations._clip import clip_values_
from ampwise.integrations._extra import missing
from ampwise.integrations._observer import Observed, OnFault, figures_of
from ampwise.policy import Policy
from ampwise.step import Engine, LossScale
from ampwise.telemetry import names

try:
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.precision import Precision as LightningPrecision
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities.model_helpers import is_overridden
except ImportError as error:
    raise missing(error, "lightning") from error

_WORDS: Mapping[str, Any] = {
    "float32": "32-true",
    "float16": "16-mixed",
    "bfloat16": "bf16-mixed",
}
"""What Lightning calls them."""


class Precision(LightningPrecision):
    """ampwise's step in Lightning's loop.

    ::

        from ampwise.integrations.lightning import Precision

        Trainer(plugins=[Precision("bf16-master", max_grad_norm=1.0)])

    Steps with a non-finite gradient are skipped in every precision, and schedulers that step with
    the optimizer are held then. Fused optimizers may be clipped. Loss scale and counters are in
    Lightning's checkpoints; loss scale, gradient norm, skips and the precision go to the Trainer's
    loggers. For automatic optimization; with manual optimization use `ampwise.TrainStep`.

    Parameters
    ----------
    policy, loss_scale, max_skips, strict
        As of `ampwise.Engine`.
    max_grad_norm
        Clip the global L2 norm of the true gradients to this; the same as the Trainer's
        ``gradient_clip_val``, which may be given instead.

    Attributes
    ----------
    engine
        The engine of the last ``fit``, with its `history`; None before.
    """

    def __init__(
        self,
        policy: str | Policy = "auto",
        *,
        max_grad_norm: float | None = None,
        loss_scale: LossScale | None = None,
        max_skips: int = 50,
        strict: bool = False,
    ) -> None:
        self.engine: Engine | None = None
        self._max_grad_norm = max_grad_norm
        self._make = partial(
            Engine, policy=policy, loss_scale=loss_scale, max_skips=max_skips, strict=strict
        )
        self._evaluating: Engine | None = None
        self._undo: list[Callable[[], object]] = []
        self._held = False
        self._looked_at = False

    # -- what Lightning calls, in this order -------------------------------------------------------

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Model and optimizers are on their device: make the engine over them."""
        self.teardown()
        module: Any = unwrapped(model)
        if module.trainer.state.fn == TrainerFn.FITTING:
            self._check(module)
            self.engine = self._make(model, optimizers, max_grad_norm=self._max_grad_norm)
            self._begin(module, lr_schedulers)
        elif any(True for _ in model.parameters()):
            # Nothing is trained, and nothing is ever stepped.
            self._evaluating = self._make(model, torch.optim.SGD(model.parameters()))
        if engine := self._evaluating or self.engine:
            self.precision = _WORDS[engine.policy.compute_dtype]
        return model, optimizers, lr_schedulers

    def forward_context(self) -> AbstractContextManager[None]:
        """Training, validation, test and prediction run under the policy."""
        engine = self._evaluating or self.engine
        return super().forward_context() if engine is None else engine.autocast()

    def backward(
        self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Backward of the scaled loss."""
        if args or kwargs.keys() - {"retain_graph"}:
            given = ", ".join((*map(str, args), *kwargs))
            raise UsageError(f"backward: expected the loss alone, or retain_graph=, got {given}")
        self._engine.backward(tensor, **kwargs)

    def optimizer_step(
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Forward and backward, then guard, and step or skip."""
        engine, loss = self._engine, closure()
        if loss is None:  # training_step wants no step
            engine.discard()
            self._held = True
            return None
        if self._looked_at:
            engine.gradients()
        self._after_closure(model, optimizer)
        engine.update()
        self._held = engine.schedule_holds()
        return loss

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: float = 0.0,
        gradient_clip_algorithm: Any = "norm",
    ) -> None:
        """Clip true gradients: a norm in the step itself, values now."""
        if clip_val <= 0:
            return
        if str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm)) == "value":
            clip_values_(self._engine.gradients().values(), clip_val)
        elif self._engine.max_grad_norm != clip_val:
            self._engine.max_grad_norm = float(clip_val)

    def state_dict(self) -> dict[str, Any]:
        """Loss scale, counters and an open window, for Lightning's checkpoint."""
        return {} if self.engine is None else self.engine.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where a checkpoint was written."""
        if self.engine is not None:
            self.engine.load_state_dict(state_dict)

    def teardown(self) -> None:
        """Let go of model and optimizers; the engine's history and state stay."""
        while self._undo:
            self._undo.pop()()
        self._evaluating = None

    # -- inside ------------------------------------------------------------------------------------

    @property
    def _engine(self) -> Engine:
        if self.engine is None:
            raise UsageError("Precision: expected to be called by Trainer.fit, which connects it")
        return self.engine

    def _check(self, module: Any) -> None:
        """Refuse what would go past the engine."""
        if not module.automatic_optimization:
            raise UsageError(
                "Precision: expected automatic optimization; with automatic_optimization=False "
                "leave the plugin out and train with ampwise.TrainStep(self, self.optimizers())"
            )
        if is_overridden("backward", module):
            raise UsageError(
                f"Precision: {type(module).__name__}.backward is not called, as the engine makes "
                "the backward; remove it, and change gradients in on_before_optimizer_step"
            )
        clip = module.trainer.gradient_clip_val
        if clip is not None and self._max_grad_norm is not None:
            raise UsageError(
                f"Precision: clipping is set twice, by Trainer(gradient_clip_val={clip!r}) and by "
                f"Precision(max_grad_norm={self._max_grad_norm!r}); leave one out"
            )

    def _begin(self, module: Any, lr_schedulers: list[Any]) -> None:
        """Be told of schedules, and log; until `teardown`."""
        trainer, engine = module.trainer, self._engine
        watched = [(each, "on_before_optimizer_step") for each in trainer.callbacks]
        watched += [(module, "on_before_optimizer_step"), (module, "configure_gradient_clipping")]
        self._looked_at = any(is_overridden(hook, each) for each, hook in watched)
        self._held = False
        with_optimizer = [each.scheduler for each in lr_schedulers if each.interval == "step"]
        real = module.lr_scheduler_step

        def lr_scheduler_step(scheduler: Any, metric: Any) -> None:
            """The module's own, but after a skipped step."""
            if not (self._held and any(scheduler is each for each in with_optimizer)):
                real(scheduler, metric)

        module.lr_scheduler_step = lr_scheduler_step
        figures = _Figures(engine)
        trainer.callbacks.insert(0, figures)
        self._undo += [
            engine.close,
            partial(delattr, module, "lr_scheduler_step"),
            partial(trainer.callbacks.remove, figures),
        ]


class _Figures(pl.Callback):
    """Logs an engine's figures: plugins cannot."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for each in trainer.loggers:
            each.log_hyperparams({names.PRECISION: self._engine.policy.text})

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        policy = self._engine.policy
        for record in self._engine.poll()[-1:]:
            seen = names.metrics_of(record, policy.text, enabled=policy.autocast)
            _log(pl_module, figures_of(seen))


class Callback(Observed, pl.Callback):
    """Logs loss scale, skips, true gradient norm and dtypes; diagnoses the first fault.

    ::

        from ampwise.integrations.lightning import Callback

        Trainer(precision="16-mixed", callbacks=[Callback()])

    Figures go to the Trainer's loggers as ``amp/loss_scale``, ``amp/grad_norm`` (before clipping,
    of true gradients), ``amp/found_inf``, ``amp/skipped_total`` and ``amp/products/<dtype>``.
    Losses and parameters are those without it, bit for bit.

    Parameters
    ----------
    on_fault
        ``diagnose``: at the first step that is not finite, find the line and the cause, print it,
        and keep it. ``off``: only log.
    folder
        Where the diagnosis is written; default: the Trainer's ``log_dir``, or its
        ``default_root_dir``.
    """

    def __init__(self, *, on_fault: OnFault = "diagnose", folder: str | Path | None = None) -> None:
        super().__init__("trainer.fit()", on_fault, folder)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Observe from here on."""
        if isinstance(trainer.precision_plugin, Precision):
            raise UsageError(
                "Callback: expected Lightning's own precision; ampwise's Precision plugin logs by "
                "itself: leave the callback out"
            )
        self._observer.begin(self._folder or trainer.log_dir or trainer.default_root_dir)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the figures of a step that is done."""
        self._observer.step_over()
        _log(pl_module, self._observer.figures())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Observe no longer."""
        self._observer.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Observe no longer: training has failed, or was interrupted."""
        self._observer.end(exception)


def _log(module: pl.LightningModule, figures: Mapping[str, float]) -> None:
    if figures:
        module.log_dict(dict(figures), on_step=True, on_epoch=False, batch_size=1)
