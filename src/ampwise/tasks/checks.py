"""Checks of what a task gives, as early as they can be made, and whose fault an error is."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ampwise.data import leaves
from ampwise.errors import AmpwiseError, TaskError
from ampwise.step.modules import as_one, held_by, in_form, several
from ampwise.step.samples import samples_in as leading_dimension
from ampwise.tasks.seeding import seed_all
from ampwise.tasks.task import Task

_built: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules with parameters that are in use, to notice one that is handed out twice."""


@contextmanager
def user_code(what: str) -> Generator[None]:
    """Mark an error raised inside as the task's own: its traceback is shown, not ours.

    Raises
    ------
    TaskError
        When the code inside exits, as a script without a ``__main__`` guard does.
    """
    try:
        yield
    except Exception as error:
        mark(error, what)
        raise
    except SystemExit as error:
        raise TaskError(
            f"{what} called sys.exit({error.code!r}): put what a script does under "
            'if __name__ == "__main__"'
        ) from None


def mark(error: Exception, what: str) -> None:
    """Note which part of the task raised an error, unless ampwise raised it or it is noted."""
    if not isinstance(error, AmpwiseError) and not hasattr(error, "__ampwise_user__"):
        error.__ampwise_user__ = what  # pyright: ignore[reportAttributeAccessIssue]


def build(
    task: Task,
    device: torch.device,
    seed: int,
    spread: Callable[[Any], Any] | None = None,
) -> tuple[Any, Any]:
    """A fresh model on `device`, initialised under `seed` on the CPU, and its optimizer.

    Each may be several, in the form the task gives them. All generators are seeded, so that what is
    drawn next, such as an order of data, is the same in every process. `spread` puts the model on
    several ranks before the optimizer is built.

    Raises
    ------
    TaskError
        When the model is on another device already, or the optimizer is over other parameters.
    """
    seed_all(seed)
    with user_code("the task's model()"):
        model = task.model()
    whole = _checked_model(model, device)
    whole.to(device)
    built = model if spread is None else spread(model)
    if task.optimizer is None:
        optimizer = in_form(model, _default_optimizer)
    else:
        with user_code("the task's optimizer()"):
            optimizer = task.optimizer(model)
    _check_optimizer(whole, optimizer)
    return built, optimizer


def _checked_model(given: Any, device: torch.device) -> nn.Module:
    """What a task's `model` gave as one module, if it can be trained."""
    models = (given,) if isinstance(given, nn.Module) else several(given) or (given,)
    for each in models:
        if not isinstance(each, nn.Module):
            raise TaskError(
                f"task model() returned {_in_words(given, each)}: expected an nn.Module, or a "
                "mapping or sequence of several"
            )
    model = as_one(given)
    if not any(each.requires_grad for each in model.parameters()):
        raise TaskError(
            "task model() has no parameters that require grad, so there is nothing to train"
        )
    places = {each.device.type for each in model.parameters()}
    if places - {"cpu", device.type}:
        raise TaskError(
            f"task model() put parameters on {', '.join(sorted(places))}, but the run is on "
            f"{device}: build the model on the CPU; ampwise moves it"
        )
    owners = [
        each for each in model.modules() if next(each.parameters(recurse=False), None) is not None
    ]
    if any(each in _built for each in owners):
        raise TaskError(
            "task model() handed out the same modules again: runs would train each other's "
            "weights; build a fresh model in every call"
        )
    _built.update(owners)
    return model


def _default_optimizer(model: nn.Module) -> Optimizer:
    trained = [each for each in model.parameters() if each.requires_grad]
    if not trained:
        raise TaskError(
            f"one of the task's models, {type(model).__name__}, has no parameters that require "
            "grad: expected optimizer=lambda model: ..., which says what is trained by what"
        )
    return torch.optim.AdamW(trained, lr=1e-3, fused=all(e.is_floating_point() for e in trained))


def _in_words(given: Any, wrong: Any) -> str:
    """A thing of a wrong type, among others or by itself."""
    among = "" if wrong is given else f" with {type(wrong).__name__} in it"
    return f"{type(given).__name__}{among}"


def _check_optimizer(model: nn.Module, given: Any) -> None:
    optimizers = several(given)
    for each in optimizers or (given,):
        if not isinstance(each, Optimizer):
            raise TaskError(
                f"task optimizer() returned {_in_words(given, each)}: expected a "
                "torch.optim.Optimizer, or a mapping or sequence of several"
            )
    own = {id(each) for each in model.parameters()}
    held = held_by(optimizers)
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
    nothing = object()
    with user_code("the task's batches()"):
        epochs = [_iterable(task.batches()) for _ in range(2)]
        first, again = (next(iter(epoch), nothing) for epoch in epochs)
    if first is nothing:
        raise TaskError("task batches() gave no batch: expected at least one")
    if again is nothing or (epochs[0] is epochs[1] and isinstance(epochs[0], Iterator)):
        raise TaskError(
            "task batches() goes on where it was instead of starting again: it must start a new "
            "epoch each time; return a DataLoader or a list, not an iterator that is used up"
        )
    check_finite(first)
    return first


def _iterable(epoch: Any) -> Iterable[Any]:
    if not hasattr(epoch, "__iter__") and not hasattr(epoch, "__getitem__"):
        raise TaskError(
            f"task batches() returned {type(epoch).__name__}: expected an iterable of batches"
        )
    return epoch


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


def samples_in(task: Task, batch: Any) -> int:
    """Samples (or tokens) in a batch, as the task counts them."""
    if task.samples is None:
        return leading_dimension(batch)
    try:
        return int(task.samples(batch))
    except Exception as error:
        mark(error, "the task's samples()")
        raise


def metrics_of(task: Task, model: Any) -> dict[str, float]:
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


_LOWER_PARTS = ("loss", "error", "perplexity", "divergence", "distance", "deviance", "entropy")
"""Anywhere in a name, in small letters: a metric that should fall."""

_LOWER_WORDS = re.compile(
    "n?r?mse|mae|rmsle|[sw]?mape|wape|nll|nlpd|b?ce|xent|kld?|jsd?|mmd|emd|bp[bcdpt]|ppl|[cdtw]er|"
    "eer|[em]ce|brier|crps|f[iva]d|kid|lpips|epe|err|fpr|fnr|frr|regret"
)
"""The same as whole words of a name: ``val_mse``, ``MSE@10`` and ``testMse``, not ``kinetic``."""


def higher_is_better(task: Task, metric: str) -> bool:
    """Direction of a metric, by the task's word or by its name."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", metric)
    lower = any(part in metric.lower() for part in _LOWER_PARTS) or any(
        _LOWER_WORDS.fullmatch(word.lower()) for word in words
    )
    return task.higher_is_better.get(metric, not lower)


def endless(task: Task) -> Iterator[Any]:
    """Batches of epoch after epoch, as `trained_on` gives them."""
    while True:
        yield from trained_on(task.batches)


def trained_on(batches: Callable[[], Iterable[Any]]) -> Iterator[Any]:
    """Batches of one epoch, with the loader's errors marked as the task's own.

    Raises
    ------
    TaskError
        When the epoch is empty: a run that counts steps would never end.
    """
    empty = True
    with user_code("the task's batches()"):
        iterator = iter(_iterable(batches()))
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            break
        except Exception as error:
            mark(error, "the task's batches()")
            raise
        empty = False
        yield batch
    if empty:
        raise empty_epoch()


def empty_epoch() -> TaskError:
    """What to raise for an epoch without a batch, on which a run that counts steps never ends."""
    return TaskError(
        "task batches() gave no batch: it must start a new epoch each time it is called"
    )
