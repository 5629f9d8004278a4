"""Tasks: how a command gets at a model, the built-in ones, and checks of what people write."""

from __future__ import annotations

from ampwise.tasks.loading import BUILT_IN, load_task
from ampwise.tasks.task import Task

__all__ = ["BUILT_IN", "Task", "load_task"]
