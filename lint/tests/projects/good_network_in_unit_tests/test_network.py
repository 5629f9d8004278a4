import torch
from data import loader
from network import make_model


def step(model, x, y, optimizer, scaler):
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x, y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def test_it_trains():
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        step(model, x, y, optimizer, scaler)


def test_it_runs_with_any_batch():
    model = make_model()
    for size in (1, 2):
        with torch.no_grad():
            assert model(torch.zeros(size, 8)).shape == (size, 8)
