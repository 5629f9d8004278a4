"""Mixed precision is on, and training is no faster."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(2000):
    x = torch.randn(32, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = (model(x).squeeze(-1) - x.mean(-1)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
