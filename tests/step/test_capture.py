"""What a captured step refuses, and what it does without CUDA; the graph itself is in tests/gpu."""

from __future__ import annotations

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from ampwise.errors import UsageError
from ampwise.step import TrainStep

from .helpers import OPTIMIZERS, batches, classify, mlp, parameters


def test_without_cuda_steps_run_as_usual_and_that_is_said():
    runs = []
    for graphed in (False, True):
        model = mlp()
        step = TrainStep(model, OPTIMIZERS["adamw-fused"](model.parameters()), policy="bf16")
        if graphed:
            with pytest.warns(UserWarning, match="CUDA graphs need a CUDA device: steps on cpu"):
                captured = step.captured(classify)
        for batch in batches(5):
            captured(batch) if graphed else step(classify, batch)
        runs.append((parameters(model), step.history))
    assert torch.equal(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1]


def test_what_cannot_be_captured_is_refused_with_the_reason():
    model = mlp()
    fused = OPTIMIZERS["adamw-fused"](model.parameters())
    with pytest.raises(UsageError, match="accumulate=1"):
        TrainStep(model, fused, policy="fp32", accumulate=2).captured(classify)
    plain = OPTIMIZERS["adamw-plain"](model.parameters())
    with pytest.raises(UsageError, match="expected fused optimizers"):
        TrainStep(model, plain, policy="fp32").captured(classify)
    with pytest.raises(UsageError, match=r"lr=torch\.tensor"):
        TrainStep(model, fused, policy="fp32", scheduler=StepLR(fused, 1)).captured(classify)
