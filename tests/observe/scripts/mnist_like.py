"""A small convolutional network on images, after pytorch/examples' mnist/main.py."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset

BATCH = 16


class Images(Dataset):
    """A bright square in one quarter of a noisy image; the label is the quarter."""

    def __init__(self, count, fault="none", first=0, last=0):
        self.count, self.fault, self.bad = count, fault, range(first, last)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        image = torch.rand(1, 14, 14, generator=torch.Generator().manual_seed(index))
        row, column = 7 * (index % 4 // 2), 7 * (index % 2)
        image[0, row : row + 7, column : column + 7] += 1
        if index in self.bad and self.fault == "forward":
            image[0, 3, 3] = 1e20  # a broken pixel
        if index in self.bad and self.fault == "backward":
            image.zero_()  # a picture nobody took
        return image, index % 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1, 14, 14))
        self.conv1 = nn.Conv2d(1, 8, 3)
        self.conv2 = nn.Conv2d(8, 16, 3)
        self.dropout = nn.Dropout(0.25)
        self.fc1 = nn.Linear(16 * 25, 32)
        self.fc2 = nn.Linear(32, 4)

    def forward(self, x):
        x = x.pow(2)  # PLANTED forward: gamma, for pixels between 0 and 2
        x = x * self.gain
        norm = x.flatten(1).pow(2).sum(1).sqrt()  # PLANTED backward: of a black image
        x = x / (norm.view(-1, 1, 1, 1) + 1) * 14
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = torch.flatten(self.dropout(F.max_pool2d(x, 2)), 1)
        x = F.relu(self.fc1(x))
        return F.log_softmax(self.fc2(x), dim=1)


def train(args, model, loader, optimizer, scaler, losses):
    model.train()
    for data, target in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", args.dtype, enabled=args.precision != "fp32"):
            output = model(data)
            loss = F.nll_loss(output, target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())


def test(args, model, loader):
    model.eval()
    correct = 0
    with torch.no_grad(), torch.autocast("cpu", args.dtype, enabled=args.precision != "fp32"):
        for data, target in loader:
            correct += (model(data).argmax(1) == target).sum().item()
    print(f"Test set: accuracy {correct}/{len(loader.dataset)}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32")
    parser.add_argument("--fault", choices=["none", "forward", "backward", "skip"], default="none")
    parser.add_argument("--at-step", type=int, default=3)
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--dump")
    args = parser.parse_args()
    args.dtype = torch.float16 if args.precision == "fp16" else torch.bfloat16

    torch.manual_seed(0)
    epochs = 2
    count = args.steps // epochs * BATCH
    first = (args.at_step - 1) * BATCH
    images = Images(count, args.fault, first, first + BATCH if args.once else count)
    train_loader = DataLoader(images, BATCH, num_workers=args.workers)
    test_loader = DataLoader(Images(64), 32)
    model = Net()
    optimizer = optim.Adadelta(model.parameters(), lr=0.5)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    scaler = torch.amp.GradScaler(
        "cpu",
        init_scale=2.0**30 if args.fault == "skip" else 2.0**12,
        enabled=args.precision == "fp16",
    )
    losses = []
    for _ in range(epochs):
        train(args, model, train_loader, optimizer, scaler, losses)
        test(args, model, test_loader)
        scheduler.step()
    if args.dump:
        torch.save({"losses": losses, "model": model.state_dict()}, args.dump)


if __name__ == "__main__":
    main()
