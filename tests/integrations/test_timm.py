"""timm's scaler object: the same call and state, with ampwise's step behind it."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ampwise import UsageError
from ampwise.integrations.timm import NativeScaler
from tests.observe.scripts import timm_scaler as script

from ..step.helpers import batches, mlp

SCALE = 2.0**16


def as_timm(model: nn.Module, scaler: Any, data: Any, **clip: Any) -> list[Any]:
    """The loop of timm's train.py, two micro-batches a step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    given = []
    for number, (x, y) in enumerate(data):
        if number % 2 == 0:
            optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y) / 2
        given.append(
            scaler(
                loss, optimizer, parameters=model.parameters(), create_graph=False,
                need_update=number % 2 == 1, **clip,
            )
        )  # fmt: skip
    return given


@pytest.mark.parametrize(
    "clip", [{}, {"clip_grad": 0.1}, {"clip_grad": 1e-3, "clip_mode": "value"}]
)
def test_training_is_as_with_timms_own(clip):
    """After timm/utils/cuda.py; a step is skipped in both."""
    data = batches(12)
    data[4][0][0, 0] = float("inf")
    mine, theirs = mlp(), mlp()
    ours = NativeScaler("cpu")
    as_timm(mine, ours, data, **clip)
    reference = script.NativeScaler("cpu", init_scale=ours.engine.history[0].loss_scale)
    as_timm(theirs, reference, data, **clip)
    assert [each.skipped for each in ours.engine.history] == [False, False, True] + [False] * 3
    assert ours.engine.loss_scale.scale.item() == reference.state_dict()["scale"]
    for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-7), (one - other).abs().max()


def test_it_gives_the_true_norm_of_steps(capsys):
    model = mlp()
    scaler = NativeScaler()
    given = as_timm(model, scaler, batches(4), clip_grad=0.01)
    assert (given[0], given[2]) == (None, None)
    norms = [each.item() for each in (given[1], given[3])]
    assert norms == [each.grad_norm for each in scaler.engine.history]
    assert norms[0] > 0.01


def test_state_goes_on_under_timms_key_and_from_timms_own_scaler():
    assert NativeScaler.state_dict_key == script.NativeScaler.state_dict_key
    first = NativeScaler()
    as_timm(mlp(), first, batches(8))
    again = NativeScaler()
    again.load_state_dict(first.state_dict())
    assert again.state_dict() == first.state_dict()
    as_timm(mlp(), again, batches(2))
    assert again.engine.steps == 5
    theirs = script.NativeScaler("cpu", init_scale=2.0**7)
    as_timm(mlp(), theirs, batches(2))
    again.load_state_dict(theirs.state_dict())
    assert again.engine.loss_scale.scale.item() == 2.0**7


def test_its_signature_begins_with_that_of_the_released_one():
    timm = pytest.importorskip("timm.utils.cuda", exc_type=ImportError)
    wanted = list(inspect.signature(timm.NativeScaler.__call__).parameters.values())
    own = list(inspect.signature(NativeScaler.__call__).parameters.values())
    assert [(e.name, e.default) for e in own[: len(wanted)]] == [
        (each.name, each.default) for each in wanted
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"create_graph": True}, "create_graph: expected False"),
        ({"clip_grad": 1.0, "clip_mode": "norms"}, "clip_mode: expected 'norm', 'value' or 'agc'"),
    ],
)
def test_what_it_cannot_do_is_refused_in_a_line(change, words):
    model = mlp()
    loss = F.cross_entropy(model(torch.ones(4, 8)), torch.zeros(4).long())
    scaler = NativeScaler(policy="fp32")
    with pytest.raises(UsageError, match=words):
        scaler(loss, torch.optim.SGD(model.parameters()), **change)


def test_another_optimizer_or_a_policy_of_the_forward_is_refused():
    model, scaler = mlp(), NativeScaler()
    as_timm(model, scaler, batches(2))
    with pytest.raises(UsageError, match="make a scaler for each optimizer"):
        as_timm(model, scaler, batches(2))
    with pytest.raises(UsageError, match="expected fp16, bf16, tf32 or fp32"):
        NativeScaler(policy="bf16-master")
