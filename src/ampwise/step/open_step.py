"""What there is of a step that is not over: its window, gradients, decisions, and buffers.

It has begun as soon as there are gradients that nobody has stepped on. It is over when it closes;
or it is dropped, and then the models are as before its first forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ampwise.step.attempt import Attempt
from ampwise.step.buffers import BufferGuard
from ampwise.step.host import HostFlag
from ampwise.step.members import Members
from ampwise.step.pending import Pending
from ampwise.step.state import OpenState
from ampwise.step.warn import warn_user
from ampwise.step.window import Window


class OpenStep:
    """The parts of an open step, which begin, are saved, and are dropped together.

    Parameters
    ----------
    members
        What is trained.
    pending
        What becomes of their gradients.

    Attributes
    ----------
    window
        What share each micro-batch has.
    pending
        The gradients, and the decisions so far.
    buffers
        Those that forward writes, as they were.
    attempt
        The call that is under way, which an error takes back; None between calls.
    """

    def __init__(self, members: Members, pending: Pending) -> None:
        self._members = members
        self.window = Window()
        self.pending = pending
        self.buffers = BufferGuard(members)
        self.attempt: Attempt | None = None

    @property
    def begun(self) -> bool:
        """Whether there are gradients that nobody has stepped on."""
        return self.window.position > 0 or self.pending.is_open

    def try_call(self, drop: Callable[[], None], *, begins: bool, forward: bool) -> Attempt:
        """Context of a call: an error leaves the step as before it.

        Parameters
        ----------
        drop
            Drops the step, where that cannot be had.
        begins
            Whether the step begins with this call.
        forward
            Whether the call makes a forward, which writes buffers.
        """
        back = self.buffers.before(begins=begins) if forward else None
        self.attempt = Attempt(self.window, self.pending, back, drop, self._end_attempt)
        return self.attempt

    def _end_attempt(self) -> None:
        self.attempt = None

    def drop_earlier_gradients(self) -> None:
        """Have it begin without gradients: those of before are of no known scale."""
        earlier = [(each, each.grad) for each in self._members.held if each.grad is not None]
        if not earlier:
            return
        for parameter, _ in earlier:
            parameter.grad = None
        lost = [id(each) for each, gradient in earlier if gradient.is_sparse or gradient.any()]
        if lost:
            names = {id(each): name for name, each in self._members.named().items()}
            shown = ", ".join([names[each] for each in lost[:3]])
            more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
            warn_user(
                f"gradients of {shown}{more} were there before the step's first backward, from "
                "another loop, loss.backward(), or a time when no optimizer held the parameter; "
                "they are dropped: train with step.backward(loss), and call zero_grad() before"
            )

    def drop(self) -> None:
        """Drop it; buffers stay as they are."""
        self.buffers.forget()
        self.window.close()
        self.pending.clear()
        for parameter in self._members.held:
            parameter.grad = None

    def state(self) -> OpenState | None:
        """What there is of it, copied; None if it has not begun."""
        if not self.begun:
            return None
        named, pending = self._members.named(), self.pending
        carried = pending.carried
        return OpenState(
            window=self.window.state_dict(),
            gradients={n: e.grad.clone() for n, e in named.items() if e.grad is not None},
            unscaled=sorted(pending.unscaled),
            found=[each.tensor.clone() for each in pending.found],
            norms=[each.clone() for each in pending.norms],
            carried={n: carried[e].clone() for n, e in named.items() if e in carried},
            buffers=self.buffers.state_dict(),
        )

    def load(self, state: OpenState, named: Mapping[str, Tensor], device: torch.device) -> None:
        """Go on with one whose parameters have these names; decisions are taken on `device`."""
        pending = self.pending
        self.window.load_state_dict(state.window)
        self.buffers.load_state_dict(state.buffers)
        pending.unscaled = set(state.unscaled)
        pending.found = [HostFlag(each.to(device)) for each in state.found]
        pending.norms = [each.to(device) for each in state.norms]
        for name, gradient in state.gradients.items():
            named[name].grad = gradient.to(named[name].device, copy=True)
        for name, gradient in state.carried.items():
            pending.carried[named[name]] = gradient.to(named[name].device, copy=True)
