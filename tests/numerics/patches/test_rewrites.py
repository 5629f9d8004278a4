"""Each formula and what is written instead: the same in float64, and right in 16 bits."""

from __future__ import annotations

import ast
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from ampwise.numerics.remedy.patches import attention, domain, primitives
from ampwise.numerics.remedy.patches.site import Site
from ampwise.numerics.remedy.patches.source import UNREADABLE, SourceFile
from ampwise.numerics.remedy.patches.template import Rewrite

ROWS = (*primitives.ROWS, *attention.ROWS, *domain.DOUBLE_WHERE)
_SITE = Site(SourceFile.of(Path("x.py"), b"", 0), 0, dtype="float16")
CLAMPS = (*domain._clamped(_SITE), *domain._limited(_SITE), domain._EMPTY)
HEAD = "import torch\nimport torch.nn.functional as F\n\n\n"


def apply(code: str, row: Rewrite, line: int = 0) -> str | None:
    """The code with the first change that a row makes at a line (of the code, from 1)."""
    data = (HEAD + code).encode()
    at = (line or code.count("\n")) + HEAD.count("\n")
    source = SourceFile.of(Path("x.py"), data, at)
    site = Site(source, at, dtype="float16", compute_dtype="float16")
    edit = next(row.edits(site), None)
    return None if edit is None else source.edited(edit.changes).decode().removeprefix(HEAD)


def run(code: str, *args: torch.Tensor) -> torch.Tensor:
    names: dict = {}
    exec(compile(HEAD + code, "x.py", "exec"), names)
    return names["f"](*args)


# -- every row, in float64 ------------------------------------------------------------------------


VALUES = {
    "D": "-1", "D_": "-1", "K_": "True", "EPS": "1e-9", "S": "8", "I": "-100", "N": "1.5",
    "C": "float('-inf')", "P": "y", "A": "0.7978845608028654",
}  # fmt: skip


class Spelled(ast.NodeTransformer):
    """A template as code: its operations are torch's, its holes are names and numbers."""

    def visit_Name(self, node):
        return ast.parse(VALUES.get(node.id, node.id.lower()), mode="eval").body

    def visit_Call(self, node):
        op = node.func.id
        keywords = [
            each for each in node.keywords
            if not (isinstance(each.value, ast.Name) and each.value.id in ("T_", "W_", "R_", "MAX_", "L_"))
        ]  # fmt: skip
        args = [
            each for each in node.args if not (isinstance(each, ast.Name) and each.id == "MAX_")
        ]
        args = [self.visit(each) for each in args]
        if op == "square":
            return ast.BinOp(args[0], ast.Pow(), ast.Constant(2))
        if op == "reciprocal":
            return ast.BinOp(ast.Constant(1), ast.Div(), args[0])
        if op == "mT":
            return ast.Attribute(args[0], "mT", ast.Load())
        for each in keywords:
            each.value = self.visit(each.value)
        home = "F" if op in ("cross_entropy", "binary_cross_entropy") else "torch"
        func = ast.Attribute(ast.Name(home, ast.Load()), op, ast.Load())
        return ast.Call(func, args, keywords)


def spelled(pattern: str) -> str:
    tree = Spelled().visit(ast.parse(pattern, mode="eval"))
    return f"def f({', '.join(NAMES)}):\n    return {ast.unparse(tree)}\n"


NAMES = ("x", "y", "z", "w", "b", "q", "k", "v", "m")


def benign(row: Rewrite) -> list[torch.Tensor]:
    """Arguments at which nothing is near a limit, in float64."""
    g = torch.Generator().manual_seed(0)

    def between(low: float, high: float, *shape: int) -> torch.Tensor:
        return low + (high - low) * torch.rand(*shape, generator=g, dtype=torch.float64)

    x, y, z = (between(0.2, 0.8, 4, 6) for _ in range(3))
    if "cross_entropy" in row.instead and "binary" not in row.instead:
        y = torch.tensor([0, 2, -100, 5])
    if "log(-torch" in row.instead:
        x = -x
    elif "acosh" in row.instead:
        x = 1 + x
    q, k, v = (between(-1, 1, 2, 5, 6) for _ in range(3))
    mask = torch.rand(5, 5, generator=g) > 0.9
    mask.fill_diagonal_(False)
    if "where" in row.instead:
        mask = torch.rand(4, 6, generator=g) > 0.5
    elif "attn_mask=M," in row.instead:
        mask = between(-1, 0, 5, 5)
    return [x, y, z, between(0.5, 1, 6), between(0.5, 1, 6), q, k, v, mask]


PATTERNS = [
    pytest.param(row, each, id=f"{row.what}: {each}")
    for row in (*ROWS, *CLAMPS)
    for each in row.pattern
]


@pytest.mark.parametrize(("row", "pattern"), PATTERNS)
def test_what_is_written_instead_is_the_same_in_float64(row, pattern):
    code = spelled(pattern)
    patched = apply(code, row)
    assert patched is not None
    assert patched != code
    args = benign(row)
    wanted = run(code, *args)
    wide = 1e-6 if ".float()" in row.instead or "torch.tensor" in row.instead else 1e-8
    torch.testing.assert_close(run(patched, *args).double(), wanted, rtol=wide, atol=wide)


@pytest.mark.parametrize("row", [*ROWS, *CLAMPS], ids=lambda row: f"{row.what}, {row.pattern[0]}")
def test_a_rewrite_is_made_once(row):
    code = spelled(row.pattern[0])
    once = apply(code, row)
    assert once is not None
    twice = apply(once, row, 2)
    assert twice is None


# -- where the formula fails in 16 bits -----------------------------------------------------------


def hard(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


FAILING = {
    "log(softmax)": ("log_softmax in place", "torch.log(torch.softmax(x, dim=-1))", hard(-20, 0, 1)),
    "log(softmax + eps)": ("log_softmax in place", "(x.softmax(-1) + 1e-12).log()", hard(-17, 0, 1)),
    "log(sigmoid)": ("logsigmoid in place of log(sig", "x.sigmoid().log()", hard(-18, 0, 1)),
    "log(1 - sigmoid)": ("log(1 - sigmoid)", "torch.log(1 - torch.sigmoid(x))", hard(12, 0, 1)),
    "logsumexp": ("logsumexp", "x.exp().sum(-1).log()", hard(20, 18, 1)),
    "logaddexp": ("logaddexp", "torch.log(torch.exp(x) + torch.exp(2 * x))", hard(20, 18, 1)),
    "three exponentials": ("logsumexp in place of log(exp + exp + exp)",
        "torch.log(torch.exp(-x) + torch.exp(-2 * x) + torch.exp(-3 * x))", hard(20, 18, 1)),
    "a share": ("logsumexp in place of the logarithm of a share",
        "-torch.log(x.mean(-1).exp() / (x.mean(-1).exp() + x.exp().sum(-1)))", hard(20, 18, 1)),
    "weights": ("logsumexp with the logarithm", "torch.log((x.exp() * (x > 2)).sum(-1))",
        hard(20, 18, 1)),
    "log(mean(exp))": ("logsumexp in place of log(mean", "x.exp().mean(-1).log()", hard(20, 18, 1)),
    "squashed": ("the logarithm of 1 - tanh", "torch.log(1 - torch.tanh(x) ** 2 + 1e-6)",
        hard(4.5, -5, 1)),
    "sqrt(exp)": ("half the exponent", "x.exp().sqrt()", hard(20, 18, 1)),
    "division by exp": ("the negative exponent in place of a division", "3 / x.exp()",
        hard(-9, 12, 18)),
    "sigmoid of a difference": ("sigmoid of the difference",
        "x.exp() / (x.exp() + (2 * x).exp())", hard(-8, 12, 1)),
    "asinh": ("asinh", "torch.log(x + (x ** 2 + 1).sqrt())", hard(400, 3, 1)),
    "softplus": ("softplus in place of log(1", "torch.log(torch.exp(x) + 1)", hard(20, -1, 1)),
    "softmax": ("softmax in place of exp", "x.exp() / x.exp().sum(-1, keepdim=True)", hard(20, 18, 1)),
    "softmax of what a maximum is taken from": ("softmax in place of exp",
        "(x - x.max()).exp() / (x - x.max()).exp().sum(-1, keepdim=True)",
        torch.tensor([[60.0, 1, 0], [3, 2, 1]], dtype=torch.float64)),
    "tanh": ("tanh in place", "(x.exp() - (-x).exp()) / (x.exp() + (-x).exp())", hard(20, 18, 1)),
    "expm1": ("expm1 in place of exp(x)", "x.exp() - 1", hard(1e-4, 2e-4, 3e-4)),
    "log1p": ("log1p", "torch.log(1 + x)", hard(1e-4, 2e-4, 3e-4)),
    "log of a product": ("a sum of logarithms", "x.prod(-1).log()", hard(*[1e-3] * 20)),
    "log(cosh)": ("softplus in place of cosh", "x.cosh().log()", hard(20, -18, 1)),
    "rms_norm": ("rms_norm", "x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)",
        hard(400, 300, -300)),
    "layer_norm": ("layer_norm", "(x - x.mean(-1, keepdim=True)) / torch.sqrt("
        "((x - x.mean(-1, keepdim=True)) ** 2).mean(-1, keepdim=True) + 1e-5)",
        hard(900, 300, -300)),
    "var": ("torch.var", "(x * x).mean(-1) - x.mean(-1) ** 2", hard(200, 201, 202)),
    "vector_norm": ("vector_norm", "x.square().sum(-1).sqrt()", hard(400, 300, -300)),
    "normalize": ("normalize in float32", "x / torch.sqrt((x ** 2).sum(-1, keepdim=True))",
        hard(400, 300, -300)),
    "hypot": ("hypot", "(x ** 2 + (2 * x) ** 2) ** 0.5", hard(400, 300, -300)),
    "silu": ("silu", "x / (1 + torch.exp(-x))", hard(-20, 3, 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILING)
def test_in_16_bits_it_is_right_where_the_formula_is_not(name):
    what, formula, x = FAILING[name]
    named = [each for each in ROWS if what in each.what]
    row = min(named, key=lambda each: not each.what.startswith(what))
    code = f"def f(x):\n    return {formula}\n"
    rows = [each for each in ROWS if each.what == row.what]
    patched = next(made for each in rows if (made := apply(code, each)))
    wanted, slope = with_gradient(code, x)

    with torch.autocast("cpu", torch.float16):
        bad, bad_slope = with_gradient(code, x.half())
        good, good_slope = with_gradient(patched, x.half())
    assert not (close(bad, wanted) and close(bad_slope, slope))
    assert close(good, wanted)
    assert close(good_slope, slope)


def with_gradient(code: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.clone().requires_grad_()
    result = run(code, x)
    weighted = result.double().flatten() * torch.arange(1.0, 1 + result.numel()) ** 2
    (slope,) = torch.autograd.grad(weighted.sum(), x)
    return result.detach().double(), slope.double()


def close(actual: torch.Tensor, wanted: torch.Tensor) -> bool:
    size = float(wanted.abs().max())
    return (
        bool(torch.isfinite(actual).all()) and float((actual - wanted).abs().max()) <= 0.02 * size
    )


# -- what must not be rewritten -------------------------------------------------------------------

ROW = next(row for row in ROWS if row.what.startswith("log_softmax"))


@pytest.mark.parametrize(
    "body",
    [
        "p = torch.softmax(x, -1)\n    x = x + 1\n    return torch.log(p) + x",
        "p = torch.softmax(x, -1)\n    p[0] = 1\n    return torch.log(p)",
        "p = torch.softmax(x, -1)\n    p.clamp_(0.1)\n    return torch.log(p)",
        "p = torch.softmax(x, -1)\n    p = p * 2\n    return torch.log(p)",
        "if x.sum() > 0:\n        p = torch.softmax(x, -1)\n    else:\n        p = x\n    return torch.log(p)",
        "p = x\n    for _ in range(2):\n        q = torch.log(p)\n        p = torch.softmax(x, -1)\n    return q",
        "return torch.log(torch.softmax(x, -1) + 0.5)",
        "return np.log(torch.softmax(x, -1))",
        "return torch.log(self.softmax(x))",
        "return torch.log(torch.softmax(*x))",
    ],
)
def test_another_value_is_not_taken_for_the_formula(body):
    code = f"def f(x):\n    {body}\n"
    for line in range(1, code.count("\n") + 1):
        assert apply(code, ROW, line) is None


def test_over_several_lines_with_what_is_used_elsewhere_kept():
    code = (
        "def f(x):\n"
        "    # probabilities, for the metric\n"
        "    p = torch.softmax(x, -1)   # as it is\n"
        "    log_p = torch.log(\n"
        "        p,  # never 0\n"
        "    )\n"
        "    return log_p , p\n"
    )
    assert apply(code, ROW, 4) is None  # a comment would be lost
    bare = code.replace("  # never 0", "")
    assert apply(bare, ROW, 4) == bare.replace(
        "torch.log(\n        p,\n    )", "F.log_softmax(x, dim=-1)"
    )


def test_of_several_formulas_of_a_kind_all_are_rewritten():
    code = "def f(x, y):\n    p = x.softmax(-1)\n    return p * (p.log() - y.softmax(-1).log())\n"
    assert apply(code, ROW) == code.replace("p.log()", "F.log_softmax(x, dim=-1)").replace(
        "y.softmax(-1).log()", "F.log_softmax(y, dim=-1)"
    )


def test_nothing_is_called_a_second_time():
    body = (
        "def f(x):\n    p = torch.softmax({}, -1)\n    log_p = torch.log(p)\n    return log_p, p\n"
    )
    assert apply(body.format("self.drop(x)"), ROW, 3) is None
    assert apply(body.format("x"), ROW, 3) == body.format("x").replace(
        "torch.log(p)", "F.log_softmax(x, dim=-1)"
    )


def test_comments_above_a_line_that_goes_stay():
    code = "def f(x):\n    y = 2 * x\n    # softmax first\n    p = torch.softmax(y, -1)\n    return p.log()\n"
    assert apply(code, ROW) == (
        "def f(x):\n    y = 2 * x\n    # softmax first\n    return F.log_softmax(y, dim=-1)\n"
    )


@pytest.mark.parametrize(
    ("imports", "wanted"),
    [
        ("import torch", "torch.log_softmax"),
        ("import torch as t", "t.log_softmax"),
        ("from torch import nn, log, softmax", "nn.functional.log_softmax"),
        ("import torch\nfrom torch.nn import functional as fn", "fn.log_softmax"),
        ("import torch\nfrom torch.nn.functional import log_softmax", "log_softmax"),
    ],
)
def test_names_are_written_as_the_file_writes_them(imports, wanted):
    code = f"{imports}\n\ndef f(x):\n    return x.softmax(-1).log()\n"
    source = SourceFile.of(Path("x.py"), code.encode(), code.count("\n"))
    edit = next(ROW.edits(Site(source, code.count("\n"))))
    text = source.edited(edit.changes).decode()
    assert f"return {wanted}(x, dim=-1)" in text
    names = SimpleNamespace()
    exec(text, vars(names))
    x = torch.randn(2, 3)
    torch.testing.assert_close(names.f(x), F.log_softmax(x, dim=-1))
    assert math.isfinite(float(names.f(x).sum()))


def test_torch_is_imported_where_it_is_not():
    code = '"""A loss."""\n\ndef f(x):\n    return x.softmax(-1).log()\n'
    source = SourceFile.of(Path("x.py"), code.encode(), 4)
    text = source.edited(next(ROW.edits(Site(source, 4))).changes).decode()
    assert text.startswith('"""A loss."""\nimport torch\n')
    assert "return torch.log_softmax(x, dim=-1)" in text


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_what_is_not_changed_stays_to_the_byte(end):
    code = f"import torch{end}def f(x):{end}\tp = x.softmax( -1 ){end}\treturn  p.log( ) {end}{end}q = [ 1,\t2 ]"
    source = SourceFile.of(Path("x.py"), code.encode(), 4)
    text = source.edited(next(ROW.edits(Site(source, 4))).changes).decode()
    assert (
        text
        == f"import torch{end}def f(x):{end}\treturn  torch.log_softmax(x, dim=-1) {end}{end}q = [ 1,\t2 ]"
    )


def test_a_file_that_cannot_be_kept_to_the_byte_is_left_alone():
    with pytest.raises(UNREADABLE):
        SourceFile.of(Path("x.py"), b"def f(x):\n    y = x\n\n\x0c    return y\n", 2)
