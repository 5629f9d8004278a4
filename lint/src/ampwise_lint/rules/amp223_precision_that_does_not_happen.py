"""# precision-that-does-not-happen

## What it does
Reports settings that contradict each other: `fp16=True` with `use_cpu=True`
(`TrainingArguments`), `precision="16-mixed"` with `accelerator="cpu"` (Lightning),
`Accelerator(cpu=True, mixed_precision="fp16")`. As info: a `nullcontext()` that is chosen for the
CPU whatever the dtype, beside an autocast with a dtype: in one expression, in two branches, or by
a function that returns early; silent where the device is a text in the file that says `cuda`, and
nothing reads another one.

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
import re
from collections.abc import Iterator

from ampwise_lint.analysis import Analysis
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.source.library import AUTOCASTS, NULL
from ampwise_lint.source.places import assignments, block_of, names, scope_of, stores
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
    for choice in (*module.index.of(ast.IfExp), *module.index.of(ast.If)):
        null = _null_for_cpu(module, choice)
        if null is not None and not _is_fixed(module, choice, choice.test):
            yield Mistake(
                null,
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


def _null_for_cpu(module: Module, choice: ast.IfExp | ast.If) -> ast.expr | None:
    """``nullcontext() if device == "cpu" else autocast(device, dtype=dtype)``, or as statements."""
    match choice.test:
        case ast.Compare(ops=[ast.Eq()], comparators=[ast.Constant(value="cpu")]):
            on_cpu = True
        case (
            ast.Compare(ops=[ast.NotEq()], comparators=[ast.Constant(value="cpu")])
            | ast.Compare(ops=[ast.Eq()], comparators=[ast.Constant(value="cuda")])
        ):
            on_cpu = False
        case ast.Compare(ops=[ast.NotEq()], comparators=[ast.Constant(value="cuda")]):
            on_cpu = True
        case _:
            return None
    if isinstance(choice, ast.IfExp):
        null, cast = (choice.body, choice.orelse) if on_cpu else (choice.orelse, choice.body)
        is_pair = _is_null(module, null) and _is_autocast(module, cast)
        return choice if is_pair else None
    first, other = choice.body, choice.orelse or _behind(module, choice)
    nulls, casts = (first, other) if on_cpu else (other, first)
    match nulls:
        case [ast.Return(value=ast.Call() as null), *_]:
            found = [e.value for each in casts for e in ast.walk(each) if isinstance(e, ast.Return)]
        case [ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() as null)]:
            if not choice.orelse:
                return None  # bound again behind it, perhaps
            found = [e.value for each in casts for e in assignments(each, name)]
        case _:
            return None
    cast_there = any(_is_autocast(module, each) for each in found)
    return null if _is_null(module, null) and cast_there else None


def _is_fixed(module: Module, choice: ast.AST, asked: ast.expr, steps: int = 3) -> bool:
    """Whether all that a test asks for is a text ``"cuda"``, which nothing else sets.

    `steps`: how many names may lead to it.
    """
    if isinstance(asked, ast.Constant):
        return isinstance(asked.value, str) and asked.value.startswith("cuda")
    if not steps or OVERRIDES.search(module.source.text):
        return False
    scope, used = scope_of(module, choice), names(asked)
    made = [each.value for name in used for each in assignments(scope, name)]
    once = len(made) == len(used) and all(stores(module.tree, name) == 1 for name in used)
    fixed = (each is not None and _is_fixed(module, choice, each, steps - 1) for each in made)
    return bool(made) and once and all(fixed)


OVERRIDES = re.compile(r"\bexec\(|\bglobals\(\)")
"""What sets names of a script by other words than theirs, as nanoGPT's configurator."""


def _behind(module: Module, choice: ast.If) -> list[ast.stmt]:
    """What runs where a branch that returns is not taken."""
    block = block_of(module, choice)
    return block[block.index(choice) + 1 :] if isinstance(choice.body[-1], ast.Return) else []


def _is_null(module: Module, node: ast.expr | None) -> bool:
    return isinstance(node, ast.Call) and module.imports.full(node.func) in NULL


def _is_autocast(module: Module, node: ast.expr | None) -> bool:
    """Whether it is an autocast with a dtype that CPUs run."""
    if not isinstance(node, ast.Call) or module.imports.full(node.func) not in AUTOCASTS:
        return False
    dtypes = [each.value for each in node.keywords if each.arg == "dtype"]
    return bool(dtypes) and not all(map(_is_float16, dtypes))


def _is_float16(dtype: ast.expr) -> bool:
    """Whether a dtype is none that a CPU's autocast runs: of two to choose from, one may be."""
    match dtype:
        case ast.IfExp(body=one, orelse=other):
            return _is_float16(one) and _is_float16(other)
        case _:
            return ast.unparse(dtype).rpartition(".")[2] in ("float16", "half")
