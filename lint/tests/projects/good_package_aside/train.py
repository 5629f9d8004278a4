import argparse

import torch
from models.network import Net
from torch import nn


def train(args, loader):
    model = nn.DataParallel(Net(args)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cuda", enabled=args.amp and args.dtype == "float16")
    for x, y in loader:
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16"])
    train(parser.parse_args(), [])
