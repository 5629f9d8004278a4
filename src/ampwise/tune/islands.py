"""Modules that are faster in float32 than in a policy's 16-bit format: islands for speed.

Every module that one step calls is run by itself on the inputs that it got there, forward and
backward, under the policy's autocast and as an island would run it, in turns. Modules of one place
in repeated blocks (``blocks.0.norm``, ``blocks.1.norm``) are one candidate, of which one is timed.

What runs between modules, such as the attention that a block computes itself, belongs to no module
but the block: a policy has islands of modules, not of operations, so it is not told apart.
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
from torch.utils._pytree import tree_leaves, tree_map

from ampwise.bench.arm import Arm
from ampwise.bench.race import FAILURES
from ampwise.clock import done_at
from ampwise.stats import paired_speedup, typical
from ampwise.step.precision.islands import raised
from ampwise.tune.result import Island

_ROUNDS = 15
_WORTH = 1.05
"""Speedup of a module by itself that its interval must exceed."""
_LONGEST_S = 0.5
"""A module whose forward and backward take longer is timed in fewer rounds."""


@dataclass(frozen=True)
class _Call:
    """A call of a module, with inputs that are leaves of autograd as they were."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def faster_in_float32(arm: Arm, batch: Any) -> list[Island]:
    """Candidates for islands, those first that save the most time in a step."""
    calls = _calls(arm, batch)
    names = [name for name, _ in arm.model.named_modules()]
    found: list[tuple[float, Island]] = []
    for pattern, members in _places(calls, names).items():
        island = _timed(pattern, len(members), calls[members[0]], arm)
        if island is not None and island.alone.low > _WORTH:
            found.append((len(members) * (island.low_ms - island.float32_ms), island))
    found.sort(key=lambda each: -each[0])
    return _apart([island for _, island in found])


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
        if name and not isinstance(module, nn.Dropout)
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
    """Modules by the pattern that means exactly them."""
    places: dict[str, list[str]] = {}
    for name in calls:
        places.setdefault(re.sub(r"(?<![^.])\d+(?![^.])", "*", name), []).append(name)
    found: dict[str, list[str]] = {}
    for pattern, members in places.items():
        meant = [name for name in names if name and fnmatchcase(name, pattern)]
        # A star in a pattern goes across dots, too.
        found["+".join(members) if set(meant) != set(members) else pattern] = members
    return found


def _timed(pattern: str, modules: int, call: _Call, arm: Arm) -> Island | None:
    """A module's times in both formats; None where one cannot be run by itself."""
    runs = {"low": _lowered(arm), "float32": _as_island(arm)}
    times: dict[str, list[float]] = {name: [] for name in runs}
    order, began = random.Random(0), time.perf_counter()
    try:
        for made in range(_ROUNDS + 1):
            if made > 5 and time.perf_counter() - began > _LONGEST_S:
                break
            for name in order.sample(list(runs), 2):
                start = time.perf_counter()
                runs[name](call)
                times[name].append((done_at(arm.step.device) - start) * 1e3)
    except (*FAILURES, TypeError, ValueError, AttributeError):
        return None
    low, exact = (each[1:] for each in times.values())  # the first round warms up
    return Island(
        pattern, modules, typical(low).median, typical(exact).median, paired_speedup(low, exact)
    )


def _lowered(arm: Arm) -> Callable[[_Call], None]:
    dtype, kind = getattr(torch, arm.step.policy.compute_dtype), arm.step.device.type

    def run(call: _Call) -> None:
        with torch.autocast(kind, dtype):
            outputs = call.module(*call.args, **call.kwargs)
        _backward(outputs, call)

    return run


def _as_island(arm: Arm) -> Callable[[_Call], None]:
    kind = arm.step.device.type

    def run(call: _Call) -> None:
        with torch.autocast(kind, enabled=False):
            outputs = call.module(*tree_map(raised, call.args), **tree_map(raised, call.kwargs))
        _backward(outputs, call)

    return run


def _backward(outputs: Any, call: _Call) -> None:
    """Gradients for inputs and parameters, which are left as they are."""
    heads = [each for each in tree_leaves(outputs) if isinstance(each, Tensor)]
    heads = [each for each in heads if each.requires_grad]
    inputs = [each for each in tree_leaves((call.args, call.kwargs)) if isinstance(each, Tensor)]
    wanted = [each for each in (*inputs, *call.module.parameters()) if each.requires_grad]
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
