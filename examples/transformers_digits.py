"""Hugging Face's Trainer with ampwise's callback, on scikit-learn's handwritten digits.

python examples/transformers_digits.py
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import random_split
from transformers import Trainer, TrainingArguments

from ampwise.integrations.transformers import Callback


class Digits(nn.Module):
    """Anything that returns its loss will do for the Trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))

    def forward(self, pixels: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layers(pixels)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def accuracy(predicted: Any) -> dict[str, float]:
    logits, labels = predicted
    return {"accuracy": float((logits.argmax(1) == labels).mean())}


def main() -> None:
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images).float() / 16
    rows = [{"pixels": x, "labels": int(y)} for x, y in zip(pixels, labels, strict=True)]
    train, held_out = random_split(rows, [0.8, 0.2])  # type: ignore[arg-type]
    callback = Callback()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            Digits(),
            TrainingArguments(
                folder, num_train_epochs=4, per_device_train_batch_size=32, learning_rate=5e-3,
                bf16=True, use_cpu=True, logging_steps=45, save_strategy="no", report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=train, eval_dataset=held_out,
            compute_metrics=accuracy, callbacks=[callback],
        )  # fmt: skip
        trainer.train()
        found = trainer.evaluate()
    assert callback.report is not None
    ran = callback.report.precision.ran
    print(f"products: forward {ran.forward}, backward {ran.backward}")
    print(f"accuracy {found['eval_accuracy']:.3f}")


if __name__ == "__main__":
    main()
