"""A loop with Hugging Face Accelerate and `TrainStep`, on scikit-learn's handwritten digits.

accelerate launch examples/accelerate_digits.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import ampwise


def loss_fn(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The loss, and with it how many are right."""
    logits = model(batch[0])
    return F.cross_entropy(logits, batch[1]), (logits.argmax(1) == batch[1]).sum()


def main() -> None:
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    rows = TensorDataset(torch.tensor(images).float() / 16, torch.tensor(labels))
    train, held_out = random_split(rows, [0.8, 0.2])
    accelerator = Accelerator(cpu=True, mixed_precision="no")  # the precision is the step's
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    loader = DataLoader(train, 32, shuffle=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4 * len(loader))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    step = ampwise.TrainStep(
        model, optimizer, policy="bf16", max_grad_norm=1.0, scheduler=schedule
    )  # instead of accelerator.accumulate, backward and clip_grad_norm_
    for epoch in range(4):
        right = torch.zeros(())
        for batch in loader:
            _, correct = step(loss_fn, batch)
            right += correct
        accelerator.print(f"epoch {epoch}: {right / len(train):.3f} of the training set are right")

    accelerator.print(step.activity)
    with torch.no_grad(), step.autocast():
        batch = next(iter(DataLoader(held_out, len(held_out))))
        accelerator.print(f"accuracy {loss_fn(model, batch)[1] / len(held_out):.3f}")


if __name__ == "__main__":
    main()
