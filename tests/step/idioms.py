"""What scripts do around a training step, and the loop by hand that every policy is held against."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampwise.errors import UsageError

from .helpers import parameters

POLICIES = ("fp32", "tf32", "bf16", "fp16", "bf16-master")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "bf16-master": torch.bfloat16}
SWITCHES = (torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv)
KINDS: dict[str, dict[str, Any]] = {"fused": {"fused": True}, "plain": {"foreach": False}}

MASTER_BOUND = 0.05
"""Of the way trained, for `bf16-master` against bf16 autocast: a dozen roundings of 2**-8 each."""


def autocast_nesting() -> int:
    """Regions of autocast that are open; as long as one is, torch keeps its casts of weights."""
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return nesting


def open_contexts() -> dict[str, Any]:
    """All that a step may have entered and not left."""
    return {
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast regions": autocast_nesting(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "float32 modes": [each.fp32_precision for each in SWITCHES],
    }


@pytest.fixture(autouse=True)
def nothing_left_open() -> Generator[None]:
    """Every test here leaves torch as it was; what it leaves open is not the next one's."""
    before = open_contexts()
    yield
    after = open_contexts()
    for _ in range(autocast_nesting()):
        torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()
    torch.set_autocast_enabled("cpu", False)
    torch.set_grad_enabled(True)
    for switch, mode in zip(SWITCHES, before["float32 modes"], strict=True):
        switch.fp32_precision = mode
    assert after == before


def sgd(model: nn.Module, kind: str = "plain", **settings: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), **({"lr": 0.1} | settings), **KINDS[kind])


def adamw(model: nn.Module, kind: str = "plain", **settings: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), **({"lr": 1e-2} | settings), **KINDS[kind])


@contextmanager
def float32_math(policy: str) -> Generator[None]:
    """The CPU's float32 products as a policy wants them: bf16 math is what TF32 means there."""
    before = [each.fp32_precision for each in SWITCHES]
    try:
        for each in SWITCHES:
            each.fp32_precision = "bf16" if policy == "tf32" else "ieee"
        yield
    finally:
        for each, mode in zip(SWITCHES, before, strict=True):
            each.fp32_precision = mode


class ByHand:
    """The loop of torch's own documentation: autocast, `GradScaler`, ``loss / accumulate``."""

    def __init__(
        self, model: Any, optimizer: torch.optim.Optimizer, policy: str, accumulate: int = 1
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.policy, self.accumulate = policy, accumulate
        self.scaler = torch.amp.GradScaler("cpu", enabled=policy == "fp16")
        self.calls = 0

    def forward(self, loss_fn: Callable[[Any, Any], Tensor], batch: Any) -> Tensor:
        dtype = DTYPES.get(self.policy)
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            return loss_fn(self.model, batch)

    def __call__(self, loss_fn: Callable[[Any, Any], Tensor], batch: Any) -> Tensor:
        with float32_math(self.policy):
            loss = self.forward(loss_fn, batch)
            self.scaler.scale(loss.float() / self.accumulate).backward()
        self.calls += 1
        if self.calls % self.accumulate == 0:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
        return loss.detach()


def assert_follows(
    ours: nn.Module, theirs: nn.Module, start: Tensor, *policies: str, bound: float = MASTER_BOUND
) -> None:
    """`ours` was trained as `theirs` was by hand: bit for bit, or close under `bf16-master`."""
    mine, reference = parameters(ours), parameters(theirs)
    way = (reference - start).norm()
    assert way > 0, "the reference has not moved: the test proves nothing"
    if "bf16-master" not in policies:
        assert torch.equal(mine, reference)
    assert (mine - reference).norm() <= bound * way


def values(model: nn.Module) -> list[Tensor]:
    """Copies of all parameters."""
    return [each.detach().clone() for each in model.parameters()]


def buffers(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all buffers."""
    return {name: each.detach().clone() for name, each in model.named_buffers()}


def grads(model: nn.Module) -> list[Tensor | None]:
    """Copies of all gradients."""
    found = [each.grad for each in model.parameters()]
    return [None if each is None else each.detach().clone() for each in found]


def same(one: Any, other: Any) -> bool:
    """Equal bit for bit, NaN included, through lists, tuples and dicts."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        return bool(torch.all((one == other) | ((one != one) & (other != other))))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) or (one != one and other != other)


def state_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return copy.deepcopy(optimizer.state_dict())


def held(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def records(step: Any) -> list[str]:
    """The history in words, which compare NaN with NaN."""
    return [repr(each) for each in step.history]


def one_line(error: BaseException, *words: str) -> None:
    """Assert that an error is one line, and names what it is about."""
    text = str(error)
    assert "\n" not in text
    for word in words:
        assert word.lower() in text.lower(), text


def said(does: Callable[[], object]) -> str:
    """What a call said about a misuse: the one line of its `UsageError`, or its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            does()
        except UsageError as error:
            one_line(error)
            return str(error)
    lines = [str(each.message) for each in caught if issubclass(each.category, UserWarning)]
    return " | ".join(lines)


def poisoned(batch: tuple[Tensor, Tensor], value: float = float("inf")) -> tuple[Tensor, Tensor]:
    """The batch with one element that is no number."""
    x = batch[0].clone()
    x.view(-1)[3] = value
    return x, batch[1]


def run(step: Callable[..., Any], loss_fn: Callable[..., Tensor], data: Iterable[Any]) -> list[Any]:
    return [step(loss_fn, batch) for batch in data]
