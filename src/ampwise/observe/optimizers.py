"""Optimizers: every update, whoever asks for it, and the norm of the gradients it is made with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ampwise.lines import users_line
from ampwise.observe.patches import Patches
from ampwise.observe.scalers import Scalers
from ampwise.observe.session import Session
from ampwise.observe.steps import Attempt
from ampwise.step.modules import held_by


class Optimizers:
    """All optimizers of a script, in the order of their first update."""

    what = "optimizer steps"

    def __init__(self, session: Session, scalers: Scalers) -> None:
        self.names: dict[int, str] = {}
        self._session, self._scalers = session, scalers

    def install(self, patches: Patches) -> None:
        """Put it in place: hooks of torch's for the optimizers of everybody."""
        patches.hook(register_optimizer_step_pre_hook(self._before))
        patches.hook(register_optimizer_step_post_hook(self._after))
        patches.wrap(Optimizer, "load_state_dict", self._load)

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._session.active:
            return None
        self.names.setdefault(id(optimizer), type(optimizer).__name__)
        stepping = self._scalers.stepping
        by_scaler = stepping is not None and stepping.optimizer is optimizer
        self._session.tell("stepped", optimizer, by_scaler=by_scaler)
        if by_scaler:
            assert stepping is not None
            stepping.called = True
            return None
        closure = kwargs.get("closure") or next(filter(callable, args[1:]), None)
        if closure is None:
            self._session.tell("gradients_ready", optimizer)
            return None

        def looked_at() -> Any:
            """Forward and backward run in here: only now are there gradients."""
            result = closure()
            self._session.tell("gradients_ready", optimizer)
            return result

        rest = {name: each for name, each in kwargs.items() if name != "closure"}
        return (args[0], looked_at), rest

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        stepping = self._scalers.stepping
        if not self._session.active or (stepping is not None and stepping.optimizer is optimizer):
            return
        self._session.attempt(Attempt(optimizer, skipped=False, line=users_line()))

    def _load(self, real: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        loaded = real(optimizer, *args, **kwargs)
        if self._session.active and optimizer.state:  # Accelerate loads what has none, to move it
            self._session.tell("loaded", optimizer)
        return loaded


def gradients_of(optimizer: Optimizer) -> list[Tensor]:
    """All dense gradients; of sharded ones, this rank's part."""
    found = [each.grad for each in held_by([optimizer])]
    held = [getattr(each, "_local_tensor", each) for each in found if each is not None]
    return [each for each in held if each.layout is torch.strided]


def norm_of(gradients: Sequence[Tensor]) -> Tensor | None:
    """Global L2 norm, at least in float32, on the device of the first; None without gradients."""
    if not gradients:
        return None
    device, norms = gradients[0].device, list[Tensor]()
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for each in gradients:
        kinds.setdefault((each.device, each.dtype), []).append(each)
    for (_, dtype), alike in kinds.items():
        # In float32 where it is less; to ask for what it is already would cost a quarter more.
        wider = torch.float32 if dtype in (torch.float16, torch.bfloat16) else None
        found = torch._foreach_norm(alike, 2, dtype=wider)
        norms += found if len(kinds) == 1 else [each.to(device, torch.float32) for each in found]
    return torch.linalg.vector_norm(torch.stack(norms))
