"""Losses as functions of module calls: what a tape makes of the code between them."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from ampwise.observe.calls import Calls
from ampwise.observe.spots import call_from, spots_here
from ampwise.observe.tape import NoProgramError, Tape, Values
from ampwise.places import is_internal


class Taped:
    """Calls a model as a script would, and makes a program of a loss."""

    def __init__(self, model):
        self.model, self.calls, self.tape = model, Calls(), Tape("cpu")

    def __call__(self, *args):
        self.tape.switch(on=False)
        self.calls.begin(self.model, args, {})
        call = self.calls.end(output := self.model(*args))
        assert call is not None
        self.tape.called(call)
        self.tape.switch(on=True)
        return output

    def program(self, loss):
        self.tape.switch(on=False)
        ended = self.calls.backward(loss, ())
        program = self.tape.program(loss, ended, [])
        self.tape.forget()
        return program, ended

    def loss_again(self, program, of):
        return program.run(Values([], []), of, [], torch.device("cpu"))


@pytest.fixture
def taped():
    torch.manual_seed(0)
    taped = Taped(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)))
    yield taped
    taped.tape.switch(on=False)
    assert not _get_current_function_mode_stack()


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(6, 4, generator=generator), torch.randint(0, 3, (6,), generator=generator)]


def entropy(out, y):
    return F.cross_entropy(F.dropout(out, 0.3), y) + 0.1 * out.square().mean()


def penalised(out, _):
    (gradient,) = torch.autograd.grad(out.sum(), out, create_graph=True)
    return (out * gradient).mean()


def written(out, y):
    total = torch.zeros(6)
    total += F.cross_entropy(out, y, reduction="none")
    total[0] = 0.0
    return total.mean()


@pytest.mark.parametrize("loss_of", [entropy, penalised, written, lambda out, _: out.mean()])
def test_a_program_gives_the_loss_of_another_step_to_the_bit(taped, loss_of):
    x, y = data = batch()
    taped.calls.batch(data)
    program, _ = taped.program(loss_of(taped(x), y))
    x, y = data = batch(1)
    taped.calls.batch(data)
    loss = loss_of(taped(x), y)
    _, of = taped.program(loss)
    state = torch.get_rng_state()
    again = taped.loss_again(program, of)
    torch.set_rng_state(state)
    assert torch.equal(again, loss)
    wanted = torch.autograd.grad(loss, [*taped.model.parameters()])
    found = torch.autograd.grad(again, [*taped.model.parameters()])
    assert all(map(torch.equal, wanted, found))


def test_writing_into_what_was_there_before_is_refused(taped):
    x, y = batch()
    history = torch.zeros(6)
    history += F.cross_entropy(taped(x), y, reduction="none")
    with pytest.raises(
        NoProgramError, match=r"line \d+ writes into a tensor that was there before"
    ):
        taped.program(history.mean())


def test_what_the_loss_does_not_need_is_left_out(taped):
    x, y = batch()
    out = taped(x)
    out.argmax(1).eq(y).float().mean()  # an accuracy
    program, _ = taped.program(F.cross_entropy(out, y))
    assert [type(each).__name__ for each in program.nodes.values()] == ["Called", "Operation"]


class Counting(TorchFunctionMode):
    """A script's own mode."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_modes_of_the_script_come_and_go_as_ever(taped):
    x, _ = batch()
    with Counting() as outer:
        out = taped(x)
        inner = Counting()
        with inner:
            assert _get_current_function_mode_stack() == [taped.tape, outer, inner]
            loss = out.sum()
        assert _get_current_function_mode_stack() == [taped.tape, outer]
    assert _get_current_function_mode_stack() == [taped.tape]
    loss.backward()
    taped.program(loss)
    assert not _get_current_function_mode_stack()


def test_a_call_from_a_spot_looks_as_if_it_came_from_there():
    def here():
        frame = sys._getframe(0)
        return frame, spots_here(frame)

    def look():
        """The innermost frame that is the user's, as an intervention looks for it."""
        frame = sys._getframe(1)
        while is_internal(frame.f_code.co_filename):
            frame = frame.f_back
        return frame

    frame, spots = here()
    seen = call_from(spots, look, (), {})
    assert seen is not frame
    assert seen.f_code.co_filename == __file__
    lines = [line for *_, line in seen.f_code.co_lines() if line]
    assert (min(lines), max(lines)) == (spots[-1].first, spots[-1].last)
    assert spots[-1].line in lines


@pytest.mark.parametrize("in_the_loss", [False, True])
def test_random_states_are_kept_only_for_what_the_loss_draws(taped, in_the_loss):
    """A batch that is drawn is there; noise in the loss has to be drawn again, after all before."""
    _, y = batch()
    taped.tape.switch(on=True)
    x = torch.randn(6, 4)
    out = taped(x)
    spare = torch.rand(3)
    loss = F.cross_entropy(out + torch.randn(3) if in_the_loss else out, y)
    program, ended = taped.program(loss)
    assert program.draws is in_the_loss
    torch.rand(1)
    assert torch.equal(taped.loss_again(program, ended), loss)
    del spare
