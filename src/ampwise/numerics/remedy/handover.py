"""The failing step as a file: all that a fresh process needs to run it again.

Parameters, buffers, optimizer, loss scale, batches and the random state before each, and what the
step should have given. Tensors and plain values only: it loads with ``weights_only=True``.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ampwise.bench.arm import Arm, Settings
from ampwise.errors import UsageError, in_one_line
from ampwise.numerics.observe.constants import originals
from ampwise.numerics.observe.made import note_originals
from ampwise.numerics.observe.narrow import Maker
from ampwise.numerics.observe.reference import Reference
from ampwise.policy import Policy
from ampwise.step.recorder import MicroBatch, RandomState, Stash
from ampwise.step.replay import Replay, undisturbed
from ampwise.tasks import Task
from ampwise.training.random_state import random_state, set_random_state

_OPEN = ("window", "gradients", "true", "found", "norms", "carried", "buffers")
"""What a step's state has of a window that is not over."""


@dataclass(frozen=True)
class TaskSource:
    """How a task was named, so that another process can load it."""

    spec: str
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])


@dataclass(frozen=True)
class Failing:
    """A step that failed, in the training that came to it.

    Attributes
    ----------
    after
        What float64 makes of the parameters, where it is the step's update that failed.
    wanted
        What the step should have given, where that is known already.
    updates
        How many steps are to be trained again from the beginning, where it is what their updates
        add up to that is wrong; else 0.
    at
        File and name of the function whose results are near the end of the format; None where that
        is not asked.
    made
        What makes parameters in 16 bits, by their names, where their updates are lost.
    weak
        Parameters whose gradient is wrong, though the whole does not show it (`fix.Judgement`).
    casts
        Lines that cast parameters from float32 to 16 bits.
    """

    source: TaskSource
    arm: Arm
    settings: Settings
    stash: Stash
    after: Mapping[str, Tensor] = dataclasses.field(default_factory=dict[str, Tensor])
    wanted: Reference | None = None
    updates: int = 0
    at: tuple[str, str] | None = None
    made: Mapping[str, Maker] = dataclasses.field(default_factory=dict[str, Maker])
    weak: Sequence[str] = ()
    casts: frozenset[tuple[str, int]] = frozenset()

    @property
    def step(self) -> Replay:
        """The step, to be run again."""
        return Replay(self.arm.step)


def save(file: Path, failing: Failing, wanted: Reference) -> None:
    """Write what `load` and `restored` take.

    Raises
    ------
    UsageError
        When a batch, or the optimizer's state, is more than tensors and plain values; or when it
        cannot be written.
    """
    try:
        with undisturbed(failing.step):
            torch.save(_content(failing, wanted), file)
        load(file)
    except Exception as error:  # noqa: BLE001 - pickling, and its undoing, raise anything
        raise UsageError(f"the step cannot be handed over: {in_one_line(error)}") from None


def load(file: Path) -> dict[str, Any]:
    """What `save` wrote."""
    return torch.load(file, weights_only=True)


def _content(failing: Failing, wanted: Reference) -> dict[str, Any]:
    arm, began = failing.arm, failing.stash.before
    made = [tensor for tensor, _ in originals([arm.model])]  # which a patch may make in float32
    return {
        "spec": failing.source.spec,
        "settings": dict(failing.source.settings),
        "policy": arm.step.policy.text,
        "run": {**vars(failing.settings), "device": str(failing.settings.device)},
        "parameters": {n: began.get(n, each) for n, each in arm.model.named_parameters()},
        "buffers": dict(arm.model.named_buffers()),
        "as_made": [n for n, each in arm.model.named_buffers() if any(each is o for o in made)],
        "optimizer": arm.optimizer.state_dict(),
        "step": {k: v for k, v in arm.step.state_dict().items() if k not in _OPEN},
        "window": window(failing.stash, failing.settings.device),
        "wanted": vars(wanted) | {"finite": wanted.finite},
        "after": dict(failing.after),
        "updates": failing.updates,
        "at": failing.at,
        "narrow": list(failing.made),
        "weak": list(failing.weak),
    }


def window(stash: Stash, device: torch.device) -> dict[str, Any]:
    """What `stash` takes: the batches, each with the random state before its forward."""
    states: list[dict[str, Any]] = []
    for each in stash.micro_batches:
        each.random_state.restore(device)
        states.append(random_state())
    return {
        "step": stash.step,
        "scale": stash.scale,
        "batches": [_plain(each.batch) for each in stash.micro_batches],
        "states": states,
        "before": stash.before,
        "updates": stash.updates,
    }


def run_settings(content: Mapping[str, Any]) -> Settings:
    """The settings of the run that failed."""
    run: dict[str, Any] = content["run"]
    return Settings(
        torch.device(run["device"]), run["seed"], run["accumulate"], run["max_grad_norm"]
    )


def restored(task: Task, content: Mapping[str, Any]) -> tuple[Arm, Stash]:
    """The training as it was before the failing step, and that step."""
    settings = run_settings(content)
    arm = Arm(task, Policy.parse(content["policy"]), settings)
    note_originals(task, arm, settings)
    with torch.no_grad():
        for own, kept in (
            (dict(arm.model.named_parameters()), content["parameters"]),
            (dict(arm.model.named_buffers()), content["buffers"]),
        ):
            _same_names(own, kept)
            for name, each in own.items():
                if name not in content["as_made"]:
                    each.copy_(kept[name])
    arm.optimizer.load_state_dict(content["optimizer"])
    arm.step.load_state_dict(content["step"])
    return arm, stash(arm, content["window"])


def reference(content: Mapping[str, Any]) -> Reference:
    """What the step should have given."""
    return Reference(**{k: v for k, v in content["wanted"].items() if k != "finite"})


def stash(arm: Arm, window: Mapping[str, Any]) -> Stash:
    """A window that `window` wrote, on an arm."""
    device = arm.step.device
    micro_batches: list[MicroBatch] = []
    for batch, state in zip(window["batches"], window["states"], strict=True):
        set_random_state(state)
        now = RandomState.now(device)
        micro_batches.append(MicroBatch(arm.iteration.again, _as_it_was(batch), now))
    began = {"before": window["before"], "updates": window["updates"]}
    return Stash(window["step"], window["scale"], micro_batches, **began)


def _same_names(own: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> None:
    if own.keys() != kept.keys():
        names = ", ".join(sorted(own.keys() ^ kept.keys())[:4])
        raise UsageError(f"the patched model has other parameters or buffers: {names}")


# -- batches --------------------------------------------------------------------------------------

_KIND = "__ampwise_kind__"


def _plain(value: Any) -> Any:
    """A batch in containers that load anywhere; others are named by their class."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _named(value, list(map(_plain, value)))
    if isinstance(value, tuple | list):
        return type(value)(map(_plain, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {e.name: _plain(getattr(value, e.name)) for e in dataclasses.fields(value)}
        return _named(value, fields)
    return value.detach() if isinstance(value, Tensor) else value


def _named(value: Any, content: Any) -> dict[str, Any]:
    kind = type(value)
    return {_KIND: [kind.__module__, kind.__qualname__], "content": content}


def _as_it_was(value: Any) -> Any:
    if isinstance(value, dict):
        entries = cast("dict[Any, Any]", value)
        if _KIND not in entries:
            return {key: _as_it_was(each) for key, each in entries.items()}
        kind: Any = importlib.import_module(entries[_KIND][0])
        for part in entries[_KIND][1].split("."):
            kind = getattr(kind, part)
        content = _as_it_was(entries["content"])
        if isinstance(content, list):
            return kind(*content)
        made = object.__new__(kind)  # as `data.move` does: the constructor's checks are not run
        for name, each in content.items():
            object.__setattr__(made, name, each)
        return made
    if isinstance(value, tuple | list):
        return type(value)(map(_as_it_was, value))
    return value
