"""Training looks fine, and in evaluation everything is NaN: BatchNorm kept a skipped step's inf."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4)
)
model(torch.randn(2, 3, 8, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
for step in range(10):
    x, y = torch.randn(16, 3, 8, 8), torch.randint(0, 4, (16,))
    if step == 4:
        x *= 1e5
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
model.eval()
print("in evaluation:", model(torch.randn(1, 3, 8, 8)))
