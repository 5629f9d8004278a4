import torch
from amp import Mixed
from torch.nn.parallel import DistributedDataParallel


def train(net, loader, rank, parts):
    net = DistributedDataParallel(net, device_ids=[rank])
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    amp = Mixed(True)
    for x, y in loader:
        for part in range(parts):
            with amp.context():
                loss = net(x[part], y[part])
            amp.backward(loss / parts)  # expect: AMP307
        amp.apply(optimizer)
