"""One step op by op: which matrix products ran in which dtype, forward and backward, and where.

A dispatch mode is on from the first update up to the next one of the same optimizer, and never
again. Compiled code would run eagerly under it, and round otherwise; so where something is
compiled, the operations that run are recorded below Python instead (`executed`), without their
lines. A step in which more is compiled has the compiler's own operations in it: the next is taken.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ampwise.observe.executed import Recording, is_profiled
from ampwise.observe.listener import Listener
from ampwise.observe.modules import Modules, bare
from ampwise.observe.result import Ran
from ampwise.observe.session import Session
from ampwise.observe.steps import Attempt
from ampwise.places import NOWHERE, Places
from ampwise.products import (
    CountProducts,
    OddProduct,
    Product,
    is_product,
    odd_ones,
    operand_of,
)

_HIDING = ("reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
"""Modes of the compiler in which it writes products itself, or repeats them as CUDA graphs."""
_HIDDEN = "products of compiled code are kernels or CUDA graphs of the compiler's own"
_PROFILED = "there is compiled code, and the script uses the profiler that would see its products"
_TRIES = 5
"""Steps with compiled code in them that are looked at, until one compiles nothing more."""


class Census(Listener):
    """The products of one step.

    Attributes
    ----------
    why_not
        Why none was made; empty where one was.
    looking
        Whether the step that is looked at is the open one.
    """

    def __init__(self, session: Session, modules: Modules) -> None:
        self.products: Counter[Product] = Counter()
        self.why_not = "the script ended before its second step"
        self._session, self._modules = session, modules
        self._first: Optimizer | None = None
        self.looking = False
        self._inside = ExitStack()
        self._recording: Recording | None = None
        self._graphs, self._tries, self._hides = 0, _TRIES, False

    @property
    def made(self) -> bool:
        """Whether a step was looked at."""
        return not self.why_not

    def compiled(self, settings: Mapping[str, Any]) -> None:
        """Something is given to the compiler."""
        if settings.get("mode") in _HIDING or settings.get("options"):
            self._hides = True

    def attempted(self, attempt: Attempt) -> None:
        """Begin after the first update; end after the next of the same optimizer."""
        if self._first is None:
            self._first = attempt.optimizer
            self._begin()
        elif self.looking and self._first is attempt.optimizer:
            self._session.watched()
            self.end()
            if self._tries and not self.made:
                self._begin()

    def end(self) -> None:
        """Look no longer."""
        self.looking = False
        self._inside.close()
        if self._recording is not None:
            recording, self._recording = self._recording, None
            self._take(recording)

    def ran(self) -> Ran:
        """Products by dtype."""
        found: dict[str, Counter[str]] = {"forward": Counter(), "backward": Counter()}
        for each, times in self.products.items():
            found[each.place.phase][each.dtype] += times
        return Ran(*(dict(found[phase].most_common()) for phase in ("forward", "backward")))

    def odd_ones(self, wanted: set[str]) -> list[OddProduct]:
        """Lines whose products ran in another dtype than was wanted; else than most."""
        dtypes = Counter[str]()
        for each, times in self.products.items():
            dtypes[each.dtype] += times
        usual = wanted & dtypes.keys() or {each for each, _ in dtypes.most_common(1)}
        return odd_ones(self.products, usual)

    def _begin(self) -> None:
        self._graphs = _graphs()
        if self._graphs:
            self._record()
            return
        self.why_not, self.looking = "", True
        stack = _Stack()
        self._modules.inner = stack
        self._inside.callback(setattr, self._modules, "inner", None)
        self.products = self._inside.enter_context(CountProducts(Places(stack))).found

    def _record(self) -> None:
        """Have the operations of a step recorded."""
        if self._hides or is_profiled():
            self.why_not, self._tries = _HIDDEN if self._hides else _PROFILED, 0
            return
        self._recording = Recording()
        self._tries -= 1
        self.looking = True

    def _take(self, recording: Recording) -> None:
        """Count what was recorded; not what belongs to a compilation, or to the race."""
        executed = recording.end(is_product)
        self.why_not = "more was compiled in each of the steps that were looked at"
        if recording.gave_way:
            self.why_not, self._tries = _PROFILED, 0
        if _graphs() > self._graphs or self._session.raced or recording.gave_way:
            return
        for each in executed:
            dtype = each.dtypes[operand_of(each.name)]
            if dtype:
                place = replace(NOWHERE, phase="backward" if each.backward else "forward")
                self.products[Product(each.name, dtype, place)] += 1
        self.why_not = "" if self.products else _HIDDEN


def _graphs() -> int:
    """How many graphs were compiled so far."""
    utils = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else utils.counters["stats"]["unique_graphs"]


class _Stack:
    """Which module is running, by the names that outermost modules know."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._calls: Counter[str] = Counter()
        self._stack: list[tuple[str, int]] = []

    @property
    def top(self) -> tuple[str, int]:
        return self._stack[-1] if self._stack else ("", 0)

    def push(self, module: nn.Module) -> None:
        if id(module) not in self._names:
            for name, each in bare(module).named_modules():
                self._names.setdefault(id(each), name)
        name = self._names.get(id(module), "")
        self._stack.append((name, self._calls[name]))
        self._calls[name] += 1

    def pop(self) -> None:
        self._stack.pop()
