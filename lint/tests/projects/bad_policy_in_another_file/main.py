# Nothing here but the policy that FSDP is handed tells that it trains in lower precision.
import torch
from policies import policy_of
from torch.distributed.fsdp import FullyShardedDataParallel


def train(model, loader, cfg):
    model = FullyShardedDataParallel(model, mixed_precision=policy_of(cfg))
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in loader:
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        print(loss.item())  # expect: AMP301
