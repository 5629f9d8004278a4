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
from torch import nn

from ampwise.step.compiled import eager
from ampwise.step.recorder import Stash
from ampwise.step.replay import replay
from ampwise.step.train_step import TrainStep


def stages(step: TrainStep, stash: Stash) -> dict[str, bool]:
    """Whether a window is clean as it is, as ``aot_eager`` and in eager mode."""
    found = {"compiled": replay(step, stash).clean}
    with _backend(step, "aot_eager"):
        found["aot_eager"] = replay(step, stash).clean
    found["eager"] = replay(step, stash, around=lambda: eager(step.models)).clean
    return found


def in_words(found: dict[str, bool]) -> str:
    """Which stages fail, in a sentence."""
    fails = [name for name, clean in found.items() if not clean]
    holds = [name for name, clean in found.items() if clean]
    return (
        f"The step fails {' and '.join(fails) or 'nowhere'} and is clean in "
        f"{' and '.join(holds) or 'no stage'}: the fault is in what the compiler makes of the "
        "model, not in its code."
    )


@contextmanager
def _backend(step: TrainStep, backend: str) -> Generator[None]:
    """Whole compiled models under another backend, for a while."""
    before: Any = step.model
    undo: list[tuple[nn.Module, Any]] = []

    def other(model: nn.Module) -> nn.Module:
        inner: Any = getattr(model, "_orig_mod", None)
        if inner is not None:
            return torch.compile(inner, backend=backend)  # pyright: ignore[reportReturnType]
        return model

    for model in step.models:
        for each in model.modules():
            if each._compiled_call_impl is not None and not hasattr(each, "_orig_mod"):
                undo.append((each, each._compiled_call_impl))
                each._compiled_call_impl = torch.compile(each._call_impl, backend=backend)
    step.model = other(before) if isinstance(before, nn.Module) else [*map(other, before)]
    try:
        yield
    finally:
        step.model = before
        for each, compiled in undo:
            each._compiled_call_impl = compiled
