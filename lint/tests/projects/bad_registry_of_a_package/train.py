import torch
from models.registry import MATCHERS
from torch.nn import functional


def train(model, loader, name):
    matcher = MATCHERS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cuda")
    for x, targets in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            outputs = model(x)
            order = matcher(outputs, targets).argmin(1)
            loss = functional.cross_entropy(outputs["logits"], order)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
