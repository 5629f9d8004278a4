"""A function of another file writes the checkpoint."""

from copy import deepcopy

import torch
from checkpoint import save_checkpoint
from torch.nn import functional


def train(model, loader):
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict(),
    }
    save_checkpoint(state, "last.pt")
    save_checkpoint({"model": deepcopy(model).half()}, "release.pt")
