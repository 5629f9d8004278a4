"""Modules of a folder without ``__init__.py``."""

import torch
import tools.losses
import tools.writing


def train(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        writer = tools.writing.Writer(step, 100)
        loss = tools.losses.loss_of(model, x, y)
        if writer.is_time:
            print(loss.item())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
