"""A call that raises leaves a step as before it: what that takes.

Shares and decisions are copied, which costs next to nothing. Buffers are copied by `BufferGuard`
anyway where a window begins, and once more in its later micro-batches. Gradients that are there
already are set aside while backward makes new ones, and are then added to these. Autograd would add
each new gradient to its old one as it comes and let it go, so this holds a second set of gradients
at the end of backward. Where that is too much (``undo="window"``), and on several ranks, whose sums
nobody can take apart, the whole window is dropped instead.

Not taken back is what an optimizer's own ``step`` did before it raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from ampwise.step.pending import Pending
from ampwise.step.window import Window


class SetAside:
    """Gradients that are there before a backward, to be added to what it makes.

    Parameters
    ----------
    parameters
        Whose gradients they are. One with hooks that look at the sum of its gradients keeps it in
        place, and a copy is set aside.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._before = [(each, each.grad) for each in parameters]
        self._in_place: set[int] = set()
        self._some = bool([1 for _, gradient in self._before if gradient is not None])

    def take(self) -> None:
        """Set them aside: an error from now on needs `put_back`."""
        if self._some:
            self._take()

    def _take(self) -> None:
        before = {id(parameter): (parameter, gradient) for parameter, gradient in self._before}
        self._before = list(before.values())  # each once
        for index, (parameter, gradient) in enumerate(self._before):
            if gradient is not None and getattr(parameter, "_post_accumulate_grad_hooks", None):
                self._in_place.add(id(parameter))
                self._before[index] = parameter, gradient.clone()
            else:
                parameter.grad = None

    def add_back(self) -> None:
        """Add them to the new ones."""
        if self._some:
            with torch.no_grad():
                self._add()

    def _add(self) -> None:
        new: list[Tensor] = []
        old: list[Tensor] = []
        for parameter, gradient in self._before:
            fresh = parameter.grad
            if gradient is None or id(parameter) in self._in_place:
                continue
            if fresh is None:
                # A copy: what decides may change it in place before an error puts this one back.
                parameter.grad = gradient.clone()
            elif gradient.is_sparse or fresh.is_sparse:
                parameter.grad = gradient + fresh
            else:
                new.append(fresh)
                old.append(gradient)
        if new:
            torch._foreach_add_(new, old)

    def put_back(self) -> None:
        """Have the gradients be as before."""
        for parameter, gradient in self._before:
            parameter.grad = gradient


class Attempt:
    """Context of a call: if it raises, the step is as before.

    Parameters
    ----------
    window, pending
        What is put back.
    buffers_back
        Puts the buffers back; None for calls without a forward.
    drop
        Drops the open window.
    over
        Called when the outermost context ends; it may be entered inside itself.
    """

    def __init__(
        self,
        window: Window,
        pending: Pending,
        buffers_back: Callable[[], None] | None,
        drop: Callable[[], None],
        over: Callable[[], None],
    ) -> None:
        self._window = window
        self._pending = pending
        self._buffers_back = buffers_back
        self._drop = drop
        self._over = over
        self._aside: SetAside | None = None
        self._reached: Sequence[Tensor] = ()
        self._lost = False
        self._depth = 0
        # Where nothing is open yet there is nothing to remember.
        is_open = window.position or pending.is_open
        self._before = (window.moment(), pending.moment()) if is_open else None

    def begin_backward(self, parameters: Sequence[Tensor], *, exact: bool) -> None:
        """A backward is about to add to the gradients of some parameters."""
        self._lost = not exact
        self._reached = parameters
        if exact and self._before is not None:  # else a window begins, and there are none
            self._aside = SetAside(parameters)
            self._aside.take()

    def end_backward(self) -> None:
        """It is done."""
        if self._aside is not None:
            self._aside.add_back()

    def __enter__(self) -> Self:
        self._depth += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._depth -= 1
        if not self._depth:
            self.end(error)

    def end(self, error: BaseException | None) -> None:
        """The call is over; it has raised `error`, if that is one."""
        self._over()
        if error is not None:
            self._undo()

    def _undo(self) -> None:
        if self._lost:
            self._drop()
            return
        if self._before is None:
            self._window.close()
            self._pending.clear()
            for parameter in self._reached:
                parameter.grad = None
        else:
            self._window.restore(self._before[0])
            self._pending.restore(self._before[1])
        if self._buffers_back is not None:
            self._buffers_back()
        if self._aside is not None:
            self._aside.put_back()
