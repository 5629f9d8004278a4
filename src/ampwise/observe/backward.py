"""Backward: losses and micro-batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ampwise.lines import users_line
from ampwise.observe.patches import Patches
from ampwise.observe.scalers import Scalers
from ampwise.observe.session import Session


class Backwards:
    """Every ``backward`` of a script."""

    what = "backward, losses"

    def __init__(self, session: Session, scalers: Scalers) -> None:
        self._session, self._scalers = session, scalers

    def install(self, patches: Patches) -> None:
        """Put it in place; ``Tensor.backward`` calls this, too."""
        patches.wrap(torch.autograd, "backward", self._backward)

    def _backward(self, real: Any, tensors: Any, *args: Any, **kwargs: Any) -> None:
        session = self._session
        if not session.active or session.in_backward:
            real(tensors, *args, **kwargs)
            return
        scaled = self._scalers.scaled_by(_single(tensors))
        loss = _loss(tensors) if scaled is None else scaled.loss
        segment, line = session.segment, users_line()
        segment.backwards[line] = segment.backwards.get(line, 0) + 1
        segment.scaled += scaled is not None
        segment.plain += scaled is None
        segment.by_hand |= _is_scaled_by_hand(loss, *args, **kwargs)
        if loss is not None:
            segment.losses.append(loss.detach())
        session.tell("backward_begins", loss, None if scaled is None else scaled.scaler)
        session.in_backward = True
        try:
            real(tensors, *args, **kwargs)
        finally:
            session.in_backward = False
            session.tell("backward_ends")


def _is_scaled_by_hand(loss: Tensor | None, grad_tensors: Any = None, *_: Any, **__: Any) -> bool:
    node = None if loss is None else loss.grad_fn
    return grad_tensors is not None or (node is not None and node.name() == "MulBackward0")


def _single(tensors: Any) -> Any:
    if isinstance(tensors, Tensor):
        return tensors
    several = list(tensors) if isinstance(tensors, list | tuple) else []
    return several[0] if len(several) == 1 else None


def _loss(tensors: Any) -> Tensor | None:
    """The loss, if it is one number."""
    single = _single(tensors)
    return single if isinstance(single, Tensor) and single.numel() == 1 else None
