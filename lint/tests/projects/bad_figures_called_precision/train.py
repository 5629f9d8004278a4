import torch
from figures import precision_of


def train(model, loader, optimizer, criterion):
    scaler = torch.amp.GradScaler("cuda")  # expect: AMP118
    for x, y in loader:
        optimizer.zero_grad()
        output = model(x)
        loss = criterion(output, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return precision_of(output.argmax(1), y)
