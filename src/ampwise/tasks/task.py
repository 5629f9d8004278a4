"""The contract between a model and every ampwise command."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ampwise.errors import TaskError
from ampwise.step import TrainStep


@dataclass(frozen=True)
class Task:
    """What a command needs to know to train a model.

    Attributes
    ----------
    model
        Builds a fresh model on the CPU; called under a seed. May build several, in a mapping or a
        sequence: what else is given a model then gets them in that form, and their names in
        reports begin with key or position (``generator.0``).
    batches
        One epoch of training batches; every call starts the epoch anew. A batch is a tensor
        or any nesting of tuples, lists, dicts and dataclasses of tensors.
    loss
        Scalar loss of one batch that is already on the model's device.
    optimizer
        Optimizer over the model's parameters, or several. Default: AdamW with lr 1e-3, one for each
        model.
    evaluate
        Metrics of the model on held-out data, such as ``{"accuracy": 0.93}``.
    name
        What reports call the task. Default: its function's name, or its file's where that is
        ``task``.
    samples
        Samples (or tokens) in a batch: the unit of rates and of accumulation weights.
    higher_is_better
        Direction of each metric. A metric that is not listed: higher is better, unless its name
        says otherwise, as ``val_loss``, ``mse``, ``perplexity``, ``wer`` and ``fid`` do.
    levers
        Variants of the task that should train the same and cost less, by name (``chunked-loss``):
        ``bench`` measures each against the task itself, ``tune`` may choose it, ``train --levers``
        takes it.
    chance
        Metrics of a model that has learnt nothing, such as ``{"accuracy": 0.1}``: what training has
        to beat before precisions are compared. Default: the metrics before training.
    info
        Facts for the record of a run: which data, which size.
    iteration
        Instead of `loss`, for any other loop (a GAN, actor-critic): one iteration on a batch by the
        step's own parts, ``step.autocast()``, ``step.backward(loss, optimizers=[...])`` and
        ``step.update([...])``; returns the loss to report. See `TrainStep.iterate`.

    Raises
    ------
    TaskError
        When an attribute that must be a function is something else, such as the model itself; with
        neither `loss` nor `iteration`, or both.
    """

    model: Callable[[], Any]
    batches: Callable[[], Iterable[Any]]
    loss: Callable[[Any, Any], Tensor] | None = None
    optimizer: Callable[[Any], Any] | None = None
    evaluate: Callable[[Any], Mapping[str, float]] | None = None
    name: str = ""
    samples: Callable[[Any], int] | None = None
    higher_is_better: Mapping[str, bool] = field(default_factory=dict[str, bool])
    levers: Mapping[str, Callable[[], Task]] = field(
        default_factory=dict[str, "Callable[[], Task]"]
    )
    chance: Mapping[str, float] = field(default_factory=dict[str, float])
    info: Mapping[str, str | int | float] = field(default_factory=dict[str, str | int | float])
    iteration: Callable[[TrainStep, Any], Tensor] | None = None

    def __post_init__(self) -> None:
        for name, arguments in _ARGUMENTS.items():
            value = getattr(self, name)
            optional = name not in ("model", "batches")
            built = name == "model" and isinstance(value, nn.Module)
            if (built or not callable(value)) and not (optional and value is None):
                raise TaskError(
                    f"Task({name}=...) is of type {type(value).__name__}: expected a function; "
                    f"write {name}=lambda{arguments}: ..."
                )
        if (self.loss is None) == (self.iteration is None):
            given = "neither" if self.loss is None else "both"
            raise TaskError(
                f"Task has {given} of loss and iteration: expected one; loss=lambda model, batch: "
                "... for one loss a step, iteration=lambda step, batch: ... for any other loop"
            )


_ARGUMENTS = {
    "model": "",
    "batches": "",
    "loss": " model, batch",
    "optimizer": " model",
    "evaluate": " model",
    "samples": " batch",
    "iteration": " step, batch",
}
