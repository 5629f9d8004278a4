"""Gradients on their way from backward to the optimizers, and the decisions about them.

Backward leaves them scaled. They become true in the optimizer's own kernel or just before it; or
earlier, in place, where somebody wants to look at them, or the scale changes under those of an
optimizer that does not step. True ones cannot be added to by the next scaled backward: they are
carried along beside it, and added in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampwise.errors import UsageError
from ampwise.step.guard import Guard
from ampwise.step.host import HostFlag
from ampwise.step.members import Members


class Pending:
    """What became of the gradients of each optimizer since it last stepped.

    Parameters
    ----------
    members
        Whose gradients they are.
    device
        Where decisions are taken.
    max_grad_norm
        Limit of the norm of those that step together; None for no clipping.
    together
        Whether optimizers that update together are skipped together.
    make_step
        Makes an optimizer's step, its own being given.

    Attributes
    ----------
    unscaled
        Optimizers, by position, whose gradients are true already.
    carried
        True gradients of earlier steps, by parameter, beside scaled ones.
    found, norms
        found_inf and norm of each decision in this step that was about something.
    empty
        The same of a decision about losses that count nothing; None if there was none.
    """

    def __init__(
        self,
        members: Members,
        device: torch.device,
        max_grad_norm: float | None,
        *,
        together: bool,
        make_step: Callable[[Optimizer, Callable[[], object]], object],
    ) -> None:
        self._members = members
        self._device = device
        self.max_grad_norm = max_grad_norm
        self._together, self.make_step = together, make_step
        self._guards: dict[tuple[int, ...], Guard] = {}
        self.clear()

    def clear(self) -> None:
        """Forget what was decided, and which gradients are true."""
        self.unscaled: set[int] = set()
        self.carried: dict[Tensor, Tensor] = {}
        self.found: list[HostFlag] = []
        self.norms: list[Tensor] = []
        self.empty: tuple[HostFlag, Tensor] | None = None

    @property
    def is_open(self) -> bool:
        """Whether there are true gradients, or decisions that the step's end waits for."""
        return bool(self.unscaled or self.carried or self.found or self.empty)

    @property
    def has_decided(self) -> bool:
        """Whether any decision of this step was taken."""
        return bool(self.found or self.empty)

    def forget_guards(self) -> None:
        """Have decisions be about other optimizers from now on."""
        self._guards.clear()

    def moment(self) -> dict[str, Any]:
        """Its state, for `restore`."""
        return {
            "unscaled": self.unscaled.copy(),
            "carried": self.carried.copy(),
            "found": self.found.copy(),
            "norms": self.norms.copy(),
            "empty": self.empty,
        }

    def restore(self, moment: Mapping[str, Any]) -> None:
        """Be as at a moment."""
        vars(self).update(moment)

    def sets(self, chosen: Sequence[int]) -> list[tuple[int, ...]]:
        """The sets of optimizers that decide together: all in one, or each in its own."""
        return [tuple(chosen)] if self._together else [(each,) for each in chosen]

    def guard(self, indices: tuple[int, ...]) -> Guard:
        """Who decides about a set of optimizers."""
        if indices not in self._guards:
            together = [self._members.optimizers[index] for index in indices]
            self._guards[indices] = Guard(
                together, self._device, self.max_grad_norm, self.make_step
            )
        return self._guards[indices]

    def with_gradients(self, indices: Iterable[int]) -> list[int]:
        """Those of some optimizers that have gradients which are still scaled."""
        return [
            index
            for index in indices
            if index not in self.unscaled
            and any(each.grad is not None for each in self._members.held_at([index]))
        ]

    def unscale(self, indices: Sequence[int], divisor: Tensor | None) -> None:
        """Make gradients true, in place, and add to them those carried along."""
        if divisor is not None and indices:
            self.guard(tuple(indices)).divide_(divisor)
        for parameter in self._members.held_at(indices) if self.carried else ():
            if (carried := self.carried.pop(parameter, None)) is not None:
                parameter.grad = carried if parameter.grad is None else parameter.grad + carried
        self.unscaled.update(indices)

    def make_way(self, chosen: Iterable[int], whose: frozenset[int]) -> None:
        """A scaled backward comes: carry true gradients along beside it.

        Raises
        ------
        UsageError
            When they are of the same window, whose gradients somebody has looked at.
        """
        if not self.unscaled:
            return
        true = self.unscaled.intersection(chosen)
        if true & whose:
            raise UsageError(
                "backward() after gradients() in one window: those gradients are unscaled already; "
                "call update() first, or look at gradients after the last backward of the window"
            )
        for parameter in self._members.held_at(true):
            if parameter.grad is not None:
                self.carried[parameter], parameter.grad = parameter.grad, None
        self.unscaled -= true

    def decide(
        self,
        indices: tuple[int, ...],
        divisor: Callable[[], Tensor | None],
        agree: Callable[[Guard], None],
        *,
        keep: bool,
    ) -> Guard:
        """Step with one set of optimizers, or skip it; its gradients are used up.

        Parameters
        ----------
        divisor
            Gives what turns scaled gradients into true ones, once ranks have agreed.
        agree
            Has all ranks decide alike.
        keep
            Whether gradients stay as they are if an optimizer raises.
        """
        guard = self.guard(indices)
        agree(guard)
        if self.carried or self.unscaled.intersection(indices):
            self.unscale([each for each in indices if each not in self.unscaled], divisor())
            agree(guard)  # the norm is another one now
        are_true = not self.unscaled.isdisjoint(indices)
        guard.step(None if are_true else divisor(), keep=keep)
        self.unscaled.difference_update(indices)
        for parameter in self._members.held_at(indices):
            parameter.grad = None
        return guard

    def note(self, flag: HostFlag, norm: Tensor, *, is_nothing: bool) -> None:
        """Remember a decision until the step's end."""
        if is_nothing:
            self.empty = flag, norm
        else:
            self.found.append(flag)
            self.norms.append(norm)

    def outcome(self) -> tuple[HostFlag, Tensor, bool]:
        """found_inf and norm over all decisions of the step, which are then forgotten.

        Returns
        -------
        tuple
            found_inf, norm, and whether any decision was about something.
        """
        found, norms, empty = self.found, self.norms, self.empty
        self.found, self.norms, self.empty = [], [], None
        if not found:
            assert empty is not None
            return *empty, False
        flag, norm = found[0], norms[0]
        if len(found) > 1:
            flag = HostFlag(torch.stack([each.tensor for each in found]).amax())
            norm = torch.linalg.vector_norm(torch.stack(norms))
        return flag, norm, True
