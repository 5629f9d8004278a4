"""Losses of a folder that is no package."""

import torch


def loss_of(model, x, y):
    with torch.autocast("cuda", dtype=torch.float16):
        return torch.nn.functional.cross_entropy(model(x), y)
