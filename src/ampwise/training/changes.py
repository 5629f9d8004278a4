"""What makes a run the run it is, and what of that is another when it is resumed.

A checkpoint remembers it (`makeup`): accumulation window, clipping, schedule and its length, seed,
batch size, optimizer and its hyper-parameters, facts of the task. What differs on resume is named,
a line each (`differences`), and refused (`refusal`) unless the user allows it; then the new values
are in force from there on (`carried_over`):

    batch size         the epoch goes on at the sample where it was
    hyper-parameters   the new ones; the optimizer keeps its state (moments)
    schedule           goes on at the same step, along the new curve
    seed               random numbers are drawn anew; an epoch that has begun keeps its order
    optimizer          of another class, or with something turned on that needs state which the
                       checkpoint does not have: its state starts anew

Another precision, another number of ranks and more steps at a constant learning rate need no
leave. What an older checkpoint does not remember is not compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ampwise.distributed.host_group import everyone
from ampwise.errors import UsageError
from ampwise.step.together import Together
from ampwise.tasks import Task
from ampwise.tasks.checks import samples_in, user_code
from ampwise.telemetry.run import plain
from ampwise.training.checkpoint import Trained
from ampwise.training.config import TrainConfig
from ampwise.training.random_state import seeded_state, set_random_state
from ampwise.training.share import DataRandom, whole_batches
from ampwise_lint.base.words import counted

_SETTINGS = ("batch_size", "accumulate", "max_grad_norm", "seed", "optimizer")

_LONGEST = 200
"""Characters of a value in a line of differences."""

_NO_VALUES = {
    *("params", "param_names", "initial_lr"),
    *("foreach", "fused", "capturable", "differentiable"),  # how it computes, not what
}

_NEED_STATE = ("amsgrad", "centered", "momentum")
"""Hyper-parameters that, once turned on, need state that steps without them have not made."""


# -- what is remembered ----------------------------------------------------------------------------


def makeup(
    task: Task, config: TrainConfig, optimizer: Optimizer, batch_size: int
) -> dict[str, Any]:
    """What makes a run the run it is, as plain values, for its record and its checkpoints.

    Parameters
    ----------
    optimizer
        As the task made it, before a step: hyper-parameters are those a run begins with.
    batch_size
        Samples in the first batch, as the task counts them.
    """
    values = {
        "task": task.name,
        **config.to_json(),
        "batch_size": batch_size,
        "optimizer": _kind(optimizer),
        "hyperparameters": [_hyperparameters(group) for group in optimizer.param_groups],
        "task_info": task.info,
        "changes": [],
    }
    # By way of JSON, since NumPy's numbers are no plain values where a checkpoint is loaded.
    return json.loads(json.dumps(plain(values)))


def _kind(optimizer: Optimizer) -> str:
    parts = optimizer.optimizers if isinstance(optimizer, Together) else (optimizer,)
    return " and ".join(type(each).__name__ for each in parts)


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    values = {key: _number(each) for key, each in group.items() if key not in _NO_VALUES}
    if "initial_lr" in group:  # where a scheduler has changed the other one
        values["lr"] = _number(group["initial_lr"])
    kinds = str | int | float | tuple | list | None
    return {key: each for key, each in values.items() if isinstance(each, kinds)}


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


# -- what differs ----------------------------------------------------------------------------------


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between the makeup in a checkpoint and that of now, a line each."""
    lines = _lines(_settings(before), _settings(now))
    pairs = _groups(before, now)
    for number, (old, new) in enumerate(pairs, start=1):
        lines += _lines(old, new, f" of parameter group {number}" if len(pairs) > 1 else "")
    if not _state_fits(before, now):
        lines.append("optimizer state: starts anew")
    return lines


def refusal(path: Path, lines: Sequence[str]) -> UsageError:
    """The error that names what differs from a checkpoint, and says what to do."""
    return UsageError(
        f"{path} is of a run that was set up otherwise:",
        *(f"  {line}" for line in lines),
        "give the values of the checkpoint to continue that run, or --allow-changes to go on with "
        "the new ones",
    )


def _settings(run: Mapping[str, Any]) -> dict[str, Any]:
    """All that is compared but the optimizer's hyper-parameters."""
    settings = {key: run[key] for key in _SETTINGS if key in run}
    if "hyperparameters" in run:
        settings["parameter_groups"] = len(run["hyperparameters"])
    info = {f"{key} of the task": value for key, value in run.get("task_info", {}).items()}
    return settings | _schedule(run) | info


def _schedule(run: Mapping[str, Any]) -> dict[str, Any]:
    length = {"steps of the schedule": run["steps"]} if run["schedule"] == "cosine" else {}
    return {"schedule": run["schedule"], "warmup_steps": run["warmup_steps"], **length}


def _groups(
    before: Mapping[str, Any], now: Mapping[str, Any]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Hyper-parameters by parameter group, before and now; none where the two do not compare."""
    old, new = before.get("hyperparameters", ()), now["hyperparameters"]
    alike = before.get("optimizer") == now["optimizer"] and len(old) == len(new)
    return list(zip(old, new, strict=True)) if alike else []


def _state_fits(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether the optimizer can go on with the state that the checkpoint has of it."""
    pairs = _groups(before, now)
    turned_on = any(
        new[key] and not old.get(key, new[key])
        for old, new in pairs
        for key in new.keys() & set(_NEED_STATE)
    )
    return "optimizer" not in before or (bool(pairs) and not turned_on)


def _lines(old: Mapping[str, Any], new: Mapping[str, Any], whose: str = "") -> list[str]:
    return [
        f"{_words(key)}{whose}: {_spelled(value)} in the checkpoint, {_spelled(new[key])} now"
        for key, value in old.items()
        if key in new and value != new[key]
    ]


def _words(key: str) -> str:
    return "learning rate" if key == "lr" else key.replace("_", " ")


def _spelled(value: Any) -> str:
    words = "none" if value is None else str(value)
    return words if len(words) <= _LONGEST else f"{words[: _LONGEST - 3]}..."


# -- going on with it ------------------------------------------------------------------------------


def carried_over(
    content: Mapping[str, Any],
    trained: Trained,
    task: Task,
    now: Mapping[str, Any],
    say: Callable[[str], object],
) -> dict[str, Any]:
    """What a checkpoint holds, with the values of now in place of its own; all ranks call this.

    Parameters
    ----------
    content
        As loaded.
    trained, task, now
        What it will be put into, fresh, and its makeup.
    say
        Told where samples are trained on again.
    """
    before, ranks = content["config"], everyone()
    content = {**content, "position": dict(content["position"])}
    _renew_optimizer(content, trained, now)
    if before.get("batch_size", now["batch_size"]) != now["batch_size"]:
        content["position"] |= _by_samples(content["position"], task, now["batch_size"], say)
    if before["seed"] != now["seed"]:
        content["rng"] = seeded_state(now["seed"], content["step"]["steps"], ranks.rank)
        if not content["position"]["batch"]:
            content["position"]["epoch_rng"] = None
    return content


def _renew_optimizer(content: dict[str, Any], trained: Trained, now: Mapping[str, Any]) -> None:
    """Put new hyper-parameters, and the learning rate of the new schedule, into a checkpoint."""
    before, live = content["config"], trained.optimizer.param_groups
    pairs, fits = _groups(before, now), _state_fits(before, now)
    state = content["optimizer"] if fits else trained.optimizer.state_dict()
    groups = [dict(group) for group in state["param_groups"]]
    for group, fresh, (old, new) in zip(groups, live, pairs, strict=False):  # none: not remembered
        group |= {key: fresh[key] for key in old.keys() & new.keys() if old[key] != new[key]}
    content["optimizer"] = {**state, "param_groups": groups}
    rates = any(old.get("lr") != new.get("lr") for old, new in pairs)
    if rates or not fits or _schedule(before) != _schedule(now):
        content["scheduler"] = _rescheduled(groups, trained, content["step"])


def _rescheduled(
    groups: list[dict[str, Any]], trained: Trained, step: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Give groups the learning rates of a new schedule at the step they are at; its state."""
    made = step["steps"] - step["skipped"] + step["held"]
    first = [each.get("initial_lr", each["lr"]) for each in trained.optimizer.param_groups]
    scheduler, rates = trained.scheduler, first
    if isinstance(scheduler, LambdaLR):
        factors = [factor(made) for factor in scheduler.lr_lambdas]
        rates = [rate * factor for rate, factor in zip(first, factors, strict=True)]
    for group, initial, rate in zip(groups, first, rates, strict=True):
        group |= {"initial_lr": initial, "lr": rate}
    return None if scheduler is None else {**scheduler.state_dict(), "last_epoch": made}


def _by_samples(
    position: Mapping[str, Any], task: Task, batch_size: int, say: Callable[[str], object]
) -> dict[str, int]:
    """Where a position is in batches of another size: after as many whole ones as fit in."""
    if not position["batch"]:
        return {}
    source, ranks = DataRandom(), everyone()
    began = {**position["epoch_rng"], "cuda": []}  # data is drawn on the host

    def passed() -> tuple[int, int]:
        with user_code("the task's batches()"):
            return whole_batches(
                *(task.batches, position["samples"], ranks.size),
                lambda batch: samples_in(task, batch),
            )

    source.draw(lambda: set_random_state(began))
    batch, samples = ranks.first(lambda: source.draw(passed))
    again = position["samples"] - samples
    few = f"{counted(again, 'sample')}, too few for a batch of {batch_size}"
    if not batch:
        say(f"the epoch begins anew, with {few}")
    elif again:
        say(f"trained on again: {few}")
    return {"batch": batch, "samples": samples}
