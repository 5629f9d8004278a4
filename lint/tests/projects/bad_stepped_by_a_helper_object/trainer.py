"""No word of the step stands here: an object of another file makes it."""

import torch
from precision import MixedPrecision


class Trainer:
    def __init__(self, model, optimizer, criterion, loader):
        self.model, self.optimizer = model, optimizer
        self.criterion, self.loader = criterion, loader
        self.precision = MixedPrecision()

    def train_epoch(self):
        self.model.train()
        for x, y in self.loader:
            with self.precision.context():
                loss = self.criterion(self.model(x), y)
            self.precision.apply(loss, self.optimizer, self.model.parameters())

    def fit(self, epochs):
        for _ in range(epochs):
            self.train_epoch()
            torch.save(  # expect: AMP111
                {
                    "model": self.model.state_dict(),
                    "optimizer": self.optimizer.state_dict(),
                },
                "latest.pt",
            )
