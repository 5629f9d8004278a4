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
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

_AS_THEY_ARE = nullcontext()

_Hooks = MutableMapping[int, Callable[..., Any]]
_Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def hooked(
    parameters: Sequence[Tensor], scale: Tensor | None, counts: bool | Tensor
) -> AbstractContextManager[None]:
    """Context of a backward to `parameters`, whose hooks see gradients divided by `scale`.

    None divides by nothing. Gradients are 0 unless the backward `counts`, which a device may know
    alone: multiplied by 0 a NaN would stay NaN; this way it is gone, and the host need not know.
    """
    found = [] if scale is None else list(_hooks_of(parameters, scale))
    if counts is True and not found:
        return _AS_THEY_ARE
    return _hooked(parameters, found, counts)


@contextmanager
def _hooked(
    parameters: Sequence[Tensor],
    found: Sequence[tuple[_Hooks, _Wrap]],
    counts: bool | Tensor,
) -> Generator[None]:
    originals = [(hooks, dict(hooks)) for hooks, _ in found]
    for hooks, wrap in found:
        for key, hook in hooks.items():
            hooks[key] = wrap(hook)
    leaves = [] if counts is True else [each for each in parameters if each.requires_grad]
    handles = [_emptied(each, counts) for each in leaves]
    try:
        yield
    finally:
        for each in handles:
            each.remove()
        for hooks, before in originals:
            for key in hooks.keys() & before.keys():  # a hook may have removed itself
                hooks[key] = before[key]


def _emptied(parameter: Tensor, counts: bool | Tensor) -> RemovableHandle:
    """Have the gradient of a parameter be 0 unless it counts."""
    mask = torch.as_tensor(counts, dtype=torch.bool, device=parameter.device)
    return parameter.register_hook(lambda gradient: torch.where(mask, gradient, 0.0))


def _hooks_of(parameters: Iterable[Tensor], scale: Tensor) -> Iterator[tuple[_Hooks, _Wrap]]:
    for parameter in parameters:
        if hooks := parameter._backward_hooks:
            yield hooks, partial(_on_gradient, scale=scale)
        if hooks := getattr(parameter, "_post_accumulate_grad_hooks", None):
            yield hooks, partial(_on_parameter, scale=scale)


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
