"""Invariants 5 and 9: fused steps, logging included, read nothing back to the host.

On the CPU a value read through an operator (``.item()``, ``bool(tensor)``) shows as
``_local_scalar_dense``, which is what waits for the device on an accelerator.
"""

from __future__ import annotations

import pytest
import torch

from ampwise.step import TrainStep
from ampwise.step.host import HostFlag

from .helpers import OPTIMIZERS, SyncCounter, batches, classify, mlp


def count_syncs(step: TrainStep, steps: int = 3) -> int:
    data = batches(steps + 2)
    for batch in data[:2]:
        step(classify, batch)  # the first forward is watched, optimizer state is created
    with SyncCounter() as counter:
        for batch in data[2:]:
            step(classify, batch)
            step.poll()
    return counter.count


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("optimizer", ["adamw-fused", "sgd-fused"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "bf16-master"])
def test_fused_steps_cost_no_host_sync(precision, optimizer, accumulate):
    model = mlp()
    step = TrainStep(
        model,
        OPTIMIZERS[optimizer](model.parameters()),
        policy=precision,
        max_grad_norm=1.0,
        accumulate=accumulate,
    )
    assert count_syncs(step, 6) == 0
    assert step.syncs_per_step == 0


@pytest.mark.parametrize("decided_on", ["device"], indirect=True)
def test_plain_optimizers_cost_one_and_say_so(monkeypatch):
    monkeypatch.setattr(HostFlag, "read", lambda self: bool(self.tensor.item()))  # as elsewhere
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    step = TrainStep(model, sgd, policy="fp16")
    step._log.outcomes.at_once = False
    step._log.outcomes.settle = lambda found_inf: [False]
    assert count_syncs(step, 4) == 4
    assert step.syncs_per_step == 1


def test_the_counter_sees_what_it_should():
    with SyncCounter() as counter:
        torch.ones(()).item()
        bool(torch.ones(()) > 0)
    assert counter.count == 2
