"""Compiled models under dispatch modes: run eagerly, or the compiler gives their code up."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn


def is_compiled(models: Iterable[nn.Module]) -> bool:
    """Whether a part of some models is compiled."""
    return any(
        type(each).__name__ == "OptimizedModule" or each._compiled_call_impl is not None
        for model in models
        for each in model.modules()
    )


def eager(models: Iterable[nn.Module]) -> AbstractContextManager[Any]:
    """Context in which no compiled code is used, and none is lost: enter it before the mode."""
    if not is_compiled(models):
        return nullcontext()  # the compiler need not even be loaded
    return torch.compiler.set_stance("force_eager")
