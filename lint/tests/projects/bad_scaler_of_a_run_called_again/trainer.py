import torch


class Trainer:
    def __init__(self, model, optimizer, loader):
        self.model, self.optimizer, self.loader = model, optimizer, loader

    def train(self):
        scaler = torch.amp.GradScaler("cuda")  # expect: AMP110
        for x, y in self.loader:
            self.optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = self.model(x, y)
            scaler.scale(loss).backward()
            scaler.step(self.optimizer)
            scaler.update()

    def save(self, path):
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(state, path)
