"""Changes to a computation that a replay can try out: what a fix would do to the code.

A line or a function of the user's is changed by a torch-function mode, which sees every call of the
torch API together with the frame that made it; a module by hooks; what happens inside the library's
own kernels by a dispatch mode. None of them touches the model or its code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from ampwise.numerics.places import is_internal
from ampwise.step.precision import Islands

_SINGULAR = {
    "sqrt": 0.0, "rsqrt": 0.0, "log": 0.0, "log2": 0.0, "log10": 0.0, "reciprocal": 0.0,
    "pow": 0.0, "__pow__": 0.0, "div": 0.0, "true_divide": 0.0, "__truediv__": 0.0,
    "norm": 0.0, "vector_norm": 0.0, "linalg_vector_norm": 0.0, "acos": 1.0, "asin": 1.0,
}  # fmt: skip
"""Functions and where their derivative is infinite."""

Change = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class Scope:
    """Which calls are meant: those of one line, or of one function."""

    def __init__(self, file: str, line: int, *, function: bool = False) -> None:
        self.file, self.line, self.function = file, line, function

    def holds(self) -> bool:
        """Whether the call that is being made comes from here."""
        frame: Any = sys._getframe(2)
        while frame is not None and is_internal(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None or frame.f_code.co_filename != self.file:
            return False
        if not self.function:
            return frame.f_lineno == self.line
        lines = [line for *_, line in frame.f_code.co_lines() if line is not None]
        return min(lines) <= self.line <= max(lines)


def as_it_is(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """No change."""
    return func(*args, **kwargs)


class InScope(TorchFunctionMode):
    """Torch calls of a scope are made through `change`, all others through `elsewhere`."""

    def __init__(self, scope: Scope, change: Change, elsewhere: Change = as_it_is) -> None:
        super().__init__()
        self._scope, self._change, self._elsewhere = scope, change, elsewhere

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward:
            with self:  # for what is recomputed in it: activation checkpointing
                return _backward(args[0], **kwargs)
        if getattr(func, "__name__", "") in _ACCESS:
            return func(*args, **kwargs)
        change = self._change if self._scope.holds() else self._elsewhere
        return change(func, args, kwargs)


def _backward(
    loss: Tensor, gradient: Tensor | None, inputs: Sequence[Tensor] | None, **kwargs: Any
) -> None:
    """`Tensor.backward` with function modes left on: on gradient edges they do not take it over."""
    edge = torch.autograd.graph.get_gradient_edge
    seed = torch.ones_like(loss) if gradient is None else gradient
    leaves = None if inputs is None else [edge(each) for each in inputs]
    torch.autograd.backward(edge(loss), seed, inputs=leaves, **kwargs)


_ACCESS = frozenset(["__get__", "__set__", "size", "dim", "stride", "numel", "is_floating_point"])


def raised(device_type: str, dtype: torch.dtype = torch.float32) -> Change:
    """Run in `dtype` (float32 or float64): inputs raised to it, autocast off."""
    below = (torch.float16, torch.bfloat16, torch.float32)
    below = below[:2] if dtype == torch.float32 else below

    def up(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(dtype) if value.dtype in below else value
        return dtype if isinstance(value, torch.dtype) and value in below else value

    def change(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if getattr(func, "__name__", "") in ("half", "bfloat16", "float"):
            return up(args[0])
        with torch.autocast(device_type, enabled=False):
            return func(*tree_map(up, args), **tree_map(up, kwargs))

    return change


def lowered(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run in float32 what would be in float64: for what a function in float64 hands on."""

    def down(value: Any) -> Any:
        wide = isinstance(value, Tensor) and value.dtype == torch.float64
        return value.float() if wide else value

    return func(*tree_map(down, args), **tree_map(down, kwargs))


def constants(least: float, most: float) -> Change:
    """Run with constants that the format holds: none between 0 and `least`, none beyond `most`."""

    def fit(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, float):
            return value
        if 0 < value < least and value < 1e-3:
            return least
        return max(-most, min(most, value))

    def change(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*map(fit, args), **{name: fit(each) for name, each in kwargs.items()})

    return change


def small_constants(least: float, names: Sequence[str]) -> Change:
    """Give library functions a larger `eps`, which they otherwise have as a default."""
    larger = constants(least, float("inf"))

    def change(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if getattr(func, "__name__", "") in names and "eps" not in kwargs:
            kwargs = {**kwargs, "eps": least}
        return larger(func, args, kwargs)

    return change


def away_from_singularities() -> Change:
    """Replace arguments at which a derivative is infinite, before the function sees them."""

    def change(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        if name not in _SINGULAR:
            return func(*args, **kwargs)
        at = 1 if "div" in name and len(args) > 1 else 0
        value = args[at]
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return func(*args, **kwargs)
        singular = (value.detach() - _SINGULAR[name]).abs() <= torch.finfo(value.dtype).tiny
        if name in ("log", "log2", "log10", "sqrt", "rsqrt"):
            singular = value.detach() <= torch.finfo(value.dtype).tiny
        if "norm" in name:
            # All of a row at zero: nudge one side of it, which moves the norm by nothing.
            safe = value + torch.where(singular, torch.finfo(value.dtype).eps, 0.0)
        else:
            safe = torch.where(singular, torch.ones_like(value) / 2, value)
        return func(*args[:at], safe, *args[at + 1 :], **kwargs)

    return change


def zero_for_nothing() -> Change:
    """A reduction over no elements gives 0."""

    def change(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        return torch.nan_to_num(result) if isinstance(result, Tensor) else result

    return change


class FiniteScores(TorchDispatchMode):
    """Softmax sees the most negative finite number where scores are -inf."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func._overloadpacket.__name__ in ("_softmax", "_log_softmax", "_safe_softmax"):
            scores = args[0]
            least = torch.finfo(scores.dtype).min
            args = (scores.masked_fill(torch.isneginf(scores), least), *args[1:])
        return func(*args, **(kwargs or {}))


@contextmanager
def in_float32(modules: Sequence[nn.Module], device_type: str) -> Generator[None]:
    """Some modules in float32, for a while."""
    islands = Islands(lambda: modules, device_type)
    islands.enter()
    try:
        yield
    finally:
        islands.leave()


@contextmanager
def fresh_statistics(models: Sequence[nn.Module]) -> Generator[None]:
    """Buffers with NaN or inf as after construction: means 0, variances 1."""
    with torch.no_grad():
        for model in models:
            for name, buffer in model.named_buffers():
                if buffer.is_floating_point() and not bool(torch.isfinite(buffer).all()):
                    buffer.fill_(1.0 if name.rpartition(".")[2].endswith("var") else 0.0)
    yield


def on(
    scope: Scope, change: Change, elsewhere: Change = as_it_is
) -> Callable[[], AbstractContextManager[Any]]:
    """Makes the context of a change in a scope."""
    return lambda: InScope(scope, change, elsewhere)
