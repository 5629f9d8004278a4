"""Checks of what a task gives, at the first moment they can be made, and whose fault an error is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampwise.data import leaves
from ampwise.errors import AmpwiseError, TaskError
from ampwise.step.samples import samples_in as leading_dimension
from ampwise.tasks.task import Task


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """Mark an error raised inside as the task's own: its traceback is shown, not ours."""
    try:
        yield
    except AmpwiseError:
        raise
    except Exception as error:
        if not hasattr(error, "__ampwise_user__"):
            error.__ampwise_user__ = what  # pyright: ignore[reportAttributeAccessIssue]
        raise


def build(task: Task, device: torch.device, seed: int) -> tuple[nn.Module, Optimizer]:
    """A fresh model on `device`, initialised under `seed` on the CPU, and its optimizer.

    Raises
    ------
    TaskError
        When the model is on another device already, or the optimizer is over other parameters.
    """
    torch.manual_seed(seed)
    with user_code("the task's model()"):
        model = task.model()
    if not isinstance(model, nn.Module):
        raise TaskError(f"task model() returned {type(model).__name__}: expected an nn.Module")
    places = {each.device.type for each in model.parameters()}
    if places - {"cpu", device.type}:
        raise TaskError(
            f"task model() put parameters on {', '.join(sorted(places))}, but the run is on "
            f"{device}: build the model on the CPU; ampwise moves it"
        )
    if not places:
        raise TaskError("task model() has no parameters, so there is nothing to train")
    model.to(device)
    with user_code("the task's optimizer()"):
        optimizer = task.optimizer(model) if task.optimizer else _default_optimizer(model)
    _check_optimizer(model, optimizer)
    return model, optimizer


def _default_optimizer(model: nn.Module) -> Optimizer:
    trained = [each for each in model.parameters() if each.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-3, fused=all(e.is_floating_point() for e in trained))


def _check_optimizer(model: nn.Module, optimizer: Any) -> None:
    if not isinstance(optimizer, Optimizer):
        raise TaskError(
            f"task optimizer() returned {type(optimizer).__name__}: expected a "
            "torch.optim.Optimizer"
        )
    own = {id(each) for each in model.parameters()}
    held = [each for group in optimizer.param_groups for each in group["params"]]
    foreign = sum(id(each) not in own for each in held)
    if foreign:
        raise TaskError(
            f"task optimizer() holds {foreign} of {len(held)} parameters that are not the model's: "
            "build it from the model it is given, optimizer=lambda model: AdamW(model.parameters())"
        )


def first_batch(task: Task) -> Any:
    """The first batch, after a look at whether an epoch can be started twice.

    Raises
    ------
    TaskError
        When there is none, the second epoch is empty, or the batch holds inf or NaN.
    """
    epochs = []
    for _ in range(2):
        with user_code("the task's batches()"):
            epochs.append(next(iter(task.batches()), None))
    first, again = epochs
    if first is None:
        raise TaskError("task batches() gave no batch: expected at least one")
    if again is None:
        raise TaskError(
            "task batches() is empty when called again: it must start a new epoch each time; "
            "return a DataLoader or a list, not an iterator that is used up"
        )
    check_finite(first)
    return first


def check_finite(batch: Any) -> None:
    """Refuse a first batch with inf or NaN in it, naming the tensor."""
    for path, tensor in leaves(batch):
        if tensor.is_floating_point():
            bad = int((~torch.isfinite(tensor)).sum())
            if bad:
                raise TaskError(
                    f"the first batch holds inf or NaN: {bad} of {tensor.numel()} values of {path};"
                    " clean the data, no precision can train on it"
                )


def checked_loss(task: Task) -> Callable[[nn.Module, Any], Tensor]:
    """The task's loss, with its errors marked as its own."""
    loss_of = task.loss

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with user_code("the task's loss()"):
            return loss_of(model, batch)

    return loss


def samples_in(task: Task, batch: Any) -> int:
    """Samples (or tokens) in a batch, as the task counts them."""
    return int(task.samples(batch)) if task.samples else leading_dimension(batch)


def metrics_of(task: Task, model: nn.Module) -> dict[str, float]:
    """What the task's `evaluate` says about a model; the caller sets mode and autocast.

    Raises
    ------
    TaskError
        When it is not a mapping of names to numbers.
    """
    if task.evaluate is None:
        return {}
    with user_code("the task's evaluate()"):
        metrics = task.evaluate(model)
    if not isinstance(metrics, Mapping):
        raise TaskError(
            f"task evaluate() returned {type(metrics).__name__}: expected a mapping like "
            '{"accuracy": 0.93}'
        )
    try:
        return {str(name): float(value) for name, value in metrics.items()}
    except (TypeError, ValueError):
        raise TaskError(f"task evaluate() returned {metrics}: expected numbers by name") from None


def higher_is_better(task: Task, metric: str) -> bool:
    """Direction of a metric, by the task's word or by its name."""
    words = ("loss", "error", "perplexity")
    return task.higher_is_better.get(metric, not any(word in metric.lower() for word in words))


def trained_on(batches: Callable[[], Iterable[Any]]) -> Iterator[Any]:
    """Batches of one epoch, with the loader's errors marked as the task's own."""
    with user_code("the task's batches()"):
        iterator = iter(batches())
    while True:
        with user_code("the task's batches()"):
            try:
                batch = next(iterator)
            except StopIteration:
                return
        yield batch
