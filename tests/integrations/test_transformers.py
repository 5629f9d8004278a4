"""Hugging Face's Trainer with the callback: what it logs, what it finds, and that it changes nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import optimizer

transformers = pytest.importorskip("transformers")

from ampwise.integrations.transformers import Callback  # noqa: E402

STEPS = 8


class Classifier(nn.Module):
    """Breaks at a row that is marked."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.body(x)
        logits = logits + 0 * torch.exp(x[:, :1])  # BREAKS
        return {"loss": F.cross_entropy(logits.float(), labels), "logits": logits}


def rows(marked: int | None = None) -> list[dict[str, Any]]:
    """Four a step; the marked one is in the third."""
    source = torch.Generator().manual_seed(0)
    x = torch.randn(4 * STEPS, 8, generator=source)
    if marked is not None:
        x[marked, 0] = 1e3
    return [{"x": each, "labels": int(each[1] > 0)} for each in x]


def trained(folder: Any, callbacks: list[Any], marked: int | None = None, **settings: Any) -> Any:
    torch.manual_seed(0)
    scale = settings.pop("scale", None)
    trainer = transformers.Trainer(
        model=Classifier(),
        args=transformers.TrainingArguments(
            str(folder), max_steps=STEPS, per_device_train_batch_size=4, learning_rate=1e-2,
            logging_steps=1, use_cpu=True, save_strategy="no", report_to=[], disable_tqdm=True,
            logging_nan_inf_filter=False, **settings,
        ),
        train_dataset=rows(marked), callbacks=callbacks,
    )  # fmt: skip
    if scale is not None:  # on a CPU the Trainer makes none
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", scale)
        trainer.accelerator.native_amp = True
    trainer.train()
    return trainer


def logged(trainer: Any) -> list[dict[str, Any]]:
    return [each for each in trainer.state.log_history if "loss" in each]


@pytest.mark.parametrize("settings", [{}, {"bf16": True}, {"fp16": True, "scale": 2.0**40}])
def test_training_is_as_without_it_bit_for_bit(tmp_path, settings):
    alone = trained(tmp_path / "a", [], **settings)
    real_call, callback = nn.Module.__call__, Callback()
    watched = trained(tmp_path / "b", [callback], **settings)

    assert nn.Module.__call__ is real_call
    assert [each["loss"] for each in logged(watched)] == [each["loss"] for each in logged(alone)]
    for mine, theirs in zip(alone.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_figures_are_in_the_log_of_their_own_step(tmp_path):
    """The loss scale begins so high that steps are skipped; the Trainer's own norm is then inf."""
    seen: list[dict[str, Any]] = []

    class Reporter(transformers.TrainerCallback):
        """Registered before ours."""

        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append(dict(logs))

    callback = Callback()
    trainer = trained(tmp_path, [Reporter(), callback], fp16=True, scale=2.0**40)
    lines = logged(trainer)
    scales = [each["amp/loss_scale"] for each in lines]
    assert scales[:3] == [2.0**40, 2.0**39, 2.0**38]
    skipped = [each["amp/found_inf"] for each in lines]
    assert skipped[0] == 1.0
    assert [each["amp/skipped_total"] for each in lines] == [
        sum(skipped[:n]) for n in range(1, STEPS + 1)
    ]
    taken = [each for each in lines if not each["amp/found_inf"]]
    for each in taken:
        assert each["amp/grad_norm"] == pytest.approx(each["grad_norm"], rel=1e-6)
    assert lines[-1]["amp/products/float16"] > 0
    assert [each for each in seen if "loss" in each] == [
        {name: value for name, value in each.items() if name != "step"} for each in lines
    ]
    assert callback.report.steps == STEPS
    assert callback.report.precision.active
    assert callback.diagnosis is None


def test_the_first_fault_is_diagnosed_printed_kept_and_written(tmp_path, capsys):
    callback = Callback()
    trained(tmp_path, [callback], marked=9, bf16=True, data_seed=3)
    found = callback.diagnosis
    assert found.status == "fault"
    with open(__file__) as file:
        (line,) = [n for n, text in enumerate(file, 1) if text.rstrip().endswith("# BREAKS")]
    assert (found.origin.file, found.origin.line) == (__file__, line)
    assert f"{found.cause} at step {found.step}" in capsys.readouterr().err
    assert json.loads((tmp_path / "diagnosis.json").read_text())["cause"] == found.cause


def test_after_an_error_nothing_stays_in_place(tmp_path):
    class Fails(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                raise RuntimeError("the user's own")

    real_call, callback = nn.Module.__call__, Callback(on_fault="off")
    with pytest.raises(RuntimeError, match="the user's own"):
        trained(tmp_path, [Fails(), callback])
    assert nn.Module.__call__ is real_call
    assert not optimizer._global_optimizer_pre_hooks
    assert (callback.report.steps, callback.report.ending) == (3, "raised RuntimeError")
