"""What a task gives is checked at the first moment it can be, and each fault named."""

from __future__ import annotations

import contextlib
import math
import traceback

import pytest
import torch
from torch import nn

from ampwise.errors import TaskError, UsageError
from ampwise.step import TrainStep
from ampwise.tasks import Task
from ampwise.tasks.checks import (
    build,
    first_batch,
    higher_is_better,
    metrics_of,
    samples_in,
    trained_on,
)
from ampwise.tasks.iteration import Iteration

CPU = torch.device("cpu")
BATCH = torch.ones(4, 2)


def task(**changes) -> Task:
    settings = {
        "model": lambda: nn.Linear(2, 1),
        "batches": lambda: [BATCH],
        "loss": lambda model, batch: model(batch).mean(),
    }
    return Task(**{**settings, **changes})


# -- model and optimizer -----------------------------------------------------------------------------


def test_the_same_seed_builds_the_same_model():
    first, again, other = (build(task(), CPU, seed)[0].weight for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_default_optimizer_is_fused_adamw_over_what_is_trained():
    def half_frozen() -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        model[0].requires_grad_(False)
        return model

    model, optimizer = build(task(model=half_frozen), CPU, 0)
    assert isinstance(optimizer, torch.optim.AdamW)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["fused"]) == (1e-3, True)
    assert [id(each) for each in group["params"]] == [id(each) for each in model[1].parameters()]


def test_the_optimizer_is_built_on_the_model_that_was_moved():
    model, optimizer = build(
        task(optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=1)), CPU, 0
    )
    assert {id(each) for each in optimizer.param_groups[0]["params"]} == {
        id(each) for each in model.parameters()
    }


GLOBAL = nn.Linear(2, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": lambda: 3}, "model() returned int: expected an nn.Module"),
        ({"model": nn.ReLU}, "no parameters that require grad"),
        (
            {"model": lambda: nn.Linear(2, 1).requires_grad_(False)},
            "no parameters that require grad",
        ),
        ({"model": lambda: nn.Linear(2, 1, device="meta")}, "put parameters on meta, but the run"),
        (
            {"optimizer": lambda m: torch.optim.SGD([*m.parameters(), *GLOBAL.parameters()], lr=1)},
            "optimizer() holds 2 of 4 parameters that are not the model's",
        ),
        ({"optimizer": lambda m: "adam"}, "optimizer() returned str"),
    ],
)
def test_models_and_optimizers_that_cannot_work(changes, message):
    with pytest.raises(TaskError) as raised:
        build(task(**changes), CPU, 0)
    assert message in str(raised.value)


def test_a_model_handed_out_twice_is_refused_also_as_a_part():
    shared = nn.Linear(2, 2)
    for model in (lambda: shared, lambda: nn.Sequential(shared, nn.Linear(2, 1))):
        with contextlib.suppress(TaskError):  # the part is in use by then
            build(task(model=model), CPU, 0)
        with pytest.raises(TaskError, match="same modules again"):
            build(task(model=model), CPU, 0)


def test_a_shared_module_without_parameters_is_no_sharing():
    activation = nn.ReLU()
    for _ in range(2):
        build(task(model=lambda: nn.Sequential(nn.Linear(2, 1), activation)), CPU, 0)


# -- batches -----------------------------------------------------------------------------------------


def test_the_first_batch():
    assert first_batch(task()) is BATCH


def used_up(count: int):
    iterator = iter([BATCH] * count)
    return lambda: iterator


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (list, "gave no batch"),
        (used_up(1), "goes on where it was"),
        (used_up(5), "goes on where it was"),
        (lambda: 3, "returned int: expected an iterable"),
    ],
)
def test_batches_that_are_empty_or_cannot_start_again(batches, message):
    with pytest.raises(TaskError, match=message):
        first_batch(task(batches=batches))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_or_inf_in_the_very_first_batch_is_named(value):
    image = torch.ones(2, 3)
    image[1, 2] = value
    batch = {"label": torch.ones(2, dtype=torch.long), "image": image}
    with pytest.raises(TaskError, match=r"first batch.*1 of 6 values of batch\['image'\]"):
        first_batch(task(batches=lambda: [batch]))


def test_an_epoch_that_is_empty_later_does_not_spin_forever():
    shared = iter([BATCH])
    epochs = (list(trained_on(lambda: (each for each in shared))) for _ in range(2))
    assert next(epochs) == [BATCH]
    with pytest.raises(TaskError, match="gave no batch"):
        next(epochs)


# -- loss, samples, metrics --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda model, batch: model(batch).mean().item(), "got float"),
        (lambda model, batch: model(batch), "shape (4, 1); reduce it with .mean()"),
        (lambda model, batch: model(batch).mean().detach(), "does not require grad"),
        (lambda model, batch: model(batch).argmax(), "torch.int64"),
        (lambda model, batch: None, "got NoneType"),
    ],
)
def test_a_loss_that_is_none_is_told_from_the_first_step(loss, message):
    wrong = task(loss=loss)
    model, optimizer = build(wrong, CPU, 0)
    step = TrainStep(model, optimizer, policy="fp32")
    with pytest.raises(UsageError) as raised:
        Iteration(wrong)(step, BATCH)
    assert message in str(raised.value)


def fails(*arguments):
    raise ZeroDivisionError("theirs")


def stepped(made):
    return TrainStep(*build(made, CPU, 0), policy="fp32")


@pytest.mark.parametrize(
    ("part", "call"),
    [
        ("model", lambda t: build(t, CPU, 0)),
        ("optimizer", lambda t: build(t, CPU, 0)),
        ("batches", first_batch),
        ("loss", lambda t: Iteration(t)(stepped(t), BATCH)),
        ("iteration", lambda t: Iteration(t)(stepped(t), BATCH)),
        ("samples", lambda t: samples_in(t, BATCH)),
        ("evaluate", lambda t: metrics_of(t, nn.Linear(2, 1))),
    ],
)
def test_an_error_of_the_tasks_own_is_marked_and_keeps_its_traceback(part, call):
    with pytest.raises(ZeroDivisionError, match="theirs") as raised:
        call(task(**{part: fails}, **({"loss": None} if part == "iteration" else {})))
    assert raised.value.__ampwise_user__ == f"the task's {part}()"
    assert traceback.extract_tb(raised.value.__traceback__)[-1].name == "fails"


def test_samples_by_the_tasks_word_or_by_the_first_dimension():
    assert samples_in(task(), {"name": "x", "x": torch.ones(7, 3)}) == 7
    assert samples_in(task(samples=lambda batch: batch.numel()), BATCH) == 8


def test_metrics_become_numbers_by_name():
    given = {"accuracy": torch.tensor(0.5), "loss": 2}
    assert metrics_of(task(evaluate=lambda m: given), GLOBAL) == {"accuracy": 0.5, "loss": 2.0}
    assert metrics_of(task(), GLOBAL) == {}


@pytest.mark.parametrize("returned", [0.93, None, {"accuracy": "high"}, {"accuracy": [1, 2]}])
def test_metrics_that_are_none(returned):
    with pytest.raises(TaskError, match=r"evaluate\(\) returned"):
        metrics_of(task(evaluate=lambda m: returned), GLOBAL)


def test_direction_of_metrics():
    stated = task(higher_is_better={"loss_ratio": True, "score": False})
    directions = {name: higher_is_better(stated, name) for name in ("loss_ratio", "score", "f1")}
    assert directions == {"loss_ratio": True, "score": False, "f1": True}
    assert not any(higher_is_better(task(), name) for name in ("val_loss", "Perplexity", "error"))


@pytest.mark.parametrize(
    "name",
    ["mse", "val_mae", "RMSE", "test/nll", "bpc", "bpb", "ppl", "WER@10", "cer", "fid", "valKl"],
)
def test_names_of_metrics_that_should_fall(name):
    assert not higher_is_better(task(), name)


@pytest.mark.parametrize("name", ["accuracy", "f1_per_class", "R2", "kinetic_score", "mIoU"])
def test_names_of_metrics_that_should_rise(name):
    assert higher_is_better(task(), name)
