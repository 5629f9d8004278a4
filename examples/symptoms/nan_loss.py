"""float16 autocast, written as the documentation has it; the loss becomes NaN."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)


class Attention(nn.Module):
    """Scores are divided after the product, when they no longer fit."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.qk = nn.Linear(width, 2 * width)
        self.value = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, time, width) to the same."""
        q, k = self.qk(x).chunk(2, -1)
        scores = q @ k.transpose(-1, -2)
        return (scores / 8).softmax(-1) @ self.value(x)


model = nn.Sequential(Attention(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
for step in range(8):
    x, y = torch.randn(4, 16, 64), torch.randint(0, 10, (64,))
    if step == 5:
        x *= 300
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(x).flatten(0, 1), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
