"""BF16 parameters and gradients with float32 master weights in the optimizer (`bf16-master`).

The model's parameters become bfloat16, in place; the optimizer gets float32 copies, the masters.
After backward each bfloat16 gradient moves into its master's float32 one (so a window accumulates
in float32); after the step the masters are rounded back into the model. Per parameter that is
2 + 2 + 4 bytes of weights and masters, and no autocast copy of the weights.

Two kinds of parameters stay as they are: those of normalisation layers and islands, where
bfloat16 costs accuracy and saves nothing, and those the optimizer does not hold (frozen ones have
no master to keep their precision in).

DDP fixes the dtype of what it sums when it is made, so under DDP the parameters are lowered before
(`lower_parameters`, called by `ampwise.distributed.wrap.replicate`), and each keeps its float32
value at hand for the master. They cannot become float32 again, so one that gets no master is an
error. What DDP sums is the bfloat16 gradient; so in the last micro-batch of a window the masters'
gradients go back into the parameters first, unless they are sums already.

Checkpoints know nothing of this: ``model.state_dict()`` gives the float32 masters, and
``model.load_state_dict`` takes a float32 checkpoint into them. Both are hooks on the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from ampwise.errors import UsageError

_MASTER = "_ampwise_master"
"""Attribute of a lowered parameter: its float32 value, until a master takes it over."""

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm)


class MasterWeights:
    """float32 masters of the parameters that some optimizers hold.

    Parameters
    ----------
    modules
        The models whose parameters they are.
    optimizers
        Their parameter groups, and any state they have, move over to the masters.
    dtype
        What the parameters become; with float32 nothing changes and there are no masters.
    keep
        Parameters that stay as they are, beside those of normalisation layers.

    Raises
    ------
    UsageError
        When a parameter was lowered before, and gets no master.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        dtype: torch.dtype,
        keep: Iterable[nn.Parameter] = (),
    ) -> None:
        self._masters: dict[nn.Parameter, Tensor] = {}
        if dtype != torch.float32:
            self._install(modules, optimizers, dtype, keep)
        _check_none_is_left(modules)

    def _install(
        self,
        modules: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        dtype: torch.dtype,
        keep: Iterable[nn.Parameter],
    ) -> None:
        """Lower what the optimizers hold, and give them the masters instead."""
        kept = {id(parameter) for parameter in keep} | _normalisation_parameters(modules)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"] = [
                    self._replace(optimizer, parameter, dtype)
                    if _has_master(parameter, kept)
                    else parameter
                    for parameter in group["params"]
                ]
        for module in modules:
            self._teach_state_dict(module)

    def _replace(self, optimizer: Optimizer, parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
        """The master that takes a parameter's place in its optimizer."""
        master = self._masters.get(parameter)
        if master is None:
            _lower(parameter, dtype)
            master = self._masters[parameter] = vars(parameter).pop(_MASTER)
            parameter.grad = None
        if parameter in optimizer.state:
            optimizer.state[master] = optimizer.state.pop(parameter)
        return master

    def take_gradients(self) -> None:
        """Move the model's gradients into the masters, adding to what is there."""
        fresh = [(p, m) for p, m in self._masters.items() if p.grad is not None]
        for parameter, master in fresh:
            assert parameter.grad is not None
            if master.grad is None:
                master.grad = parameter.grad.to(torch.float32)
            else:
                master.grad.add_(parameter.grad)
            parameter.grad = None

    def give_back_gradients(self) -> None:
        """Move what the masters have collected into the model, for the next backward to add to."""
        for parameter, master in self._masters.items():
            if master.grad is not None:
                parameter.grad = master.grad.to(parameter.dtype)
                master.grad = None

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the masters into the model; after a skipped step this changes nothing."""
        if self._masters:
            torch._foreach_copy_(list(self._masters), list(self._masters.values()))

    def of(self, parameter: nn.Parameter) -> Tensor:
        """The tensor the optimizer holds for a parameter: its master, or the parameter itself."""
        return self._masters.get(parameter, parameter)

    def _teach_state_dict(self, module: nn.Module) -> None:
        def give_masters(owner: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
            for name, parameter in owner.named_parameters(remove_duplicate=False):
                if prefix + name in state and parameter in self._masters:
                    state[prefix + name] = self._masters[parameter].detach()

        @torch.no_grad()
        def take_masters(owner: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
            for name, parameter in owner.named_parameters():
                master, value = self._masters.get(parameter), state.get(prefix + name)
                if master is not None and value is not None and value.shape == master.shape:
                    master.copy_(value)

        module.register_state_dict_post_hook(give_masters)
        module.register_load_state_dict_pre_hook(take_masters)


def lower_parameters(module: nn.Module, dtype: torch.dtype, keep: Iterable[nn.Module] = ()) -> None:
    """Lower a module's parameters now, ahead of the `MasterWeights` that will take their values.

    `keep` are parts that stay as they are, beside normalisation layers and what is frozen.
    """
    if dtype == torch.float32:
        return
    kept = _normalisation_parameters([module])
    kept |= {id(parameter) for part in keep for parameter in part.parameters()}
    for parameter in module.parameters():
        if parameter.requires_grad and _has_master(parameter, kept):
            _lower(parameter, dtype)


def _has_master(parameter: Tensor, kept: set[int]) -> bool:
    is_full = parameter.dtype == torch.float32 and id(parameter) not in kept
    return is_full or _MASTER in vars(parameter)


def _lower(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    if _MASTER not in vars(parameter):
        vars(parameter)[_MASTER] = parameter.detach().clone()
        parameter.data = parameter.data.to(dtype)


def _check_none_is_left(modules: Iterable[nn.Module]) -> None:
    left = [
        name
        for module in modules
        for name, parameter in module.named_parameters()
        if _MASTER in vars(parameter)
    ]
    if left:
        raise UsageError(
            f"parameters {', '.join(left)}: replicate(model, 'bf16-master') made them bfloat16, "
            "and this step has no float32 masters for them; expected policy='bf16-master' and an "
            "optimizer that holds them, or requires_grad_(False) before replicate()"
        )


def _normalisation_parameters(modules: Iterable[nn.Module]) -> set[int]:
    return {
        id(parameter)
        for module in modules
        for layer in module.modules()
        if isinstance(layer, _NORMS)
        for parameter in layer.parameters(recurse=False)
    }
