import torch
from torch import nn


class Trainer:
    def __init__(self, wrapped, network, optimizer):
        self.wrapped = wrapped
        self.network = network
        self.optimizer = optimizer

    def fit(self, loader):
        for x, y in loader:
            with self.optimizer.context:
                loss = nn.functional.cross_entropy(self.wrapped(x), y)
            self.optimizer.step(loss)

    @torch.no_grad()
    def evaluate(self, loader):
        self.network.eval()
        correct = 0
        for x, y in loader:
            correct += (self.network(x).argmax(1) == y).sum()  # expect: AMP203
        return correct
