"""Held-out metrics of a model in training."""

from __future__ import annotations

import torch

from ampwise.distributed.layout import unwrapped
from ampwise.step import TrainStep
from ampwise.step.modules import as_one, in_form
from ampwise.tasks.checks import metrics_of
from ampwise.tasks.task import Task


def held_out(task: Task, step: TrainStep) -> dict[str, float]:
    """The task's metrics of what a step trains, out of DDP, under its autocast.

    That is in evaluation mode, without gradients. Every module's mode is put back as it was: a part
    that is frozen in evaluation mode stays so.
    """
    model = in_form(step.model, unwrapped)
    modes = [(module, module.training) for module in as_one(model).modules()]
    as_one(model).eval()
    try:
        with torch.no_grad(), step.autocast():
            return metrics_of(task, model)
    finally:
        for module, training in modes:
            module.training = training
