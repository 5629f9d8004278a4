"""What the commands share: common options, and checks of their values.

Each command declares a dataclass ``Options``: its fields are the flags, the text below each field
its help. `ampwise.cli.parsing` has tyro turn a command line and a ``--config`` file into one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from ampwise.distributed.launch import launch
from ampwise.errors import UsageError
from ampwise_lint.base.output import say

if TYPE_CHECKING:
    import torch

    from ampwise.policy import Policy

Gate = Literal["off", "fail", "strict"]


@dataclass
class Shared:
    """What every command takes."""

    json: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the result as JSON to this file; - for standard output, and nothing else there."""

    debug: bool = False
    """Show where an error came from."""


@dataclass
class Common(Shared):
    """What every command that takes a TASK takes."""

    task: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="[TASK]")] = "charlm"
    """Built-in task (charlm, digits, text:PATH), file.py[:function] or module[:function]."""

    set: Annotated[
        tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="KEY=VALUE")
    ] = ()
    """Keyword argument for the task's function; may be given several times."""

    device: str | None = None
    """cpu, cuda, cuda:1, mps, xpu; default: the best device present."""

    seed: int = 0
    """Seed of initialisation, dropout and data order."""

    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Folder of the run; default: a new numbered one under runs/."""

    config: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """TOML or YAML file with values for these options; flags win."""

    quiet: bool = False
    """No progress, only the result."""

    def earlier(self) -> Mapping[str, Any]:
        """Options by name that were given before, and hold where nothing is given now."""
        return {}

    def settings(self) -> dict[str, str]:
        """The ``--set`` pairs."""
        pairs: dict[str, str] = {}
        for each in self.set:
            key, equals, value = each.partition("=")
            if not (key and equals):
                raise UsageError(f"--set {each!r}: expected KEY=VALUE")
            pairs[key] = value
        return pairs


def positive(name: str, value: float | None) -> None:
    """Refuse a number that is zero, negative or not a number; None means not given."""
    if value is not None and not value > 0:
        kind = "integer" if isinstance(value, int) else "number"
        raise UsageError(f"{name}: expected a positive {kind}, got {value}")


def check_seeds(seeds: int) -> None:
    """Refuse one seed: it has no partner to be compared with."""
    if seeds < 0 or seeds == 1:
        raise UsageError(f"seeds: expected 0 (no parity) or at least 2, got {seeds}")


def saved_in(error: BaseException, place: Path) -> None:
    """Note where results are that an error did not take along; `ampwise.cli.main` says it."""
    error.__ampwise_saved__ = place  # pyright: ignore[reportAttributeAccessIssue]


def policies(text: str | None) -> list[Policy] | None:
    """Policies of a comma-separated list; None if none was given."""
    from ampwise.policy import Policy

    if text is None:
        return None
    names = [each for each in text.split(",") if each.strip()]
    if not names:
        raise UsageError("precisions: expected a comma-separated list such as bf16,fp16")
    return [Policy.parse(each) for each in names]


def device_of(name: str | None) -> torch.device:
    """The device that this process uses; where an absent one becomes the CPU, that is said."""
    import torch

    from ampwise.capability import present_devices
    from ampwise.distributed.launch import device_of
    from ampwise.policy import choose_device

    me = launch()
    device, reason, moved = choose_device(name, present_devices())
    if moved and me.leads:
        say(f"{reason}; using {device}")
    return torch.device(device_of(me, device))
