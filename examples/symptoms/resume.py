"""After a resume the loss is worse for a while; the loop is on a GPU, and is only read here."""

import torch
from torch import nn


def train(model: nn.Module, loader, optimizer: torch.optim.Optimizer, path: str) -> None:
    """The checkpoint holds everything but the loss scale."""
    scaler = torch.amp.GradScaler("cuda")
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
