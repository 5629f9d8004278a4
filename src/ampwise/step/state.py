"""The state of a step between two calls, to and from a dict that loads with ``weights_only=True``.

The dict's keys stay: checkpoints hold them. What later versions add has a default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ampwise.errors import UsageError

_NEEDED = ("policy", "loss_scale", "steps")


@dataclass(slots=True)
class OpenState:
    """What there is of a window that is not over.

    Attributes
    ----------
    window
        Position and sums (`Window.state_dict`).
    gradients
        Collected so far, by parameter name.
    unscaled
        Optimizers, by position, whose gradients are true already.
    found, norms
        Of the decisions already taken in this iteration.
    carried
        True gradients from earlier iterations, that are still to be added, by parameter name.
    buffers
        Those that forward writes, as they were when the window began, by FQN.
    """

    window: dict[str, Any]
    gradients: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    unscaled: list[int] = field(default_factory=list[int])
    found: list[Tensor] = field(default_factory=list[Tensor])
    norms: list[Tensor] = field(default_factory=list[Tensor])
    carried: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    buffers: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def checked(self, parameters: Mapping[str, Tensor]) -> OpenState:
        """Itself, if there is a parameter for each gradient.

        Raises
        ------
        UsageError
            When there is not.
        """
        fitting = {**self.gradients, **self.carried}
        wrong = [
            f"{name} ({tuple(each.shape)}, expected {tuple(parameters[name].shape)})"
            for name, each in fitting.items()
            if name in parameters and each.shape != parameters[name].shape
        ]
        if wrong:
            raise UsageError(
                f"step state has gradients of other shapes: {', '.join(wrong[:6])}; load it into a "
                "step over the same models and optimizers"
            )
        missing = [name for name in (*self.gradients, *self.carried) if name not in parameters]
        if missing:
            raise UsageError(
                f"step state has gradients of {', '.join(missing[:6])}, and there is no such "
                "parameter; load it into a step over the same models and optimizers"
            )
        return self


@dataclass(slots=True)
class StepState:
    """Policy, loss scale, counters, and the open window.

    Attributes
    ----------
    policy
        Its text.
    loss_scale
        `LossScale.state_dict`; empty where nothing is scaled.
    steps, skipped, growths, backoffs
        Totals since training began.
    skipped_in_a_row
        Skipped steps since one was made.
    held
        Schedule steps still to be left out.
    unit
        What the weights of several ranks are relative to; None before the first.
    precision
        What the next step depends on in the precision itself (`Precision.state_dict`).
    """

    policy: str
    loss_scale: dict[str, Any]
    steps: int
    skipped: int = 0
    growths: int = 0
    backoffs: int = 0
    skipped_in_a_row: int = 0
    held: int = 0
    unit: float | None = None
    precision: dict[str, Any] = field(default_factory=dict[str, Any])
    open: OpenState | None = None

    def to_dict(self) -> dict[str, Any]:
        """As plain values and tensors."""
        state = {name: getattr(self, name) for name in self.__slots__ if name != "open"}
        if self.open is not None:
            state |= {name: getattr(self.open, name) for name in self.open.__slots__}
            state["true"] = state.pop("unscaled")
        return state

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> StepState:
        """What `to_dict` gave.

        Raises
        ------
        UsageError
            When `state` is something else.
        """
        if missing := [key for key in _NEEDED if key not in state]:
            raise UsageError(
                f"step state lacks {', '.join(missing)}: expected TrainStep.state_dict() or that "
                "of an enabled torch.amp.GradScaler"
            )
        own = {name: state[name] for name in cls.__slots__ if name in state and name != "open"}
        if "window" not in state:
            return cls(**own)
        values = {**state, "unscaled": state.get("true", [])}
        names = OpenState.__slots__
        return cls(
            **own, open=OpenState(**{name: values[name] for name in names if name in values})
        )
