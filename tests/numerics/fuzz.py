"""Random small networks, written out as source with at most one planted fault.

A network is a chain of blocks of different kinds, some of them recomputed, shared or in place. The
fault is planted in one block, and comes at one training step.
"""

from __future__ import annotations

import importlib.util
import random
import textwrap
from dataclasses import dataclass
from pathlib import Path

from ampwise.tasks import Task

BLOCKS = {
    "linear": ("self.f = nn.Linear(W, W)", "h = torch.relu(self.f(h))"),
    "residual": ("self.f = nn.Linear(W, W)", "h = h + 0.5 * torch.tanh(self.f(h))"),
    "norm": ("self.f = nn.LayerNorm(W)", "h = self.f(h)"),
    "gate": (
        "self.f, self.g = nn.Linear(W, W), nn.Linear(W, W)",
        "h = self.f(h) * torch.sigmoid(self.g(h))",
    ),
    "attention": (
        "self.f = nn.Linear(W, 3 * W)",
        """
        q, k, v = self.f(h).view(*h.shape[:-1], 1, -1).chunk(3, dim=-1)
        h = h + F.scaled_dot_product_attention(q, k, v).flatten(-2)
        """,
    ),
    "multihead": (
        "self.f = nn.MultiheadAttention(W, 2, batch_first=True)",
        "h = h + self.f(h.unsqueeze(1), h.unsqueeze(1), h.unsqueeze(1))[0].squeeze(1)",
    ),
    "softmax": (
        "self.f = nn.Linear(W, W)",
        """
        mask = torch.arange(h.shape[-1]) <= h.shape[-1] // 2
        h = h + torch.softmax(self.f(h).masked_fill(~mask, float("-inf")), dim=-1)
        """,
    ),
    "convolution": (
        "self.f = nn.Conv1d(1, 2, 3, padding=1)",
        "h = h + self.f(h.unsqueeze(1)).mean(1)",
    ),
    "batch norm": ("self.f = nn.BatchNorm1d(W)", "h = torch.tanh(self.f(h))"),
    "dropout": ("self.f = nn.Dropout(0.2)", "h = self.f(h)"),
    "in place": (
        "self.f = nn.Linear(W, W)",
        """
        h = self.f(h)
        h.mul_(0.5).add_(0.1)
        """,
    ),
    "views": (
        "self.f = nn.Linear(W, W)",
        """
        a, b = self.f(h).chunk(2, dim=-1)
        h = torch.cat([b, a], dim=-1)
        """,
    ),
    "buffer": (
        'self.f = nn.Linear(W, W); self.register_buffer("room", torch.empty(W))',
        """
        self.room.copy_(h.detach().float().mean(0).clamp(-1, 1))
        h = self.f(h) + self.room
        """,
    ),
}

FAULTS = {
    "overflow": "h = h.half() * 0 + 1; h = (h * 300) * (h * 300)",
    "square": "h = (h.half() * 0 + 400).pow(2)",
    "product": "h = (h.half() * 0 + 200) @ (torch.zeros(W, W, dtype=torch.float16) + 200)",
    "cast": "h = (h.float() * 0 + 1e5).half()",
    "exp": "h = torch.exp(h.half() * 0 + 12)",
    "cumulative": "h = torch.cumsum(h.half() * 0 + 3e4, dim=-1)",
    "in place": "h = h.half().clone().mul_(0).add_(60000).mul_(2)",
    "log": "h = h + torch.log(h * 0)",
    "root": "h = torch.sqrt(-1 - h.abs())",
    "division": "h = h / (h - h)",
    "empty mean": "h = h + h[h > 1e30].mean()",
    "masked": "h = torch.softmax(h.masked_fill(torch.ones_like(h).bool(), float('-inf')), dim=-1)",
    "eps": "h = h.half() * 0; h = h / h.norm(dim=-1, keepdim=True).clamp_min(1e-12)",
    "root of zero": "h = h + torch.sqrt(h * 0)",
    "norm of zero": "h = h + (h.float() * 0).square().sum(-1, keepdim=True).sqrt()",
    "dead branch": "h = torch.where(h > 1e30, torch.log((h - h).clamp(min=0)), h)",
    "backward": "h = Broken.apply(h)",
    "nan": "h = h * float('nan')",
}
"""Each on one line: that line is the answer."""

HEAD = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

W = {width}


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        return h * 1

    @staticmethod
    def backward(ctx, grad):
        return grad / (grad - grad)  # <- in backward


"""


@dataclass(frozen=True)
class Draw:
    """A network as a task, and where its fault is."""

    task: Task
    fault: str
    line: int
    module: str
    step: int
    path: Path


def draw(seed: int, folder: Path, *, faulty: bool) -> Draw:
    """A network, the same for the same seed."""
    rng = random.Random(seed)
    width, depth = rng.choice([4, 8, 16]), rng.randint(2, 6)
    kinds = [rng.choice(list(BLOCKS)) for _ in range(depth)]
    place, step = rng.randrange(depth), rng.randint(1, 5)
    fault = rng.choice(list(FAULTS)) if faulty else ""
    source = HEAD.format(width=width)
    for index, kind in enumerate(kinds):
        source += _block(index, kind, fault if index == place else "", step)
    recomputed = {i for i in range(depth) if rng.random() < 0.25 and kinds[i] != "buffer"}
    source += _network(depth, recomputed)
    path = folder / f"net_{seed}_{faulty}.py"
    path.write_text(source)
    module = _load(path)
    lines = source.splitlines()
    mark = "# <- in backward" if fault == "backward" else "# <- here"
    line = next((i for i, each in enumerate(lines, 1) if mark in each), 0)
    return Draw(_task(module, seed, width), fault, line, f"blocks.{place}", step, path)


def _block(index: int, kind: str, fault: str, step: int) -> str:
    made, used = BLOCKS[kind]
    body = textwrap.dedent(used).strip()
    if fault:
        body += f"\nif STEP == {step}:\n    {FAULTS[fault]}  # <- here"
    return (
        f"class Block{index}(nn.Module):  # {kind}\n"
        f"    def __init__(self):\n        super().__init__()\n        {made}\n\n"
        f"    def forward(self, h):\n{textwrap.indent(body, '        ')}\n        return h\n\n\n"
    )


def _network(depth: int, recomputed: set[int]) -> str:
    calls = [
        f"        h = checkpoint(self.blocks[{i}], h, use_reentrant=False)"
        if i in recomputed
        else f"        h = self.blocks[{i}](h)"
        for i in range(depth)
    ]
    blocks = ", ".join(f"Block{i}()" for i in range(depth))
    return (
        "STEP = 0\n\n\nclass Net(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.first = nn.Linear(W, W)\n"
        f"        self.blocks = nn.ModuleList([{blocks}])\n        self.last = nn.Linear(W, 3)\n\n"
        "    def forward(self, x):\n        h = self.first(x)\n"
        + "\n".join(calls)
        + "\n        return self.last(h)\n\n\n"
        "def loss(model, batch):\n    global STEP\n    x, y, step = batch\n"
        "    STEP = int(step)\n"
        "    return F.cross_entropy(model(x).float(), y)\n"
    )


def _load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _task(module, seed: int, width: int) -> Task:
    import torch

    def batches():
        generator = torch.Generator().manual_seed(seed)
        for step in range(1, 20):
            x = torch.randn(6, width, generator=generator)
            yield x, torch.randint(0, 3, (6,), generator=generator), torch.tensor(step)

    return Task(
        model=module.Net,
        batches=batches,
        loss=module.loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        name=f"net {seed}",
    )
