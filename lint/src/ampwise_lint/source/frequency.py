"""How often a condition lets something happen, by how it is written."""

from __future__ import annotations

import ast
import re

from ampwise_lint.source.roles import dotted

SETTING = re.compile(
    r"vi[sz](ual|_|\b)|debug|verbose|plot|profil|dump|trac(e|ing)\b|interval|should_|_freq\b"
    r"|(\b|_)(every|due)\b|every_|(^|[^a-z])(do|is|to|will|must|need|time)_log(_\w+|ging)?\b"
    r"|log_(step|now|this)\b|log(ging)?_?level|verbosity|(use|store|return)_(kv|cache)\b|kv_cache"
)
"""What is switched on to look into a training or to generate, not to train, or says that it is
time to."""

AT_THE_END = re.compile(r"(^|[._])(is_)?(last|final|force)(_step|_epoch|_save)?$")
"""Flags of the end of a training, or of whoever asks for something out of turn."""

COUNTER = re.compile(
    r"(^|[._])(steps?|it|iters?|iteration|idx|index|i|n|batch_?(idx|i|id)?|count(er)?)(_since_\w+)?$"
)
"""Names of what counts steps."""

DUE = re.compile(r"next|last|since")
"""Names of when something was done, or is to be done."""

FEW = 10
"""Steps at the beginning that are looked at."""


def is_for_few(test: ast.expr) -> bool:
    """``step == 0``, ``step in shown``, ``random() < 0.01``, also among other conditions."""
    match test:
        case ast.Compare(left=ast.Call(func=drawn), ops=[op], comparators=[right]):
            return dotted(drawn).endswith("random.random") and _is_unlikely(op, right)
        case ast.Compare(left=ast.Name(id="__name__")):
            return True
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return _counts(left) and _picks(left, op, right)
        case ast.BoolOp(op=ast.And(), values=values):
            return any(map(is_for_few, values))
        case ast.BoolOp(op=ast.Or(), values=values):
            return all(map(is_for_few, values))
        case _:
            return False


def _is_unlikely(op: ast.cmpop, right: ast.expr) -> bool:
    """``random.random() < 0.005``."""
    chance = right.value if isinstance(right, ast.Constant) else None
    return isinstance(op, ast.Lt) and isinstance(chance, float) and chance * FEW <= 1


def _counts(node: ast.expr) -> bool:
    """``step``, ``step + 1``, ``step - last_log``."""
    if isinstance(node, ast.BinOp):
        return _counts(node.left) or _counts(node.right)
    return bool(COUNTER.search(dotted(node)))


def _picks(left: ast.expr, op: ast.cmpop, right: ast.expr) -> bool:
    """Whether a count of steps is compared so that few of them pass."""
    match op, right:
        case ast.Eq(), ast.Constant(value=str()):
            return False
        case ast.Eq() | ast.In(), _:
            return True
        case ast.Lt() | ast.LtE(), ast.Constant(value=int(first)):
            return first <= FEW
        case ast.Gt() | ast.GtE(), _:
            return bool(DUE.search(ast.unparse(left)) or DUE.search(ast.unparse(right)))
        case _:
            return False


def is_for_most(test: ast.expr) -> bool:
    """``if step % 100: continue``, ``if step not in shown``: what leaves most steps out."""
    match test:
        case ast.BinOp(op=ast.Mod(), left=left):
            return _counts(left)
        case ast.UnaryOp(op=ast.Not(), operand=few):
            asked = ast.unparse(few)
            return is_for_few(few) or bool(SETTING.search(asked) or AT_THE_END.search(asked))
        case ast.Compare(left=left, ops=[ast.NotEq() | ast.NotIn()]):
            return _counts(left)
        case ast.BoolOp(op=ast.Or(), values=values):
            return any(map(is_for_most, values))
        case ast.BoolOp(op=ast.And(), values=values):
            return all(map(is_for_most, values))
        case _:
            return False
