"""Entering a policy: autocast, float32 mode and islands, around forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ampwise.errors import PolicyError
from ampwise.policy import Policy


class Float32Mode:
    """Context: float32 matmuls and convolutions run as the policy says, then as before.

    float32 means IEEE float32. TF32 means TF32 on GPUs and oneDNN's bfloat16 math on CPUs. The
    switches are global in PyTorch, so they are set for forward and backward only, and only when
    they differ. May be entered again inside itself; the outermost exit puts the switches back.
    """

    def __init__(self, policy: Policy, device_type: str) -> None:
        on_cpu = device_type == "cpu"
        backend, convolution = (
            (torch.backends.mkldnn, torch.backends.mkldnn)
            if on_cpu
            else (torch.backends.cuda, torch.backends.cudnn)
        )
        self._switches: tuple[Any, ...] = ()
        if device_type in ("cpu", "cuda"):
            self._switches = (backend.matmul, convolution.conv)
        self._mode = ("bf16" if on_cpu else "tf32") if policy.tf32 else "ieee"
        self._before: list[tuple[Any, str]] = []
        self._depth = 0

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        for switch in self._switches:
            before = switch.fp32_precision
            if before != self._mode:
                self._before.append((switch, before))
                switch.fp32_precision = self._mode

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        while self._before and not self._depth:
            switch, before = self._before.pop()
            switch.fp32_precision = before


class Forward:
    """Context of forward and loss: autocast and float32 mode of a policy.

    With a float32 policy autocast is off inside, also when the caller has it on.
    """

    def __init__(self, policy: Policy, device_type: str, float32_mode: Float32Mode) -> None:
        self._device_type = device_type
        self._enabled = policy.autocast
        self._dtype = getattr(torch, policy.compute_dtype) if policy.autocast else None
        self._float32_mode = float32_mode
        self._entered: list[torch.autocast | None] = []

    def __enter__(self) -> None:
        self._float32_mode.__enter__()
        autocast = None
        if self._enabled or torch.is_autocast_enabled(self._device_type):
            autocast = torch.autocast(self._device_type, self._dtype, self._enabled)
            autocast.__enter__()
        self._entered.append(autocast)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if autocast := self._entered.pop():
            autocast.__exit__(kind, error, trace)
        self._float32_mode.__exit__()


def keep_islands(module: nn.Module, patterns: tuple[str, ...], device_type: str) -> list[nn.Module]:
    """Keep the submodules whose name matches a pattern in float32; returns them.

    Inside an island autocast is off and half-precision inputs are raised to float32. Installed as
    forward hooks, so that nothing about the modules themselves changes.
    """
    islands = islands_of(module, patterns)
    for island in islands:
        make_island(island, device_type)
    return islands


def islands_of(module: nn.Module, patterns: tuple[str, ...]) -> list[nn.Module]:
    """The submodules whose name matches a pattern.

    Raises
    ------
    PolicyError
        When a pattern matches no module: a typo would otherwise protect nothing, silently.
    """
    names = dict(module.named_modules())
    islands: list[nn.Module] = []
    for pattern in patterns:
        matching = [layer for name, layer in names.items() if name and fnmatchcase(name, pattern)]
        if not matching:
            raise PolicyError(
                f"islands: no module matches {pattern!r}; modules are named like "
                f"{', '.join(list(names)[1:4]) or 'nothing: the model has no submodules'}"
            )
        islands += [layer for layer in matching if layer not in islands]
    return islands


def make_island(module: nn.Module, device_type: str) -> Callable[[], None]:
    """Keep one module in float32; returns what takes that back."""
    entered: list[ExitStack] = []  # a stack: a module may call itself

    def enter(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        stack = ExitStack()
        stack.enter_context(torch.autocast(device_type, enabled=False))
        entered.append(stack)
        return tree_map(_raise_precision, args), tree_map(_raise_precision, kwargs)

    def leave(*_: Any) -> None:
        entered.pop().close()

    handles = (
        module.register_forward_pre_hook(enter, with_kwargs=True),
        module.register_forward_hook(leave, always_call=True),
    )

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


def _raise_precision(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16):
        return value.float()
    return value
