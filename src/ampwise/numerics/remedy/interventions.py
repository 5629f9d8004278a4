"""Changes to a computation that a replay can try out: what a fix would do to the code.

A line or a function of the user's is changed by a torch-function mode, which sees every call of the
torch API together with the frame that made it; a module by hooks; what happens inside the library's
own kernels by a dispatch mode. None of them touches the model or its code.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from ampwise.numerics.observe import domain
from ampwise.numerics.observe.extent import which
from ampwise.places import is_internal
from ampwise.products import LOWERED
from ampwise.step.precision import CallMode, Islands
from ampwise.step.recorder import finite

_SINGULAR = {
    "sqrt": 0.0, "rsqrt": 0.0, "log": 0.0, "log2": 0.0, "log10": 0.0, "reciprocal": 0.0,
    "pow": 0.0, "__pow__": 0.0, "div": 0.0, "true_divide": 0.0, "__truediv__": 0.0,
    "norm": 0.0, "vector_norm": 0.0, "linalg_vector_norm": 0.0, "acos": 1.0, "asin": 1.0,
}  # fmt: skip
"""Functions and where their derivative is infinite."""

Change = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class Scope:
    """Which calls are meant: those of some lines of a file, or of the functions around them."""

    def __init__(self, file: str, *lines: int, function: bool = False) -> None:
        self.file, self.lines, self.function = file, lines, function

    def holds(self) -> bool:
        """Whether the call that is being made comes from here."""
        frame: Any = sys._getframe(2)
        while frame is not None and is_internal(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None or frame.f_code.co_filename != self.file:
            return False
        if not self.function:
            return frame.f_lineno in self.lines
        own = [line for *_, line in frame.f_code.co_lines() if line is not None]
        return any(min(own) <= line <= max(own) for line in self.lines)


def as_it_is(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """No change."""
    return func(*args, **kwargs)


class InScope(CallMode):
    """Torch calls of a scope are made through `change`, all others through `elsewhere`."""

    def __init__(self, scope: Scope, change: Change, elsewhere: Change = as_it_is) -> None:
        super().__init__()
        self._scope, self._change, self._elsewhere = scope, change, elsewhere

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call, changed if it is of the scope."""
        if getattr(func, "__name__", "") in _ACCESS:
            return func(*args, **kwargs)
        change = self._change if self._scope.holds() else self._elsewhere
        return change(func, args, kwargs)

    def idle(self, device_type: str) -> Callable[[], AbstractContextManager[Any]]:
        """Makes the context of the same look at the same calls, which changes nothing."""
        return lambda: InScope(self._scope, _looked_at(device_type))


def _looked_at(device_type: str) -> Change:
    """What raising inputs costs beside the raising: arguments gone through, autocast entered."""

    def same(value: Any) -> Any:
        return value

    def change(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        enabled = torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type)
        with torch.autocast(device_type, dtype, enabled=enabled):
            return func(*tree_map(same, args), **tree_map(same, kwargs))

    return change


_ACCESS = frozenset(["__get__", "__set__", "size", "dim", "stride", "numel", "is_floating_point"])


_OF_AUTOGRAD = frozenset(["grad", "backward", "requires_grad_", "retain_grad", "register_hook"])
_LOWERED = LOWERED | {
    "__matmul__", "__rmatmul__", "multi_head_attention_forward", "lstm", "gru", "rnn_tanh",
    "rnn_relu",
}  # fmt: skip
"""Calls that autocast runs in 16 bits."""


class Raised:
    """Run in `dtype` (float32 or float64): inputs raised to it, autocast off.

    A tensor is raised once, as it would be at the start of a function: so the parts of its gradient
    are added up in `dtype`, too. What asks autograd for a derivative is left alone: of a raised
    copy there is none.

    Attributes
    ----------
    effective
        Whether there was anything in a lower format so far.
    """

    def __init__(self, device_type: str, dtype: torch.dtype = torch.float32) -> None:
        below = (torch.float16, torch.bfloat16, torch.float32)
        self.effective = False
        self._device_type, self._dtype = device_type, dtype
        self._below = below[:2] if dtype == torch.float32 else below
        self._copies: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call in it."""
        name = getattr(func, "__name__", "")
        if name in ("half", "bfloat16", "float"):
            self.effective |= name != "float"
            return args[0].to(self._dtype)
        if name in _LOWERED and torch.is_autocast_enabled(self._device_type):
            self.effective = True
        with torch.autocast(self._device_type, enabled=False):
            if name in _OF_AUTOGRAD:
                return func(*args, **kwargs)
            return func(*tree_map(self._up, args), **tree_map(self._up, kwargs))

    def _up(self, value: Any) -> Any:
        dtype = value.dtype if isinstance(value, Tensor) else value
        if not isinstance(dtype, torch.dtype) or dtype not in self._below:
            return value
        self.effective = True
        return self._copy(value) if isinstance(value, Tensor) else self._dtype

    def _copy(self, tensor: Tensor) -> Tensor:
        """The raised copy of a tensor as it is now; the one there is, if it is that still."""
        now = tensor._version, torch.is_grad_enabled()
        state, copy = self._copies.get(tensor) or (None, tensor)
        if state != now:
            copy = tensor.to(self._dtype)
            self._copies[tensor] = now, copy
        return copy


_PRODUCTS = _LOWERED | {"mul", "__mul__", "__rmul__", "multiply", "square", "sum"}
_SAME_UNIT = frozenset(
    ["view", "reshape", "transpose", "permute", "swapaxes", "contiguous", "flatten", "unflatten",
     "squeeze", "unsqueeze", "chunk", "split", "relu", "dropout", "__getitem__", "clone", "expand",
     "to", "half", "bfloat16", "float", "type_as"]
)  # fmt: skip
_SCALINGS = frozenset(["mul", "__mul__", "__rmul__", "multiply", "div", "divide", "true_divide",
                       "__truediv__"])  # fmt: skip


class OtherUnit:
    """Make products of some lines in a larger unit, as far as the operation that needs the own one.

    The first factor is divided by `unit`; what comes of it is multiplied by it again, after the
    next scaling by a number, or in float32 before whatever else takes it.
    """

    def __init__(self, unit: float) -> None:
        self._unit = unit
        self._smaller: dict[int, Tensor] = {}  # alive, so that no id returns

    def inside(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call on these lines."""
        ours = getattr(func, "__name__", "") in _PRODUCTS and not self._any(args, kwargs)
        if not ours or not args or not isinstance(args[0], Tensor):
            return self.outside(func, args, kwargs)
        return self._kept(func(args[0] / self._unit, *args[1:], **kwargs))

    def outside(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call elsewhere, which may take what they made."""
        name = getattr(func, "__name__", "")
        if not self._any(args, kwargs):
            return func(*args, **kwargs)
        if name in _SAME_UNIT:
            return self._kept(func(*args, **kwargs))
        if name in _SCALINGS and not all(isinstance(each, Tensor) and each.dim() for each in args):
            return func(*args, **kwargs) * self._unit
        return func(*tree_map(self._restored, args), **tree_map(self._restored, kwargs))

    def _any(self, args: Any, kwargs: Any) -> bool:
        return any(id(each) in self._smaller for each in (*args, *kwargs.values()))

    def _restored(self, value: Any) -> Any:
        return value.float() * self._unit if id(value) in self._smaller else value

    def _kept(self, made: Any) -> Any:
        for each in made if isinstance(made, list | tuple) else [made]:
            self._smaller[id(each)] = each
        return made


def lowered(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run in float32 what would be in float64: for what a function in float64 hands on."""

    def down(value: Any) -> Any:
        wide = isinstance(value, Tensor) and value.dtype == torch.float64
        return value.float() if wide else value

    return func(*tree_map(down, args), **tree_map(down, kwargs))


def constants(least: float, most: float, near_one: float = 1.0) -> Change:
    """Run with constants that the format holds.

    None between 0 and `least`, none beyond `most`, none between `near_one` and 1.
    """

    def fit(value: Any) -> Any:
        if isinstance(value, Tensor) and not value.dim() and value.is_floating_point():
            return value.clamp(min=least) if 0 < float(value) < min(least, 1e-3) else value
        if isinstance(value, bool) or not isinstance(value, float):
            return value
        if 0 < value < least and value < 1e-3:
            return least
        if near_one < abs(value) < 1:
            return math.copysign(near_one, value)
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
            return func(*args[:at], safe, *args[at + 1 :], **kwargs)
        safe = torch.where(singular, torch.ones_like(value) / 2, value)
        made = func(*args[:at], safe, *args[at + 1 :], **kwargs)
        before = func(*args, **kwargs).detach()
        return torch.where(singular, before, made)

    return change


def inside_domain(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a call with its argument clamped to where the function is defined."""
    if args and isinstance(args[0], Tensor):
        args = (domain.inside(getattr(func, "__name__", ""), args[0]), *args[1:])
    return func(*args, **kwargs)


def clamped(names: Collection[str], least: float | None, most: float) -> Change:
    """Make some functions with their argument between two numbers."""

    def change(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if getattr(func, "__name__", "").removesuffix("_") in names and args:
            args = (torch.clamp(args[0], least, most), *args[1:])
        return func(*args, **kwargs)

    return change


def scaled_inside(scale: float) -> Change:
    """Ask for gradients of so many times a value, and divide what comes by it."""

    def change(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if getattr(func, "__name__", "") != "grad" or not args:
            return func(*args, **kwargs)
        values = [args[0]] if isinstance(args[0], Tensor) else args[0]
        found = func([each.float() * scale for each in values], *args[1:], **kwargs)
        return tuple(None if each is None else each.float() / scale for each in found)

    return change


def uncorrected(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a variance divide by the number of values, not by one less."""
    if getattr(func, "__name__", "") not in ("var", "std", "var_mean", "std_mean"):
        return func(*args, **kwargs)
    kwargs = {name: each for name, each in kwargs.items() if name != "unbiased"}
    args = tuple(each for each in args if not isinstance(each, bool))
    return func(*args, **(kwargs | {"correction": 0}))


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


def with_bad_statistics(models: Sequence[nn.Module]) -> dict[str, Any]:
    """Modules, by FQN, that can reset running statistics and whose are not finite."""
    named = (each for model in models for each in model.named_modules())
    return {
        name: module
        for name, module in named
        if hasattr(module, "reset_running_stats") and not all(map(finite, _own_buffers(module)))
    }


def bad_buffers(models: Sequence[nn.Module]) -> dict[str, str]:
    """Other buffers that are not finite, by FQN, and which of their elements."""
    resettable = with_bad_statistics(models)
    return {
        name: which(~torch.isfinite(buffer))
        for model in models
        for name, buffer in model.named_buffers()
        if name.rpartition(".")[0] not in resettable and not finite(buffer)
    }


def _own_buffers(module: nn.Module) -> list[Tensor]:
    return [each for _, each in module.named_buffers(recurse=False)]


@contextmanager
def fresh_statistics(modules: Sequence[Any]) -> Generator[None]:
    """Running statistics as after construction: means 0, variances 1."""
    for module in modules:
        module.reset_running_stats()
    yield


def on(
    scope: Scope, change: Change, elsewhere: Change = as_it_is
) -> Callable[[], AbstractContextManager[Any]]:
    """Makes the context of a change in a scope."""
    return lambda: InScope(scope, change, elsewhere)
