"""What becomes of an output in the block it is made in: whether it is shown, and nothing else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ampwise_lint.source.places import names
from ampwise_lint.source.project import Module
from ampwise_lint.source.roles import dotted

FIGURE = re.compile(
    r"loss|(?<![a-z])metric|accura|correct|recall|evaluat|perplex|scores?\b"
    r"|(\b|_)(acc\d?|m?iou|dice|psnr|ssim|auc|f1|mae|r?mse|fid|[wc]er|bleu)(_|\b)",
    re.IGNORECASE,
)
"""Words of what outputs are measured by."""

BLOCKS = ast.For | ast.AsyncFor | ast.While | ast.FunctionDef | ast.AsyncFunctionDef
SIMPLE = ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr | ast.Return | ast.Delete
PICTURES = re.compile(
    r"(^|\.)(make_grid|save_image|add_images?|visuali[sz]e|imshow|imsave|imwrite|savefig|fromarray|mimsave"
    r"|write_video|log_images?|wandb\.Image|Image|to_pil\w*|ToPILImage"
    r"|(plot|draw|show|save|display|visuali[sz]e)_\w*(images?|imgs?|pics?|samples?|examples?|grids?|png|figures?)\w*)$"
)
"""Functions that show what they are given, or make a picture of it."""


def is_pictured(module: Module, output: ast.AST) -> bool:
    """Whether an output, and all that is made of it in its block, is only made into pictures."""
    own = module.statement_of(output)
    if _is_shown(own):
        return True
    derived = bound(own)
    if not derived:
        return False
    shown = False
    for each in _statements(module, own):
        if names_read(each).isdisjoint(derived):
            continue
        if _is_shown(each):
            shown = True
            continue
        if not bound(each) or _measures(each):
            return False
        derived |= bound(each)
    return shown


def names_read(node: ast.AST) -> set[str]:
    """Names that some code reads."""
    return names(node) - bound(node)


def _statements(module: Module, statement: ast.stmt) -> Iterator[ast.stmt]:
    """The simple statements behind one in the loop or the function around it, in order."""
    around: ast.AST | None = module.parents.get(id(statement))
    while around is not None and not isinstance(around, BLOCKS):
        around = module.parents.get(id(around))
    inside = [each for each in ast.walk(around or module.tree) if isinstance(each, SIMPLE)]
    behind = [each for each in inside if each.lineno > statement.lineno]
    yield from sorted(behind, key=lambda each: each.lineno)


def bound(statement: ast.AST) -> set[str]:
    """Names that an assignment binds, by themselves or in a tuple; empty if it does more."""
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    parts = [e for each in targets for e in (each.elts if isinstance(each, ast.Tuple) else [each])]
    bound = {each.id for each in parts if isinstance(each, ast.Name)}
    return bound if len(bound) == len(parts) else set()


def _is_shown(statement: ast.stmt) -> bool:
    return any(
        isinstance(each, ast.Call) and PICTURES.search(dotted(each.func))
        for each in ast.walk(statement)
    )


def _measures(statement: ast.stmt) -> bool:
    """Whether a figure is made of something."""
    text = ast.unparse(statement)
    return "criterion" in text or "==" in text or bool(FIGURE.search(text))
