"""How each pass of a script computes its loss: looked at in the first steps, kept for all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampwise.observe.calls import Call, Calls, Pass
from ampwise.observe.tape import NoProgramError, Program, Tape

_LOOKS = 2
"""Updates of each optimizer up to which it is looked."""
_MOST_LOOKS, _MORE_LOOKS = 16, 3
"""Updates of all, where some optimizer is used once only; and after steps that do not fit."""


class Programs:
    """What is known of how losses are computed.

    Attributes
    ----------
    compiles
        Whether code outside of modules is compiled: it must not be looked at.
    """

    def __init__(self) -> None:
        self.compiles = False
        self._why_not = "how it is computed was not seen"
        self._tape: Tape | None = None
        self._updates: Counter[int] = Counter()
        self._early = True
        self._more = _MORE_LOOKS
        self._again = False
        self._known: dict[tuple[int, int], Program] = {}
        self._draws = False
        self._missed = False

    @property
    def why_not(self) -> str:
        """Why the last loss is not known as a function."""
        if self.compiles:
            return "code outside of modules is compiled, and not looked into"
        return self._why_not

    @property
    def draws(self) -> bool:
        """Whether losses may depend on random numbers drawn outside of modules."""
        return self._draws or self._looks

    @property
    def known(self) -> bool:
        """Whether all losses that were looked at are known and alike, and no more are looked at."""
        return bool(self._known) and not self._missed and not self._looks

    def call_begins(self) -> None:
        """A module is about to run, under no mode of ours."""
        if self._tape is not None:
            self._tape.switch(on=False)

    def call_ends(self, call: Call | None, device: torch.device | None) -> None:
        """It returned; what follows is its script's."""
        if self._tape is None and self._looks and call is not None and device is not None:
            self._tape = Tape(device.type)
        if self._tape is not None:
            if call is not None:
                self._tape.called(call)
            self._tape.switch(on=True)

    def backward_begins(self, ended: Pass, loss: Tensor | None, calls: Calls) -> None:
        """A loss is there, still in its graph."""
        if self._tape is None:
            return
        self._tape.switch(on=False)
        if loss is None:
            self._why_not = "backward was called on more than one number"
        else:
            try:
                before = [*calls.earlier, *calls.passes[:-1]]
                known = [call for each in before for call in each.calls]
                ended.program = self._tape.program(loss, ended, known)
            except NoProgramError as error:
                self._why_not = str(error)
        self._tape.forget()

    def backward_ends(self) -> None:
        """The next pass begins."""
        if self._tape is not None:
            self._tape.switch(on=True)

    def updated(self, optimizer: Optimizer, passes: Sequence[Pass]) -> None:
        """An update was made or skipped, after some passes."""
        self._updates[id(optimizer)] += 1
        if self._early or self._updates[id(optimizer)] == 1:
            few = min(self._updates.values()) < _LOOKS
            self._early = few and self._updates.total() < _MOST_LOOKS
        for position, each in enumerate(passes):
            self._missed |= self._tape is not None and each.program is None
            if each.program is not None:
                before = self._known.get((id(optimizer), position))
                self._missed |= before is not None and before.differs(each.program)
                self._known[id(optimizer), position] = each.program
                self._draws |= each.program.draws
        if self._tape is None:
            return
        self._again = False
        if not self._looks:
            self.stop()
        else:
            self._tape.forget()
            self._tape.switch(on=True)

    def stop(self) -> None:
        """Look no longer."""
        if self._tape is not None:
            self._tape.switch(on=False)
            self._tape = None

    def pause(self) -> None:
        """The script waits."""
        if self._tape is not None:
            self._tape.switch(on=False)

    def look_again(self) -> None:
        """Look at the next step, too: what is known does not hold in this one."""
        if self._more:
            self._more -= 1
            self._again = True

    def of(self, optimizer: Optimizer, passes: Sequence[Pass]) -> list[Program] | None:
        """How each of some passes computes its loss; None where it is not known of all."""
        found: list[Program] = []
        for position, each in enumerate(passes):
            known = self._known.get((id(optimizer), position))
            candidates = (each.program, known, *self._known.values())
            fits = (one for one in candidates if one is not None and one.fits(each))
            if (program := next(fits, None)) is None:
                return None
            found.append(program)
        return found

    @property
    def _looks(self) -> bool:
        """Whether the open step is looked at."""
        return (self._early or self._again) and not self.compiles
