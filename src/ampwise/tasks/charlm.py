"""A GPT-style language model on bytes: the built-in task that is real everywhere.

The text is the standard library of the Python that runs it, some ten megabytes of real source code
that every machine has. Files come in the order of their paths; every tenth is held out. The corpus
differs between Python versions, so its SHA-256 is part of the record.

The model: byte and position embedding, pre-norm blocks of causal attention and a GELU MLP, a head
tied to the embedding. Cross-entropy in float32, in nats per byte.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampwise.capability import DeviceCapability, present_devices, probe
from ampwise.errors import TaskError
from ampwise.losses import linear_cross_entropy
from ampwise.tasks.task import Task

VOCABULARY = 256
HELD_OUT_WINDOWS = 64


@dataclass(frozen=True)
class Size:
    """Dimensions of a model and of its batches; a batch holds windows of `context` bytes."""

    width: int
    layers: int
    heads: int
    context: int
    batch: int
    lr: float
    dropout: float = 0.0


# `base` takes as much into a batch as nanoGPT's character model, the best known of about its size.
SIZES = {
    "tiny": Size(width=128, layers=2, heads=4, context=128, batch=8, lr=1e-3),
    "small": Size(width=256, layers=4, heads=4, context=256, batch=8, lr=1e-3),
    "base": Size(width=512, layers=6, heads=8, context=256, batch=64, lr=6e-4),
}


def task(
    size: Literal["tiny", "small", "base", "auto"] = "tiny",
    batches: int = 200,
    batch: int | None = None,
    context: int | None = None,
    dropout: float = 0.0,
    seed: int = 0,
) -> Task:
    """The standard library as a corpus.

    Parameters
    ----------
    size
        Dimensions of the model; ``auto`` for a size at which this machine shows what it can:
        `fitting`.
    batches
        Batches in an epoch.
    batch
        Windows in a batch, if not the size's own.
    context
        Bytes in a window, if not the size's own.
    dropout
        Probability of dropout after attention and MLP.
    seed
        Which windows an epoch consists of, and their order: the same in every epoch.
    """
    if size == "auto":
        size = fitting(probe(present_devices()[0]))
    shape = shaped("charlm", size, batch=batch, context=context, dropout=dropout)
    return language_model(f"charlm-{size}", standard_library(), shape, batches, seed)


def fitting(capability: DeviceCapability) -> Literal["tiny", "small", "base"]:
    """The largest size worth a short comparison: on a CPU without 16-bit units none but the tiny.

    On an accelerator anything smaller than ``base`` is bound by launches, in every precision.
    """
    if capability.kind != "cpu":
        return "base"
    gains = [each for name, each in capability.formats.items() if each.gains and name != "tf32"]
    return "small" if gains else "tiny"


def shaped(name: str, size: str, **settings: float | None) -> Size:
    """A size with some of its dimensions replaced; None keeps the size's own.

    Raises
    ------
    TaskError
        When one of them makes no sense.
    """
    given = {key: value for key, value in settings.items() if value is not None}
    shape = dataclasses.replace(SIZES[size], **given)  # pyright: ignore[reportArgumentType]
    if min(shape.batch, shape.context) < 1 or not 0 <= shape.dropout < 1:
        raise TaskError(
            f"task {name}: batch={shape.batch}, context={shape.context}, dropout={shape.dropout}: "
            "expected positive sizes and a dropout from 0 to below 1"
        )
    return shape


def language_model(
    name: str,
    files: list[bytes],
    shape: Size,
    batches: int = 200,
    seed: int = 0,
) -> Task:
    """A task over some texts, with about a tenth of them held out.

    Raises
    ------
    TaskError
        When the held-out part has no room for a window.
    """
    if batches < 1:
        raise TaskError(f"task {name}: batches={batches}: expected a positive number")
    training, held_out = _split(files)
    if len(held_out) < shape.context + 1:
        raise TaskError(
            f"task {name}: the text is too short: {len(training) + len(held_out)} bytes, expected "
            f"at least {10 * (shape.context + 1)} for windows of {shape.context}: use a longer "
            "text, or --set context=N"
        )
    epoch = _Epoch(training, shape, batches, seed)
    check = _Windows(held_out, shape.context, HELD_OUT_WINDOWS)
    plain = Task(
        name=name,
        model=lambda: Transformer(shape),
        batches=lambda: iter(epoch),
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(
            model.parameters(), lr=shape.lr, betas=(0.9, 0.95), fused=True
        ),
        evaluate=check.evaluate,
        samples=lambda windows: windows.size(0) * (windows.size(1) - 1),
        higher_is_better={"loss": False, "accuracy": True},
        chance=_by_frequency(training, held_out),
        info={
            "corpus_bytes": len(training) + len(held_out),
            "corpus_sha256": _digest(training, held_out),
            "samples": "bytes",
        },
    )
    chunked = dataclasses.replace(plain, loss=chunked_loss)
    return dataclasses.replace(plain, levers={"chunked-loss": lambda: chunked})


def standard_library() -> list[bytes]:
    """Sources of the running Python's own library, in the order of their paths; no tests."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "test", "tests", "idle_test", "__pycache__"}
    paths = sorted(
        path
        for path in root.rglob("*.py")
        if not left_out.intersection(path.relative_to(root).parts)
    )
    if not paths:
        raise TaskError(
            f"task charlm: no Python sources under {root}; train on your own text: text:PATH"
        )
    return [path.read_bytes() for path in paths]


class Transformer(nn.Module):
    """The decoder; input (batch, context) of int64, output (batch, context, 256) logits."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(_initialise)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the byte after each position."""
        return self.head(self.hidden(x))

    def hidden(self, x: Tensor) -> Tensor:
        """What the head reads: (batch, context, width)."""
        x = self.tokens(x) + self.positions(torch.arange(x.size(1), device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Block(nn.Module):
    """Attention and MLP, each with a norm before and a residual around."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.heads = size.heads
        self.dropout = nn.Dropout(size.dropout)
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Same shape out as in: (batch, context, width)."""
        x = x + self.dropout(self._attend(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))

    def _attend(self, x: Tensor) -> Tensor:
        batch, context, width = x.shape
        q, k, v = (
            each.view(batch, context, self.heads, -1).transpose(1, 2)
            for each in self.qkv(x).split(width, dim=2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.projection(mixed.transpose(1, 2).reshape(batch, context, width))


def loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean cross-entropy of the next byte, in nats; windows are (batch, context + 1) of int64."""
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


def chunked_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """The same, without ever holding the logits of all positions."""
    assert isinstance(model, Transformer)
    hidden = model.hidden(windows[:, :-1])
    return linear_cross_entropy(hidden, model.head.weight, windows[:, 1:])


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and getattr(module, "bias", None) is not None:
        nn.init.zeros_(module.bias)


def _split(files: list[bytes]) -> tuple[Tensor, Tensor]:
    """Training and held-out bytes: every tenth file held out, if that is near a tenth of the text.

    Else, as for one file or a huge one among small ones, the last tenth of the text.
    """
    text, held_out = b"".join(files), b"".join(files[::10])
    if 0.05 <= len(held_out) / max(1, len(text)) <= 0.2:
        training = b"".join(each for index, each in enumerate(files) if index % 10)
    else:
        cut = len(text) * 9 // 10
        training, held_out = text[:cut], text[cut:]
    return _as_tensor(training), _as_tensor(held_out)


def _by_frequency(training: Tensor, held_out: Tensor) -> dict[str, float]:
    """Held-out metrics of a model that knows only how often each byte occurs."""
    seen, met = (torch.bincount(each, minlength=VOCABULARY) + 1.0 for each in (training, held_out))
    met = met / met.sum()
    loss = -(met * (seen / seen.sum()).log()).sum()
    return {"loss": loss.item(), "accuracy": met[seen.argmax()].item()}


def _as_tensor(text: bytes) -> Tensor:
    if not text:  # frombuffer refuses an empty buffer, and warns about a read-only one
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _digest(*texts: Tensor) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.numpy().tobytes())
    return digest.hexdigest()


class _Epoch:
    """Random windows of a text, the same ones in every epoch, whatever the global seed."""

    def __init__(self, text: Tensor, shape: Size, batches: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        ends = len(text) - shape.context  # one byte more than the context is its last target
        self._text, self._length = text, shape.context + 1
        self._starts = torch.randint(0, ends, (batches, shape.batch), generator=generator)

    def __iter__(self) -> Iterator[Tensor]:
        within = torch.arange(self._length)
        for starts in self._starts:
            yield self._text[starts[:, None] + within].long()


class _Windows:
    """Evenly spread windows of held-out text."""

    def __init__(self, text: Tensor, context: int, count: int) -> None:
        starts = torch.linspace(0, len(text) - context - 1, count, dtype=torch.float64).long()
        self._windows = text[starts[:, None] + torch.arange(context + 1)].long()

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Held-out loss in nats per byte, and accuracy of the next byte."""
        device = next(model.parameters()).device
        losses, hits = [], []
        for windows in self._windows.to(device).split(16):
            logits = model(windows[:, :-1]).float()
            target = windows[:, 1:]
            losses.append(F.cross_entropy(logits.flatten(0, 1), target.flatten()))
            hits.append((logits.argmax(-1) == target).float().mean())
        return {
            "loss": torch.stack(losses).mean().item(),
            "accuracy": torch.stack(hits).mean().item(),
        }
