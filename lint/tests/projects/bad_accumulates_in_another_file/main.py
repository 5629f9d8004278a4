import torch
from accelerate import Accelerator
from loop import one_epoch


def main(model, loader):
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(10):
        one_epoch(accelerator, model, optimizer, loader)


main(torch.load("model.pt"), torch.load("loader.pt"))
