"""Gradient hooks that see true gradients while backward runs on the scaled loss.

``Tensor.register_hook`` and ``register_post_accumulate_grad_hook`` fire inside backward, where
gradients are still multiplied by the loss scale: a hook that clips, logs or adds noise would be
wrong by that factor. While a scaled backward runs, each such hook on a parameter is wrapped to be
shown the true gradient; what it returns or leaves is scaled again. Hooks on activations are not
parameters' and keep seeing scaled gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

_AS_THEY_ARE = nullcontext()

_Hooks = MutableMapping[int, Callable[..., Any]]
_Wrap = Callable[[Callable[..., Any], Tensor], Callable[..., Any]]


def true_gradients(
    parameters: Iterable[Tensor], scale: Tensor | None
) -> AbstractContextManager[None]:
    """Context: hooks on `parameters` see gradients divided by `scale` (None: nothing to do)."""
    hooked = [] if scale is None else list(_hooked(parameters))
    return _wrapped(hooked, scale) if hooked and scale is not None else _AS_THEY_ARE


def counting(parameters: Sequence[Tensor], counts: bool | Tensor) -> AbstractContextManager[None]:
    """Context: gradients of `parameters` are 0 unless `counts`, which a device may know alone.

    Multiplied by 0 a NaN would stay NaN. This way it is gone, and the host need not know.
    """
    if counts is True or not parameters:
        return _AS_THEY_ARE
    device = parameters[0].device
    mask = torch.as_tensor(counts, dtype=torch.bool, device=device)
    return _counting(parameters, mask)


@contextmanager
def _counting(parameters: Iterable[Tensor], counts: Tensor) -> Generator[None]:
    handles = [
        each.register_hook(lambda gradient: torch.where(counts, gradient, 0.0))
        for each in parameters
    ]
    try:
        yield
    finally:
        for each in handles:
            each.remove()


@contextmanager
def _wrapped(hooked: Sequence[tuple[_Hooks, _Wrap]], scale: Tensor) -> Generator[None]:
    originals = [(hooks, dict(hooks)) for hooks, _ in hooked]
    for hooks, wrap in hooked:
        for key, hook in hooks.items():
            hooks[key] = wrap(hook, scale)
    try:
        yield
    finally:
        for hooks, before in originals:
            for key in hooks.keys() & before.keys():  # a hook may have removed itself
                hooks[key] = before[key]


def _hooked(parameters: Iterable[Tensor]) -> Iterator[tuple[_Hooks, _Wrap]]:
    for parameter in parameters:
        if hooks := parameter._backward_hooks:
            yield hooks, _on_gradient
        if hooks := getattr(parameter, "_post_accumulate_grad_hooks", None):
            yield hooks, _on_parameter


def _on_gradient(hook: Callable[..., Any], scale: Tensor) -> Callable[..., Any]:
    def wrapped(gradient: Tensor) -> Tensor | None:
        changed = hook(gradient / scale)
        return None if changed is None else changed * scale

    return wrapped


def _on_parameter(hook: Callable[..., Any], scale: Tensor) -> Callable[..., Any]:
    def wrapped(parameter: Tensor) -> None:
        with torch.no_grad():
            if parameter.grad is not None:
                parameter.grad.div_(scale)
            hook(parameter)
            if parameter.grad is not None:  # the hook may have taken it
                parameter.grad.mul_(scale)

    return wrapped
