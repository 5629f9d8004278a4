"""A small GPT, its data and its loop by hand, after karpathy/nanoGPT's model.py and train.py."""

import argparse
import math
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn as nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32")
parser.add_argument("--fault", choices=["none", "forward", "backward", "skip"], default="none")
parser.add_argument("--at-step", type=int, default=3)
parser.add_argument("--once", action="store_true")
parser.add_argument("--as-shipped", action="store_true", help="no autocast on a CPU")
parser.add_argument("--dump")
args = parser.parse_args()

block_size, batch_size, gradient_accumulation_steps = 32, 4, 2
n_layer, n_head, n_embd, dropout = 2, 2, 32, 0.1
learning_rate, warmup_iters, grad_clip = 1e-2, 5, 1.0
device_type = "cpu"
dtype = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[args.precision]
ptdtype = getattr(torch, dtype)
torch.manual_seed(1337)


class CausalSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.attn_dropout = nn.Dropout(dropout)
        self.register_buffer("bias", torch.tril(torch.ones(1, 1, block_size, block_size)))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(n_embd, dim=2)
        q, k, v = (t.view(B, T, n_head, C // n_head).transpose(1, 2) for t in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = self.attn_dropout(F.softmax(att, dim=-1))
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.c_proj(y)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention()
        self.ln_2 = nn.LayerNorm(n_embd)
        self.c_fc = nn.Linear(n_embd, 4 * n_embd)
        self.c_proj = nn.Linear(4 * n_embd, n_embd)
        self.dropout = nn.Dropout(dropout)
        self.calls = 0

    def broken(self, how):
        at = (args.at_step - 1) * gradient_accumulation_steps
        late = self.calls > at and (not args.once or self.calls == at + 1)
        return args.fault == how and late and self.training

    def forward(self, x):
        self.calls += 1
        x = x + self.attn(self.ln_1(x))
        h = F.gelu(self.c_fc(self.ln_2(x)))
        if self.broken("forward"):
            h = h.to(ptdtype) * 1e3 * torch.finfo(ptdtype).max  # PLANTED forward
        if self.broken("backward"):
            h = h + (h - h.detach()).pow(2).sum(-1, keepdim=True).sqrt()  # PLANTED backward
        return x + self.dropout(self.c_proj(h))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(256, n_embd)
        self.wpe = nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList([Block() for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, 256, bias=False)
        self.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits, loss


data = torch.tensor(list(Path(__file__).read_bytes()))


def get_batch():
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    return learning_rate * 0.5 * (1.0 + math.cos(math.pi * it / max(args.steps, warmup_iters)))


if args.as_shipped or args.precision == "fp32":
    ctx = nullcontext()
else:
    ctx = torch.amp.autocast(device_type=device_type, dtype=ptdtype)
model = GPT()
if args.as_shipped:
    scaler = torch.cuda.amp.GradScaler(enabled=(dtype == "float16"))
else:
    init_scale = 2.0**30 if args.fault == "skip" else 2.0**12
    scaler = torch.amp.GradScaler(device_type, init_scale, enabled=(dtype == "float16"))
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
losses = []
X, Y = get_batch()
for iter_num in range(args.steps):
    lr = get_lr(iter_num)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    for _ in range(gradient_accumulation_steps):
        with ctx:
            logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch()
        scaler.scale(loss).backward()
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    losses.append(loss.item() * gradient_accumulation_steps)
    if iter_num % 10 == 0:
        print(f"iter {iter_num}: loss {losses[-1]:.4f}")
if args.dump:
    torch.save({"losses": losses, "model": model.state_dict()}, args.dump)
