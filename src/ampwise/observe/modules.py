"""Modules: which are called by code outside of modules, and inside of which we are.

``nn.Module.__call__`` is replaced on the class, before `torch._dynamo` is imported: no hook is left
in anybody's model, so that it can be copied, pickled and compiled as ever, and the compiler takes
what it finds for the original.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ampwise.observe.patches import Patches, unseen
from ampwise.observe.session import Session

Around = Callable[[Callable[..., Any], nn.Module, tuple[Any, ...], dict[str, Any]], Any]


_LAST_WORK_S = 0.1


class _Here(threading.local):
    """How deep in modules a thread is."""

    depth = 0


class Modules:
    """Calls of modules.

    Attributes
    ----------
    inner
        Told of modules called inside of modules, while somebody looks: ``push(module)``, ``pop()``.
    around
        Called instead of a module by code outside of modules, with what calls it, the module and
        its arguments; None to call it.
    """

    what = "calls of modules"

    def __init__(self, session: Session) -> None:
        self.inner: Any = None
        self.around: Around | None = None
        self._session = session
        self._here = _Here()
        self._copies: dict[int, nn.Module] = {}

    def install(self, patches: Patches) -> None:
        """Put it in place."""
        real, here, session = nn.Module.__call__, self._here, self._session
        is_compiling = torch.compiler.is_compiling

        def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            # The compiler is inside of a module; torch 2.11's takes a thread's own depth for 0.
            inside = here.depth or session.in_backward or is_compiling()
            if inside or not session.active:
                if self.inner is None:
                    return real(module, *args, **kwargs)
                return self._inside(real, module, args, kwargs)
            return self._outermost(real, module, args, kwargs)

        wrapper = unseen(call)
        wrapper.__name__ = real.__name__
        wrapper.__qualname__ = real.__qualname__
        patches.replace(nn.Module, "__call__", wrapper)
        for name in ("torch._dynamo.utils", "torch._dynamo.variables.nn_module"):
            if name in sys.modules:
                patches.replace(sys.modules[name], "unpatched_nn_module_call", wrapper)

    def let_go(self) -> None:
        """Let go of what ranks have copies of, once nothing is left of their last collective.

        A thread of gloo drops that work, and with it objects of Python's, for which it needs the
        interpreter's lock. Where a script's end frees its DDP in that moment, it waits for the
        thread, holding the lock, forever; so copies are held until here.
        """
        if self._copies:
            time.sleep(_LAST_WORK_S)
            self._copies.clear()

    def _outermost(self, real: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        session, output = self._session, None
        if isinstance(module, nn.parallel.DistributedDataParallel):
            self._copies[id(module)] = module
        self._here.depth = 1
        try:
            session.tell("call_begins", module, args, kwargs)
            if self.around is None:
                output = self._inside(real, module, args, kwargs)
            else:
                output = self.around(partial(self._inside, real), module, args, kwargs)
        finally:
            self._here.depth = 0
            session.tell("call_ends", module, output)
        return output

    def _inside(self, real: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        inner = self.inner
        if inner is None:
            return real(module, *args, **kwargs)
        inner.push(module)
        try:
            return real(module, *args, **kwargs)
        finally:
            inner.pop()


def name_of(module: nn.Module) -> str:
    """Class of a module, inside what compilation and DDP put around it."""
    return type(bare(module)).__name__


def bare(module: nn.Module) -> nn.Module:
    """A module without what compilation and DDP put around it."""
    while True:
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            module = module.module
        elif (inside := module._modules.get("_orig_mod")) is not None:
            module = inside  # of a compiled one; asked for by attribute, its absence costs 20 us
        else:
            return module
