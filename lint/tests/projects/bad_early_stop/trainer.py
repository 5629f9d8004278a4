import torch
from base import Base


class Trainer(Base):
    def __init__(self, config, model, loader):
        super().__init__(config, model, loader)
        self.scaler = torch.amp.GradScaler("cuda")

    def train_on(self, batch):
        self.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = self.model(batch).mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss
