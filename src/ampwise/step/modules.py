"""The modules and parameters of models as they are now: nothing about them is remembered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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


class Several(nn.Module):
    """Several models as one module, to go through: names begin with the model's own.

    Parameters
    ----------
    models
        By name: the key in a mapping, or the position in a sequence.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._modules.update(models)  # a key may be what a module has as an attribute: `train`


def as_one(given: Any) -> nn.Module:
    """The model that was given; of several, what holds them, which is made anew each time.

    So parameters, modules and states have one name everywhere: ``generator.0.weight`` of a mapping,
    ``1.0.weight`` of a sequence.
    """
    if isinstance(given, nn.Module):
        return given
    models = several(given)
    if len(models) == 1:
        return models[0]
    names = given if isinstance(given, Mapping) else range(len(models))
    return Several(dict(zip(map(str, names), models, strict=True)))


def in_form(given: Any, change: Callable[[Any], Any]) -> Any:
    """What was given as one, as a mapping or as a sequence, in that form, each thing changed."""
    if isinstance(given, nn.Module) or not isinstance(given, Iterable):
        return change(given)
    if isinstance(given, Mapping):
        return {name: change(each) for name, each in given.items()}
    values = [change(each) for each in given]
    if isinstance(given, list):
        return values
    kind: Any = type(given)
    return kind(*values) if hasattr(given, "_fields") else tuple(values)


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
