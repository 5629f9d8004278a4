"""A way to train a task: a precision policy and levers, as one value with one spelling."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ampwise.policy import PRESETS, Policy
from ampwise.tasks.levers import spelled, times_in


@dataclass(frozen=True)
class Setting:
    """What ``train`` is given beside the task.

    Attributes
    ----------
    levers
        As `ampwise.tasks.levers` spells them, in the order in which they are pulled.
    """

    policy: Policy
    levers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "levers", spelled(",".join(self.levers)))

    @property
    def text(self) -> str:
        """On one line: ``bf16 + checkpointing + compile``."""
        return " + ".join((self.policy.text, *self.levers))

    @property
    def times(self) -> int:
        """How many of the task's batches make one step."""
        return max(map(times_in, self.levers), default=1)

    @property
    def own_batch(self) -> Setting:
        """The same with the task's own batch."""
        return replace(self, levers=tuple(each for each in self.levers if times_in(each) == 1))

    def having(self, lever: str) -> Setting:
        """The same with one more lever; a batch takes the place of another."""
        base = self.own_batch if times_in(lever) > 1 else self
        return replace(base, levers=(*base.levers, lever))

    def options(self) -> dict[str, str]:
        """The same as options of ``train``."""
        levers = {"levers": ",".join(self.levers)} if self.levers else {}
        return {"precision": self.policy.text, **levers}


PLAIN = Setting(PRESETS["fp32"])
"""What everything is compared with: strict float32 and no lever."""


def to_toml(task: str, given: Mapping[str, str], options: Mapping[str, str]) -> str:
    """A file for ``train --config``.

    Parameters
    ----------
    task, given
        The task as it is spelled, and its keyword arguments as text.
    """
    lines = [f"{name} = {_quoted(value)}" for name, value in {"task": task, **options}.items()]
    table = [f"{_quoted(name)} = {_quoted(value)}" for name, value in given.items()]
    return "\n".join([*lines, *(["", "[set]"] if table else []), *table]) + "\n"


def _quoted(text: str) -> str:
    """A basic string of TOML."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
