"""The guard: between backward and the optimizer, decide on the device whether to step, and how far.

    norm, found_inf   one read of the still scaled gradients          (`gradients.norms`)
    clip coefficient  min(1, max_norm / (norm + 1e-6)), as in `torch.nn.utils.clip_grad_norm_`
    unscale and clip  folded: the optimizer's kernel divides by  scale * (1 / coefficient)
                      general: one multiplication by  coefficient / scale, in place

Bytes moved per float32 element: 4 for the guard, and nothing is written before the optimizer;
`unscale_` + `clip_grad_norm_` + `step` read and write every gradient twice more.

Folding rounds ``1 / coefficient`` and the division, where unscaling and clipping one after the
other round the coefficient and the product: results differ by at most 2 ULP of the gradient. A
power-of-two scale without clipping is exact, so there the results are equal bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampwise.step import gradients as grads
from ampwise.step import optimizers as optim
from ampwise.step.host import HostFlag
from ampwise.telemetry.ring import number

_EPS = 1e-6  # of torch.nn.utils.clip_grad_norm_
_LARGEST = torch.finfo(torch.float32).max


def _plainly(optimizer: Optimizer, make: Callable[[], object]) -> None:  # noqa: ARG001
    """Make an optimizer's step as it is."""
    make()


class Guard:
    """The decision over one set of optimizers that step, or are skipped, together.

    Parameters
    ----------
    optimizers
        That set.
    device
        Where the decision is taken.
    max_norm
        Limit of the norm; None for no clipping.
    make_step
        Makes the step of an optimizer, which is given beside it (`Precision.step`).

    Attributes
    ----------
    grad_norm
        Global L2 norm of the true gradients, before clipping; a float32 scalar on the device. inf
        or NaN with `found_inf`.
    found_inf
        1.0 when any gradient is inf or NaN, else 0.0; a float32 scalar on the device, written
        anew by each step.
    norms
        Of the single gradients, still scaled, as `gradients.norms` gives them; empty where all
        ranks agreed on one norm.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        device: torch.device,
        max_norm: float | None,
        make_step: Callable[[Optimizer, Callable[[], object]], object] = _plainly,
    ) -> None:
        self.optimizers = tuple(optimizers)
        self._make_step = make_step
        self.max_norm = max_norm
        self._device = device
        self._agreed: Tensor | None = None
        self.flag = HostFlag(torch.zeros((), device=device))
        self.found_inf = self.flag.tensor
        self.grad_norm = torch.zeros((), device=device)
        self._length = 0.0  # the same as a number, where the host has it
        self.norms: list[Tensor] = []
        self._one = torch.ones((), device=device)

    @property
    def folds(self) -> bool:
        """Whether the optimizers' kernels unscale, clip and skip by themselves, on the device."""
        if not all(map(optim.folds, self.optimizers)):
            return False
        # Kernels write the gradient back; one that two optimizers share would be divided twice.
        return len(self.optimizers) == 1 or not grads.are_shared(self.optimizers)

    def divide_(self, divisor: Tensor) -> None:
        """Turn scaled gradients into true ones now, in place; pass `step` None afterwards."""
        grads.multiply_(grads.gradients_of(self.optimizers), divisor.reciprocal())

    def read(self) -> list[Tensor]:
        """What `norms` would be now."""
        return grads.norms(grads.gradients_of(self.optimizers))

    def agree(self, norm: Tensor) -> None:
        """Let the next `step` go by this norm of the gradients, still scaled: that of all ranks."""
        self._agreed = norm

    def step(self, divisor: Tensor | None, *, keep: bool = False) -> None:
        """Examine the gradients, then step or skip.

        Parameters
        ----------
        divisor
            Scalar that turns the gradients into true ones: loss scale times window weight. None
            when they are true already.
        keep
            Have the gradients as before if an optimizer raises; where they are made true in place,
            that takes a copy.
        """
        gradients = grads.gradients_of(self.optimizers)
        self._examine(gradients, divisor)
        if self.folds:
            self._step_folded(divisor)
        else:
            self._step_in_place(gradients, divisor, keep=keep)

    def _examine(self, gradients: Sequence[Tensor], divisor: Tensor | None) -> None:
        """Set `found_inf` and `grad_norm`."""
        if self._agreed is not None:
            agreed, self._agreed, self.norms = self._agreed, None, []
            self._judge(agreed, divisor)
            return
        self.norms = grads.norms(gradients)
        self._judge(grads.together(self.norms, self._device), divisor)
        if self.flag.on_host and self.flag.read():
            self._look_again(gradients, divisor)

    def _look_again(self, gradients: Sequence[Tensor], divisor: Tensor | None) -> None:
        """Judge by the largest element: perhaps only a sum overflowed. No sync on the host."""
        norm = grads.wide_norm(gradients, self._device)
        if math.isfinite(number(norm)):
            self._judge(grads.largest(gradients, self._device), divisor)
        if not self.flag.read():
            norm = norm if divisor is None else norm / divisor
            self.grad_norm = norm.clamp(max=_LARGEST).float()
            self._length = number(self.grad_norm)

    def _judge(self, bound: Tensor, divisor: Tensor | None) -> None:
        """Raise `found_inf` if a gradient is not finite, or will not be once it is divided.

        A small divisor, as of a short window or under a scale below 1, can take float32 beyond its
        end. The norm is a bound for all elements; so a true norm beyond float32's end counts as
        inf, but where the host can look again.
        """
        true = bound if divisor is None else bound / divisor
        self.grad_norm = true if true.dtype is torch.float32 else true.float()
        if self.flag.on_host:
            self._length = number(self.grad_norm)
            self.flag.set(not math.isfinite(self._length))
            return
        self.found_inf.zero_()
        torch._amp_foreach_non_finite_check_and_unscale_(
            [self.grad_norm], self.found_inf, self._one
        )

    def _excess(self) -> Tensor | None:
        """How many times too long the gradient is; None where the host knows that it is not."""
        if self.max_norm is None:
            return None
        if self.flag.on_host:
            excess = (self._length + _EPS) / self.max_norm
            return torch.tensor(excess) if excess > 1 else None
        return ((self.grad_norm + _EPS) / self.max_norm).clamp_(min=1.0)

    def _step_folded(self, divisor: Tensor | None) -> None:
        # Where the host knows, the kernel need not be asked to skip.
        if self.flag.on_host and self.flag.read():
            return
        grad_scale, excess = divisor, self._excess()
        if excess is not None:
            grad_scale = excess if divisor is None else divisor * excess
        found_inf = None if self.flag.on_host else self.found_inf
        for optimizer in self.optimizers:
            fold = partial(optim.step_folded, optimizer, grad_scale, found_inf)
            self._make_step(optimizer, fold)

    def _step_in_place(
        self, gradients: Sequence[Tensor], divisor: Tensor | None, *, keep: bool
    ) -> None:
        """The general path: true, clipped gradients in ``.grad``, and the host decides."""
        if self.flag.read():
            return
        factor = None
        if self.max_norm is not None:
            factor = (self.max_norm / (self.grad_norm + _EPS)).clamp_(max=1.0)
        if divisor is not None:
            factor = divisor.reciprocal() if factor is None else factor / divisor
        with grads.kept(self.optimizers) if keep and factor is not None else nullcontext():
            if factor is not None:
                grads.multiply_(gradients, factor)
            for optimizer in self.optimizers:
                self._make_step(optimizer, optimizer.step)
