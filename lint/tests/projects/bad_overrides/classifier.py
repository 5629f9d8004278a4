import torch
import torch.nn.functional as F
from base import BaseTrainer


class Trainer(BaseTrainer):
    def compute_loss(self, batch):
        x, y = batch
        p = torch.sigmoid(self.model(x))
        return F.binary_cross_entropy(p, y)  # expect: AMP209

    def clip(self):
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)  # expect: AMP101

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        total = 0.0
        for x, y in self.val_loader:
            out = self.model(x)  # expect: AMP203
            total += (out.argmax(1) == y).sum().item()
        return total
