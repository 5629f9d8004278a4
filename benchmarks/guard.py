"""Figure 1: what guarding a step costs: norm, found_inf, unscale, clip and the optimizer.

Over 20 M float32 parameters, gradients given: ampwise's guard with fused AdamW, against the recipe
``unscale_`` + ``clip_grad_norm_`` + ``scaler.step`` + ``update`` with the same fused AdamW and with
the default one. The bare fused step is the lower bound.
"""

from __future__ import annotations

import statistics

import torch
from torch import nn

from _common import paired_ratio, save, show, take_turns
from ampwise.step import LossScale
from ampwise.step.guard import Guard

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = [(512, 512)] * 60 + [(2048, 512)] * 4 + [(512,)] * 64


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    made = [nn.Parameter(torch.randn(shape, device=DEVICE)) for shape in SHAPES]
    for each in made:
        each.grad = torch.randn_like(each) * 2.0**16
    return made


def recipe(**settings: bool):
    held = parameters()
    optimizer = torch.optim.AdamW(held, lr=1e-4, **settings)
    scaler = torch.amp.GradScaler(DEVICE.type)
    scaler.scale(torch.ones((), device=DEVICE))

    def run() -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(held, 1.0)
        scaler.step(optimizer)
        scaler.update()

    return run


def guarded():
    optimizer = torch.optim.AdamW(parameters(), lr=1e-4, fused=True)
    guard = Guard([optimizer], DEVICE, 1.0)
    scale = LossScale().fresh(DEVICE)

    def run() -> None:
        guard.step(scale.divisor)
        scale.update(guard.found_inf)

    return run


def bare():
    optimizer = torch.optim.AdamW(parameters(), lr=1e-4, fused=True)
    return optimizer.step


def main() -> None:
    arms = {
        "ampwise": guarded(),
        "recipe, fused AdamW": recipe(fused=True),
        "recipe, default AdamW": recipe(),
        "bare fused AdamW step": bare(),
    }
    sync = torch.cuda.synchronize if DEVICE.type == "cuda" else (lambda: None)
    samples = take_turns(arms, 60, synchronize=sync)
    ratios = {n: paired_ratio(samples[n], samples["ampwise"]) for n in arms if n != "ampwise"}
    for name, values in samples.items():
        print(f"{name:44s} {statistics.median(values):6.2f} ms")
    for name, ratio in ratios.items():
        print(show(f"{name} / ampwise", ratio))
    count = sum(each.numel() for each in parameters())
    save(
        f"guard-{DEVICE.type}",
        {
            "parameters": count,
            "median_ms": {name: statistics.median(values) for name, values in samples.items()},
            "time_relative_to_ampwise": ratios,
        },
    )


if __name__ == "__main__":
    main()
