"""Lightning with ampwise's precision plugin, on scikit-learn's handwritten digits.

python examples/lightning_digits.py [bf16-master]
"""

from __future__ import annotations

import logging
import sys
import warnings

import lightning
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from ampwise.integrations.lightning import Precision

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")


class Digits(lightning.LightningModule):
    """A small network; nothing in it knows of a precision."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.layers(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        right = self.layers(batch[0]).argmax(1) == batch[1]
        self.log("accuracy", right.float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3, fused=True)


def main(policy: str) -> None:
    lightning.seed_everything(0, verbose=False)
    images, labels = load_digits(return_X_y=True)
    rows = TensorDataset(torch.tensor(images).float() / 16, torch.tensor(labels))
    train, held_out = random_split(rows, [0.8, 0.2])
    plugin = Precision(policy, max_grad_norm=1.0)
    trainer = lightning.Trainer(
        max_epochs=4, accelerator="cpu", plugins=[plugin], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Digits(), DataLoader(train, 32, shuffle=True), DataLoader(held_out, 360))
    assert plugin.engine is not None
    print(plugin.engine.activity)
    skipped = plugin.engine.history[-1].skipped_total
    print(f"{plugin.engine.policy.text}: {plugin.engine.steps} steps, {skipped} skipped")
    print(f"accuracy {trainer.callback_metrics['accuracy']:.3f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "bf16-master")
