"""Two ranks under Lightning's DDP; rank 0 has a bad batch in the second of three steps."""

import logging
import warnings

import lightning
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from ampwise.integrations.lightning import Precision

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.layers(batch[0]).float(), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


def main():
    plugin = Precision("bf16", max_grad_norm=0.5)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, accumulate_grad_batches=2,
        plugins=[plugin], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    source = torch.Generator().manual_seed(trainer.global_rank)
    data = [(torch.randn(4, 8, generator=source), torch.arange(4)) for _ in range(6)]
    if trainer.global_rank == 0:
        data[2][0][0, 0] = float("inf")
    model = Net()
    trainer.fit(model, DataLoader(data, batch_size=None))
    total = sum(each.double().sum().item() for each in model.parameters())
    skipped = [each.skipped for each in plugin.engine.history]
    norms = [each.grad_norm for each in plugin.engine.history if not each.skipped]
    print(f"rank {trainer.global_rank}: {skipped} {norms} {total!r}\n", end="", flush=True)


if __name__ == "__main__":
    main()
