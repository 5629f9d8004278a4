"""Warns of `lr_scheduler.step()` before `optimizer.step()`, though the order is right."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(16, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=20)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
for _ in range(20):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = 1000 * nn.functional.mse_loss(model(torch.randn(8, 16)), torch.zeros(8, 4))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    schedule.step()
    optimizer.zero_grad()
