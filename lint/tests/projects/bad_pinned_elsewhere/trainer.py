"""A trainer that is handed its loader."""

import torch


class Trainer:
    def __init__(self, model, optimizer, criterion, device):
        self.model, self.optimizer, self.criterion = model, optimizer, criterion
        self.device = device
        self.scaler = torch.amp.GradScaler("cuda")

    def train(self, loader):
        for x, y in loader:
            x = x.to(self.device)  # expect: AMP303
            y = y.to(self.device, non_blocking=True)
            self.optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = self.criterion(self.model(x), y)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
