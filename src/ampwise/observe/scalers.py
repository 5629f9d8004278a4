"""`GradScaler`: what it scales, unscales, steps and skips.

PyTorch's own, and so that of Accelerate, Lightning, timm and transformers, whose scalers are it or
inherit from it. A skip is known to the host, as `Optimizer.step` is then not called; a fused
optimizer is called, and what it found stays on the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from ampwise.lines import Line, users_line
from ampwise.observe.patches import Patches
from ampwise.observe.result import Asked
from ampwise.observe.session import Session
from ampwise.observe.steps import Attempt
from ampwise.step.modules import held_by


@dataclass
class Stepping:
    """A scaler's ``step`` that is running, and whether it called the optimizer's."""

    optimizer: Optimizer
    called: bool = False


@dataclass
class Scaled:
    """A loss that a scaler has multiplied, by the identity of the product."""

    product: Any
    loss: Tensor
    scaler: GradScaler


@dataclass
class Scalers:
    """All scalers of a script.

    Attributes
    ----------
    stepping
        The ``step`` that is running; None outside of one.
    """

    session: Session
    what: str = "GradScaler"
    stepping: Stepping | None = None
    made: list[weakref.ref[GradScaler]] = field(default_factory=list[Any])
    refused: dict[Line, None] = field(default_factory=dict[Line, None])
    _scaled: Scaled | None = None
    _true: set[int] = field(default_factory=set[int])

    def install(self, patches: Patches) -> None:
        """Put it in place."""
        for name in ("__init__", "scale", "unscale_", "step", "update", "load_state_dict"):
            patches.wrap(GradScaler, name, getattr(self, f"_{name.strip('_')}"))

    def asked(self) -> list[Asked]:
        """Where a scaler was wanted that torch switched off, as there is no device for it."""
        return [Asked("float16", *line) for line in self.refused]

    @property
    def live(self) -> list[GradScaler]:
        """Those that scale."""
        known = (each() for each in self.made)
        return [each for each in known if each is not None and each._enabled]

    def scaled_by(self, tensor: Any) -> Scaled | None:
        """The loss that a tensor is a scaled one of."""
        found = self._scaled
        return found if found is not None and found.product is tensor else None

    def factor(self, parameters: Iterable[Tensor]) -> Tensor | None:
        """The loss scale that gradients are still multiplied by; None where they are true ones."""
        scaled, live = self._scaled, self.session.segment.scaled
        if not live or scaled is None:
            return None
        held = (each for each in parameters if each.grad is not None)
        return None if all(id(each) in self._true for each in held) else scaled.scaler._scale

    def _init(self, real: Any, scaler: GradScaler, *args: Any, **kwargs: Any) -> None:
        real(scaler, *args, **kwargs)
        if not self.session.active:
            return
        self.made.append(weakref.ref(scaler))
        if scaler._enabled:
            self.session.tell("scaler_made", scaler)
        elif kwargs.get("enabled", True):
            self.refused[users_line()] = None

    def _scale(self, real: Any, scaler: GradScaler, outputs: Any) -> Any:
        product = real(scaler, outputs)
        if self.session.active and scaler._enabled and isinstance(outputs, Tensor):
            self._scaled = Scaled(product, outputs, scaler)
            if not any(each() is scaler for each in self.made):  # made before anybody looked
                self.made.append(weakref.ref(scaler))
        return product

    def _unscale(self, real: Any, scaler: GradScaler, optimizer: Any) -> None:
        if self.session.active and scaler._enabled:
            self.session.tell("unscaled", scaler, inner(optimizer))
            self._true |= {id(each) for each in held_by([inner(optimizer)])}
        real(scaler, optimizer)

    def _step(self, real: Any, scaler: GradScaler, optimizer: Any, *args: Any, **kw: Any) -> Any:
        if not (self.session.active and scaler._enabled):
            return real(scaler, optimizer, *args, **kw)
        self.session.tell("scaler_steps", scaler, inner(optimizer))
        before, self.stepping = self.stepping, Stepping(inner(optimizer))
        stepping, scale = self.stepping, scaler._scale
        try:
            result = real(scaler, optimizer, *args, **kw)
        finally:
            self.stepping = before
        self.session.attempt(
            Attempt(
                stepping.optimizer,
                _skipped(scaler, optimizer, stepping),
                None if scale is None else scale.detach().clone(),
                line=users_line(),
            )
        )
        return result

    def _update(self, real: Any, scaler: GradScaler, *args: Any, **kwargs: Any) -> None:
        if self.session.active and scaler._enabled:
            self.session.tell("updated", scaler)
            self._true.clear()
        real(scaler, *args, **kwargs)

    def _load_state_dict(self, real: Any, scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
        if self.session.active:
            self.session.tell("loaded", scaler)
        return real(scaler, *args, **kwargs)


def inner(optimizer: Any) -> Any:
    """The optimizer inside a trainer's wrapper of one."""
    while not isinstance(optimizer, Optimizer) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def is_unscaled(scaler: GradScaler, optimizer: Any) -> bool:
    """Whether an optimizer's gradients are true ones again."""
    state = scaler._per_optimizer_states.get(id(optimizer), {})
    return state.get("stage", OptState.READY) is not OptState.READY


def _skipped(scaler: GradScaler, optimizer: Any, stepping: Stepping) -> bool | Tensor:
    """Whether an update was skipped; what was found, where only the device knows."""
    if not stepping.called:
        return True
    if not getattr(stepping.optimizer, "_step_supports_amp_scaling", False):
        return False
    found = list(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())
    if not found:
        return False
    if all(each.device.type == "cpu" for each in found):
        return sum(float(each) for each in found) > 0
    return torch.stack([each.to(found[0].device) for each in found]).sum()
