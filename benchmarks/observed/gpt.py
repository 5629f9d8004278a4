"""A small GPT on text, as nanoGPT trains it: a loop by hand, batches by hand, clipping.

Run as a script it trains; `task` is the same for ``ampwise bench``.
"""

import argparse
import statistics
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

BLOCK, BATCH, LAYERS, HEADS = 64, 12, 4, 4


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)

    def forward(self, x):
        rows, length, width = x.shape
        q, k, v = (
            each.view(rows, length, HEADS, -1).transpose(1, 2)
            for each in self.c_attn(x).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(rows, length, width))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width)
        self.c_fc, self.c_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.c_proj(F.gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, width), nn.Embedding(BLOCK, width)
        self.h = nn.ModuleList(Block(width) for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, 256, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


DATA = torch.tensor(list(Path(statistics.__file__).read_bytes()))


def get_batch():
    starts = torch.randint(len(DATA) - BLOCK, (BATCH,))
    x = torch.stack([DATA[i : i + BLOCK] for i in starts])
    y = torch.stack([DATA[i + 1 : i + 1 + BLOCK] for i in starts])
    return x, y


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99))


def task(width="128"):
    from ampwise import Task

    return Task(
        model=lambda: GPT(int(width)),
        batches=lambda: (get_batch() for _ in range(1000)),
        loss=lambda model, batch: model(*batch)[1],
        optimizer=make_optimizer,
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--clip", type=float, default=1.0)
    args = parser.parse_args()
    torch.manual_seed(1337)
    model = GPT(args.width)
    optimizer = make_optimizer(model)
    for step in range(args.steps):
        _, loss = model(*get_batch())
        loss.backward()
        if args.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 100 == 0:
            print(f"iter {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
