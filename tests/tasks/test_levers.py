"""Levers: the same training with each of them, under the same names, or a reason why not."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ampwise.bench.arm import Arm, Settings
from ampwise.bench.memory import peak_bytes
from ampwise.cli.main import main
from ampwise.errors import LeverError, UsageError
from ampwise.policy import Policy
from ampwise.tasks import Task, load_task
from ampwise.tasks.levers import blocks_of, pulled, spelled
from ampwise.telemetry.run import read_steps

SETTINGS = Settings(torch.device("cpu"))
TINY = {"size": "tiny", "batch": "2", "context": "16"}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.drop, self.b = nn.Linear(16, 64), nn.Dropout(0.5), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.b(self.drop(torch.relu(self.a(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def blocky(optimizer=None, model=Net, levers=None) -> Task:
    def batches():
        generator = torch.Generator().manual_seed(0)
        for _ in range(5):
            yield torch.randn(64, 16, generator=generator)

    return Task(
        name="blocky",
        model=model,
        batches=batches,
        loss=lambda net, x: net(x).float().square().mean(),
        optimizer=optimizer,
        levers=levers or {},
    )


def images(model=None) -> Task:
    def batches():
        for _ in range(3):
            yield torch.ones(4, 3, 8, 8), torch.zeros(4, dtype=torch.long)

    net = lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(288, 4))  # noqa: E731
    return Task(
        name="images",
        model=model or net,
        batches=batches,
        loss=lambda net, pair: F.cross_entropy(net(pair[0]), pair[1]),
    )


def after(task: Task, policy: str, steps: int = 3) -> dict[str, torch.Tensor]:
    arm = Arm(task, Policy.parse(policy), SETTINGS)
    for batch in [*task.batches()][:steps]:
        torch.manual_seed(1)  # of dropout
        arm.run(batch)
    return arm.model.state_dict()


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert list(first) == list(second)
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], atol=1e-5, rtol=1e-4)


def test_blocks_are_repeated_and_made_of_modules():
    assert list(blocks_of(Net())) == ["blocks.0", "blocks.1", "blocks.2"]
    assert blocks_of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == {}
    nested = nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block()))
    assert list(blocks_of(nested)) == ["0", "1"]
    lists = nn.ModuleList([nn.ModuleList([Block(), Block()]), nn.ModuleList([Block(), Block()])])
    assert list(blocks_of(lists)) == ["0.0", "0.1", "1.0", "1.1"]
    assert list(blocks_of(nn.Sequential(Block(), nn.Linear(2, 2)))) == []


@pytest.mark.parametrize("policy", ["fp32", "bf16", "bf16-master", "bf16:islands=blocks.1"])
def test_checkpointing_trains_the_same_in_less_memory(policy):
    task = blocky()
    small = pulled(task, ["checkpointing"])
    same(after(task, policy), after(small, policy))
    batches = list(task.batches())
    peaks = [
        peak_bytes(
            lambda each=each: Arm(each, Policy.parse(policy), SETTINGS), batches, SETTINGS.device
        )
        for each in (task, small)
    ]
    assert peaks[1] < peaks[0]


def test_a_checkpointed_model_is_copied_and_evaluated_like_any_other():
    model = pulled(blocky(), ["checkpointing"]).model()
    clone, x = copy.deepcopy(model), torch.randn(4, 16)
    with torch.no_grad():
        clone.blocks[0].a.weight.zero_()
        clone.eval(), model.eval()
        assert not torch.equal(clone(x), model(x))
    assert type(model.blocks[0]).__name__ == "Block"


@pytest.mark.parametrize("model", [Net, lambda: nn.Sequential(nn.Linear(16, 8), nn.ReLU())])
def test_compiled_in_place_means_compiled_and_keeps_every_name(monkeypatch, model):
    graphs: list[int] = []
    plain = torch.compile

    def counting(graph, inputs):
        def run(*args):
            graphs.append(1)
            return graph.forward(*args)

        return run

    monkeypatch.setattr(torch, "compile", lambda call: plain(call, backend=counting))
    task = blocky(model=model)
    wanted = after(task, "bf16")
    # More tasks than the compiler takes variants of one function.
    for _ in range(10):
        graphs.clear()
        same(wanted, after(pulled(task, ["compile"]), "bf16"))
        assert len(graphs) >= 3
    torch._dynamo.reset()


def test_models_of_a_task_share_what_is_compiled(monkeypatch):
    made: list[int] = []
    plain = torch.compile

    def counting(graph, inputs):
        made.append(1)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda call: plain(call, backend=counting))
    task = pulled(load_task("charlm", TINY), ["chunked-loss", "compile"])
    for _ in range(3):
        after(task, "bf16", steps=1)
    torch._dynamo.reset()
    assert len(made) == 1  # for two blocks in each of three models


def test_a_loss_that_calls_past_the_model_runs_compiled_blocks(monkeypatch):
    graphs: list[int] = []
    plain = torch.compile

    def counting(graph, inputs):
        def run(*args):
            graphs.append(1)
            return graph.forward(*args)

        return run

    monkeypatch.setattr(torch, "compile", lambda call: plain(call, backend=counting))
    task = load_task("charlm", TINY)
    after(pulled(task, ["chunked-loss", "compile"]), "fp32", steps=1)
    torch._dynamo.reset()
    assert len(graphs) >= 2  # one for each block


def test_a_fused_optimizer_is_the_same_optimizer():
    def grouped(model):
        first, *rest = model.parameters()
        groups = [{"params": [first], "lr": 0.5}, {"params": rest}]
        return torch.optim.AdamW(groups, lr=0.1, weight_decay=0.3, betas=(0.8, 0.9))

    task = blocky(grouped)
    fused = pulled(task, ["fused-optimizer"])
    optimizer = fused.optimizer(fused.model())
    assert [each["fused"] for each in optimizer.param_groups] == [True, True]
    assert [each["lr"] for each in optimizer.param_groups] == [0.5, 0.1]
    same(after(task, "fp32"), after(fused, "fp32"))


def test_channels_last_is_in_weights_and_batches():
    seen = []

    class Looks(nn.Conv2d):
        def forward(self, x):
            seen.append(x.is_contiguous(memory_format=torch.channels_last))
            return super().forward(x)

    net = lambda: nn.Sequential(Looks(3, 8, 3), nn.Flatten(), nn.Linear(288, 4))  # noqa: E731
    task = images(net)
    found = after(pulled(task, ["channels-last"]), "fp32")
    assert seen == [True] * 3
    same(after(task, "fp32"), found)


def test_a_larger_batch_holds_several_in_their_order():
    task = pulled(blocky(), ["batch=2"])
    sizes = [len(each) for each in task.batches()]
    assert sizes == [128, 128, 64]
    assert torch.equal(torch.cat([*task.batches()]), torch.cat([*blocky().batches()]))


def test_a_task_s_own_lever_comes_first_and_its_loss_is_the_loss():
    task = load_task("charlm", TINY)
    assert spelled("compile, chunked-loss,batch=2") == ("chunked-loss", "batch=2", "compile")
    variant = pulled(task, ["batch=2", "chunked-loss"])
    model, batch = task.model(), next(iter(variant.batches()))
    assert len(batch) == 4
    assert variant.loss is not task.loss
    torch.testing.assert_close(task.loss(model, batch), variant.loss(model, batch))


@pytest.mark.parametrize(
    ("lever", "task", "why"),
    [
        ("checkpointing", images(), "no repeated blocks"),
        ("channels-last", blocky(), "no 2d convolution"),
        ("fused-optimizer", blocky(), "no optimizer that has it and is not fused yet"),
    ],
)
def test_a_lever_that_does_not_fit_says_why(lever, task, why):
    with pytest.raises(LeverError, match=why):
        Arm(pulled(task, [lever]), Policy.parse("fp32"), SETTINGS)


def test_batches_that_cannot_be_joined_say_so():
    def scalars():
        yield {"x": torch.ones(2, 3), "n": torch.tensor(1.0)}

    task = pulled(Task(model=Net, batches=scalars, loss=lambda *_: torch.ones(())), ["batch=2"])
    with pytest.raises(UsageError, match="lever batch=2 does not fit: batches cannot be joined"):
        next(iter(task.batches()))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("compil", "expected some of chunked-loss, batch=N, .*, got 'compil'; did you mean"),
        ("batch=1", "expected batch=N"),
        ("batch", "expected batch=N"),
        ("compile,compile", "compile is given twice"),
        ("batch=2,batch=4", "batch is given twice"),
    ],
)
def test_a_wrong_lever_is_one_line(text, said, capsys):
    with pytest.raises(UsageError, match=said):
        pulled(load_task("charlm", TINY), text.split(","))
    assert main(["train", "--levers", text, "--steps", "1"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_train_pulls_them_and_a_resumed_run_goes_on_with_them(tmp_path, capsys):
    out = tmp_path / "run"
    common = ["train", "charlm", "--set", "batch=2", "--set", "context=16", "--quiet"]
    first = ["--levers", "checkpointing,batch=3", "--precision", "fp32", "--steps", "2"]
    assert main([*common, *first, "--out", str(out)]) == 0
    assert main([*common, "--resume", "--out", str(out), "--steps", "4"]) == 0
    record = json.loads((out / "run.json").read_text())
    assert record["options"]["levers"] == "checkpointing,batch=3"
    assert record["config"]["batch_size"] == 2 * 16 * 3
    assert [each["step"] for each in read_steps(out) if "train/loss" in each] == [1, 2, 3, 4]
