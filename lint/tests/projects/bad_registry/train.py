"""One method of a registry makes optimizer and schedule."""

import torch
from base import Base
from torch.nn import functional


class Trainer(Base):
    def run(self, loader):
        scaler = torch.amp.GradScaler("cuda")
        for x, y in loader:
            self.optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = functional.cross_entropy(self.model(x), y)
            scaler.scale(loss).backward()
            scaler.step(self.optimizer)
            scaler.update()
            self.lr_scheduler.step()  # expect: AMP112
