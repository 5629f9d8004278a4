"""Trains the network that an option names."""

import models
import torch
from torch.nn import functional


def train(options, loader):
    model = vars(models)[options.network](options).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
