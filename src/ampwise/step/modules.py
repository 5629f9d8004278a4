"""The modules and parameters of models as they are now: nothing about them is remembered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer


def modules_of(models: Iterable[nn.Module]) -> list[nn.Module]:
    """All modules of some models, each once; `Module.modules` at a fifth of its time."""
    found: dict[nn.Module | None, None] = {}
    ahead: list[nn.Module | None] = [*models]
    while ahead:
        module = ahead.pop()
        if module is not None and module not in found:
            found[module] = None
            if module._modules:
                ahead += module._modules.values()
    return list(found)  # pyright: ignore[reportReturnType]


def parameters_by_name(models: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """Parameters by FQN; with several models the model's position comes first (``0.weight``)."""
    return {
        _prefixed(models, index, name): parameter
        for index, model in enumerate(models)
        for name, parameter in model.named_parameters()
    }


def modules_by_name(models: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """Modules by FQN in the same way; "" for the only model itself."""
    return {
        _prefixed(models, index, name): module
        for index, model in enumerate(models)
        for name, module in model.named_modules()
    }


def held_by(optimizers: Iterable[Optimizer]) -> list[Any]:
    """The parameters that some optimizers update, in their order, each as often as it is there."""
    return [
        parameter
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]


def several(one_or_more: Any) -> tuple[Any, ...]:
    """The things in what was given as one, as a mapping, or as any collection of them."""
    if isinstance(one_or_more, Mapping):
        return tuple(one_or_more.values())
    return tuple(one_or_more) if isinstance(one_or_more, Iterable) else (one_or_more,)


def _prefixed(models: Sequence[nn.Module], index: int, name: str) -> str:
    if len(models) == 1:
        return name
    return f"{index}.{name}" if name else str(index)
