import torch


class AmpOptimizer:
    def __init__(self, optimizer, params):
        self.context = torch.autocast("cuda", dtype=torch.float16)
        self.scaler = torch.amp.GradScaler("cuda")
        self.optimizer = optimizer
        self.params = params

    def step(self, loss):
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
