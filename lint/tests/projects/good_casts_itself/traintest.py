"""A network that is handed in, and whose forward is decorated with autocast."""

import torch


def train(model, loader, criterion):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    validate(model, loader)


def validate(model, loader):
    model.eval()
    with torch.no_grad():
        return [model(x) for x, _ in loader]


def test(model, loader):
    model.eval()
    right = 0
    with torch.no_grad():
        for x, y in loader:
            right = right + (model(x).argmax(1) == y).sum()
    return right
