"""Training scripts that know nothing of ampwise: what a run says of them, and that it changes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.observe.running import (
    SCRIPTS,
    TORCHRUN,
    Ran,
    by_itself,
    differences,
    observed,
    planted,
)  # fmt: skip

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Script:
    """What is true of a script, by reading it."""

    optimizers: tuple[str, ...] = ("AdamW",)
    micro_batches: float = 1
    needs: str = "torch"
    launcher: tuple[str, ...] = ()
    # Whether its schedule is held on a skipped step; None: it has none that steps with the optimizer.
    held: bool | None = None
    asks_at: str = "torch.autocast("


KNOWN = {
    "accelerate_loop": Script(
        micro_batches=2, needs="accelerate", held=True, asks_at="model(inputs)"
    ),
    "checkpointed": Script(),
    "compiled": Script(optimizers=("SGD",), held=False),
    "ddp": Script(micro_batches=2, launcher=TORCHRUN),
    "gan": Script(optimizers=("Adam", "Adam"), asks_at="with autocast:"),
    "hf_trainer": Script(
        micro_batches=2, needs="transformers", held=False, asks_at="trainer.train()"
    ),
    "lightning_fit": Script(micro_batches=2, needs="lightning", held=False, asks_at="trainer.fit("),
    "mnist_like": Script(optimizers=("Adadelta",)),
    "nanogpt": Script(micro_batches=2, held=False, asks_at="with ctx:"),
    "timm_scaler": Script(micro_batches=2, asks_at="with amp_autocast()"),
}


def path_of(name: str) -> Path:
    pytest.importorskip(KNOWN[name].needs)
    return SCRIPTS / f"{name}.py"


def watch(name: str, cwd: Path, *arguments: str) -> Ran:
    ran = observed([str(path_of(name)), *arguments], cwd, launcher=KNOWN[name].launcher)
    assert ran.code == 0, ran.err
    return ran


def slow(*values: str) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


QUICK = [
    ("accelerate_loop", "bf16"),
    ("hf_trainer", "bf16"),
    ("nanogpt", "fp16"),
]
CLEAN = [
    *QUICK,
    slow("mnist_like", "fp32"),
    *(
        slow(name, precision)
        for name in sorted(KNOWN)
        for precision in ("bf16", "fp16")
        if (name, precision) not in QUICK
    ),
]


@pytest.mark.parametrize(("name", "precision"), CLEAN)
def test_a_clean_run_is_as_without_and_has_no_finding(
    tmp_path: Path, name: str, precision: str
) -> None:
    script, known = path_of(name), KNOWN[name]
    arguments = [str(script), "--steps", "50", "--precision", precision, "--dump"]
    alone = by_itself([*arguments, "alone.pt"], tmp_path, known.launcher, forked=True)
    assert alone.code == 0, alone.err
    ran = observed([*arguments, "observed.pt"], tmp_path, launcher=known.launcher)

    assert ran.code == 0, ran.err
    assert list(differences(tmp_path / "alone.pt", tmp_path / "observed.pt")) == []
    assert without_times(ran.out) == without_times(alone.out)
    report = ran.report
    assert [each["code"] for each in report["findings"]] == []
    assert (report["faults"], report["skips"], report["exit_code"]) == ([], [], 0)
    assert report["not_observed"] == []
    assert report["steps"] == 50
    assert report["micro_batches_per_step"] == known.micro_batches
    assert tuple(report["optimizers"]) == known.optimizers
    check_precision(report["precision"], script, precision)
    check_steps(ran)
    assert (report["loss_scale"] is not None) == (precision == "fp16")


def without_times(out: str) -> list[str]:
    """What was printed, but for how long it took."""
    return [line for line in out.splitlines() if "train_runtime" not in line]


def check_precision(found: dict[str, Any], script: Path, precision: str) -> None:
    """What was asked for, where, and that it ran."""
    wanted = DTYPES[precision]
    assert found["active"] is True
    assert set(found["parameters"]) == {"float32"}
    for products in found["ran"].values():
        assert max(products, key=products.get) == wanted
        assert sum(products.values()) >= 3
    if precision == "fp32":
        assert (found["asked"], found["exceptions"]) == ([], [])
        return
    assert {each["dtype"] for each in found["asked"]} == {wanted}
    lines = script.read_text().splitlines()
    for each in found["asked"]:
        assert Path(each["file"]) == script
        assert KNOWN[script.stem].asks_at in lines[each["line"] - 1]


def check_steps(ran: Ran) -> None:
    """The file of steps, and the report, are there."""
    steps = ran.steps()
    assert [each["step"] for each in steps] == list(range(1, 51))
    assert all(each["train/loss"] > 0 and each["amp/grad_norm"] > 0 for each in steps)
    assert all(each["train/lr"] >= 0 for each in steps)
    assert ran.report["script"] in (ran.folder / "report.html").read_text()


def test_losses_in_the_file_are_those_of_the_script(tmp_path: Path) -> None:
    """The mean over micro-batches, with scaling and the accumulation's own division undone."""
    import torch

    ran = watch("checkpointed", tmp_path, "--steps", "8", "--precision", "fp16", "--dump", "d.pt")
    losses = torch.load(tmp_path / "d.pt")["losses"]
    assert [each["train/loss"] for each in ran.steps()] == losses


@pytest.mark.slow
def test_products_that_stay_in_float32_are_named(tmp_path: Path) -> None:
    """Attention with dropout takes the math path on a CPU, which computes in float32."""
    ran = watch("hf_trainer", tmp_path, "--steps", "4", "--precision", "bf16")
    found = ran.report["precision"]
    assert found["active"] is True
    odd = [each for each in found["exceptions"] if each["phase"] == "forward"]
    assert {each["dtype"] for each in odd} == {"float32"}
    assert sum(each["times"] for each in odd) == found["ran"]["forward"]["float32"] == 8
    assert all("attention" in each["module"] for each in odd)


MADE_AT = {
    "accelerate_loop": "accelerator = Accelerator(",
    "hf_trainer": "Trainer(",
    "nanogpt": "GradScaler(",
}


@pytest.mark.parametrize("name", ["accelerate_loop", slow("hf_trainer"), "nanogpt"])
def test_a_precision_asked_for_and_not_active_is_said_first(tmp_path: Path, name: str) -> None:
    """As these three treat float16 on a CPU: in silence."""
    ran = watch(name, tmp_path, "--steps", "6", "--precision", "fp16", "--as-shipped")
    found = ran.report["precision"]
    assert found["active"] is False
    (asked,) = found["asked"]
    assert (asked["dtype"], Path(asked["file"])) == ("float16", path_of(name))
    assert MADE_AT[name] in path_of(name).read_text().splitlines()[asked["line"] - 1]
    assert set(found["ran"]["forward"]) == set(found["ran"]["backward"]) == {"float32"}
    first = ran.report["findings"][0]
    assert (first["code"], first["file"], first["line"]) == ("AMP501", asked["file"], asked["line"])
    assert "float16" in first["message"]
    before = ran.err.partition(" finished after 6 steps")[0]
    assert "Precision asked for, but not active: float16" in before


CAUSES = {"forward": "RANGE_OVERFLOW", "backward": "BACKWARD_SINGULARITY"}
QUICK_FAULTS = {
    ("accelerate_loop", "fp16", "backward"),
    ("checkpointed", "bf16", "forward"),
    ("gan", "bf16", "backward"),
    ("nanogpt", "fp16", "forward"),
}
FAULTS = [
    each if each in QUICK_FAULTS else slow(*each)
    for name in sorted(KNOWN)
    for precision in ("bf16", "fp16")
    for each in ((name, precision, "forward"), (name, precision, "backward"))
    if name != "ddp"
]


@pytest.mark.parametrize(("name", "precision", "what"), FAULTS)
def test_a_planted_fault_is_found_at_its_line(
    tmp_path: Path, name: str, precision: str, what: str
) -> None:
    arguments = ["--steps", "6", "--precision", precision, "--fault", what, "--at-step", "3"]
    ran = watch(name, tmp_path, *arguments)
    assert ran.report["faults"], ran.report["not_observed"]
    check_fault(ran.report["faults"][0], path_of(name), what)


def check_fault(fault: dict[str, Any], script: Path, what: str) -> None:
    line = planted(script, what)
    origin = fault["origin"]
    assert (fault["status"], fault["phase"]) == ("fault", what)
    assert (Path(origin["file"]), origin["line"]) == (script, line)
    assert origin["source"].strip() == script.read_text().splitlines()[line - 1].strip()
    assert fault["cause"] == CAUSES[what]
    assert fault["step"] == 3


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("nanogpt", "backward"),
        slow("mnist_like", "backward"),
        slow("hf_trainer", "forward"),
        slow("mnist_like", "forward"),
        slow("nanogpt", "forward"),
    ],
)
def test_a_fault_of_one_step_only_is_found_too(tmp_path: Path, name: str, what: str) -> None:
    """In the data, or by a counter of the module's own; nothing was updated twice."""
    arguments = ["--steps", "6", "--precision", "bf16", "--fault", what, "--once"]
    ran = watch(name, tmp_path, *arguments)
    check_fault(ran.report["faults"][0], path_of(name), what)


@pytest.mark.slow
def test_a_fault_on_one_rank_is_said_with_the_rank(tmp_path: Path) -> None:
    arguments = ["--steps", "6", "--precision", "bf16", "--fault", "forward", "--at-step", "3"]
    ran = watch("ddp", tmp_path, *arguments)
    (fault, *_) = ran.report["faults"]
    assert fault["rank"] == 1
    assert Path(fault["origin"]["file"]) == path_of("ddp")
    assert fault["origin"]["line"] == planted(path_of("ddp"), "forward")


@pytest.mark.parametrize("name", ["nanogpt", slow("checkpointed"), slow("mnist_like")])
def test_a_fault_leaves_the_run_as_it_was(tmp_path: Path, name: str) -> None:
    """Diagnosing replays steps: the training does not notice."""
    arguments = [str(path_of(name)), "--steps", "8", "--precision", "fp16", "--fault", "backward"]
    alone = by_itself([*arguments, "--once", "--dump", "alone.pt"], tmp_path, forked=True)
    assert alone.code == 0, alone.err
    ran = observed([*arguments, "--once", "--dump", "observed.pt"], tmp_path)
    assert list(differences(tmp_path / "alone.pt", tmp_path / "observed.pt")) == []
    assert (ran.code, ran.out) == (0, alone.out)
    assert ran.report["skips"][0]["step"] == 3  # later ones are the loss scale's own


SETTLE = ("accelerate_loop",)


@pytest.mark.parametrize("name", [each if each in SETTLE else slow(each) for each in sorted(KNOWN)])
def test_skipped_steps_are_seen_and_whether_the_schedule_was_held(
    tmp_path: Path, name: str
) -> None:
    """A loss scale that starts too high, and settles."""
    arguments = ["--steps", "30", "--precision", "fp16", "--fault", "skip"]
    ran = watch(name, tmp_path, *arguments)
    skips, scale = ran.report["skips"], ran.report["loss_scale"]
    steps = [each["step"] for each in skips]
    assert steps[0] == 1
    assert len(steps) < 30
    assert scale["first"] == 2.0**30
    assert scale["last"] == scale["lowest"] == 2.0 ** (30 - len(skips))
    assert (scale["growths"], scale["backoffs"]) == (0, len(skips))
    assert {each["noticed_by_schedule"] for each in skips} == {KNOWN[name].held}
    assert {each["status"] for each in ran.report["faults"]} <= {"benign"}
    totals = [each["amp/skipped_total"] for each in ran.steps()]
    assert totals == [sum(each <= step for each in steps) for step in range(1, 31)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "held"), [("adamw_torch", True), ("adamw_torch_fused", False)]
)
def test_a_trainer_holds_its_schedule_unless_a_fused_optimizer_hides_the_skip(
    tmp_path: Path, optimizer: str, held: bool
) -> None:
    """Accelerate looks whether the optimizer was called; a fused one always is (accelerate#4242)."""
    arguments = ["--steps", "30", "--precision", "fp16", "--fault", "skip", "--optim", optimizer]
    ran = watch("hf_trainer", tmp_path, *arguments)
    assert {each["noticed_by_schedule"] for each in ran.report["skips"]} == {held}
    moved = [each["train/lr"] for each in ran.steps()]
    assert (moved[0] == moved[1]) == held


@pytest.mark.slow
@pytest.mark.parametrize("what", [None, *CAUSES])
def test_a_model_that_inductor_compiles(tmp_path: Path, what: str | None) -> None:
    arguments = ["--steps", "6", "--precision", "bf16", "--backend", "inductor"]
    ran = watch("compiled", tmp_path, *arguments, *(["--fault", what] if what else []))
    if what is None:
        assert (ran.report["findings"], ran.report["faults"]) == ([], [])
        products = ran.report["precision"]["ran"]
        assert products["forward"] == {"bfloat16": 3}
        assert set(products["backward"]) == {"bfloat16"}
    else:
        check_fault(ran.report["faults"][0], path_of("compiled"), what)
