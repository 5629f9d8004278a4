import torch
from chances import of_tokens


class Policy:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.ctx = torch.autocast("cuda", dtype=torch.bfloat16)

    def chances(self, ids, targets):
        with self.ctx:
            logits = self.model(ids)
        return of_tokens(logits, targets)  # expect: AMP202

    def train(self, batches):
        for ids, targets, gains in batches:
            loss = -(self.chances(ids, targets) * gains).mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.after_step()

    def after_step(self):
        pass
