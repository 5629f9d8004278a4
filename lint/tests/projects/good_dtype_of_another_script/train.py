"""A dtype out of a configuration, in a file that speaks of no 16 bits: float32, as often as not."""

import torch
from data import decoded


def train(model, loader, config):
    model.to(config.device, dtype=getattr(torch, config.dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate)
    for x, y in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(decoded(x)), y)
        loss.backward()
        optimizer.step()


def main(model, loader, make_config):
    train(model, loader, make_config(device="cuda", learning_rate=1e-3, dtype="float32"))
