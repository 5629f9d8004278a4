import torch
from torch import nn


def train_step(model, optimizer, x, y, fp16, scaler):
    optimizer.zero_grad(set_to_none=True)
    if not fp16:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return
    with torch.autocast("cuda", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
