"""DistributedDataParallel with accumulation, for torchrun."""

import argparse
import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(8))
        self.body = nn.Sequential(nn.Linear(9, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, x):
        x = x * self.gain
        x = x + 0.1 * x.pow(2)  # PLANTED forward: of an outlier
        length = x.pow(2).sum(-1, keepdim=True).sqrt()  # PLANTED backward: of an empty row
        return self.body(torch.cat([x, length], -1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32")
    parser.add_argument("--fault", choices=["none", "forward", "backward", "skip"], default="none")
    parser.add_argument("--at-step", type=int, default=3)
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--fault-rank", type=int, default=1)
    parser.add_argument("--dump")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, accumulate, batch = dist.get_rank(), 2, 8
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    dtype = torch.float16 if args.precision == "fp16" else torch.bfloat16
    init_scale = 2.0**30 if args.fault == "skip" else 2.0**12
    scaler = torch.amp.GradScaler("cpu", init_scale, enabled=args.precision == "fp16")

    x = torch.randn(args.steps * accumulate * batch * dist.get_world_size(), 8)
    data = TensorDataset(x, (x[:, 0] > x[:, 1]).long())
    sampler = DistributedSampler(data, shuffle=False)
    losses = []
    for index, (inputs, labels) in enumerate(DataLoader(data, batch, sampler=sampler)):
        step, boundary = index // accumulate + 1, index % accumulate == accumulate - 1
        bad = step >= args.at_step and not (args.once and step > args.at_step)
        if bad and rank == args.fault_rank and args.fault in ("forward", "backward"):
            inputs[0] = 1e20 if args.fault == "forward" else 0
        with contextlib.nullcontext() if boundary else model.no_sync():
            with torch.autocast("cpu", dtype, enabled=args.precision != "fp32"):
                loss = F.cross_entropy(model(inputs), labels) / accumulate
            scaler.scale(loss).backward()
        losses.append(loss.item())
        if boundary:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    if rank == 0:
        print(f"loss {losses[-1]:.4f}")
    if args.dump and rank == 0:
        torch.save({"losses": losses, "model": model.module.state_dict()}, args.dump)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
