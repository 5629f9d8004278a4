"""A vision transformer trained with timm's NativeScaler, after timm/utils/cuda.py and train.py."""

import argparse
from contextlib import suppress
from functools import partial

import torch
import torch.nn as nn


def dispatch_clip_grad(parameters, value, mode="norm", norm_type=2.0):
    if mode == "norm":
        torch.nn.utils.clip_grad_norm_(parameters, value, norm_type=norm_type)
    elif mode == "value":
        torch.nn.utils.clip_grad_value_(parameters, value)
    else:
        raise ValueError(f"unknown clip mode: {mode}")


class NativeScaler:
    state_dict_key = "amp_scaler"

    def __init__(self, device="cuda", **settings):
        self._scaler = torch.amp.GradScaler(device=device, **settings)

    def __call__(
        self,
        loss,
        optimizer,
        clip_grad=None,
        clip_mode="norm",
        parameters=None,
        create_graph=False,
        need_update=True,
    ):
        self._scaler.scale(loss).backward(create_graph=create_graph)
        if need_update:
            if clip_grad is not None:
                assert parameters is not None
                self._scaler.unscale_(optimizer)
                dispatch_clip_grad(parameters, clip_grad, mode=clip_mode)
            self._scaler.step(optimizer)
            self._scaler.update()

    def state_dict(self):
        return self._scaler.state_dict()

    def load_state_dict(self, state_dict):
        self._scaler.load_state_dict(state_dict)


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unsqueeze(1).chunk(3, dim=-1)
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(attended.squeeze(1))
        return x + self.mlp(self.norm2(x))


class Vit(nn.Module):
    """Patches of 4 by 4 pixels, standardised one by one."""

    def __init__(self, dim=32):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(16))
        self.embed = nn.Linear(16, dim)
        self.pos = nn.Parameter(torch.zeros(1, 9, dim))
        self.blocks = nn.Sequential(Block(dim), Block(dim))
        self.head = nn.Linear(dim, 4)

    def forward(self, x):
        x = x.unfold(1, 4, 4).unfold(2, 4, 4).reshape(len(x), 9, 16)
        x = x * self.gain
        power = x.pow(2).mean(-1, keepdim=True)  # PLANTED forward: of one bright pixel
        x = x + 0.1 * power
        spread = (x - x.mean(-1, keepdim=True)).pow(2).sum(-1, keepdim=True)
        x = x / (1 + spread.sqrt())  # PLANTED backward: where a patch is black
        x = self.blocks(self.embed(x) + self.pos)
        return self.head(x.mean(1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32")
    parser.add_argument("--fault", choices=["none", "forward", "backward", "skip"], default="none")
    parser.add_argument("--at-step", type=int, default=3)
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--grad-accum-steps", type=int, default=2)
    parser.add_argument("--dump")
    args = parser.parse_args()
    torch.manual_seed(42)
    model = Vit()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)

    amp_autocast, loss_scaler = suppress, None
    if args.precision == "bf16":
        amp_autocast = partial(torch.autocast, device_type="cpu", dtype=torch.bfloat16)
    elif args.precision == "fp16":
        amp_autocast = partial(torch.autocast, device_type="cpu", dtype=torch.float16)
        init_scale = 2.0**30 if args.fault == "skip" else 2.0**12
        loss_scaler = NativeScaler(device="cpu", init_scale=init_scale)
    loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)
    losses = []
    for update_idx in range(args.steps):
        late = update_idx + 1 >= args.at_step
        bad = late and not (args.once and update_idx + 1 > args.at_step)
        optimizer.zero_grad()
        for batch_idx in range(args.grad_accum_steps):
            images, target = torch.rand(8, 12, 12), torch.randint(4, (8,))
            images[torch.arange(8), target, target] += 2
            if bad and args.fault == "forward":
                images[0, 5, 5] = 1e20
            if bad and args.fault == "backward":
                images[0] = 0
            need_update = batch_idx + 1 == args.grad_accum_steps
            with amp_autocast():
                loss = loss_fn(model(images), target) / args.grad_accum_steps
            if loss_scaler is not None:
                loss_scaler(
                    loss,
                    optimizer,
                    clip_grad=1.0,
                    parameters=model.parameters(),
                    need_update=need_update,
                )
            else:
                loss.backward()
                if need_update:
                    dispatch_clip_grad(model.parameters(), value=1.0)
                    optimizer.step()
            losses.append(loss.item())
    print(f"Train: loss {losses[-1]:#.3g}")
    if args.dump:
        torch.save({"losses": losses, "model": model.state_dict()}, args.dump)


if __name__ == "__main__":
    main()
