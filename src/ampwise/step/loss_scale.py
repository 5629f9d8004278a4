"""Dynamic loss scaling: the state, on the device, and its one rule.

The loss is multiplied by `scale` so that small float16 gradients do not underflow. After each step:

- found_inf: the growth tracker restarts; once `hysteresis` such steps have come since the last
  growth, the scale is multiplied by `backoff_factor`.
- otherwise the growth tracker counts; at `growth_interval` the scale is multiplied by
  `growth_factor` and tracker and hysteresis restart.

With ``hysteresis=1`` this is the rule of `torch.amp.GradScaler`, bit for bit, as long as the scale
stays between floor and ceiling; ``hysteresis > 1`` is Megatron's rule. The bounds are this
project's: without a floor a run of bad steps takes the scale to exactly 0, where the next good step
divides 0 by 0. The floor, 2**-14, is float16's smallest normal number: below it even a loss
gradient of 1 would be subnormal. The ceiling, 2**24, lifts float16's smallest subnormal to 1.

Nothing here reads a value back to the host, except `state_dict` and `value`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ampwise.errors import UsageError

INIT_SCALE = 2.0**16
FLOOR = 2.0**-14
CEILING = 2.0**24


class LossScale:
    """A dynamic loss scale: settings, and in a step (`TrainStep.loss_scale`) state.

    A step takes over the settings and keeps a state of its own, so one instance can be given to
    several steps.

    Parameters
    ----------
    init_scale
        First scale.
    growth_factor, backoff_factor, growth_interval
        As in `torch.amp.GradScaler`.
    hysteresis
        Steps with found_inf, since the last growth, that it takes to lower the scale.
    floor, ceiling
        Bounds that the scale never leaves.

    Raises
    ------
    UsageError
        For a factor, an interval or bounds that cannot work.
    """

    enabled = True

    def __init__(
        self,
        init_scale: float = INIT_SCALE,
        *,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 1,
        floor: float = FLOOR,
        ceiling: float = CEILING,
    ) -> None:
        _check("growth_factor", growth_factor, growth_factor > 1, "above 1")
        _check("backoff_factor", backoff_factor, 0 < backoff_factor < 1, "between 0 and 1")
        _check("growth_interval", growth_interval, growth_interval >= 1, "at least 1")
        _check("hysteresis", hysteresis, hysteresis >= 1, "at least 1")
        _check("floor", floor, 0 < floor <= init_scale, "above 0 and at most init_scale")
        _check("ceiling", ceiling, ceiling >= init_scale, "at least init_scale")
        self.init_scale = float(init_scale)
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        self.hysteresis = hysteresis
        self.floor = floor
        self.ceiling = ceiling
        self.scale = torch.tensor(float(init_scale))
        self._growth_tracker = torch.zeros((), dtype=torch.int32)
        self._hysteresis_left = torch.tensor(float(hysteresis))

    def fresh(self, device: torch.device) -> LossScale:
        """One with the same settings on a device, in its first state."""
        twin = copy.copy(self)
        twin.scale = torch.tensor(self.init_scale, device=device)
        twin._growth_tracker = torch.zeros((), dtype=torch.int32, device=device)
        twin._hysteresis_left = torch.tensor(float(self.hysteresis), device=device)
        return twin

    @property
    def value(self) -> float:
        """The scale, on the host (waits for the device)."""
        return float(self.scale)

    @property
    def divisor(self) -> Tensor | None:
        """What gradients must be divided by: the scale, or None where nothing is scaled."""
        return self.scale

    def fingerprint(self) -> Tensor:
        """The bits of the scale, and the growth tracker: two int64 on the device."""
        return torch.stack((self.scale.view(torch.int32).long(), self._growth_tracker.long()))

    def update(self, found_inf: Tensor) -> None:
        """Apply the rule; `found_inf` is a float32 scalar, 1 when the step was bad, else 0."""
        if self.hysteresis > 1:
            self._update_with_hysteresis(found_inf)
            return
        torch._amp_update_scale_(
            self.scale,
            self._growth_tracker,
            found_inf,
            self.growth_factor,
            self.backoff_factor,
            self.growth_interval,
        )
        self.scale.clamp_(self.floor, self.ceiling)

    def _update_with_hysteresis(self, found_inf: Tensor) -> None:
        bad = found_inf > 0
        self._hysteresis_left.sub_(found_inf)
        self._growth_tracker.add_(1).masked_fill_(bad, 0)
        grow = self._growth_tracker >= self.growth_interval
        back_off = bad & (self._hysteresis_left <= 0)
        self.scale.copy_(torch.where(grow, self.scale * self.growth_factor, self.scale))
        self.scale.copy_(torch.where(back_off, self.scale * self.backoff_factor, self.scale))
        self.scale.clamp_(self.floor, self.ceiling)
        self._growth_tracker.masked_fill_(grow, 0)
        self._hysteresis_left.masked_fill_(grow, float(self.hysteresis))

    def state_dict(self) -> dict[str, Any]:
        """The keys of `torch.amp.GradScaler.state_dict`, which can load it, and a few more."""
        return {
            "scale": self.value,
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": int(self._growth_tracker),
            "hysteresis": self.hysteresis,
            "_patience": float(self._hysteresis_left),
            "floor": self.floor,
            "ceiling": self.ceiling,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of this class or of `torch.amp.GradScaler`.

        Raises
        ------
        UsageError
            When `state` is not one: an entry is missing, or the scale is not a positive number.
        """
        needed = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
        if missing := [key for key in needed if key not in state]:
            raise UsageError(
                f"loss-scale state lacks {', '.join(missing)}: expected the state_dict of an "
                "ampwise.LossScale or an enabled torch.amp.GradScaler"
            )
        scale = float(state["scale"])
        _check("scale", scale, 0 < scale < float("inf"), "a positive number")
        self.growth_factor = float(state["growth_factor"])
        self.backoff_factor = float(state["backoff_factor"])
        self.growth_interval = int(state["growth_interval"])
        self.hysteresis = int(state.get("hysteresis", self.hysteresis))
        # A GradScaler may have left our bounds; they give way rather than change its scale.
        self.floor = min(float(state.get("floor", self.floor)), scale)
        self.ceiling = max(float(state.get("ceiling", self.ceiling)), scale)
        self.scale.fill_(scale)
        self._growth_tracker.fill_(int(state["_growth_tracker"]))
        self._hysteresis_left.fill_(float(state.get("_patience", self.hysteresis)))


class UnitLossScale(LossScale):
    """The same verbs for precisions whose loss is not scaled: the scale is 1 and stays 1."""

    enabled = False

    def __init__(self) -> None:
        super().__init__(1.0)

    @property
    def divisor(self) -> Tensor | None:
        """None: nothing to divide by."""
        return None

    def update(self, found_inf: Tensor) -> None:
        """Nothing to adapt."""

    def state_dict(self) -> dict[str, Any]:
        """Empty, as that of a disabled `torch.amp.GradScaler`."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to load: a scale saved under another precision does not apply to this one."""


def _check(name: str, value: float, holds: bool, expected: str) -> None:
    if not holds:
        raise UsageError(f"loss scale: {name} must be {expected}, got {value}")
