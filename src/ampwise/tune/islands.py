"""What is faster in float32 than in a policy's 16-bit format: islands for speed.

Every module that one step calls, and every function of torch's that its code calls, is run by
itself on the inputs that it got there, forward and backward, under the policy's autocast and as an
island would run it, in turns. Modules of one place in repeated blocks (``blocks.0.norm``,
``blocks.1.norm``) are one candidate, and so are all calls of a function; of each one is timed.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ampwise.bench.arm import Arm
from ampwise.bench.race import FAILURES
from ampwise.clock import done_at
from ampwise.data.move import tensors
from ampwise.errors import PolicyError
from ampwise.stats import paired_speedup, typical
from ampwise.step.precision import CallMode
from ampwise.step.precision.functions import functions_named
from ampwise.step.precision.islands import in_float32
from ampwise.tune.result import Island

_ROUNDS = 15
_WORTH = 1.05
"""Speedup by itself that an interval must exceed."""
_SHARE = 0.01
"""Share of a step that all of them together must save."""
_LONGEST_S = 0.5
"""What takes longer, forward and backward, is timed in fewer rounds."""

_NO_RESULT = frozenset(["backward", "grad", "requires_grad_", "retain_grad", "register_hook"])


@dataclass(frozen=True)
class _Call:
    """A call of a module or function, with inputs that are leaves of autograd as they were."""

    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def wanted(self) -> list[Tensor]:
        """What gradients are for: inputs, and a module's parameters."""
        own = self.run.parameters() if isinstance(self.run, nn.Module) else ()
        inputs = tensors([self.args, self.kwargs])
        return [each for each in (*inputs, *own) if each.requires_grad]


def faster_in_float32(arm: Arm, batch: Any) -> list[Island]:
    """Candidates for islands, those first that save the most time in a step."""
    modules, functions = _calls(arm, batch), _Functions()
    with functions:
        arm.run(batch)
    names = [name for name, _ in arm.model.named_modules()]
    candidates = {
        pattern: (modules[members[0]], len(members))
        for pattern, members in _places(modules, names).items()
    }
    candidates |= {f"{name}()": each for name, each in functions.found.items()}
    start = time.perf_counter()
    arm.run(batch)
    least_ms = _SHARE * (done_at(arm.step.device) - start) * 1e3
    found: list[tuple[float, Island]] = []
    for pattern, (call, times) in candidates.items():
        island = _timed(pattern, times, call, arm)
        if island is not None and island.alone.low > _WORTH:
            found.append((times * (island.low_ms - island.float32_ms), island))
    found.sort(key=lambda each: -each[0])
    return _apart([island for saved_ms, island in found if saved_ms > least_ms])


class _Functions(CallMode):
    """Notes calls of torch's functions that a policy can name.

    Attributes
    ----------
    found
        By name the call with the largest inputs, and how many calls there were.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, tuple[_Call, int]] = {}
        self._names: dict[Any, str | None] = {}
        self._sizes: dict[str, int] = {}

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call, and note it if it is part of a forward."""
        name = self._name_of(func)
        result = func(*args, **kwargs)
        made = [each for each in tensors(result) if each.requires_grad] if name else []
        if name and made and torch.is_grad_enabled():
            inputs = tensors([args, kwargs])
            self._note(name, func, args, kwargs, sum(each.numel() for each in inputs))
        return result

    def _note(
        self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], size: int
    ) -> None:
        known, times = self.found.get(name, (None, 0))
        if known is None or size > self._sizes[name]:
            known, self._sizes[name] = _Call(func, *tree_map(_kept, (args, kwargs))), size
        self.found[name] = known, times + 1

    def _name_of(self, func: Any) -> str | None:
        """What a policy calls a function; None for one that it cannot keep in float32."""
        if func not in self._names:
            spelled = getattr(func, "__name__", "")
            name = spelled.strip("_")
            changes = spelled.endswith("_") and not spelled.endswith("__")
            try:
                named = not changes and name not in _NO_RESULT and func in functions_named([name])
            except PolicyError:
                named = False
            self._names[func] = name if named else None
        return self._names[func]


def _calls(arm: Arm, batch: Any) -> dict[str, _Call]:
    """The first call of each module in a step, by the module's name."""
    found: dict[str, _Call] = {}

    def noting(name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if name not in found and torch.is_grad_enabled():
                found[name] = _Call(module, *tree_map(_kept, (args, kwargs)))

        return note

    hooks = [
        module.register_forward_pre_hook(noting(name), with_kwargs=True)
        for name, module in arm.model.named_modules()
        if name
    ]
    try:
        arm.run(batch)
    finally:
        for each in hooks:
            each.remove()
    return found


def _kept(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def _places(calls: Mapping[str, _Call], names: Sequence[str]) -> dict[str, list[str]]:
    """Modules of one place and class by the pattern that means exactly them."""
    places: dict[tuple[str, type], list[str]] = {}
    for name, call in calls.items():
        place = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
        places.setdefault((place, type(call.run)), []).append(name)
    found: dict[str, list[str]] = {}
    for (pattern, _), members in places.items():
        meant = [name for name in names if name and fnmatchcase(name, pattern)]
        # A star in a pattern goes across dots, too.
        found["+".join(members) if set(meant) != set(members) else pattern] = members
    return found


def _timed(pattern: str, times: int, call: _Call, arm: Arm) -> Island | None:
    """Times of a call in both formats; None where it cannot be made by itself."""
    kind, dtype = arm.step.device.type, getattr(torch, arm.step.policy.compute_dtype)
    runs = {"low": call.run, "float32": in_float32(call.run, kind)}
    taken: dict[str, list[float]] = {name: [] for name in runs}
    order, began = random.Random(0), time.perf_counter()
    try:
        for made in range(_ROUNDS + 1):
            if made > 5 and time.perf_counter() - began > _LONGEST_S:
                break
            for name in order.sample(list(runs), 2):
                start = time.perf_counter()
                with torch.autocast(kind, dtype):
                    outputs = runs[name](*call.args, **call.kwargs)
                _backward(outputs, call)
                taken[name].append((done_at(arm.step.device) - start) * 1e3)
    except (*FAILURES, TypeError, ValueError, AttributeError):
        return None
    low, exact = (each[1:] for each in taken.values())  # the first round warms up
    return Island(
        pattern, times, typical(low).median, typical(exact).median, paired_speedup(low, exact)
    )


def _backward(outputs: Any, call: _Call) -> None:
    """Gradients for inputs and parameters, which are left as they are."""
    heads, wanted = [each for each in tensors(outputs) if each.requires_grad], call.wanted
    if heads and wanted:
        ones = [torch.ones_like(each) for each in heads]
        torch.autograd.grad(heads, wanted, ones, allow_unused=True)


def _apart(islands: Sequence[Island]) -> list[Island]:
    """Of modules inside each other, the one that saves more."""
    kept: list[Island] = []
    for each in islands:
        if not any(_overlap(each.pattern, other.pattern) for other in kept):
            kept.append(each)
    return kept


def _overlap(first: str, second: str) -> bool:
    return any(
        f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.")
        for a in first.split("+")
        for b in second.split("+")
    )
