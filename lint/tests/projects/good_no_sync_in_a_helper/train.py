import torch
from parallel import perhaps_alone
from torch.nn.parallel import DistributedDataParallel


def main(net, criterion, loader, rank, accumulate=4):
    model = DistributedDataParallel(net.cuda(rank), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    scaler = torch.amp.GradScaler("cuda")
    for i, (x, y) in enumerate(loader):
        last = (i + 1) % accumulate == 0
        with perhaps_alone(model, enabled=not last):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = criterion(model(x), y) / accumulate
            scaler.scale(loss).backward()
        if last:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
