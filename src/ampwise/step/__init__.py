"""The training step, one stage a file; `engine` and `train_step` put them together."""

from __future__ import annotations

from ampwise.step.activity import Activity
from ampwise.step.engine import Engine
from ampwise.step.loss_scale import LossScale
from ampwise.step.train_step import TrainStep
from ampwise.telemetry.ring import StepRecord

__all__ = ["Activity", "Engine", "LossScale", "StepRecord", "TrainStep"]
