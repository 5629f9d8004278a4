import torch
from loop import one_epoch
from torch.nn.parallel import DistributedDataParallel


def main(net, loader, rank, parts):
    net = DistributedDataParallel(net, device_ids=[rank])
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(10):
        one_epoch(net, optimizer, scaler, loader, parts)
