import torch


def one_epoch(net, optimizer, scaler, loader, parts):
    for i, (x, y) in enumerate(loader):
        with torch.autocast("cuda"):
            loss = net(x, y) / parts
        scaler.scale(loss).backward()  # expect: AMP307
        if (i + 1) % parts == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
