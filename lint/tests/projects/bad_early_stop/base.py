"""A trainer's loop, which asks whether it ends, and counts its steps."""

import torch


class Base:
    def __init__(self, config, model, loader):
        self.config, self.model, self.loader = config, model, loader
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.1, total_steps=9)

    def ends(self):
        if self.config.most and self.step > self.config.most:
            return True

    def train(self):
        self.step = 0
        for batch in self.loader:
            if self.ends():
                break
            loss = self.train_on(batch)
            self.scheduler.step()  # expect: AMP112
            if self.step % 50 == 0:
                print(loss.item())
            self.step += 1
