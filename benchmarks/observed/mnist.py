"""A convolutional network on images, as pytorch/examples trains one on MNIST: with a DataLoader.

Run as a script it trains; `task` is the same for ``ampwise bench``.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH = 64


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(9216, 128), nn.Linear(128, 10)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = torch.flatten(self.dropout1(F.max_pool2d(x, 2)), 1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x), dim=1)


def images():
    """A brighter band in one tenth of the rows; the label says which."""
    source = torch.Generator().manual_seed(0)
    pictures = torch.rand(2048, 1, 28, 28, generator=source)
    labels = torch.randint(10, (2048,), generator=source)
    for picture, label in zip(pictures, labels.tolist(), strict=True):
        picture[:, 2 * label : 2 * label + 3] += 1
    return TensorDataset(pictures, labels)


def loader():
    return DataLoader(images(), BATCH, shuffle=True, drop_last=True)


def make_optimizer(model):
    return torch.optim.Adadelta(model.parameters(), lr=1.0)


def task():
    from ampwise import Task

    return Task(
        model=Net,
        batches=loader,
        loss=lambda model, batch: F.nll_loss(model(batch[0]), batch[1]),
        optimizer=make_optimizer,
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=100)
    args = parser.parse_args()
    torch.manual_seed(1)
    model, batches = Net(), loader()
    optimizer = make_optimizer(model)
    for epoch in range(args.epochs):
        for data, target in batches:
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
