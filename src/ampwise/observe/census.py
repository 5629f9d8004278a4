"""One step op by op: which matrix products ran in which dtype, forward and backward, and where.

A dispatch mode is on from the first update up to the next one of the same optimizer, and never
again. Compiled code would run eagerly under it, and round otherwise; so where something is
compiled, its step is not looked at this way.
"""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import ExitStack

from torch import nn
from torch.optim import Optimizer

from ampwise.observe.listener import Listener
from ampwise.observe.modules import Modules, bare
from ampwise.observe.result import Ran
from ampwise.observe.session import Session
from ampwise.observe.steps import Attempt
from ampwise.places import Places
from ampwise.products import CountProducts, OddProduct, Product, odd_ones


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

    @property
    def made(self) -> bool:
        """Whether a step was looked at."""
        return not self.why_not

    def attempted(self, attempt: Attempt) -> None:
        """Begin after the first update; end after the next of the same optimizer."""
        if self._first is None:
            self._first = attempt.optimizer
            self._begin()
        elif self.looking and self._first is attempt.optimizer:
            self._session.watched()
            self.end()

    def end(self) -> None:
        """Look no longer."""
        self.looking = False
        self._inside.close()

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
        if _compiles():
            self.why_not = "the script compiles, and compiled code is not looked into"
            return
        self.why_not, self.looking = "", True
        stack = _Stack()
        self._modules.inner = stack
        self._inside.callback(setattr, self._modules, "inner", None)
        self.products = self._inside.enter_context(CountProducts(Places(stack))).found


def _compiles() -> bool:
    """Whether any code was compiled so far."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and utils.counters["stats"]["unique_graphs"] > 0


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
