"""A loop of one's own with Hugging Face Accelerate."""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self, fault, at, once):
        super().__init__()
        self.fault, self.at, self.once = fault, at, once
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 64)
        self.head = nn.Linear(64, 4)
        self.calls = 0

    def broken(self, how):
        late = self.calls > self.at and not (self.once and self.calls > self.at + 1)
        return self.fault == how and late and self.training

    def forward(self, x):
        self.calls += 1
        x = F.relu(self.first(x))
        if self.broken("forward"):
            x = torch.exp(x.float() + 100)  # PLANTED forward
        x = F.relu(self.second(x))
        if self.broken("backward"):
            x = x + (x - x.detach()).pow(2).sum(1, keepdim=True).sqrt()  # PLANTED backward
        return self.head(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32")
    parser.add_argument("--fault", choices=["none", "forward", "backward", "skip"], default="none")
    parser.add_argument("--at-step", type=int, default=3)
    parser.add_argument("--once", action="store_true")
    parser.add_argument(
        "--as-shipped", action="store_true", help="fp16 on a CPU: Accelerate ignores it"
    )
    parser.add_argument("--dump")
    args = parser.parse_args()

    torch.manual_seed(0)
    mixed = {"fp32": "no"}.get(args.precision, args.precision)
    accumulate = 2
    accelerator = Accelerator(
        cpu=True, mixed_precision=mixed, gradient_accumulation_steps=accumulate
    )
    if args.precision == "fp16" and not args.as_shipped:
        init_scale = 2.0**30 if args.fault == "skip" else 2.0**12
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale)
        accelerator.native_amp = True

    x = torch.randn(args.steps * accumulate * 8, 16)
    y = x[:, :4].argmax(1)
    model = Net(args.fault, (args.at_step - 1) * accumulate, args.once)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses = []
    model.train()
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.print(f"loss {losses[-1]:.4f}, lr {scheduler.get_last_lr()[0]:.2e}")
    if args.dump:
        torch.save({"losses": losses, "model": model.state_dict()}, args.dump)


if __name__ == "__main__":
    main()
