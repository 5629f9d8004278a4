"""Lightning with ampwise's plugin, and with the callback that only looks."""

from __future__ import annotations

import csv
import json
import logging
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import DataLoader

from ampwise import LossScale, TrainStep, UsageError

L = pytest.importorskip("lightning")

from lightning.pytorch.callbacks import LearningRateMonitor  # noqa: E402
from lightning.pytorch.loggers import CSVLogger  # noqa: E402
from lightning.pytorch.plugins import MixedPrecision  # noqa: E402

from ampwise.integrations.lightning import Callback, Precision  # noqa: E402

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 12


class Net(L.LightningModule):
    def __init__(self, fused: bool = True, interval: str = "step") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
        self.fused, self.interval = fused, interval
        self.losses: list[float] = []

    def loss(self, batch: Any) -> Any:
        x, y = batch
        logits = self.layers(x)
        logits = logits + 0 * torch.exp(x[:, :1])  # BREAKS
        return F.cross_entropy(logits.float(), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))
        self.seen = self.layers(batch[0]).dtype

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        made = torch.optim.AdamW(self.parameters(), lr=1e-2, fused=self.fused)
        schedule = torch.optim.lr_scheduler.StepLR(made, 1, gamma=0.9)
        return [made], [{"scheduler": schedule, "interval": self.interval}]


def batches(bad: tuple[int, ...] = (), count: int = STEPS) -> list[Any]:
    source = torch.Generator().manual_seed(1)
    x = torch.randn(count * 4, 8, generator=source)
    for each in bad:
        x[each * 4, 0] = 1e3
    return [(x[n : n + 4], (x[n : n + 4, 1] > 0).long()) for n in range(0, len(x), 4)]


def trainer(folder: Any, **settings: Any) -> Any:
    chosen = {
        "accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1,
        "default_root_dir": folder, **settings,
    }  # fmt: skip
    return L.Trainer(**chosen)


def loader(each: list[Any]) -> Any:
    return DataLoader(each, batch_size=None)


def fit(folder: Any, model: Any, data: Any, validate: Any = None, **settings: Any) -> Any:
    made = trainer(folder, **settings)
    made.fit(model, loader(data), None if validate is None else loader(validate))
    return made


def same(one: nn.Module, other: nn.Module) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return all(torch.equal(mine[name], theirs[name]) for name in mine)


# -- the plugin ------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16", "bf16-master"])
def test_it_is_the_step_of_a_loop_by_hand(tmp_path, policy):
    """Accumulation, clipping, a fused optimizer, a schedule and two bad steps: to the bit."""
    data = batches(bad=(4, 5, 9))
    scale = LossScale(init_scale=2.0**24) if policy == "fp16" else None
    model, by_hand = Net(), Net()
    made = fit(
        tmp_path, model, data, accumulate_grad_batches=2, gradient_clip_val=0.5,
        plugins=[Precision(policy, loss_scale=scale)],
    )  # fmt: skip

    (optimizer,), (schedule,) = by_hand.configure_optimizers()
    step = TrainStep(
        by_hand, optimizer, policy=policy, accumulate=2, max_grad_norm=0.5,
        scheduler=schedule["scheduler"], loss_scale=scale,
    )  # fmt: skip
    for batch in data:
        step(lambda m, b: m.loss(b), batch)

    assert same(model, by_hand)
    assert made.lr_scheduler_configs[0].scheduler.last_epoch == schedule["scheduler"].last_epoch
    history = made.precision_plugin.engine.history
    assert [each.skipped for each in history] == [each.skipped for each in step.history]
    assert sum(each.skipped for each in history) >= 2
    norms = [each.grad_norm for each in history if not each.skipped]
    assert norms == pytest.approx([e.grad_norm for e in step.history if not e.skipped], rel=1e-6)


def test_lightning_itself_refuses_to_clip_with_a_fused_optimizer_and_we_do_not(tmp_path):
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fit(
            tmp_path, Net(), batches(), gradient_clip_val=1.0,
            plugins=[MixedPrecision("16-mixed", "cpu", scaler)],
        )  # fmt: skip
    made = fit(tmp_path, Net(), batches(), plugins=[Precision("fp16", max_grad_norm=1.0)])
    assert made.global_step == STEPS


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_only_schedules_that_step_with_the_optimizer_are_held(tmp_path, interval):
    made = fit(
        tmp_path, Net(interval=interval), batches(bad=(STEPS - 1,)), plugins=[Precision("bf16")]
    )
    taken = {"step": STEPS - 1, "epoch": 1}[interval]
    assert made.lr_scheduler_configs[0].scheduler.last_epoch == taken


def test_hooks_see_true_gradients_and_their_edits_count(tmp_path):
    class Looks(Net):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.norm = torch.cat([e.grad.flatten() for e in self.parameters()]).norm().item()
            for each in self.parameters():
                each.grad.zero_()

    model = Looks(fused=False)
    made = fit(tmp_path, model, batches(count=1), plugins=[Precision("fp16")])
    plain = fit(tmp_path, Net(fused=False), batches(count=1), plugins=[Precision("fp16")])
    assert model.norm == pytest.approx(plain.precision_plugin.engine.history[0].grad_norm, rel=1e-5)
    assert made.precision_plugin.engine.history[0].grad_norm == 0


def test_clipping_by_value_leaves_an_inf_to_be_found(tmp_path):
    model, before = Net(fused=False), Net(fused=False)
    made = fit(
        tmp_path, model, batches(bad=(0,), count=1), gradient_clip_val=0.1,
        gradient_clip_algorithm="value", plugins=[Precision("fp32")],
    )  # fmt: skip
    assert same(model, before)
    assert made.precision_plugin.engine.history[0].skipped
    made = fit(
        tmp_path, model, batches(count=1), gradient_clip_val=1e-6,
        gradient_clip_algorithm="value", plugins=[Precision("fp16")],
    )  # fmt: skip
    assert 0 < made.precision_plugin.engine.history[0].grad_norm < 1e-4


def test_evaluation_runs_under_the_policy_too(tmp_path):
    model = Net()
    made = fit(tmp_path, model, batches(), batches(count=2), plugins=[Precision("bf16")])
    assert model.seen == torch.bfloat16
    engine = made.precision_plugin.engine
    model.seen = None
    made.test(model, loader(batches(count=1)), verbose=False)
    assert model.seen == torch.bfloat16
    assert made.precision_plugin.engine is engine
    trainer(tmp_path, plugins=[Precision("fp16")]).validate(
        model, loader(batches(count=1)), verbose=False
    )
    assert model.seen == torch.float16


def test_a_step_that_training_step_declines_leaves_no_trace(tmp_path):
    class Declines(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == 1 else loss

    data = batches(count=3)
    model, other = Declines(), Net()
    fit(tmp_path, model, data, plugins=[Precision("bf16")])
    fit(tmp_path, other, [data[0], data[2]], plugins=[Precision("bf16")])
    assert same(model, other)


def test_a_checkpoint_has_scale_and_counters_and_goes_on_to_the_bit(tmp_path):
    data = batches(bad=(2,))

    def plugin() -> Precision:
        return Precision("fp16", loss_scale=LossScale(init_scale=2.0**20, growth_interval=3))

    whole, half = Net(), Net()
    through = fit(tmp_path, whole, data, max_epochs=2, plugins=[plugin()])
    first = trainer(tmp_path, plugins=[plugin()])
    first.fit(half, loader(data))
    first.save_checkpoint(tmp_path / "half.ckpt")
    stored = torch.load(tmp_path / "half.ckpt", weights_only=False)["Precision"]
    assert (stored["policy"], stored["steps"]) == ("fp16", STEPS)
    assert stored["skipped"] >= 1

    again = trainer(tmp_path, max_epochs=2, plugins=[plugin()])
    resumed = Net()
    again.fit(resumed, loader(data), ckpt_path=tmp_path / "half.ckpt")
    assert same(whole, resumed)
    last, expected = (each.precision_plugin.engine.history[-1] for each in (again, through))
    assert last == expected


def test_figures_and_precision_are_in_the_trainers_logger(tmp_path):
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    made = fit(
        tmp_path, Net(), batches(bad=(3,)), logger=logger, plugins=[Precision("fp16")],
        callbacks=[LearningRateMonitor("step")],
    )  # fmt: skip
    with open(f"{logger.log_dir}/metrics.csv") as file:
        lines = [each for each in csv.DictReader(file) if each["amp/loss_scale"]]
    history = made.precision_plugin.engine.history
    assert [float(e["amp/loss_scale"]) for e in lines] == [each.loss_scale for each in history]
    assert [float(e["amp/found_inf"]) for e in lines] == [each.found_inf for each in history]
    for each, record in zip(lines, history, strict=True):
        if math.isfinite(record.grad_norm):
            assert float(each["amp/grad_norm"]) == pytest.approx(record.grad_norm, rel=1e-5)
    assert float(lines[-1]["amp/skipped_total"]) == history[-1].skipped_total
    assert "amp/precision: fp16" in Path(logger.log_dir, "hparams.yaml").read_text()


def test_nothing_is_left_of_it_after_fit_or_an_error(tmp_path):
    class Fails(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 3:
                raise RuntimeError("the user's own")
            return super().training_step(batch, batch_idx)

    model, made = Fails(), trainer(tmp_path, plugins=[Precision("bf16-master")])
    callbacks = list(made.callbacks)
    with pytest.raises(RuntimeError, match="the user's own"):
        made.fit(model, loader(batches()))
    assert made.callbacks == callbacks
    assert "lr_scheduler_step" not in vars(model)
    assert all(type(each) is nn.Parameter for each in model.parameters())


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class OwnBackward(Net):
    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        loss.backward()


@pytest.mark.parametrize(
    ("model", "settings", "words"),
    [
        (Manual, {}, "expected automatic optimization"),
        (OwnBackward, {}, "OwnBackward.backward is not called"),
        (Net, {"gradient_clip_val": 1.0}, "clipping is set twice"),
        (Net, {"callbacks": [Callback()]}, "leave the callback out"),
    ],
)
def test_what_goes_past_the_engine_is_refused_in_a_line(tmp_path, model, settings, words):
    with pytest.raises(UsageError, match=words) as refusal:
        fit(
            tmp_path, model(), batches(), plugins=[Precision("bf16", max_grad_norm=2.0)], **settings
        )
    assert "\n" not in str(refusal.value)


def test_manual_optimization_with_a_train_step_counts_steps(tmp_path):
    """The guide's recipe: `self.optimizers()` counts; its `.optimizer` does not."""

    class Recipe(Manual):
        def on_fit_start(self) -> None:
            self.step = TrainStep(self, self.optimizers(), policy="bf16", max_grad_norm=1.0)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.step(lambda m, b: m.loss(b), batch)

    made = fit(tmp_path, Recipe(), batches(), max_steps=5)
    assert made.global_step == 5


@pytest.mark.slow
def test_ranks_under_ddp_skip_together_and_stay_the_same():
    script = Path(__file__).parent / "scripts" / "lightning_ddp.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = sorted(re.findall(r"rank (\d): (.*)", done.stdout))
    assert [rank for rank, _ in said] == ["0", "1"]
    assert said[0][1] == said[1][1]
    assert said[0][1].startswith("[False, True, False]")


# -- the callback ----------------------------------------------------------------------------------


def settings_for(precision: str) -> dict[str, Any]:
    if precision == "fp16":
        scaler = torch.amp.GradScaler("cpu", 2.0**40)
        return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}
    return {"precision": {"fp32": "32-true", "bf16": "bf16-mixed"}[precision]}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_training_with_the_callback_is_as_without_it_bit_for_bit(tmp_path, precision):
    alone, watched, callback = Net(), Net(), Callback()
    real_call = nn.Module.__call__
    more = {"accumulate_grad_batches": 2}
    fit(tmp_path, alone, batches(), batches(count=2), **more, **settings_for(precision))
    more |= {"callbacks": [callback], "logger": CSVLogger(tmp_path, flush_logs_every_n_steps=1)}
    fit(tmp_path, watched, batches(), batches(count=2), **more, **settings_for(precision))

    assert nn.Module.__call__ is real_call
    assert alone.losses == watched.losses
    assert same(alone, watched)
    assert (callback.report.steps, callback.diagnosis) == (STEPS // 2, None)
    with open(f"{more['logger'].log_dir}/metrics.csv") as file:
        lines = [each for each in csv.DictReader(file) if each.get("amp/grad_norm")]
    ran = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[precision]
    assert float(lines[-1][f"amp/products/{ran}"]) > 0
    if precision == "fp16":
        assert float(lines[0]["amp/found_inf"]) == 1
        assert float(lines[0]["amp/loss_scale"]) == 2.0**40
        assert len(callback.report.skips) > 0
        assert not any(each.noticed_by_schedule for each in callback.report.skips)


def test_the_callback_diagnoses_the_first_fault(tmp_path, capsys):
    callback = Callback()
    fit(tmp_path, Net(), batches(bad=(5,)), callbacks=[callback], **settings_for("bf16"))
    found = callback.diagnosis
    with open(__file__) as file:
        (line,) = [n for n, text in enumerate(file, 1) if text.rstrip().endswith("# BREAKS")]
    assert (found.status, found.step, found.origin.line) == ("fault", 6, line)
    assert f"{found.cause} at step 6" in capsys.readouterr().err
    assert json.loads((tmp_path / "diagnosis.json").read_text())["step"] == 6


def test_nothing_is_left_of_the_callback_after_an_error(tmp_path):
    class Fails(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                raise RuntimeError("the user's own")

    real_call, callback = nn.Module.__call__, Callback(on_fault="off")
    with pytest.raises(RuntimeError, match="the user's own"):
        fit(tmp_path, Fails(), batches(), callbacks=[callback])
    assert nn.Module.__call__ is real_call
    assert not torch_optimizer._global_optimizer_pre_hooks
    assert (callback.report.steps, callback.report.ending) == (3, "raised RuntimeError")
