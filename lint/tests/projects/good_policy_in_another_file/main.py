# The policy that FSDP is handed is one of float32.
import torch
from policies import full
from torch.distributed.fsdp import FullyShardedDataParallel


def train(model, loader):
    model = FullyShardedDataParallel(model, mixed_precision=full)
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in loader:
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        print(loss.item())
