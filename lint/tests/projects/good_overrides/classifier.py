import torch
import torch.nn.functional as F
from base import BaseTrainer


class Trainer(BaseTrainer):
    def compute_loss(self, batch):
        x, y = batch
        return F.binary_cross_entropy_with_logits(self.model(x), y)

    def clip(self):
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    @torch.no_grad()
    def evaluate(self, x):
        return self.model(x)

    def validate(self):
        self.model.eval()
        with torch.amp.autocast("cuda", dtype=torch.float16):
            return [self.evaluate(x) for x, _ in self.val_loader]
