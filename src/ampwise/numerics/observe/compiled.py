"""A fault in a compiled model: in the compiler's stages, where does it vanish?

A watched replay is made eagerly: under a dispatch mode compiled code would be given up, for good.
If the fault is there, too, that is where it is. If it is not, the stages are tried one by one:
compiled as it is, ``aot_eager`` (the traced graph, run operation by operation), and eager.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

from ampwise.step.compiled import eager
from ampwise.step.recorder import Stash
from ampwise.step.replayable import Replayable
from ampwise_lint.base.words import joined


def stages(step: Replayable, stash: Stash) -> dict[str, bool]:
    """Whether a window is clean as it is, as ``aot_eager`` and in eager mode."""
    found = {"compiled": step.replay(stash).clean}
    with _backend(step, "aot_eager"):
        found["aot_eager"] = step.replay(stash).clean
    found["eager"] = step.replay(stash, around=lambda: eager(step.models)).clean
    return found


def in_words(found: dict[str, bool]) -> str:
    """Which stages fail, in a sentence."""
    fails = [name for name, clean in found.items() if not clean]
    holds = [name for name, clean in found.items() if clean]
    return (
        f"The step fails {joined(fails) or 'nowhere'} and is clean in "
        f"{joined(holds) or 'no stage'}: the fault is in what the compiler makes of the "
        "model, not in its code."
    )


@contextmanager
def _backend(step: Replayable, backend: str) -> Generator[None]:
    """What is compiled of the models under another backend, for a while."""
    undo: list[tuple[Any, str, Any]] = []
    for each in (module for model in step.models for module in model.modules()):
        inner: Any = getattr(each, "_orig_mod", None)
        if inner is not None:
            other: Any = torch.compile(inner, backend=backend)
            undo.append((each, "forward", each.forward))
            each.forward = other.forward
        elif each._compiled_call_impl is not None:
            undo.append((each, "_compiled_call_impl", each._compiled_call_impl))
            each._compiled_call_impl = torch.compile(each._call_impl, backend=backend)
    try:
        yield
    finally:
        for owner, name, before in undo:
            setattr(owner, name, before)
