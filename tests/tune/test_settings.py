"""The fastest and the smallest setting: halving, levers together, a file that train takes."""

from __future__ import annotations

import json
import time
import tomllib

import pytest
import torch
from torch import nn

from ampwise.bench.arm import Arm, Settings
from ampwise.cli.main import main
from ampwise.document import load
from ampwise.policy import Policy
from ampwise.report.tune import _credit
from ampwise.stats import Interval
from ampwise.tasks import load_task
from ampwise.tune import settings as search_module
from ampwise.tune import turns as turns_module
from ampwise.tune.islands import _Call, _places, faster_in_float32
from ampwise.tune.result import Tuned
from ampwise.tune.setting import PLAIN, Setting, to_toml
from ampwise.tune.settings import SearchConfig, search_settings
from ampwise.tune.turns import Turns
from tests.tasks.test_levers import Block, blocky

CPU = Settings(torch.device("cpu"))


class Silent:
    def stage(self, what):
        pass

    def round(self, race):
        pass

    def seed(self, name, seed, planned):
        pass


def setting(text: str) -> Setting:
    policy, *levers = text.split(" + ")
    return Setting(Policy.parse(policy), tuple(levers))


@pytest.fixture
def made_up(monkeypatch):
    """Races whose times come from a table of milliseconds; what was raced is noted."""
    raced: list[tuple[list[str], int]] = []

    def given(step_ms, interrupt_at=None):
        def run_race(arms, batches, race, *, max_rounds, **_):
            names = [arm.name for arm in arms]
            raced.append((names, max_rounds))
            if interrupt_at is not None and len(raced) == interrupt_at:
                raise KeyboardInterrupt
            race.baseline, race.started = names[0], 1.0
            for name in names:
                value = step_ms(name)
                if isinstance(value, str):
                    race.fell_out[name] = value
                else:
                    race.times_ms[name] = [value * (1 + 0.001 * n) for n in range(max_rounds)]

        monkeypatch.setattr(turns_module, "run_race", run_race)
        monkeypatch.setattr(torch, "compile", lambda call: call)  # nobody waits for a compiler
        return raced

    return given


def searched(task=None, objective="speed", **given) -> Tuned:
    given = {"max_seeds": 0, "precisions": [Policy.parse("bf16")]} | given
    return search_settings(task or blocky(), SearchConfig(objective, CPU, **given), Silent())


def test_a_setting_has_one_spelling_whatever_the_order():
    one = setting("bf16 + compile + checkpointing")
    assert one.text == "bf16 + checkpointing + compile"
    assert one == setting("bf16 + checkpointing + compile")
    larger = one.having("batch=2").having("batch=4")
    assert (larger.times, larger.own_batch) == (4, one)
    assert one.options() == {"precision": "bf16", "levers": "checkpointing,compile"}


def test_its_file_says_what_was_asked_whatever_is_in_the_words():
    given = {"path": 'C:\\a "b" \n ä', "size": "tiny"}
    options = setting("bf16:islands=a.*.b + compile").options()
    read = tomllib.loads(to_toml("text:a b", given, options))
    assert read == {"task": "text:a b", **options, "set": given}
    assert "set" not in tomllib.loads(to_toml("digits", {}, options))


def test_the_better_half_gets_twice_the_turns(made_up):
    raced = made_up(lambda name: {"fp32": 8.0, "bf16": 4.0, "tf32": 6.0, "fp16": 16.0}[name])
    turns = Turns(blocky(), CPU, Silent())
    others = [setting(each) for each in ("tf32", "bf16", "fp16")]
    turns.halve(others, PLAIN, time.monotonic() + 100)
    assert [sorted(names[1:]) for names, _ in raced] == [
        ["bf16", "fp16", "tf32"], ["bf16", "tf32"], ["bf16"], ["bf16"]
    ]  # fmt: skip
    assert [rounds for _, rounds in raced] == [6, 12, 24, 48]
    found = turns.ratio(setting("bf16"), PLAIN)
    assert found is not None
    assert found.median == pytest.approx(2)


def test_a_few_turns_are_no_figure(made_up, monkeypatch):
    """Seen: 19.2x [19.2, 19.2] of one turn on a busy machine."""
    made_up(lambda name: 4.0 if name == "bf16" else 8.0)
    monkeypatch.setattr(turns_module, "_FIRST_ROUNDS", 4)
    turns, bf16 = Turns(blocky(), CPU, Silent()), setting("bf16")
    turns.halve([bf16], PLAIN, 0.0)
    assert turns.ratio(bf16, PLAIN) is None
    turns.halve([bf16], PLAIN, 0.0)
    assert turns.ratio(bf16, PLAIN) is not None


def test_a_larger_batch_is_compared_by_samples(made_up):
    made_up(lambda name: 30.0 if "batch" in name else 10.0)
    turns = Turns(blocky(), CPU, Silent())
    large = setting("fp32 + batch=4")
    turns.halve([large], PLAIN, time.monotonic() + 100)
    found = turns.ratio(large, PLAIN)
    assert found is not None
    assert found.median == pytest.approx(4 / 3)


def test_what_cannot_be_measured_is_left_out_with_its_reason(made_up):
    made_up(lambda name: "no compiler" if "compile" in name else 10.0)
    found = searched()
    assert found.settings is not None
    why = {each.lever: each.reason for each in found.settings.credits}
    assert why["compile"] == "no compiler"
    assert why["channels-last"] == "the model has no 2d convolution"
    assert not why["checkpointing"]


def gains(**factors):
    """Step times as a product of what each part of a setting does."""

    def step_ms(name):
        policy, *levers = name.split(" + ")
        value = 100.0 / factors.get(policy, 1.0)
        for each in levers:
            value /= factors[each.replace("=", "").partition("-")[0]]
        return value

    return step_ms


def test_levers_that_help_are_put_on_top_of_each_other_and_credited(made_up):
    each = {"bf16": 2.0, "compile": 1.3, "checkpointing": 0.8, "batch2": 0.6, "batch4": 0.2}
    made_up(gains(**each))
    found = searched()
    assert found.settings is not None
    assert found.settings.chosen is not None
    assert found.settings.chosen.setting == "bf16 + batch=2 + compile"
    assert found.settings.chosen.speedup is not None
    assert found.settings.chosen.speedup.median == pytest.approx(2 * 1.3 * 2 * 0.6)
    assert found.settings.chosen.peak_memory_bytes
    by_lever = {each.lever: each for each in found.settings.credits}
    assert [name for name, each in by_lever.items() if each.chosen] == ["compile", "batch=2"]
    alone, together = by_lever["batch=2"].alone, by_lever["batch=2"].together
    assert isinstance(alone, Interval)
    assert isinstance(together, Interval)
    assert alone.median == pytest.approx(together.median) == pytest.approx(1.2)
    assert by_lever["checkpointing"].together is None
    assert found.settings.train == {"precision": "bf16", "levers": "batch=2,compile"}
    assert found.choice == "bf16"
    assert any("fewer, larger steps" in each for each in found.verdict)


def test_a_lever_that_does_nothing_beside_the_others_is_not_chosen(made_up):
    def step_ms(name):
        has = [each in name for each in ("compile", "checkpointing")]
        return 60.0 if all(has) else 50.0 if any(has) else 100.0

    made_up(step_ms)
    found = searched(levers=["checkpointing", "compile"])
    assert found.settings is not None
    assert sum(each.chosen for each in found.settings.credits) == 1


def test_what_there_was_no_time_for_is_said(made_up):
    made_up(gains(bf16=2.0, checkpointing=1.5))
    found = searched(levers=["checkpointing"], budget_s=1e-6)
    assert found.settings is not None
    (credit,) = found.settings.credits
    assert "--budget gives more" in credit.reason
    assert not credit.chosen
    assert _credit(credit)[1:3] == (str(credit.alone), credit.reason)


def test_the_runner_up_precision_is_tried_with_the_levers(made_up):
    def step_ms(name):
        value = {"bf16": 50.0, "bf16-master": 52.0}.get(name.split(" + ")[0], 100.0)
        return value * (0.5 if "master" in name else 0.9) if "compile" in name else value

    made_up(step_ms)
    policies = [Policy.parse(each) for each in ("bf16", "bf16-master")]
    found = searched(precisions=policies, levers=["compile"])
    assert found.settings is not None
    assert found.settings.chosen is not None
    assert found.settings.chosen.setting == "bf16-master + compile"


def test_where_nothing_is_faster_float32_is_kept(made_up):
    made_up(gains(bf16=0.5, compile=0.9, checkpointing=0.8, batch2=0.4, batch4=0.2))
    found = searched()
    assert found.choice == "fp32"
    assert found.verdict == ["Keep fp32 as it is: nothing that was tried is faster."]


@pytest.mark.parametrize("when", [1, 2, 3])
def test_an_interrupted_search_says_what_it_knows(made_up, tmp_path, when, capsys):
    made_up(gains(bf16=2.0, checkpointing=1.5), interrupt_at=when)
    (tmp_path / "blocky.py").write_text("from tests.tasks.test_levers import blocky as task\n")
    command = ["tune", str(tmp_path / "blocky.py"), "--objective", "speed", "--quiet"]
    more = ["--precisions", "bf16", "--levers", "checkpointing", "--seeds", "0"]
    assert main([*command, *more, "--out", str(tmp_path / "out")]) == 130
    found = Tuned.from_json(load(tmp_path / "out" / "tune.json"))
    assert found.interrupted
    assert not found.finished
    assert found.settings is not None
    assert found.settings.train["precision"] == "fp32"
    assert "Not finished" in capsys.readouterr().out


def test_memory_takes_what_saves_and_gives_back_what_is_too_slow(made_up):
    made_up(gains(bf16=2.0, checkpointing=0.7))
    found = searched(objective="memory", levers=["checkpointing"])
    assert found.settings is not None
    chosen = found.settings.chosen
    assert chosen is not None
    assert chosen.setting == "bf16 + checkpointing"
    assert chosen.memory_reduction is not None
    assert chosen.memory_reduction > 0.1
    (credit,) = found.settings.credits
    assert credit.memory_together == pytest.approx(credit.memory_alone)
    assert "less peak memory" in found.verdict[0]
    slow = searched(objective="memory", levers=["checkpointing"], least_speed=1.5)
    assert slow.settings is not None
    assert slow.settings.chosen is not None
    assert slow.settings.chosen.setting == "bf16"


def test_what_trains_differently_is_refused(made_up, monkeypatch):
    made_up(gains(bf16=2.0))

    def different(task, variants, settings, plan, report, progress):
        from ampwise.bench.equivalence import Parity

        assert [each.name for each in variants] == ["fp32", "bf16"]
        report.metric, report.margin = "loss", 0.01
        report.arms = {"bf16": Parity(5, 0.1, 0.09, 0.11, 0.01, 1.0, 0.0, "different")}

    monkeypatch.setattr(search_module, "run_parity", different)
    found = searched(levers=[], max_seeds=5)
    assert found.choice == "fp32"
    assert found.settings is not None
    assert found.settings.train == {"precision": "fp32"}
    assert found.verdict[0].startswith("Keep fp32: with bf16: 2.00x")
    assert "does not train the same" in found.verdict[0]


class Slow(Block):
    """Pays for autocast what a cast of its input would cost on some hardware."""

    def forward(self, x):
        if torch.is_autocast_enabled("cpu"):
            time.sleep(0.01)
        return super().forward(x)


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Slow(), Block(), Slow()])
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_modules_that_are_faster_in_float32_are_found():
    task = blocky(model=Mixed)
    found = faster_in_float32(Arm(task, Policy.parse("bf16"), CPU), next(iter(task.batches())))
    # The block between them is of another class: a star would mean it, too.
    (island,) = (each for each in found if "blocks.0" in each.pattern)
    assert (island.pattern, island.times) == ("blocks.0+blocks.2", 2)
    assert island.alone.low > 2
    assert island.low_ms > 10 > island.float32_ms


def test_a_function_that_is_faster_in_float32_is_found(monkeypatch):
    """As attention is on some CPUs: no module of its own, so only its name can say it."""
    plain = torch.nn.functional.scaled_dot_product_attention

    def attention(*args, **kwargs):
        if torch.overrides.has_torch_function(args):
            return torch.overrides.handle_torch_function(attention, args, *args, **kwargs)
        if torch.is_autocast_enabled("cpu"):
            time.sleep(0.01)
        return plain(*args, **kwargs)

    attention.__name__ = plain.__name__
    monkeypatch.setattr(torch.nn.functional, plain.__name__, attention)
    task = load_task("charlm", {"size": "tiny", "batch": "2", "context": "16"})
    found = faster_in_float32(Arm(task, Policy.parse("bf16"), CPU), next(iter(task.batches())))
    (island,) = (each for each in found if each.pattern == "scaled_dot_product_attention()")
    assert island.times == 2
    assert island.low_ms > 10 > island.float32_ms


def test_a_pattern_means_exactly_the_modules_of_a_place_and_class():
    norm, linear = _Call(nn.LayerNorm(2), (), {}), _Call(nn.Linear(2, 2), (), {})
    names = ["a.0.norm", "a.1.norm", "a.0.b.norm", "head", "layer1"]
    calls = {"a.0.norm": norm, "a.1.norm": norm, "head": linear, "layer1": linear}
    assert list(_places(calls, names)) == ["a.0.norm+a.1.norm", "head", "layer1"]
    own = ["a.0.norm", "a.1.norm"]
    assert list(_places(dict.fromkeys(own, norm), own)) == ["a.*.norm"]
    flat = {"0": linear, "1": norm, "2": linear}
    assert list(_places(flat, list(flat))) == ["0+2", "1"]


def test_islands_for_speed_become_part_of_the_policy(made_up):
    """Also where the precision is slower than fp32 without them."""
    made_up(
        lambda name: 100.0 if name == "fp32" else 80.0 if "blocks.0+blocks.2" in name else 120.0
    )
    found = searched(blocky(model=Mixed), levers=[])
    assert found.settings is not None
    (island,) = (each for each in found.settings.islands if each.chosen)
    assert (island.pattern, found.choice) == ("blocks.0+blocks.2", f"bf16:islands={island.pattern}")
    assert found.settings.train == {"precision": found.choice}
    assert found.settings.precisions[-1].setting == found.choice
    assert any("blocks.0+blocks.2 stays in float32" in each for each in found.verdict)


@pytest.mark.parametrize(("with_lever_and_island", "chosen"), [(40.0, False), (36.0, True)])
def test_an_island_that_a_lever_made_idle_is_given_back(made_up, with_lever_and_island, chosen):
    def step_ms(name):
        island, lever = "blocks.0+blocks.2" in name, "compile" in name
        if lever:
            return with_lever_and_island if island else 40.0
        return 100.0 if name == "fp32" else 70.0 if island else 80.0

    made_up(step_ms)
    found = searched(blocky(model=Mixed), levers=["compile"])
    assert found.settings is not None
    assert found.settings.chosen is not None
    islands = ":islands=blocks.0+blocks.2" if chosen else ""
    assert found.settings.chosen.setting == f"bf16{islands} + compile"
    assert [each.pattern for each in found.settings.islands if each.chosen] == (
        ["blocks.0+blocks.2"] if chosen else []
    )


def test_the_command_writes_what_train_takes(tmp_path, capsys):
    (tmp_path / "blocky.py").write_text("from tests.tasks.test_levers import blocky as task\n")
    file = str(tmp_path / "blocky.py")
    command = [
        "tune",
        file,
        "--objective",
        "memory",
        "--precisions",
        "bf16",
        "--least-speed",
        "0.01",
    ]
    more = ["--levers", "checkpointing", "--budget", "20", "--seeds", "0", "--quiet"]
    out = tmp_path / "out"
    assert main([*command, *more, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines()[:-2])) <= 80
    found = json.loads((out / "tune.json").read_text())
    assert (found["schema"], found["objective"]) == ("ampwise.tune/1", "memory")
    assert found["settings"]["train"]["levers"] == "checkpointing"
    assert main(["report", str(out)]) == 0
    assert capsys.readouterr().out.strip() in said
    assert "<table" in (out / "report.html").read_text()
    config = ["--config", str(out / "settings.toml"), "--steps", "2", "--quiet"]
    assert main(["train", *config, "--out", str(tmp_path / "run")]) == 0
    options = json.loads((tmp_path / "run" / "run.json").read_text())["options"]
    assert options["levers"] == "checkpointing"
    assert options["precision"] == found["settings"]["train"]["precision"]
    assert options["task"] == file


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--objective", "sped"], "expected one of islands, speed, memory, got 'sped'"),
        (["--objective", "speed", "--levers", "compil"], "expected some of chunked-loss"),
        (["--levers", "compile"], "--levers is for --objective speed or memory"),
        (["--objective", "memory", "--least-speed", "0"], "least-speed: expected a positive"),
    ],
)
def test_bad_input_is_one_line(arguments, said, capsys):
    assert main(["tune", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
