"""What precision was asked for, by whatever means, and what ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

from ampwise.formats import HALF, dtype_name
from ampwise.lines import NOWHERE, Line
from ampwise.observe.autocast import Autocasts
from ampwise.observe.census import Census
from ampwise.observe.listener import Listener
from ampwise.observe.optimizers import gradients_of
from ampwise.observe.result import Asked, Precision
from ampwise.observe.scalers import Scalers
from ampwise.observe.steps import Attempt
from ampwise.step.accelerate import autocast_dtype
from ampwise.step.modules import held_by


class Dtypes(Listener):
    """Of parameters, gradients and optimizer state of each optimizer.

    Attributes
    ----------
    line
        The user's line that the first update came from.
    """

    def __init__(self) -> None:
        self.parameters, self.gradients, self.state = Counter[str](), Counter[str](), Counter[str]()
        self.line: Line = NOWHERE
        self._looked: set[int] = set()
        self._with_state: set[int] = set()

    def attempted(self, attempt: Attempt) -> None:
        """Look at the optimizer, once: at its first update, and once it has state."""
        optimizer, key = attempt.optimizer, id(attempt.optimizer)
        if key not in self._looked:
            self._looked.add(key)
            self.line = self.line if self.line.file else attempt.line
            self.parameters += _counted(held_by([optimizer]))
            self.gradients += _counted(gradients_of(optimizer))
        if key not in self._with_state and optimizer.state:
            self._with_state.add(key)
            values = (each for held in optimizer.state.values() for each in held.values())
            tensors = (each for each in values if isinstance(each, Tensor))
            self.state += _counted(each for each in tensors if each.numel() > 1)


def precision_of(
    autocasts: Autocasts, scalers: Scalers, census: Census, dtypes: Dtypes, made_at: Line
) -> Precision:
    """The section of the report; a trainer that sees to precision by itself was made at a line."""
    asked = [*autocasts.asked(), *scalers.asked()]
    asked += _by_trainers({each.dtype for each in asked}, made_at if made_at.file else dtypes.line)
    ran = census.ran()
    wanted = {each.dtype for each in asked}
    products = Counter(ran.forward) + Counter(ran.backward)
    most = sum(products.values())
    in_it = sum(products[each] for each in wanted)
    return Precision(
        asked=asked,
        ran=ran,
        exceptions=census.odd_ones(wanted),
        parameters=dict(dtypes.parameters.most_common()),
        gradients=dict(dtypes.gradients.most_common()),
        optimizer_state=dict(dtypes.state.most_common()),
        active=not wanted or (2 * in_it > most if census.made else _entered(autocasts)),
        regions=autocasts.regions(),
        float32_products=_float32_products(),
    )


def _float32_products() -> str:
    """As PyTorch's settings say: ``ieee``, ``tf32`` or ``bfloat16``."""
    setting = torch.get_float32_matmul_precision()
    return {"highest": "ieee", "high": "tf32", "medium": "bfloat16"}.get(setting, setting)


def _entered(autocasts: Autocasts) -> bool:
    """Whether a region that asks for 16 bits was on: the next best evidence."""
    return any(each.enabled and each.dtype in HALF for each in autocasts.regions())


def _by_trainers(known: Iterable[str], line: Line) -> list[Asked]:
    """What was asked of Accelerate, and of the Hugging Face Trainer by way of it.

    On a CPU it takes float16 and does nothing about it, so there is nothing in torch to see.
    """
    dtype = autocast_dtype()
    return [] if dtype is None or dtype in known else [Asked(dtype, *line)]


def _counted(tensors: Iterable[Tensor]) -> Counter[str]:
    floats = (each for each in tensors if each.is_floating_point())
    return Counter(dtype_name(each.dtype) for each in floats)
