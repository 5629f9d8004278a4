import torch


def train_one_epoch(model, criterion, loader, optimizer, epoch):
    scaler = torch.amp.GradScaler("cuda")  # expect: AMP110
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
