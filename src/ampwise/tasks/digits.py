"""A small convolutional network on scikit-learn's handwritten digits: 1,797 real 8 x 8 images."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampwise.errors import MissingExtraError, TaskError
from ampwise.installation import extra_command
from ampwise.tasks.task import Task

HELD_OUT = 360


def task(batch: int = 64, width: int = 32, lr: float = 3e-3) -> Task:
    """Digits, 1,437 for training and 360 held out, the same split every time.

    Parameters
    ----------
    batch
        Images in a batch.
    width
        Channels of the first convolution.
    lr
        Learning rate of AdamW.

    Raises
    ------
    MissingExtraError
        When scikit-learn is not installed.
    TaskError
        When there is no batch of that size.
    """
    images, labels = _load()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    if not 1 <= batch <= len(images) - HELD_OUT or width < 1:
        raise TaskError(
            f"task digits: batch={batch}, width={width}: expected a batch of 1 to "
            f"{len(images) - HELD_OUT} images and a positive width"
        )
    training = (images[:-HELD_OUT], labels[:-HELD_OUT])
    held_out = (images[-HELD_OUT:], labels[-HELD_OUT:])

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        """Shuffled by the global seed, so that seeds can be paired."""
        shuffled = torch.randperm(len(training[0]))
        for chosen in shuffled.split(batch):
            if len(chosen) == batch:
                yield training[0][chosen], training[1][chosen]

    @torch.no_grad()
    def evaluate(model: nn.Module) -> dict[str, float]:
        device = next(model.parameters()).device
        logits = model(held_out[0].to(device)).float()
        target = held_out[1].to(device)
        return {
            "accuracy": (logits.argmax(-1) == target).float().mean().item(),
            "loss": F.cross_entropy(logits, target).item(),
        }

    return Task(
        name="digits",
        model=lambda: network(width),
        batches=batches,
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=lr, fused=True),
        evaluate=evaluate,
        samples=lambda pair: len(pair[0]),
        higher_is_better={"accuracy": True, "loss": False},
        chance={"accuracy": 0.1},
        info={"images": len(images), "held_out": HELD_OUT, "samples": "images"},
    )


def network(width: int) -> nn.Sequential:
    """Two convolutions with BatchNorm and a linear head; input (batch, 1, 8, 8)."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * width, 10),
    )


def loss(model: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy of a batch of images and labels."""
    images, labels = pair
    return F.cross_entropy(model(images), labels)


def _load() -> tuple[Tensor, Tensor]:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise MissingExtraError(
            f"task digits needs scikit-learn: {extra_command('digits')}"
        ) from None
    digits: Any = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    return images, torch.tensor(digits.target)
