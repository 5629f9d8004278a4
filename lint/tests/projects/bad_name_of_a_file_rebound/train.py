import torch
from solver import make_optimizer
from torch import nn


def main(name, loader):
    network = nn.Linear(8, 8).cuda()
    centers = nn.Linear(8, 8).cuda()
    optimizer = make_optimizer(name, network)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        output = network(x)  # expect: AMP222
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.cross_entropy(output, y) + centers(x).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
