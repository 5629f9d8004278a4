import torch


class BaseTrainer:
    def __init__(self, model, optimizer, loader, val_loader):
        self.model = model
        self.optimizer = optimizer
        self.loader = loader
        self.val_loader = val_loader
        self.scaler = torch.amp.GradScaler("cuda")

    def compute_loss(self, batch):
        raise NotImplementedError

    def clip(self):
        pass

    def train_step(self, batch):
        with torch.amp.autocast("cuda", dtype=torch.float16):
            loss = self.compute_loss(batch)
        self.scaler.scale(loss).backward()
        self.clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def train(self):
        for batch in self.loader:
            self.train_step(batch)
        self.validate()

    def validate(self):
        raise NotImplementedError
