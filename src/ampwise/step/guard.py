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

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampwise.step import gradients as grads
from ampwise.step import optimizers as optim
from ampwise.step.host import HostFlag

_EPS = 1e-6  # of torch.nn.utils.clip_grad_norm_
_LARGEST = torch.finfo(torch.float32).max


class Guard:
    """The decision over one set of optimizers that step, or are skipped, together.

    Attributes
    ----------
    grad_norm
        Global L2 norm of the true gradients, before clipping; a float32 scalar on the device.
    found_inf
        1.0 when any gradient is inf or NaN, else 0.0; a float32 scalar on the device, written
        anew by each step.
    norms
        Of the single gradients, still scaled, as `gradients.norms` gives them; empty where all
        ranks agreed on one norm.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], device: torch.device, max_norm: float | None
    ) -> None:
        self._agreed: Tensor | None = None
        self.optimizers = tuple(optimizers)
        self.max_norm = max_norm
        self._device = device
        self.flag = HostFlag(torch.zeros((), device=device))
        self.found_inf = self.flag.tensor
        self.grad_norm = torch.zeros((), device=device)
        self.norms: list[Tensor] = []
        self._one = torch.ones((), device=device)
        self._folds = all(optim.folds(optimizer) for optimizer in self.optimizers)

    @property
    def folds(self) -> bool:
        """Whether the optimizers' kernels unscale, clip and skip by themselves, on the device.

        Not while step hooks watch: they would see gradients that are still scaled.
        """
        return self._folds and not any(optim.watched(optimizer) for optimizer in self.optimizers)

    def divide_(self, divisor: Tensor) -> None:
        """Turn scaled gradients into true ones now, in place; pass `step` None afterwards."""
        grads.multiply_(grads.gradients_of(self.optimizers), divisor.reciprocal())

    def read(self) -> list[Tensor]:
        """What `norms` would be now."""
        return grads.norms(grads.gradients_of(self.optimizers))

    def agree(self, norm: Tensor) -> None:
        """Let the next `step` go by this norm of the gradients, still scaled: that of all ranks."""
        self._agreed = norm

    def step(self, divisor: Tensor | None) -> None:
        """Examine the gradients, then step or skip.

        Parameters
        ----------
        divisor
            Scalar that turns the gradients into true ones: loss scale times window weight. None
            when they are true already.
        """
        gradients = grads.gradients_of(self.optimizers)
        self._examine(gradients, divisor)
        if self.folds:
            self._step_folded(divisor)
        else:
            self._step_in_place(gradients, divisor)

    def _examine(self, gradients: Sequence[Tensor], divisor: Tensor | None) -> None:
        """Set `found_inf` and `grad_norm`."""
        if self._agreed is not None:
            agreed, self._agreed, self.norms = self._agreed, None, []
            self._judge(agreed, divisor)
            return
        self.norms = grads.norms(gradients)
        self._judge(grads.together(self.norms, self._device), divisor)
        if self.flag.on_host and self.flag.read():
            # Perhaps only the float32 sum of squares overflowed. Looking costs no sync here.
            self._judge(grads.wide_norm(gradients, self._device), divisor)

    def _judge(self, norm: Tensor, divisor: Tensor | None) -> None:
        """Raise `found_inf` if the norm of the scaled gradients is not finite, and unscale it."""
        inverse = self._one if divisor is None else divisor.reciprocal()
        self.found_inf.zero_()
        # Both in one kernel on one element.
        torch._amp_foreach_non_finite_check_and_unscale_([norm], self.found_inf, inverse)
        if norm.dtype == torch.float64:
            norm = norm.clamp(max=_LARGEST).to(torch.float32)
        self.grad_norm = norm

    def _step_folded(self, divisor: Tensor | None) -> None:
        grad_scale = divisor
        if self.max_norm is not None:
            # 1 / coefficient: how many times too long the gradient is.
            excess = ((self.grad_norm + _EPS) / self.max_norm).clamp_(min=1.0)
            grad_scale = excess if divisor is None else divisor * excess
        # Where the host knows, the kernel need not be asked to skip.
        if self.flag.on_host and self.flag.read():
            return
        found_inf = None if self.flag.on_host else self.found_inf
        for optimizer in self.optimizers:
            optim.step_folded(optimizer, grad_scale, found_inf)

    def _step_in_place(self, gradients: Sequence[Tensor], divisor: Tensor | None) -> None:
        """The general path: true, clipped gradients in ``.grad``, and the host decides."""
        if self.flag.read():
            return
        factor = None
        if self.max_norm is not None:
            factor = (self.max_norm / (self.grad_norm + _EPS)).clamp_(max=1.0)
        if divisor is not None:
            factor = divisor.reciprocal() if factor is None else factor / divisor
        if factor is not None:
            grads.multiply_(gradients, factor)
        for optimizer in self.optimizers:
            optimizer.step()
