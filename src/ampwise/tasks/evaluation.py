"""Held-out metrics of a model in training."""

from __future__ import annotations

import torch
from torch import nn

from ampwise.step import TrainStep
from ampwise.tasks.checks import metrics_of
from ampwise.tasks.task import Task


def held_out(task: Task, model: nn.Module, step: TrainStep) -> dict[str, float]:
    """The task's metrics under the step's autocast, in evaluation mode, without gradients.

    Every module's mode is put back as it was: a part that is frozen in evaluation mode stays so.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), step.autocast():
            return metrics_of(task, model)
    finally:
        for module, training in modes:
            module.training = training
