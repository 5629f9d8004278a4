"""A LightningModule and Lightning's Trainer."""

import argparse
import logging
import warnings

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Regression(L.LightningModule):
    def __init__(self, steps):
        super().__init__()
        self.steps = steps
        self.gain = nn.Parameter(torch.ones(12))
        self.layers = nn.Sequential(nn.Linear(13, 48), nn.GELU(), nn.Linear(48, 1))
        self.losses = []

    def forward(self, x):
        x = x * self.gain
        x = x + 0.1 * x.pow(2)  # PLANTED forward: of an outlier
        length = x.pow(2).sum(-1, keepdim=True).sqrt()  # PLANTED backward: of an empty row
        return self.layers(torch.cat([x, length], -1)).squeeze(-1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.losses.append(loss.item())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.mse_loss(self(x), y))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def loader(count, batch, fault="none", first=0, last=0):
    x = torch.randn(count * batch, 12, generator=torch.Generator().manual_seed(1))
    y = x[:, 0] * x[:, 1]
    if fault in ("forward", "backward"):
        x[first * batch : last * batch : batch] = 1e20 if fault == "forward" else 0
    return DataLoader(TensorDataset(x, y), batch)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32")
    parser.add_argument("--fault", choices=["none", "forward", "backward", "skip"], default="none")
    parser.add_argument("--at-step", type=int, default=3)
    parser.add_argument("--once", action="store_true")
    parser.add_argument(
        "--as-shipped", action="store_true", help="16-mixed on a CPU: becomes bf16-mixed"
    )
    parser.add_argument("--dump")
    args = parser.parse_args()

    L.seed_everything(0, verbose=False)
    accumulate = 2
    precision = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}[args.precision]
    plugins = []
    if args.precision == "fp16" and not args.as_shipped:
        init_scale = 2.0**30 if args.fault == "skip" else 2.0**10
        scaler = torch.amp.GradScaler("cpu", init_scale)
        precision, plugins = None, [MixedPrecision("16-mixed", "cpu", scaler)]
    model = Regression(args.steps)
    trainer = L.Trainer(
        accelerator="cpu",
        precision=precision,
        plugins=plugins,
        max_steps=args.steps,
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    first = (args.at_step - 1) * accumulate
    last = first + accumulate if args.once else args.steps * accumulate
    train = loader(args.steps * accumulate, 16, args.fault, first, last)
    trainer.fit(model, train, loader(4, 16))
    print(f"val_loss {trainer.callback_metrics['val_loss']:.4f}")
    if args.dump:
        torch.save({"losses": model.losses, "model": model.state_dict()}, args.dump)


if __name__ == "__main__":
    main()
