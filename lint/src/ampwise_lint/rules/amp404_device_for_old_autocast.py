"""# device-for-old-autocast

## What it does
Reports `device_type=` given to `torch.cuda.amp.autocast` or `torch.cpu.amp.autocast`, and `device=`
given to their GradScaler.

## Why is this bad
These are for one device each and have no such argument: the call raises TypeError "got an
unexpected keyword argument 'device_type'". The argument belongs to `torch.amp.autocast`.

## Example
    from torch.cuda.amp import autocast

    with autocast(device_type="cuda", dtype=torch.float16):
        loss = criterion(model(x), y)

## Use instead
    from torch.amp import autocast

    with autocast(device_type="cuda", dtype=torch.float16):
        loss = criterion(model(x), y)

## Fix safety
No fix of its own: that of AMP401, which changes the import or the path, makes the call right.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampwise_lint.analysis import Analysis
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.source.project import Module
from ampwise_lint.triggers import OLD_PACKAGES

TAKES_NONE = {
    f"torch.{device}.amp.{name}": argument
    for device in ("cuda", "cpu")
    for name, argument in (("autocast", "device_type"), ("GradScaler", "device"))
}


@rule("AMP404", "device-for-old-autocast", "error", triggers=(OLD_PACKAGES,))
def check(code: Analysis) -> Iterator[Mistake]:
    module = code.module
    if "device" not in module.source.text or not _names_old(module):
        return
    for node, full in module.imports.uses(module.index):
        call = module.parents[id(node)]
        argument = TAKES_NONE.get(full, "")
        if not argument or not isinstance(call, ast.Call) or call.func is not node:
            continue
        if any(each.arg == argument for each in call.keywords):
            yield Mistake(
                call,
                module,
                f"{full} takes no {argument}: this raises TypeError; use "
                f"torch.amp.{full.rpartition('.')[2]}",
            )


def _names_old(module: Module) -> bool:
    """Whether the file may use one of the old names at all."""
    imported = any("amp" in each for _, names in module.imports.statements for each in names)
    return imported or "cuda.amp" in module.source.text
