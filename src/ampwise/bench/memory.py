"""Peak memory of whole training steps, and what it consists of.

CPU: PyTorch keeps no statistics, so every allocation of the profiler's record counts until its
address is freed, with the model built inside the record: the exact peak of live tensor bytes, the
same every time. On CUDA it is the caching allocator's own peak. (The process's resident size hides
what the C allocator keeps, and is not used.)

The parts at the peak come from `torch.distributed._tools.MemTracker`, which is private: where it
fails, parameters and optimizer state are counted and the rest is left undivided. The autocast cache
(16-bit copies of weights, made in forward or kept by the policy) counts as activations there; it is
measured apart.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from ampwise.bench.arm import Arm
from ampwise.distributed.layout import is_up, local
from ampwise.step.compiled import eager

PARTS = (
    "parameters",
    "gradients",
    "optimizer state",
    "autocast cache",
    "activations",
    "temporary",
)

_LET_GO_S = 0.005
"""Seconds that a thread of gloo gets to drop a finished collective."""


@dataclass(frozen=True)
class MemoryUse:
    """Peak in bytes, and bytes of each part at the peak (they add up to it)."""

    peak_bytes: int
    parts: dict[str, int]


def measure(make: Callable[[], Arm], batches: Sequence[Any], device: torch.device) -> MemoryUse:
    """Peak over one training step for each of `batches` (three, so that all state exists).

    Parameters
    ----------
    make
        Builds the arm anew.
    """
    peak = peak_bytes(make, batches, device)
    return MemoryUse(peak, _fill_up(peak, _parts(make, batches, device)))


def peak_bytes(make: Callable[[], Arm], batches: Sequence[Any], device: torch.device) -> int:
    """The peak alone: no dispatch mode takes part, under which compiled code would be given up."""
    gc.collect()
    if device.type == "cuda":
        return _cuda_peak(make, batches, device)

    def run() -> None:
        arm = make()
        for batch in batches:
            arm.run(batch)

    return peak_on_cpu(run)


def peak_on_cpu(run: Callable[[], object]) -> int:
    """Peak of the tensor bytes on the CPU that `run` itself allocates and that live at one time.

    Blocks from before count neither while they live nor when `run` frees them, so the figure is the
    same whatever was there. The process's own peak rises by it, less the older bytes that `run` has
    freed by then. (The profiler cannot tell those: it knows sizes only of what was allocated under
    some profiler, this one or an earlier one.)
    """
    settled = _Settled() if is_up() else nullcontext()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record, settled:
        run()
    own: dict[int, int] = {}  # bytes by address
    live = peak = 0
    for event in _allocations(record):
        # A block still listed at an address that is given out again was freed unseen.
        live -= own.pop(event.ptr, 0)
        if event.alloc_size > 0:
            own[event.ptr] = event.alloc_size
            live += event.alloc_size
            peak = max(peak, live)
    return peak


def _allocations(record: profile) -> list[Any]:
    """What was allocated and freed on the CPU, in order; `alloc_size` of a free is negative."""
    assert record.profiler is not None
    assert record.profiler.kineto_results is not None
    left: list[Any] = record.profiler.kineto_results.experimental_event_tree()
    found: list[Any] = []
    while left:
        event = left.pop()
        left += event.children
        if event.tag == _EventType.Allocation and event.extra_fields.device.type == "cpu":
            found.append(event)
    found.sort(key=lambda each: each.start_time_ns)
    return [each.extra_fields for each in found]


def _cuda_peak(make: Callable[[], Arm], batches: Sequence[Any], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    arm = make()
    for batch in batches:
        arm.run(batch)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _parts(make: Callable[[], Arm], batches: Sequence[Any], device: torch.device) -> dict[str, int]:
    arm = make()
    try:
        parts = _tracked(arm, batches, device)
    except (ImportError, AttributeError, NotImplementedError, RuntimeError):
        arm = make()
        for batch in batches:
            arm.run(batch)
        return _countable(arm)
    # A policy that keeps copies leaves autocast nothing to cast.
    cache = arm.step.copied_bytes or _autocast_cache(make(), batches[0])
    parts["autocast cache"] = min(cache, parts["activations"])
    parts["activations"] -= parts["autocast cache"]
    return parts


def _tracked(arm: Arm, batches: Sequence[Any], device: torch.device) -> dict[str, int]:
    from torch.distributed._tools.mem_tracker import MemTracker

    class Tracker(MemTracker):
        """Looks at parameters themselves, not at copies that stand for them during forward.

        A model may be called several times in a step: statistics of modules are not wanted.
        """

        def _pre_fw_hook(self, module: nn.Module, inputs: Any) -> None:
            if module in self.memory_tracking and not self._mod_tracker.is_bw:
                del self.memory_tracking[module]
            super()._pre_fw_hook(module, inputs)

        def _track_module_params_and_buffers(
            self, module: nn.Module, install_grad_hooks: bool = True
        ) -> tuple[int, int]:
            if not all(each.is_leaf for each in module.parameters()):
                return 0, 0
            return super()._track_module_params_and_buffers(module, install_grad_hooks)

    tracker = Tracker()
    tracker.track_external(arm.model, *arm.step.optimizers)
    tracker._track_module_params_and_buffers(arm.model)  # with hooks on their gradients
    with eager([arm.model]), tracker:
        for index, batch in enumerate(batches):
            if index:
                tracker.reset_mod_stats()
            arm.run(batch)
    snapshot = tracker.get_tracker_snapshot("peak")
    found = next(kinds for place, kinds in snapshot.items() if place.type == device.type)
    by_name = {str(kind).rpartition(".")[2]: size for kind, size in found.items()}
    return {
        "parameters": by_name.get("PARAM", 0) + by_name.get("BUFFER", 0),
        "gradients": by_name.get("GRAD", 0),
        "optimizer state": by_name.get("OPT", 0),
        "autocast cache": 0,
        "activations": by_name.get("ACT", 0),
        "temporary": by_name.get("TEMP", 0) + by_name.get("OTH", 0) + by_name.get("INP", 0),
    }


def _countable(arm: Arm) -> dict[str, int]:
    """What can be counted without a tracker; the rest becomes ``temporary`` in `_fill_up`."""
    state = [
        value
        for values in arm.optimizer.state.values()
        for value in values.values()
        if isinstance(value, Tensor)
    ]
    parts: dict[str, int] = dict.fromkeys(PARTS, 0)
    parts["parameters"] = _bytes([*arm.model.parameters(), *arm.model.buffers()])
    parts["autocast cache"] = arm.step.copied_bytes
    parts["optimizer state"] = _bytes(state)
    return parts


def _fill_up(peak: int, parts: dict[str, int]) -> dict[str, int]:
    """Make the parts add up to the exact peak; the two methods differ by some kilobytes."""
    parts["temporary"] += peak - sum(parts.values())
    return parts


def held_bytes(arm: Arm) -> int:
    """What this process holds between steps: parameters, their copies, buffers, optimizer state."""
    return sum(_countable(arm).values())


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(local(each).numel() * each.element_size() for each in tensors)


class _Settled(TorchDispatchMode):
    """Waits for each collective, and for the thread that made it to let go of its tensors.

    The profiler sees what the threads it was started in allocate and free. A tensor whose last
    holder is a thread of gloo would be freed unseen, and count as live for ever.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            work: Any = result[-1] if isinstance(result, tuple) else result
            dist.Work.unbox(work).wait()
            time.sleep(_LET_GO_S)
        return result


class _WeightCasts(TorchDispatchMode):
    """Adds up the half-precision copies of parameters that a step makes, each weight's once."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._left = {each.untyped_storage().data_ptr() for each in model.parameters()}
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if (
            func._overloadpacket.__name__ == "_to_copy"
            and result.element_size() < args[0].element_size()
            and (place := args[0].untyped_storage().data_ptr()) in self._left
        ):
            self._left.remove(place)
            self.bytes += result.numel() * result.element_size()
        return result


def _autocast_cache(arm: Arm, batch: Any) -> int:
    """16-bit copies of weights that autocast makes in a step."""
    with eager([arm.model]), _WeightCasts(arm.model) as casts:
        arm.run(batch)
    return casts.bytes
