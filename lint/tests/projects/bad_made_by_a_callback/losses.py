import torch.nn.functional as F


class BothLosses:
    def __init__(self):
        self.first = 0.0

    def __call__(self, output, y):
        loss = F.mse_loss(output, y)
        self.first += loss.item()  # expect: AMP301
        return loss + output.abs().mean()
