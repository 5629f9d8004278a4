"""What a replay runs again, and what it leaves out."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ampwise.step import TrainStep
from ampwise.step.recorder import Recorder, finite
from ampwise.step.replay import Replay


def recorded(accumulate=2):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.0), policy="bf16",
                     accumulate=accumulate)  # fmt: skip
    step.recorder = recorder = Recorder()
    for _ in range(accumulate):
        step(lambda m, x: m(x).float().square().mean(), torch.randn(6, 4))
    return step, recorder.closed


def test_a_replay_of_forwards_alone_gives_the_losses_and_no_gradient():
    step, stash = recorded()
    whole, forwards = Replay(step).replay(stash), Replay(step).replay(stash, backward=False)
    assert [float(each) for each in forwards.losses] == [float(each) for each in stash.losses]
    assert [float(each) for each in whole.losses] == [float(each) for each in stash.losses]
    assert forwards.gradients == {}
    assert len(whole.gradients) == 4
    assert forwards.error is None
    assert forwards.forward_s > 0


def test_forwards_alone_leave_the_step_as_it_was():
    step, stash = recorded()
    before = torch.get_rng_state()
    Replay(step).replay(stash, backward=False)
    assert torch.equal(torch.get_rng_state(), before)
    assert (step.position, step.boundary) == (0, True)
    assert step.recorder.closed is stash
    assert all(each.grad is None for each in step.model.parameters())


def test_a_replay_may_end_at_the_first_loss_that_is_not_finite():
    step, stash = recorded(accumulate=3)
    again = Replay(step)
    seen: list[torch.Tensor] = []

    def change(x):
        seen.append(x)
        return x * float("inf") if len(seen) == 2 else x

    ended = again.replay(stash, change=change, until_bad=True)
    assert len(seen) == len(ended.losses) == 2
    assert not ended.clean
    assert ended.error is None
    assert all(map(finite, ended.gradients.values()))  # of the first: no backward carried it on
    seen.clear()
    assert not all(map(finite, again.replay(stash, change=change).gradients.values()))
    whole, until_bad = again.replay(stash), again.replay(stash, until_bad=True)
    assert until_bad.clean
    assert all(map(torch.equal, until_bad.norms, whole.norms))


class Refusing(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x):
        raise RuntimeError(f"no: {self.lin(x).shape}")


def test_a_replay_that_raises_in_a_checkpointed_forward_leaves_no_hooks():
    model = Refusing()
    step = Replay(TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.0), policy="fp32"))

    def loss(model, x):
        return checkpoint(model, x, use_reentrant=False).sum()

    stash = step.rehearsal(lambda again, x: again.micro_batch(loss, x), [torch.randn(2, 4)])
    result = step.replay(stash)
    assert isinstance(result.error, RuntimeError)  # alive, and its frames with it
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
