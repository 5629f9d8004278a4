"""Modules of a folder without ``__init__.py``."""

import torch
import tools.losses
import tools.writing


def train(model, loader, optimizer):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        writer = tools.writing.Writer(step, 100)
        loss = tools.losses.loss_of(model, x, y)
        if writer.is_time:
            print(loss.item())
        loss.backward()  # expect: AMP205
        optimizer.step()
