"""timm's scaler object, with ampwise's loss scale and guard behind it.

For training scripts of timm's manner (timm, MAE, DeiT, BEiT, ConvNeXt, Swin), whose loop enters
autocast by itself and leaves the rest to one call::

    loss_scaler(loss, optimizer, clip_grad=..., parameters=..., need_update=...)

Backward, guard, step or skip and the loss scale are an `Engine`'s. The forward stays the script's,
so that running statistics which it has spoilt are not put back; `TrainStep` does that, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampwise.errors import UsageError
from ampwise.integrations._clip import clip_values_
from ampwise.integrations._extra import missing
from ampwise.policy import Policy
from ampwise.step import Engine, LossScale
from ampwise.step.modules import held_by


class NativeScaler:
    """In the place of ``timm.utils.NativeScaler``: the same call, and state under the same key.

    Fused optimizers may be clipped, and a step is skipped in every precision.

    Parameters
    ----------
    device
        Not needed, as that of the optimizer's parameters counts; taken since timm's takes it.
    policy
        What the script's autocast computes in: it decides whether the loss is scaled.
    loss_scale, max_skips
        As of `ampwise.Engine`.

    Attributes
    ----------
    engine
        Made in the first call; None before.
    """

    state_dict_key = "amp_scaler"

    def __init__(
        self,
        device: str | torch.device | None = None,
        *,
        policy: str | Policy = "fp16",
        loss_scale: LossScale | None = None,
        max_skips: int = 50,
    ) -> None:
        policy = policy if isinstance(policy, Policy) else Policy.parse(policy)
        _check(policy)
        self.engine: Engine | None = None
        self._settings: dict[str, Any] = {
            "policy": policy, "loss_scale": loss_scale, "max_skips": max_skips,
        }  # fmt: skip
        self._loaded: Mapping[str, Any] = {}

    def __call__(
        self,
        loss: Tensor,
        optimizer: Optimizer,
        clip_grad: float | None = None,
        clip_mode: str = "norm",
        parameters: Tensor | Iterable[Tensor] | None = None,
        create_graph: bool = False,
        need_update: bool = True,
        update_grad: bool = True,
    ) -> Tensor | None:
        """Backward of a loss, and the step unless `need_update` (or `update_grad`) is False.

        Parameters
        ----------
        loss
            Divided as the script wants it.
        optimizer
            The same in all calls.
        clip_grad, clip_mode
            Limit of the norm of all the optimizer's gradients, or of each value, or timm's own
            ``agc`` (over `parameters`).
        create_graph
            Expected False: second-order optimizers do not go with a scaled loss.

        Returns
        -------
        Tensor or None
            Global L2 norm of the true gradients before clipping to a norm; None without a step.

        Raises
        ------
        UsageError
            For another optimizer than before, an unknown `clip_mode`, or `create_graph`.
        """
        if create_graph:
            raise UsageError(
                "create_graph: expected False; a second derivative would be of the scaled loss: "
                "train a second-order optimizer in bf16, without a scaler"
            )
        engine = self._engine_of(optimizer)
        engine.backward(loss)
        if not (need_update and update_grad):
            return None
        self._clip(engine, clip_grad, clip_mode, parameters)
        engine.update()
        return engine.grad_norm

    def state_dict(self) -> dict[str, Any]:
        """Loss scale and counters."""
        return dict(self._loaded) if self.engine is None else self.engine.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where a state was taken; takes that of timm's own scaler, too."""
        self._loaded = dict(state_dict)
        if self.engine is not None and self._loaded:
            self.engine.load_state_dict(self._loaded)

    def _engine_of(self, optimizer: Optimizer) -> Engine:
        if self.engine is None:
            self.engine = Engine(_Held(optimizer), optimizer, **self._settings)
            if self._loaded:
                self.engine.load_state_dict(self._loaded)
        if self.engine.optimizer is not optimizer:
            raise UsageError(
                f"optimizer: expected the {type(self.engine.optimizer).__name__} of the calls "
                "before; make a scaler for each optimizer"
            )
        return self.engine

    def _clip(self, engine: Engine, limit: float | None, mode: str, parameters: Any) -> None:
        """Have gradients clipped: their norm in the step itself, values now."""
        if mode not in ("norm", "value", "agc"):
            raise UsageError(f"clip_mode: expected 'norm', 'value' or 'agc', got {mode!r}")
        norm = float(limit) if limit is not None and mode == "norm" else None
        if engine.max_grad_norm != norm:
            engine.max_grad_norm = norm
        if limit is None or mode == "norm":
            return
        gradients = engine.gradients().values()
        if mode == "value":
            clip_values_(gradients, limit)
        else:
            _adaptive(parameters, limit)


class _Held(nn.Module):
    """What an optimizer holds, for an engine that is given no model."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__()
        for number, each in enumerate(held_by([optimizer])):
            setattr(self, str(number), each)


def _check(policy: Policy) -> None:
    if policy.master_weights or policy.pure or policy.float8 or policy.islands:
        raise UsageError(
            f"policy: expected fp16, bf16, tf32 or fp32, got {policy.text!r}, which changes "
            "forward; forward is the script's own here: train with ampwise.TrainStep for that"
        )


def _adaptive(parameters: Any, limit: float) -> None:
    try:
        from timm.utils.agc import adaptive_clip_grad  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise missing(error, "timm") from error
    if parameters is None:
        raise UsageError("parameters: expected those to clip with clip_mode='agc', got None")
    adaptive_clip_grad(parameters, limit)
