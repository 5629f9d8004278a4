"""Where parameters get their 16 bits: the lines of a model's code that make them so.

A model is built once more under a dispatch mode. The format of a tensor is decided where it is
made of none that has it: ``empty`` in bfloat16, a cast of float32. What is made of it takes it
over: a copy, a product with a number, the same weights on another device. ``nn.Parameter`` and
``.data`` keep the memory, and go by it. Of a model that was there before, nothing is known.

Cost: the model once more, and only where a fault has been found in such parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ampwise.bench.arm import Settings
from ampwise.errors import TaskError
from ampwise.formats import dtype_name
from ampwise.numerics.observe.exact import HALF
from ampwise.numerics.observe.operations import (
    Operation,
    OperationMode,
    memory,
    tensors,
    written,
)
from ampwise.places import Place, Places, placing
from ampwise.step.modules import as_one
from ampwise.step.recorder import RandomState
from ampwise.tasks import Task
from ampwise.tasks.checks import build


@dataclass(frozen=True)
class Maker:
    """The operation that gives a tensor a 16-bit format.

    Attributes
    ----------
    of
        Format of what it casts; empty where it makes the tensor of nothing.
    """

    op: str
    place: Place
    dtype: str
    of: str = ""


def makers(task: Task, settings: Settings) -> Mapping[str, Maker]:
    """What makes each 16-bit parameter of a task's model so, by name, as far as code of it does.

    Nothing where the model cannot be built twice.
    """
    state = RandomState.now(settings.device)
    with placing([]) as places:
        making = _Making(places)
        try:
            with making:
                model, _ = build(task, settings.device, settings.seed)
        except TaskError:
            return {}
        finally:
            state.restore(settings.device)
    named = as_one(model).named_parameters()
    found = {name: making.of.get(memory(each)) for name, each in named if each.dtype in HALF}
    return {name: each for name, each in found.items() if each is not None and each.place.file}


def casts_of_float32(made: Mapping[str, Maker]) -> frozenset[tuple[str, int]]:
    """Lines that cast what they make of float32."""
    lines = {each.place.file_line for each in made.values()}
    return frozenset(lines - {e.place.file_line for e in made.values() if e.of != "float32"})


def in_words(place: Place) -> str:
    """``line 7 of model.py``."""
    return f"line {place.line} of {Path(place.file).name}"


class _Making(OperationMode):
    """Sees which operation gives each tensor its format, by memory."""

    def __init__(self, places: Places) -> None:
        super().__init__()
        self.of: dict[int, Maker] = {}
        self._places = places

    def operate(self, op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation."""
        func = op.func
        result = func(*args, **kwargs)
        for each in () if op.mutates else written(op, args, kwargs, result):
            takes_over = [e for e in tensors((args, kwargs)) if e.dtype == each.dtype]
            known = [self.of[memory(e)] for e in takes_over if memory(e) in self.of]
            self.of.pop(memory(each), None)  # of what had this memory before
            if each.dtype not in HALF:
                continue
            if known:
                self.of[memory(each)] = known[0]
            elif not takes_over:
                cast = next((dtype_name(e.dtype) for e in tensors((args, kwargs))), "")
                here = self._places.here()
                self.of[memory(each)] = Maker(op.name, here, dtype_name(each.dtype), cast)
        return result
