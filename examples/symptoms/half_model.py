"""ValueError: Attempting to unscale FP16 gradients."""

import torch
from torch import nn

model = nn.Linear(16, 4).half()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
for _ in range(5):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(torch.randn(8, 16)), torch.arange(8) % 4)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
