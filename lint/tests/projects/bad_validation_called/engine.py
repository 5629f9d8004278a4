import torch
import torch.nn.functional as F


def train_one_epoch(model, loader, optimizer):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()


@torch.no_grad()
def test(model, loader):
    model.eval()
    return sum((model(x).argmax(1) == y).sum() for x, y in loader)


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    correct = 0
    for x, y in loader:
        output = model(x)  # expect: AMP203
        correct += (output.argmax(1) == y).sum()
    return correct
