"""A loop of timm's manner with ampwise's scaler, on scikit-learn's handwritten digits.

python examples/timm_digits.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from ampwise.integrations.timm import NativeScaler  # instead of timm.utils


def main() -> None:
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    rows = TensorDataset(torch.tensor(images).float() / 16, torch.tensor(labels))
    train, held_out = random_split(rows, [0.8, 0.2])
    model = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    loss_scaler = NativeScaler()
    for _ in range(4):
        for x, y in DataLoader(train, 32, shuffle=True):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(x), y)
            loss_scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())

    assert loss_scaler.engine is not None
    last = loss_scaler.engine.history[-1]
    print(f"{last.step} steps, {last.skipped_total} skipped, loss scale {last.loss_scale:g}")
    with torch.no_grad():
        x, y = next(iter(DataLoader(held_out, len(held_out))))
        print(f"accuracy {(model(x).argmax(1) == y).float().mean():.3f}")


if __name__ == "__main__":
    main()
