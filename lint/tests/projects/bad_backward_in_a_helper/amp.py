import torch


class Mixed:
    def __init__(self, on):
        self.on = on
        self.scaler = torch.amp.GradScaler("cuda", enabled=on)

    def context(self):
        return torch.autocast("cuda", enabled=self.on)

    def backward(self, loss):
        self.scaler.scale(loss).backward()

    def apply(self, optimizer):
        self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad()
