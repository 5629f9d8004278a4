"""# deprecated-precision-flag

## What it does
Reports old spellings of precision in trainers: `precision=16` or "bf16" in Lightning, apex
arguments that are gone, `fp16=` in Accelerator, and `fp16=True` in transformers'
TrainingArguments whatever the device. Silent of spellings in files that run with Lightning 1 alone,
where they are the only ones: files with arguments of `Trainer`, hooks or modules that Lightning 2
has not.

## Why is this bad
Lightning 2.6 warns that `precision=16` is discouraged and reads it as 16-mixed (on a CPU:
bf16-mixed). Arguments that are gone (`amp_backend`, `half_precision_backend`,
`Accelerator(fp16=...)`) raise TypeError. transformers 5.23 with `fp16=True` trains in float32
on a CPU, without a word.

## Example
    trainer = L.Trainer(max_epochs=5, precision=16)
    arguments = TrainingArguments("runs", fp16=True)

## Use instead
    trainer = L.Trainer(max_epochs=5, precision="16-mixed")
    native = torch.cuda.is_bf16_supported(including_emulation=False)
    arguments = TrainingArguments("runs", bf16=native, fp16=not native)

## Fix safety
Unsafe: `--unsafe-fixes` writes Lightning's new spelling, which runs the same today. The other
findings have no automatic fix.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampwise_lint.analysis import Analysis
from ampwise_lint.queries.edits import edit
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.source.imports import Imports
from ampwise_lint.source.project import Module
from ampwise_lint.triggers import Trigger

LIGHTNING = ("lightning.", "pytorch_lightning.", "lightning_fabric.")
OLD = ("16", "bf16", "mixed")
NEW = {
    "16": "16-mixed",
    "bf16": "bf16-mixed",
    "32": "32-true",
    "64": "64-true",
    "mixed": "16-mixed",
}
LIGHTNING_1 = frozenset(
    ["gpus", "tpu_cores", "ipus", "num_processes", "resume_from_checkpoint", "auto_lr_find",
     "auto_scale_batch_size", "replace_sampler_ddp", "track_grad_norm", "move_metrics_to_cpu",
     "multiple_trainloader_mode", "progress_bar_refresh_rate", "weights_summary",
     "checkpoint_callback", "weights_save_path", "terminate_on_nan", "flush_logs_every_n_steps"]
)  # fmt: skip
"""Arguments of Trainer that Lightning 2 refuses."""
HOOKS = ("training_epoch_end", "validation_epoch_end", "test_epoch_end")
"""Hooks that Lightning 2 refuses."""
MODULES_1 = ("plugins.DDPPlugin", "plugins.training_type", "utilities.distributed", "metrics")
"""What Lightning 2 has no more."""
GONE = ("amp_backend", "amp_level", "fp16_opt_level", "half_precision_backend", "fp16_backend")


TRAINER_FLAGS = Trigger(
    ("lightning", "transformers", "accelerate"),
    beside=("amp_", "fp16", "precision"),
    anywhere=True,
)
"""A file with one of each may give a trainer a flag in an old spelling."""


@rule("AMP403", "deprecated-precision-flag", "info", fix="unsafe", triggers=(TRAINER_FLAGS,))
def check(code: Analysis) -> Iterator[Mistake]:
    found = code.module.imports
    for node in code.module.index.of(ast.Call):
        yield from _call(code, found, node)


def _call(code: Analysis, found: Imports, node: ast.Call) -> Iterator[Mistake]:
    full = found.full(node.func)
    last = full.rpartition(".")[2]
    for keyword in node.keywords:
        value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
        if full.startswith(LIGHTNING) and last in ("Trainer", "Fabric"):
            old = [e for e in _literals(keyword.value) if str(e.value) in OLD]
            if keyword.arg == "precision" and old and not _is_for_lightning_1(code.module):
                new = NEW[str(old[0].value)]
                yield Mistake(
                    node,
                    code.module,
                    f"precision={old[0].value!r} is an old spelling: Lightning warns and reads it "
                    f"as {new!r}; write that",
                    (edit("replace", old[0], repr(new)),),
                )
            elif keyword.arg in GONE:
                yield _gone(code, keyword)
        elif full.startswith("transformers.") and last.endswith("TrainingArguments"):
            if keyword.arg == "fp16" and value is True and not _is_on_cpu(node):
                yield Mistake(
                    keyword.value,
                    code.module,
                    "fp16=True whatever the device: GPUs since Ampere run bfloat16 at the same "
                    "speed without loss scaling, and a CPU trains in float32 without a word; ask "
                    "torch.cuda.is_bf16_supported(including_emulation=False) and set bf16 or fp16",
                )
            elif keyword.arg in GONE:
                yield _gone(code, keyword)
        elif full.startswith("accelerate.") and last == "Accelerator" and keyword.arg == "fp16":
            yield Mistake(
                keyword.value,
                code.module,
                "Accelerator(fp16=...) is gone: use mixed_precision='fp16' or 'bf16'",
            )


def _is_for_lightning_1(module: Module) -> bool:
    """Whether a file runs with Lightning 1 alone."""
    found, index = module.imports, module.index
    trainers = [e for e in index.of(ast.Call) if found.full(e.func).startswith(LIGHTNING)]
    given = {keyword.arg for each in trainers for keyword in each.keywords}
    homes = [each for _, names in found.statements for each in names if each.startswith(LIGHTNING)]
    return (
        not LIGHTNING_1.isdisjoint(given)
        or any(each.name in HOOKS for each in index.of(ast.FunctionDef))
        or any(f".{module}" in each for each in homes for module in MODULES_1)
    )


def _literals(value: ast.expr) -> list[ast.Constant]:
    """The literals that an argument may be: ``16 if torch.cuda.is_available() else 32``."""
    match value:
        case ast.Constant():
            return [value]
        case ast.IfExp(body=body, orelse=orelse):
            return [*_literals(body), *_literals(orelse)]
        case _:
            return []


def _is_on_cpu(call: ast.Call) -> bool:
    """Whether it says that there is no GPU: AMP223."""
    return any(each.arg in ("use_cpu", "no_cuda") for each in call.keywords)


def _gone(code: Analysis, keyword: ast.keyword) -> Mistake:
    return Mistake(
        keyword.value,
        code.module,
        f"{keyword.arg} chose apex.amp and is gone: remove it",
    )
