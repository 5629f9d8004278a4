import torch
from data import loader, network
from engine import (
    evaluate,
    train_one_epoch,
)

optimizer = torch.optim.AdamW(network.parameters(), fused=True)
for epoch in range(90):
    train_one_epoch(network, loader, optimizer)
    print(evaluate(network, loader))
