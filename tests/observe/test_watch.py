"""A training in this process under observation, and nothing left of it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from ampwise.observe import faults
from ampwise.observe.watch import Watch

from ..step.helpers import batches, classify, mlp
from .inside import forget_compiled


def train(
    watch: Watch | None = None, bad: int | None = None, scaler: Any = None, **sgd: Any
) -> tuple[nn.Module, list[dict[str, Any]]]:
    """Eight steps in bfloat16, or with a scaler that was made before."""
    model, seen = mlp(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dtype = torch.bfloat16 if scaler is None else torch.float16
    for number, (x, y) in enumerate(batches(8)):
        if number == bad:
            x = x * float("inf")
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = classify(model, (x, y))
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        if watch is not None:
            watch.step_over()
            seen.append(dict(watch.metrics))
    return model, seen


def nothing_left() -> bool:
    hooks = (
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    )
    return not any(hooks) and nn.Module.__call__ is CALL


CALL = nn.Module.__call__


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other tests compiled, and keep, is not this training's."""
    forget_compiled()
    monkeypatch.setattr(faults, "_compiled_already", lambda: False)


def test_it_sees_what_run_would_and_changes_nothing():
    alone, _ = train()
    with Watch() as watch:
        watched, seen = train(watch)
    assert nothing_left()
    for mine, theirs in zip(watched.parameters(), alone.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert (watch.report.steps, watch.report.ending) == (8, "finished")
    assert set(watch.products) == set(watch.report.precision.ran.forward) == {"bfloat16"}
    assert [each["train/lr"] for each in seen] == [0.1] * 8
    assert all(each["amp/grad_norm"] > 0 for each in seen)


def test_a_scaler_that_was_made_before_is_seen():
    """What the scale became is known when the step is over."""
    scaler = torch.amp.GradScaler("cpu", 2.0**40)
    with Watch(on_fault="off") as watch:
        _, seen = train(watch, scaler=scaler)
    scales = [each["amp/loss_scale"] for each in seen]
    assert scales[:2] == [2.0**40, 2.0**39]
    assert watch.report.loss_scale.last == scales[-1]
    backoffs = [each["amp/scale_backoffs"] for each in seen]
    assert backoffs == [sum(each["amp/skipped"] for each in seen[: n + 1]) for n in range(8)]


def test_a_diagnosis_is_handed_over_when_its_step_is_over():
    told: list[Any] = []
    with Watch(found=told.append) as watch:
        train(watch, bad=3)
    assert [each.cause for each in told] == ["BAD_INPUT"]
    assert told[0].step == 4
    assert [each.cause for each in watch.report.faults] == ["BAD_INPUT"]


def test_one_that_nobody_ended_ends_with_the_next_and_an_error_ends_it():
    forgotten = Watch()
    forgotten.begin()
    train()
    with pytest.raises(RuntimeError, match="the user's own"), Watch() as watch:
        assert forgotten.report.steps == 8
        train()
        raise RuntimeError("the user's own")
    assert watch.report.ending == "raised RuntimeError"
    assert nothing_left()
    forgotten.end()
    assert forgotten.report.steps == 8


def test_a_function_compiled_before_is_not_looked_into(monkeypatch):
    """A mode of ours over compiled code would have it run eagerly, and round otherwise."""
    monkeypatch.undo()
    compiled = torch.compile(classify, backend="eager")
    with Watch() as watch:
        assert watch._observation.faults._programs.compiles
    del compiled


def test_all_of_it_is_free_once_it_has_ended():
    train()  # what torch imports now, it keeps as it found it
    with Watch() as watch:
        model, _ = train(watch)
        kept = [weakref.ref(model), weakref.ref(watch._observation.session)]
    del model, watch
    gc.collect()
    assert [each() for each in kept] == [None, None]
