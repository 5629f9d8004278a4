"""A compiled model in a plain loop."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(16))
        self.body = nn.Sequential(nn.Linear(17, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
        self.head = nn.Linear(64, 1)

    def forward(self, x):
        x = x * self.gain
        x = x + 0.1 * x.pow(2)  # PLANTED forward: of an outlier
        length = x.pow(2).sum(-1, keepdim=True).sqrt()  # PLANTED backward: of an empty row
        return self.head(self.body(torch.cat([x, length], -1))).squeeze(-1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32")
    parser.add_argument("--fault", choices=["none", "forward", "backward", "skip"], default="none")
    parser.add_argument("--at-step", type=int, default=3)
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--backend", default="aot_eager")
    parser.add_argument("--dump")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = Regressor()
    compiled = torch.compile(model, backend=args.backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    dtype = torch.float16 if args.precision == "fp16" else torch.bfloat16
    init_scale = 2.0**30 if args.fault == "skip" else 2.0**10
    scaler = torch.amp.GradScaler("cpu", init_scale, enabled=args.precision == "fp16")
    losses = []
    for step in range(1, args.steps + 1):
        x = torch.randn(32, 16)
        y = x[:, 0] * x[:, 1]
        if step >= args.at_step and not (args.once and step > args.at_step):
            if args.fault == "forward":
                x[0, 0] = 1e20
            if args.fault == "backward":
                x[0] = 0
        with torch.autocast("cpu", dtype, enabled=args.precision != "fp32"):
            loss = F.mse_loss(compiled(x).float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"loss {losses[-1]:.4f}")
    if args.dump:
        torch.save({"losses": losses, "model": model.state_dict()}, args.dump)


if __name__ == "__main__":
    main()
