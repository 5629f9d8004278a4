"""The helpers that save are handed no scaler."""

import torch
from saving import save_checkpoint, save_states


def train(model, loader, criterion):
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    save_checkpoint(model, optimizer, 1e-3, 1, "a.pt")  # expect: AMP111
    save_states(model.state_dict(), optimizer.state_dict(), "b.pt")  # expect: AMP111


if __name__ == "__main__":
    train(torch.nn.Linear(8, 8), [], torch.nn.CrossEntropyLoss())
