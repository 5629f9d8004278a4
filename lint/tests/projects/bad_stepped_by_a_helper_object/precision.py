import torch


class MixedPrecision:
    def __init__(self, enabled=True):
        self.enabled = enabled
        self.scaler = torch.amp.GradScaler("cuda", enabled=enabled)

    def apply(self, loss, optimizer, parameters):
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad()

    def context(self):
        return torch.autocast("cuda", dtype=torch.float16, enabled=self.enabled)
