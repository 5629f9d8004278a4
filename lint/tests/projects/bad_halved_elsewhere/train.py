import torch
from convert import each_to_half, to_float, to_half


def train(model, loader, criterion):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


class Net(torch.nn.Module):
    def forward(self, x):
        return x


def main(loader, criterion):
    first = Net().cuda()
    to_half(first)  # expect: AMP206
    train(first, loader, criterion)
    second = Net().cuda()
    each_to_half(second)  # expect: AMP206
    train(second, loader, criterion)


def main_in_float32(loader, criterion):
    third = Net().cuda()
    to_half(third)
    to_float(third)
    train(third, loader, criterion)
    fourth = Net().cuda().half()
    fourth.float()
    train(fourth, loader, criterion)
