"""Residual blocks whose activations are computed again in backward."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 2 * width)
        self.narrow = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x, gate):
        h = self.wide(self.norm(x))
        h = F.gelu(h) * gate.exp()  # PLANTED forward: a gate of 100 opens too wide
        h = self.dropout(h)
        still = (h * (gate + 1)).pow(2).sum(-1, keepdim=True)
        h = h / (1 + still.sqrt())  # PLANTED backward: a gate of -1 leaves nothing
        return x + self.narrow(h)


class Model(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(3)])
        self.head = nn.Linear(width, 3)

    def forward(self, x, gate):
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, gate, use_reentrant=False)
        return self.head(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32")
    parser.add_argument("--fault", choices=["none", "forward", "backward", "skip"], default="none")
    parser.add_argument("--at-step", type=int, default=3)
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--dump")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    dtype = torch.float16 if args.precision == "fp16" else torch.bfloat16
    init_scale = 2.0**30 if args.fault == "skip" else 2.0**12
    scaler = torch.amp.GradScaler("cpu", init_scale, enabled=args.precision == "fp16")
    gates = {"forward": 100.0, "backward": -1.0}
    losses = []
    for step in range(1, args.steps + 1):
        bad = step >= args.at_step and not (args.once and step > args.at_step)
        gate = torch.full((16, 1), gates.get(args.fault, 0.0) if bad else 0.0)
        x = torch.randn(16, 8)
        y = x[:, :3].argmax(-1)
        with torch.autocast("cpu", dtype, enabled=args.precision != "fp32"):
            loss = F.cross_entropy(model(x, gate), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    print(f"loss {losses[-1]:.4f}")
    if args.dump:
        torch.save({"losses": losses, "model": model.state_dict()}, args.dump)


if __name__ == "__main__":
    main()
