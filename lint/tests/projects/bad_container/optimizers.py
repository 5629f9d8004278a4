"""Optimizers and their schedules by name, stepped by one object."""

import torch


class Many:
    def __init__(self, optimizers, schedulers):
        self.optimizers, self.schedulers = optimizers, schedulers
        self.names = list(optimizers.keys())

    def step(self, name, scaler):
        scaler.step(self.optimizers[name])
        scaler.update()

    def zero_grad(self):
        _ = [self.optimizers[name].zero_grad() for name in self.names]

    def schedule(self):
        _ = [self.schedulers[name].step() for name in self.names]


def build(networks):
    optimizers = dict(
        [(name, torch.optim.SGD(net.parameters(), lr=0.1)) for name, net in networks.items()]
    )
    schedulers = dict(
        [
            (name, torch.optim.lr_scheduler.OneCycleLR(each, 0.1, total_steps=9))
            for name, each in optimizers.items()
        ]
    )
    return Many(optimizers, schedulers)
