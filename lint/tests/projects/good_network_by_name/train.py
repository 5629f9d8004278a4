"""Trains the network that an option names."""

import models
import torch
from torch.nn import functional


def train(options, loader):
    model = vars(models)[options.network](options).cuda()
    teacher = models.Teacher().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        with torch.no_grad():
            target = teacher(x)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = functional.cross_entropy(model(x), target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
