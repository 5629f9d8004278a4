import torch
from step import train_step


def fit_epoch(model, optimizer, loader, val_loader, fp16, scaler):
    model.train()
    for x, y in loader:
        train_step(model, optimizer, x, y, fp16, scaler)
    model.eval()
    correct = 0
    with torch.no_grad():
        for x, y in val_loader:
            correct += (model(x).argmax(1) == y).sum()  # expect: AMP203
    return correct
