"""In which format float32 matrix products and convolutions run while a step does.

float32 means IEEE float32. TF32 means TF32 on GPUs and oneDNN's bfloat16 math on CPUs. The switches
are global in PyTorch: they are set for forward and backward only, and put back afterwards. Threads
whose steps want the same mode share it; one that wants another waits until they are out, so no
thread ever computes in another's mode.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any, Literal

import torch

from ampwise.policy import Policy
from ampwise.step.precision.base import Part

_Mode = Literal["ieee", "tf32", "bf16"]


class _Switches:
    """PyTorch's float32 switches of one kind of device, and the threads that hold them."""

    def __init__(self, *switches: Any) -> None:
        # A switch has its value from `__getattr__`, which Python asks only after a lookup that
        # fails: to ask it at once is 5 us less in every step.
        self._switches = [
            (each, getattr(each, "__getattr__", partial(getattr, each))) for each in switches
        ]
        # Taken by name: in code as cold as a step's, `with` takes three times as long.
        self._lock = threading.Lock()
        self._free = threading.Condition(self._lock)
        self._waiting = 0
        self._held: dict[int, list[_Mode]] = {}  # modes that each thread is in, by thread
        self._before: list[tuple[Any, str]] = []  # switches that were changed, as they were

    def enter(self, mode: _Mode) -> None:
        """Be in a mode; waits for other threads that are in another one."""
        me = threading.get_ident()
        self._lock.acquire()
        try:
            while self._held and self._others_differ(me, mode):
                self._waiting += 1
                self._free.wait()
                self._waiting -= 1
            if not self._held:
                self._before = self._set(mode)
            modes = self._held.setdefault(me, [])
            if modes and modes[-1] != mode:
                self._set(mode)
            modes.append(mode)
        finally:
            self._lock.release()

    def leave(self) -> None:
        """Be in the mode that this thread was in before."""
        me = threading.get_ident()
        self._lock.acquire()
        try:
            modes = self._held[me]
            left = modes.pop()
            if not modes:
                del self._held[me]
            elif modes[-1] != left:
                self._set(modes[-1])
            if not self._held:
                for switch, before in self._before:
                    switch.fp32_precision = before
            if self._waiting:
                self._free.notify_all()
        finally:
            self._lock.release()

    def _others_differ(self, me: int, mode: _Mode) -> bool:
        return any(modes[-1] != mode for who, modes in self._held.items() if who != me)

    def _set(self, mode: _Mode) -> list[tuple[Any, str]]:
        """Switch to a mode; the switches that were in another, with that."""
        changed: list[tuple[Any, str]] = []
        for switch, asked in self._switches:
            before = asked("fp32_precision")
            # "none", the default, leaves it to the wider switches, and says what they say; if they
            # say nothing either, that is IEEE. To change it would cost 20 us in every step.
            if before != mode and (before, mode) != ("none", "ieee"):
                switch.fp32_precision = mode
                changed.append((switch, before))
        return changed


_backends: Any = torch.backends  # whose annotations lack the switches
_BACKENDS = {
    "cpu": _Switches(_backends.mkldnn.matmul, _backends.mkldnn.conv),
    "cuda": _Switches(_backends.cuda.matmul, _backends.cudnn.conv),
}


class Float32Mode(Part):
    """Float32 products run as a policy says, on one kind of device."""

    def __init__(self, policy: Policy, device_type: str) -> None:
        self._switches = _BACKENDS.get(device_type)
        lowered: _Mode = "bf16" if device_type == "cpu" else "tf32"
        self._mode: _Mode = lowered if policy.tf32 else "ieee"

    def enter(self) -> None:
        """Switch to the policy's mode."""
        if self._switches is not None:
            self._switches.enter(self._mode)

    def leave(self) -> None:
        """Switch back."""
        if self._switches is not None:
            self._switches.leave()
