import torch


class Trainer:
    def __init__(self, model, optimizer, loader):
        self.model, self.optimizer, self.loader = model, optimizer, loader

    def train_epoch(self):
        scaler = torch.amp.GradScaler("cuda")  # expect: AMP110
        for batch in self.loader:
            self.optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = self.model(batch).mean()
            scaler.scale(loss).backward()
            self.optimizer.step("model", scaler)
            self.optimizer.schedule()  # expect: AMP112
