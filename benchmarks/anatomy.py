"""Where each millisecond of a step goes, against what this machine could do at best.

Whole steps of `TrainStep` (forward, backward, guard, fused AdamW), taking turns between precisions
under PyTorch's profiler. Times are self times of operations, summed by what they are for; host is
what remains of the wall time: Python, the autograd engine, the profiler itself.

The roofline of a group is the time that its operations would take at the machine's peak, whichever
is longer:

    arithmetic   floating-point operations over the fastest matrix product that was measured here
    memory       bytes of inputs and outputs over the bandwidth of a copy of 256 MB

Products and attention have both, the rest memory alone. Causal attention counts half of its
products. Small tensors that stay in a cache can beat the bandwidth of memory: over 100 %.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from _common import sample_in_turns, save
from ampwise import Task, TrainStep, load_task
from ampwise.clock import done_at
from ampwise.data import to_device
from ampwise.tasks.checks import endless

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TASKS = {
    "charlm small": ("charlm", {"size": "small"}),
    "charlm base": ("charlm", {"size": "base", "batch": "8"}),
    "digits (a CNN)": ("digits", {}),
}
PRECISIONS = ("fp32", "bf16", "bf16-master")
GROUPS = {
    "products": ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward",
                 "mkldnn_convolution", "mkldnn_convolution_backward", "linear"),
    "attention": ("_scaled_dot_product", "_flash_attention"),
    "normalisation": ("native_layer_norm", "native_batch_norm", "batch_norm", "_fused_rms_norm"),
    "activation": ("gelu", "relu", "threshold_backward", "silu", "tanh"),
    "loss": ("_log_softmax", "nll_loss", "_softmax", "cross_entropy"),
    "copies and casts": ("copy_", "_to_copy", "clone", "cat", "contiguous"),
    "optimizer": ("_fused_adam",),
    "norms of gradients": ("linalg_vector_norm", "dot", "_foreach_norm"),
}  # fmt: skip
REST, HOST = "sums and others", "host"
_COPIED_BYTES = 2**28
_PEAK_SIZES = (1024, 2048) if DEVICE.type == "cpu" else (4096, 8192)


def group_of(op: str) -> str:
    """What an operation is for."""
    name = op.removeprefix("aten::")
    for group, names in GROUPS.items():
        exact = group in ("products", "copies and casts", "norms of gradients")
        if name in names if exact else name.startswith(names):
            return group
    return REST


# -- what a step needs -----------------------------------------------------------------------------


@dataclass
class Needs:
    """Arithmetic and traffic of a step, by group."""

    flops: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    """By group and dtype of the operands."""
    moved: Counter[str] = field(default_factory=Counter[str])
    """Bytes."""


class Watch(TorchDispatchMode):
    """Counts what the operations of a step need."""

    def __init__(self) -> None:
        super().__init__()
        self.needs = Needs()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        outputs = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
        held = {each.untyped_storage()._cdata for each in inputs}
        name = func._overloadpacket.__name__
        if any(each.untyped_storage()._cdata not in held for each in outputs) or name[-1] == "_":
            group = group_of(name)
            tensors = {id(each): each for each in (*inputs, *outputs)}.values()
            self.needs.moved[group] += sum(each.numel() * each.element_size() for each in tensors)
            if flops := _flops(func, args, kwargs, out):
                dtype = str(inputs[-1].dtype).removeprefix("torch.")
                self.needs.flops[group, dtype] += flops
        return out


def _flops(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
    name = func._overloadpacket.__name__
    if name.startswith("_scaled_dot_product"):
        backward = "backward" in name
        query, key = args[1:3] if backward else args[:2]
        causal = any(each is True for each in (*args, *kwargs.values()))
        batch, heads, rows, width = query.shape
        products = 5 if backward else 2
        return products * 2 * batch * heads * rows * key.shape[-2] * width // (2 if causal else 1)
    formula = flop_registry.get(func._overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


# -- what the machine can do -----------------------------------------------------------------------


class Peak:
    """The fastest product in each dtype, and the fastest copy; measured between the steps."""

    def __init__(self) -> None:
        self.flops_per_s: dict[str, float] = {}
        self.bytes_per_s = 0.0
        self._from = torch.ones(_COPIED_BYTES // 4, device=DEVICE)
        self._to = torch.empty_like(self._from)
        self._pairs = {
            (dtype, size): torch.randn(size, size, device=DEVICE).to(getattr(torch, dtype))
            for dtype in ("float32", "bfloat16")
            for size in _PEAK_SIZES
        }

    def look(self) -> float:
        """Measure once; milliseconds."""
        began = done_at(DEVICE)
        for (dtype, size), each in self._pairs.items():
            start = done_at(DEVICE)
            torch.mm(each, each)
            rate = 2 * size**3 / (done_at(DEVICE) - start)
            self.flops_per_s[dtype] = max(rate, self.flops_per_s.get(dtype, 0.0))
        start = done_at(DEVICE)
        self._to.copy_(self._from)
        self.bytes_per_s = max(self.bytes_per_s, 2 * _COPIED_BYTES / (done_at(DEVICE) - start))
        return (done_at(DEVICE) - began) * 1e3

    def floor_ms(self, needs: Needs) -> dict[str, float]:
        """The roofline of each group."""
        arithmetic: dict[str, float] = defaultdict(float)
        for (group, dtype), flops in needs.flops.items():
            arithmetic[group] += flops / self.flops_per_s[dtype] * 1e3
        return {
            group: max(arithmetic[group], moved / self.bytes_per_s * 1e3)
            for group, moved in needs.moved.items()
        }


# -- the steps -------------------------------------------------------------------------------------


class Subject:
    """A task that trains in a precision."""

    def __init__(self, task: Task, precision: str) -> None:
        torch.manual_seed(0)
        model = task.model().to(DEVICE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        self._step = TrainStep(model, optimizer, policy=precision)
        self._task, self._batches = task, endless(task)
        self.spent: list[dict[str, float]] = []
        self.wall_ms: list[float] = []

    def step(self) -> None:
        """One whole step."""
        assert self._task.loss is not None
        self._step(self._task.loss, to_device(next(self._batches), DEVICE))

    def timed(self) -> float:
        """One step as users make it; milliseconds."""
        start = done_at(DEVICE)
        self.step()
        self.wall_ms.append((done_at(DEVICE) - start) * 1e3)
        return self.wall_ms[-1]

    def profiled(self) -> float:
        """One step under the profiler; milliseconds."""
        kinds = [ProfilerActivity.CPU]
        kinds += [ProfilerActivity.CUDA] if DEVICE.type == "cuda" else []
        with profile(activities=kinds) as seen:
            start = done_at(DEVICE)
            self.step()
            wall_ms = (done_at(DEVICE) - start) * 1e3
        spent: dict[str, float] = defaultdict(float)
        for op, ms in _times(seen):
            spent[group_of(op)] += ms
        spent[HOST] = max(0.0, wall_ms - sum(spent.values()))
        self.spent.append(spent)
        return wall_ms

    def needs(self) -> Needs:
        """What a step needs."""
        with Watch() as watch:
            self.step()
        return watch.needs


def _times(seen: profile) -> Iterator[tuple[str, float]]:
    for each in seen.key_averages():
        if each.key.startswith("aten::"):
            on_device = DEVICE.type == "cuda"
            microseconds = each.self_device_time_total if on_device else each.self_cpu_time_total
            yield each.key, microseconds / 1e3


def take_apart(task: Task, rounds: int, peak: Peak) -> dict[str, Any]:
    """A task's step in every precision, by group."""
    subjects = {each: Subject(task, each) for each in PRECISIONS}
    for each in subjects.values():
        for _ in range(3):
            each.step()
    arms = {f"{name} {what}": getattr(each, what)
            for name, each in subjects.items() for what in ("timed", "profiled")}  # fmt: skip
    sample_in_turns({**arms, "peak": peak.look}, rounds)
    found: dict[str, Any] = {}
    for name, each in subjects.items():
        groups = {group for spent in each.spent for group in spent}
        spent = {
            group: statistics.median(one.get(group, 0.0) for one in each.spent) for group in groups
        }
        found[name] = {
            "step_ms": statistics.median(each.wall_ms),
            "spent_ms": spent,
            "roofline_ms": peak.floor_ms(each.needs()),
        }
    return found


def show(name: str, found: Mapping[str, Any]) -> None:
    """A table: milliseconds of each group, and the share of them that the roofline is."""
    print(f"\n{name}: " + ", ".join(f"{p} {each['step_ms']:.1f} ms" for p, each in found.items()))
    print(f"{'':20s}" + "".join(f"{p:>22s}" for p in found))
    order = sorted(found["bf16"]["spent_ms"], key=lambda g: -found["bf16"]["spent_ms"][g])
    for group in order:
        row = f"{group:20s}"
        for each in found.values():
            ms, floor = each["spent_ms"].get(group, 0.0), each["roofline_ms"].get(group)
            share = f"{floor / ms:6.0%}" if floor and ms else ""
            row += f"{ms:14.2f} {share:>7s}"
        print(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    peak, results = Peak(), dict[str, Any]()
    for name, (task, settings) in TASKS.items():
        results[name] = take_apart(load_task(task, settings), options.rounds, peak)
        show(name, results[name])
    rates = {name: rate / 1e9 for name, rate in peak.flops_per_s.items()}
    print(f"\npeaks: {rates} GFLOP/s, copy {peak.bytes_per_s / 1e9:.1f} GB/s")
    peaks = {"gflops": rates, "copy_gb_per_s": peak.bytes_per_s / 1e9}
    save(f"anatomy-{DEVICE.type}", {"peak": peaks, "tasks": results})


if __name__ == "__main__":
    main()
