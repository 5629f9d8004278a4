import torch

from precision import dtype_of


def train(args, model, loader, optimizer, criterion):
    scaler = torch.amp.GradScaler("cuda", enabled=args.use_amp)  # expect: AMP204
    for x, y in loader:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=dtype_of(args.dtype), enabled=args.use_amp):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
