import torch
from criterion import Criterion


def train(model, loader, optimizer):
    criterion = Criterion()
    scaler = torch.amp.GradScaler("cuda")
    for x, y, x_lengths, y_lengths in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            outputs, x_lengths = model(x, x_lengths)
            with torch.autocast("cuda", enabled=False):
                loss = criterion.ctc_loss(outputs, y, x_lengths, y_lengths)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
