"""A line that makes parameters in 16 bits, and what is written there instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from ampwise.numerics.remedy.patches import parameters
from ampwise.numerics.remedy.patches.site import Site
from ampwise.numerics.remedy.patches.source import SourceFile

HEAD = "import torch\nfrom torch import nn\n\n\n"


def sites(code: str) -> Site:
    """The place of a mark."""
    data = (HEAD + code).encode()
    line = next(i for i, each in enumerate(data.decode().splitlines(), 1) if "# <-" in each)
    return Site(SourceFile.of(Path("x.py"), data, line), line, dtype="bfloat16")


def texts(code: str) -> list[str]:
    site = sites(code)
    made = [site.source.edited(each.changes).decode() for each in parameters.edits(site)]
    return [each.removeprefix(HEAD).replace("  # <-", "") for each in made]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("w = nn.Parameter(torch.zeros(n, dtype=torch.bfloat16))", "w = nn.Parameter(torch.zeros(n))"),
        ("w = nn.Embedding(9, 4, dtype=torch.half, device=d)", "w = nn.Embedding(9, 4, device=d)"),
        ("w = nn.Parameter(torch.randn(9).to(torch.bfloat16))", "w = nn.Parameter(torch.randn(9))"),
        ("w = nn.Parameter((0.1 * x).bfloat16())", "w = nn.Parameter((0.1 * x))"),
        ("return Net().to(device, torch.bfloat16)", "return Net().to(device)"),
        ("return Net().to(dtype=torch.bfloat16)", "return Net()"),
        ("return Net().to(device).half()", "return Net().to(device)"),
        ("return Net().type(torch.bfloat16)", "return Net()"),
    ],
)  # fmt: skip
def test_the_format_is_left_out(before, after):
    code = "def model(n, d, x, device):\n    {}\n"
    assert texts(code.format(f"{before}  # <-"))[0] == code.format(after)


@pytest.mark.parametrize(
    "cast",
    ["net.bfloat16()  # <-", "net = net.half()  # <-", "net.w.data = net.w.data.bfloat16()  # <-",
     "for p in net.parameters():\n        p.data = p.data.to(torch.bfloat16)  # <-"],
)  # fmt: skip
def test_so_is_a_statement_that_does_nothing_else(cast):
    code = "def model():\n    net = Net()\n    # to save memory\n    {}return net\n"
    assert texts(code.format(f"{cast}\n    "))[0].split() == code.format("").split()


def test_only_on_the_line():
    code = (
        "def task():\n    return Task(\n        model=lambda: Net().bfloat16(),  # <-\n"
        "        loss=lambda m, b: m(b.to(torch.bfloat16)),\n    )\n"
    )
    assert texts(code)[0] == code.replace(".bfloat16()", "").replace("  # <-", "")


MODULE = """class Net(nn.Module):
    def __init__(self):
        super().__init__()
        {made}

    def forward(self, x):
        self.seen = x
        return {used}
"""


@pytest.mark.parametrize(
    ("made", "used", "then"),
    [
        ("self.w = nn.Parameter(torch.randn(9){})", "x @ self.w.t() + self.w.norm()",
         "x @ self.w.to(torch.bfloat16).t() + self.w.norm()"),
        ("self.w = nn.Embedding(9, 4){}", "self.w(x) + len(self.w.weight)",
         "self.w(x).to(torch.bfloat16) + len(self.w.weight)"),
    ],
)  # fmt: skip
def test_then_the_cast_is_where_it_is_used(made, used, then):
    before = MODULE.format(made=made.format(".to(torch.bfloat16)") + "  # <-", used=used)
    assert texts(before)[1] == MODULE.format(made=made.format(""), used=then)


def test_a_format_that_is_an_argument_is_changed_where_it_is_given():
    code = "def model(n, dtype=torch.bfloat16):\n    return nn.Linear(n, n, dtype=dtype)  # <-\n"
    plain = code.replace("  # <-", "")
    assert texts(code) == [
        plain.replace("torch.bfloat16", "torch.float32"),
        plain.replace("dtype=dtype", "dtype=torch.float32"),
    ]
