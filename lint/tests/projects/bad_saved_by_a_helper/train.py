"""What is saved is put together here."""

import torch
from saving import save_checkpoint


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
    save_checkpoint(
        dict(  # expect: AMP111
            model=model.state_dict(),
            optimizer=optimizer.state_dict(),
        ),
        "last.pt",
    )
