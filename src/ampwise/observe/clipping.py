"""Clipping: what it is given, and the norm it finds on the way."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.nn.utils import clip_grad

from ampwise.observe.patches import Patches
from ampwise.observe.scalers import Scalers
from ampwise.observe.session import Session

_BY_NORM = ("clip_grad_norm_", "clip_grad_norm")
_NAMES = (*_BY_NORM, "clip_grad_value_")


class Clipping:
    """``torch.nn.utils.clip_grad_*``, under every name that torch gives them."""

    what = "gradient clipping"

    def __init__(self, session: Session, scalers: Scalers) -> None:
        self._session, self._scalers = session, scalers

    def install(self, patches: Patches) -> None:
        """Put it in place, also where torch's own modules have imported them already."""
        for name in _NAMES:
            real = getattr(clip_grad, name)
            patches.wrap(clip_grad, name, getattr(self, f"_{name.rstrip('_')}"))
            wrapper = getattr(clip_grad, name)
            for module in [each for key, each in sys.modules.items() if key.startswith("torch.")]:
                if module is not clip_grad and vars(module).get(name) is real:
                    patches.replace(module, name, wrapper)

    def _clip_grad_norm(self, real: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._session.active:
            return real(parameters, *args, **kwargs)
        several = _listed(parameters)
        factor = self._scalers.factor(several)
        self._session.tell("clipped", "clip_grad_norm_", factor)
        norm = real(several, *args, **kwargs)
        kind = kwargs.get("norm_type", args[1] if len(args) > 1 else 2.0)
        if isinstance(norm, Tensor) and float(kind) == 2:
            whole: Any = getattr(norm, "full_tensor", None)  # of a sharded one
            norm_seen = (norm if whole is None else whole()).detach()
            self._session.segment.norm = norm_seen if factor is None else norm_seen / factor
        return norm

    def _clip_grad_value(self, real: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._session.active:
            return real(parameters, *args, **kwargs)
        several = _listed(parameters)
        self._session.tell("clipped", "clip_grad_value_", self._scalers.factor(several))
        return real(several, *args, **kwargs)


def _listed(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """They may come as a generator, which can be gone through once."""
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)
