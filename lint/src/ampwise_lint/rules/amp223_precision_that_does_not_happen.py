"""# precision-that-does-not-happen

## What it does
Reports settings that contradict each other: `fp16=True` with `use_cpu=True`
(`TrainingArguments`), `precision="16-mixed"` with `accelerator="cpu"` (Lightning),
`Accelerator(cpu=True, mixed_precision="fp16")`. As info: a `nullcontext()` that is chosen for the
CPU whatever the dtype, beside an autocast with a dtype.

## Why is this bad
transformers trains in float32 without a word; Lightning runs bfloat16 instead; Accelerate raises
ValueError "fp16 mixed precision requires a GPU". CPUs run bfloat16 under autocast, and a
`nullcontext` there means that what is tried on a CPU is not what will train.

## Example
    arguments = TrainingArguments("runs", fp16=True, use_cpu=True)
    context = nullcontext() if device == "cpu" else torch.autocast(device, dtype=dtype)

## Use instead
    arguments = TrainingArguments("runs", bf16=True, use_cpu=True)
    context = torch.autocast(device, dtype=dtype, enabled=dtype != torch.float32)

## Fix safety
No automatic fix: which of the two settings is meant, only the author knows.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampwise_lint.analysis import Analysis
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.source.library import AUTOCASTS, NULL
from ampwise_lint.source.project import Module
from ampwise_lint.triggers import AUTOCAST, HALF

LIGHTNING = ("lightning.", "pytorch_lightning.", "lightning_fabric.")
NAMES = ("TrainingArguments", "Trainer", "Fabric", "Accelerator", "nullcontext", "suppress")
"""Without any of these there is nothing to look for, in most files."""
SIXTEEN = ("16", "16-mixed")


@rule("AMP223", "precision-that-does-not-happen", "warning", triggers=(AUTOCAST, HALF))
def check(code: Analysis) -> Iterator[Mistake]:
    module = code.module
    if not any(each in module.source.text for each in NAMES):
        return
    for call in module.index.of(ast.Call):
        told = _contradiction(module, call)
        if told:
            yield Mistake(call, module, told)
    for choice in module.index.of(ast.IfExp):
        if _drops_autocast(module, choice):
            yield Mistake(
                choice,
                module,
                "on a CPU nothing is cast, whatever the dtype: CPUs run bfloat16 under autocast; "
                "use autocast there too, with enabled= for float32",
                severity="info",
            )


def _contradiction(module: Module, call: ast.Call) -> str:
    full = module.imports.full(call.func)
    last = full.rpartition(".")[2]
    given = {e.arg: e.value.value for e in call.keywords if isinstance(e.value, ast.Constant)}
    on_cpu = given.get("use_cpu") is True or given.get("no_cuda") is True
    if full.startswith("transformers.") and last.endswith("TrainingArguments"):
        told = "fp16=True on a CPU: training runs in float32 without a word; use bf16=True"
        return told if given.get("fp16") is True and on_cpu else ""
    if full.startswith(LIGHTNING) and last in ("Trainer", "Fabric"):
        told = "float16 on a CPU: Lightning runs bfloat16 instead; write precision='bf16-mixed'"
        meant = str(given.get("precision")) in SIXTEEN
        return told if meant and given.get("accelerator") == "cpu" else ""
    if full.startswith("accelerate.") and last == "Accelerator":
        told = "fp16 on a CPU: Accelerator raises ValueError; use mixed_precision='bf16'"
        meant = given.get("mixed_precision") == "fp16"
        return told if meant and given.get("cpu") is True else ""
    return ""


def _drops_autocast(module: Module, choice: ast.IfExp) -> bool:
    """``nullcontext() if device == "cpu" else autocast(device, dtype=dtype)``."""
    match choice.test:
        case ast.Compare(ops=[ast.Eq()], comparators=[ast.Constant(value="cpu")]):
            null, cast = choice.body, choice.orelse
        case (
            ast.Compare(ops=[ast.NotEq()], comparators=[ast.Constant(value="cpu")])
            | ast.Compare(ops=[ast.Eq()], comparators=[ast.Constant(value="cuda")])
        ):
            null, cast = choice.orelse, choice.body
        case _:
            return False
    if not isinstance(null, ast.Call) or not isinstance(cast, ast.Call):
        return False
    pair = module.imports.full(null.func) in NULL and module.imports.full(cast.func) in AUTOCASTS
    dtypes = [each.value for each in cast.keywords if each.arg == "dtype"]
    return pair and not all(map(_is_float16, dtypes)) and bool(dtypes)


def _is_float16(dtype: ast.expr) -> bool:
    """Whether a dtype is none that a CPU's autocast runs: of two to choose from, one may be."""
    match dtype:
        case ast.IfExp(body=one, orelse=other):
            return _is_float16(one) and _is_float16(other)
        case _:
            return ast.unparse(dtype).rpartition(".")[2] in ("float16", "half")
