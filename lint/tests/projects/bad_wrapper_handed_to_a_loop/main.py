# Nothing here but the wrapper tells that it trains in mixed precision, and another file calls this.
import torch
from amp import NativeScalerWithGradNormCount
from loop import one_epoch
from torch.nn.parallel import DistributedDataParallel


def main(net, loader, args):
    net = DistributedDataParallel(net, device_ids=[args.rank])
    optimizer = torch.optim.AdamW(net.parameters())  # expect: AMP305
    loss_scaler = NativeScalerWithGradNormCount()
    for _ in range(args.epochs):
        one_epoch(net, optimizer, loss_scaler, loader, args)
