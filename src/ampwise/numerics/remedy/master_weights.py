"""Float32 copies of weights, tried: does the update move them?"""

from __future__ import annotations

import copy

from torch import Tensor, nn

from ampwise.numerics.result import Fix
from ampwise.policy import PRESETS
from ampwise.step.replayable import Replayable


def tried(step: Replayable) -> Fix:
    """Float32 master weights as a fix."""
    moved, dtype = _moves_in_float32(step), step.policy.compute_dtype
    how = "keep the parameters in float32"
    if step.policy.autocast:
        how += f": autocast computes in {dtype} anyway"
    else:
        how += f" and let autocast compute in 16 bits: {step.how(PRESETS['bf16'])}"
    return Fix(
        "float32 master weights",
        how,
        verified=moved,
        cost="2 more bytes for each parameter" if moved else "tried: they do not move then",
    )


def _moves_in_float32(step: Replayable) -> bool:
    """Whether the same update, made on float32 copies, moves most weights."""
    assert step.closed is not None
    gradients = step.replay(step.closed).gradients
    scale = float(step.closed.scale)
    held = {id(each): name for name, each in step.parameters().items()}
    original = step.optimizers[0]
    twin, pushed = copy.deepcopy(original), list[nn.Parameter]()
    twin.state.clear()
    for group, own in zip(twin.param_groups, original.param_groups, strict=True):
        group["params"] = [_in_float32(each, gradients.get(held.get(id(each), "")), scale)
                           for each in own["params"]]  # fmt: skip
        pushed += [each for each in group["params"] if each.grad is not None]
    before = [each.detach().clone() for each in pushed]
    twin.step()
    moved = total = 0
    for parameter, old in zip(pushed, before, strict=True):
        assert parameter.grad is not None
        touched = parameter.grad != 0
        moved += int(((parameter != old) & touched).sum())
        total += int(touched.sum())
    return total > 0 and moved > 0.5 * total


def _in_float32(parameter: Tensor, gradient: Tensor | None, scale: float) -> nn.Parameter:
    twin = nn.Parameter(parameter.detach().float().clone())
    if gradient is not None and not gradient.is_sparse:
        twin.grad = gradient.float() / scale
    return twin
