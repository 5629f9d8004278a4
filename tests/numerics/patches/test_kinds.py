"""Constants, formats and islands: what is written for what the diagnosis says, as text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ampwise.numerics.remedy.patches import (
    Grade,
    Proposal,
    around,
    back_from,
    casts_in,
    given_to_helpers,
    islands_in,
    made_by,
    proposals,
    reach,
    softmaxes_in,
)
from ampwise.numerics.remedy.patches.calls import CallSite
from ampwise.numerics.remedy.patches.site import Site
from ampwise.numerics.remedy.patches.source import SourceFile, code_of, with_torch

HEAD = "import torch\nimport torch.nn.functional as F\n\n\n"


def site(code: str, half: str = "", **known) -> Site:
    """A site at the line marked with ``# <-``; names in `half` hold float16 everywhere."""
    text = HEAD + code
    line = next(i for i, each in enumerate(text.splitlines(), 1) if "# <-" in each)
    here = {name: {"float16"} for name in half.split()} | {"n": {"other"}}
    dtypes = {each: dict(here) for each in range(text.count("\n") + 1)}
    source = SourceFile.of(Path("x.py"), text.encode(), line)
    return Site(source, line, **{"dtype": "float16", **known}, dtypes=dtypes)


def texts(code: str, half: str = "", **known) -> list[str]:
    return [each.data.decode().removeprefix(HEAD) for each in made(code, half, **known)]


def made(code: str, half: str = "", **known) -> list[Proposal]:
    return proposals(site(code, half, **known))


def line(body: str) -> str:
    return f"def f(x, mask, n):\n    {body}  # <-\n"


LINES = {
    "mask": ("x = x.masked_fill(mask, -1e9)", "x = x.masked_fill(mask, torch.finfo(x.dtype).min)",
             {"cause": "MASK_CONSTANT"}),
    "mask by name": ("x = x.masked_fill(mask, value=NEG)",
                     "x = x.masked_fill(mask, value=torch.finfo(x.dtype).min)",
                     {"cause": "MASK_CONSTANT"}),
    "mask of an expression": ("return (2 * x).masked_fill(mask, -1e9)",
                              'return (2 * x).masked_fill(mask, float("-inf"))',
                              {"cause": "MASK_CONSTANT"}),
    "mask by product": ("m = (1 - mask) * -10000000.0",
                        "m = (1 - mask) * torch.finfo(mask.dtype).min / 2",
                        {"cause": "MASK_CONSTANT", "half": "mask"}),
    "mask by where": ("return torch.where(mask, -1e9, x)",
                      "return torch.where(mask, torch.finfo(x.dtype).min, x)",
                      {"cause": "MASK_CONSTANT"}),
    "mask by product, cast": ("m = (1 - mask.to(n.dtype)) * -1e9",
                              "m = (1 - mask.to(n.dtype)) * torch.finfo(n.dtype).min / 2",
                              {"cause": "MASK_CONSTANT"}),
    "mask by a name less than 0": ("x = x.masked_fill(mask, -BIG)",
                                   "x = x.masked_fill(mask, torch.finfo(x.dtype).min)",
                                   {"cause": "MASK_CONSTANT"}),
    "mask in a sum": ("return x.masked_fill(mask, -1e9) + n",
                      "return x.masked_fill(mask, torch.finfo(x.dtype).min / 2) + n",
                      {"cause": "MASK_CONSTANT"}),
    "row of -inf": ("x = x.masked_fill(mask, -torch.inf)",
                    "x = x.masked_fill(mask, torch.finfo(x.dtype).min)",
                    {"cause": "FULLY_MASKED_ROW"}),
    "row of a module's mask": (
        "return self.attn(x, x, x, key_padding_mask=mask)",
        "return self.attn(x, x, x, key_padding_mask=mask & ~mask.all(dim=-1, keepdim=True))",
        {"cause": "FULLY_MASKED_ROW"}),
    "cast": ("return x.half() * 2", "return x.float() * 2", {"cause": "UNDERFLOW"}),
    "dtype": ("return torch.arange(n, dtype=torch.bfloat16)",
              "return torch.arange(n, dtype=torch.float32)", {"cause": "PRECISION_LOSS"}),
    "to": ("return x.to(torch.float16)", "return x.to(torch.float32)", {"cause": "UNDERFLOW"}),
    "the format of another tensor": (
        "return self.embed(n.to(x.dtype))", "return self.embed(n.to(torch.float32))",
        {"cause": "PRECISION_LOSS", "op": "_to_copy", "half": "x"}),
    "made in the format of another tensor": (
        "return torch.full((n,), 0.998, dtype=x.dtype)",
        "return torch.full((n,), 0.998, dtype=torch.float32)",
        {"cause": "PRECISION_LOSS", "op": "full", "half": "x"}),
    "to another tensor": (
        "return self.embed(n.to(x))", "return self.embed(n.to(x.device, torch.float32))",
        {"cause": "PRECISION_LOSS", "op": "_to_copy", "half": "x"}),
    "like another tensor": (
        "return self.embed(n.type_as(x))", "return self.embed(n.float())",
        {"cause": "PRECISION_LOSS", "op": "_to_copy", "half": "x"}),
    "eps that float32 has": (
        "return x * torch.rsqrt((x**2).mean(1, keepdim=True) + n)",
        "return x * torch.rsqrt((x.float()**2).mean(1, keepdim=True) + n)",
        {"cause": "EPS_UNDERFLOW", "op": "rsqrt", "half": "x"}),
    "operand": ("return x * 1e5", "return x.float() * 1e5",
                {"cause": "RANGE_OVERFLOW", "op": "mul", "half": "x"}),
    "operand of an operand": ("return torch.sum(x ** 2 + 1)", "return torch.sum(x.float() ** 2 + 1)",
                              {"cause": "RANGE_OVERFLOW", "op": "sum", "half": "x"}),
    "operand that is a call": ("return self.p(x) * 1e5", "return self.p(x).float() * 1e5",
                               {"cause": "RANGE_OVERFLOW", "op": "mul", "half": "x"}),
    "written": ("x[mask] = self.p(x)", "x[mask] = self.p(x).to(x.dtype)", {"cause": "DTYPE_ERROR"}),
    "added": ("x.index_add_(0, mask, x + n)", "x.index_add_(0, mask, (x + n).to(x.dtype))",
              {"cause": "DTYPE_ERROR"}),
    "added to what is made there": (
        "return torch.zeros(3).index_add_(0, mask, self.p(x))",
        "return torch.zeros(3).index_add_(0, mask, self.p(x).float())", {"cause": "DTYPE_ERROR"}),
    "nothing": ("return x.mean()", "return x.sum() / max(x.numel(), 1)",
                {"cause": "EMPTY_REDUCTION"}),
}  # fmt: skip


@pytest.mark.parametrize("name", LINES)
def test_the_gentlest_change_comes_first(name):
    before, after, known = LINES[name]
    assert texts(line(before), **known)[0] == line(after)


GUARDS = {
    "eps": ("return 1 / (x + 1e-8)", "return 1 / (x + 1e-4)"),
    "default": ("return F.normalize(x, dim=-1)", "return F.normalize(x, dim=-1, eps=1e-4)"),
    "keyword": ("return F.normalize(x, eps=1e-12)", "return F.normalize(x, eps=1e-4)"),
}


@pytest.mark.parametrize("name", GUARDS)
def test_a_larger_eps_comes_after_float32_which_keeps_the_one_that_was_meant(name):
    before, after = GUARDS[name]
    found = made(line(before), cause="EPS_UNDERFLOW", op="div", half="x")
    grades = [each.grade for each in found]
    larger = next(each for each in found if each.grade == Grade.CONSTANT)
    assert larger.data.decode().removeprefix(HEAD) == line(after)
    assert Grade.FLOAT32 in grades[: found.index(larger)]


BLOCKED = "def f(x, mask):\n    return x.masked_fill(mask, BLOCKED)  # <-\n"
NAMED = BLOCKED.replace("BLOCKED", "torch.finfo(x.dtype).min")


@pytest.mark.parametrize(
    ("above", "left"),
    [
        ("BLOCKED = -1e9\n\n\n", ""),
        ("# What must not be chosen.\nBLOCKED = -1e9\n\n\n", ""),
        ("BLOCKED = -1e9\nCLIP = 10.0\n\n\n", "CLIP = 10.0\n\n\n"),
        ("# In logits.\nBLOCKED = -1e9\nCLIP = 10.0\n\n\n", None),
        ("BLOCKED = -1e9\n__all__ = ['BLOCKED', 'f']\n\n\n", None),
    ],
    ids=["alone", "with its comment", "with others", "below a comment", "exported"],
)
def test_a_number_that_nothing_reads_any_more_is_dropped(above, left):
    here = site(above + BLOCKED, "x", cause="MASK_CONSTANT", op="masked_fill")
    assert proposals(here)[0].data.decode() == HEAD + (above if left is None else left) + NAMED


def test_a_number_that_another_file_names_stays(tmp_path):
    here = site(f"BLOCKED = -1e9\n\n\n{BLOCKED}", "x", cause="MASK_CONSTANT", op="masked_fill")
    here.source.path = tmp_path / "x.py"
    (tmp_path / "other.py").write_text("from x import BLOCKED\n")
    assert b"BLOCKED = -1e9" in proposals(here)[0].data


def test_a_mask_that_something_is_taken_from_has_room():
    code = "def f(x, mask, n):\n    x = x.masked_fill(mask, -1e9)  # <-\n    x -= n\n    return x\n"
    found = texts(code, "x", cause="MASK_CONSTANT", op="masked_fill")
    assert found[0] == code.replace("-1e9", "torch.finfo(x.dtype).min / 2")


def test_the_masks_of_one_constant_are_changed_together_and_it_is_dropped():
    code = (
        "MASKED = -1e5\n\n\nclass Model:\n"
        "    def attend(self, x, mask):\n"
        "        return torch.where(mask, torch.full_like(x, MASKED), x)  # <-\n\n"
        "    def forward(self, x, mask):\n"
        "        y = self.attend(x, mask)\n"
        "        return y.masked_fill(mask, MASKED)\n"
    )
    found = texts(code, "x", cause="MASK_CONSTANT", op="full_like")
    both = code.replace("(x, MASKED)", "(x, torch.finfo(x.dtype).min)")
    both = both.replace("(mask, MASKED)", "(mask, torch.finfo(y.dtype).min)")
    assert both.removeprefix("MASKED = -1e5\n\n\n") in found[:3]


def test_a_constant_is_found_where_its_name_was_assigned():
    code = "def f(x):\n    p = x + 1e-8\n    return torch.div(1, p)  # <-\n"
    assert code.replace("1e-8", "1e-4") in texts(code, cause="EPS_UNDERFLOW")


def test_a_cast_to_a_format_that_was_given_is_undone_above_the_line():
    code = "def f(table, n, dtype):\n    a = table[n].to(dtype)\n    return a / (1 - a)  # <-\n"
    found = texts(code, "a", cause="CANCELLATION", op="rsub")
    raised = code.replace("to(dtype)", "to(torch.float32)")
    returned = raised.replace("a / (1 - a)", "(a / (1 - a)).to(dtype)")
    assert found[:2] == [returned, raised]  # an argument that nothing reads is no help
    assert not any("to(torch.float32)" in each for each in texts(code, cause="CANCELLATION"))


def test_the_format_of_another_tensor_is_kept_where_another_operation_fails():
    code = line("return (n.to(x.dtype) * 1e5).sum()")
    found = made(code, cause="RANGE_OVERFLOW", op="mul", half="x")
    assert found
    casts = [each for each in found if b"n.to(torch.float32)" in each.data]
    assert all(each.grade >= Grade.STATEMENTS and b"x.float()" not in each.data for each in casts)


@pytest.mark.parametrize("call", ["x.new_ones(3)", "torch.ones_like(x)", "x.new_full((3,), 1.0)"])
def test_a_tensor_that_is_made_like_one_with_16_bits_is_made_in_float32(call):
    code = line(f"return n.index_add(0, at, {call})")
    wanted = code.replace(call, f"{call[:-1]}, dtype=torch.float32)")
    assert wanted in texts(code, "x", cause="PRECISION_LOSS", op="index_add")
    assert wanted not in texts(code, cause="PRECISION_LOSS", op="index_add")


def test_an_island_undoes_the_casts_in_it_and_leaves_autocast_only_for_products():
    code = "def f(q, k, r):\n    g = (r**-2).to(q.dtype)  # <-\n    return (q @ (k * g)).sum()\n"
    found = [each for each in texts(code, "q k", cause="RANGE_OVERFLOW", op="_to_copy")
             if "(r**-2).to(torch.float32)" in each]  # fmt: skip
    assert any("autocast" in e and "q.float() @ (k.float() * g)" in e for e in found)
    plain = "def f(q, k, r):\n    g = (r**-2).to(q.dtype)  # <-\n    return (q * k * g).sum()\n"
    found = [each for each in texts(plain, "q k", cause="RANGE_OVERFLOW", op="_to_copy")
             if "q.float() * k.float() * g" in each]  # fmt: skip
    assert found
    assert not any("autocast" in each for each in found if "q, k =" not in each)


def test_state_that_is_made_elsewhere_in_the_function_is_made_in_float32():
    code = (
        "def step(self, p):\n"
        "    state = self.state[p]\n"
        '    state.setdefault("v", torch.zeros_like(p, dtype=torch.float16))\n'
        '    state["v"].add_(p.grad.half() ** 2)\n'
        '    p.sub_(p.grad / (state["v"].sqrt() + self.eps))  # <-\n'
    )
    wanted = code.replace("torch.float16", "torch.float32").replace(".half()", ".float()")
    assert texts(code, cause="EPS_UNDERFLOW", op="div")[0] == wanted


def test_a_clamp_nearer_to_0_comes_before_one_whose_derivative_float16_holds():
    known = {"op": "div", "cause": "DOMAIN_ERROR"}
    code = "def f(x, n):\n    return x / n  # <-\n"
    found = texts(code, "x n", **known)
    ends = [code.replace("/ n", f"/ n.float().clamp_min({end})") for end in ("1e-12", "1e-4")]
    assert found[:2] == ends
    root = "def f(x):\n    return torch.sqrt(x)  # <-\n"
    found = texts(root, "x", op="sqrt", cause="DOMAIN_ERROR")
    assert found[1] == root.replace("sqrt(x)", "sqrt(x.float().clamp_min(1e-8))")
    assert ends[1] not in texts(code, "x n", compute_dtype="bfloat16", **known)


def test_a_product_is_divided_as_it_stands():
    code = line("return 1 - 2 * x / n")
    found = texts(code, "x n", op="div", cause="DOMAIN_ERROR")
    assert found[0] == code.replace("/ n", "/ n.float().clamp_min(1e-12)")


def test_what_rounds_to_the_end_of_the_domain_may_be_kept_inside_in_the_end():
    code = line("return torch.acos(x / n)")
    found = texts(code, "x n", op="acos", cause="PRECISION_LOSS")
    clamped = ["torch.acos((x / n).float().clamp(-1 + 1e-6, 1 - 1e-6))" in each for each in found]
    assert clamped.count(True) == 2 and clamped == sorted(clamped)  # also in a float32 function


def test_a_clamp_comes_last_where_a_wider_format_does():
    code = line("return torch.sqrt(x.mean())")
    clamped = ["clamp_min" in each for each in texts(code, "x", cause="UNDERFLOW", op="sqrt")]
    assert clamped == sorted(clamped)
    assert clamped.count(True) == 2  # and in a function in float32
    assert "clamp_min" in texts(code, "x", cause="DOMAIN_ERROR", op="sqrt")[0]


def test_an_island_asks_no_tensor_for_its_device_that_is_not_there_yet():
    code = "def f(w, k):\n    for _ in range(3):\n        v = self.m(k)  # <-\n        w = w * v\n"
    found = texts(code, "v w k", cause="RANGE_OVERFLOW", op="mm")
    islands = [each for each in found if "with torch.autocast" in each]
    assert islands
    assert all("torch.autocast(k.device.type" in each or "w.device" in each for each in islands)


def test_an_island_asks_a_tensor_of_numbers_before_one_of_labels():
    code = "def f(label, x):\n    y = self.head(x)\n    return y @ y.T  # <-\n"
    marked = site(code, "x y", cause="RANGE_OVERFLOW", op="mm")
    for here in marked.dtypes.values():
        here["label"] = {"int64"}
    marked.dtypes[6].pop("y")
    function = proposals(marked)[-1].data.decode()
    assert "torch.autocast(x.device.type" in function


def test_names_are_raised_for_all_that_comes_below():
    code = (
        "def f(m, x):\n"
        "    a, b = m(x).chunk(2)\n"
        "    # both\n"
        "    dot = (a * b).sum()  # <-\n"
        "    return dot / a.norm()\n"
    )
    wanted = code.replace(
        "    # both\n    dot", "    # both\n    a, b = a.float(), b.float()\n    dot"
    )
    assert wanted in texts(code, "a b", cause="RANGE_OVERFLOW", op="mul")


def test_names_can_be_raised_without_each_other():
    code = "def f(a, b):\n    dot = (a * b).sum()  # <-\n    return dot / a.norm()\n"
    both = [each for each in made(code, "a b", cause="RANGE_OVERFLOW", op="mul") if each.parts == 2]
    fewer = {each.only([1]).data.decode().removeprefix(HEAD) for each in both if each.only}
    assert code.replace("    dot", "    b = b.float()\n    dot") in fewer


@pytest.mark.parametrize(
    "cast", ["x.to(y.dtype)", "x.half()", "x.type_as(y)", "x.to(torch.float16)"]
)
def test_what_is_cast_to_16_bits_is_raised_before_the_cast(cast):
    code = f"def f(x, y):\n    return torch.exp({cast})  # <-\n"
    assert code.replace(cast, "x.float()") in texts(code, "y", cause="RANGE_OVERFLOW", op="exp")


def test_a_float32_sum_of_16_bit_parts_is_raised_where_these_come_in():
    code = (
        "def loss(model, batch):\n"
        "    p = torch.sigmoid(model(batch))\n"
        "    wide = p * batch\n"
        "    return torch.log(wide)  # <-\n"
    )
    marked = site(code, "p", cause="UNDERFLOW", op="log")
    for here in marked.dtypes.values():
        here.update(wide={"float32"}, batch={"float32"})
    found = [each.data.decode().removeprefix(HEAD) for each in proposals(marked)]
    assert code.replace("model(batch)", "model(batch).float()") in found


def test_an_island_raises_what_is_16_bits_and_nothing_else():
    code = (
        "def f(self, x, n):\n"
        "    # the head\n"
        "    y = self.head(x, n, x.shape[0]) @ self.w  # <-\n"
        "    return y\n"
    )
    island = (
        "def f(self, x, n):\n"
        "    # the head\n"
        "    with torch.autocast(x.device.type, enabled=False):\n"
        "        y = self.head(x.float(), n, x.shape[0]) @ self.w.float()  # <-\n"
        "    return y\n"
    )
    assert texts(code, "x self.w", cause="RANGE_OVERFLOW", op="mm")[0] == island


def test_then_the_function_is_an_island():
    code = 'def f(x):\n    """Head."""\n    # first\n    y = x @ x\n    return y @ y  # <-\n'
    found = texts(code, "x", cause="RANGE_OVERFLOW", op="mm")
    island = (
        'def f(x):\n    """Head."""\n    # first\n'
        "    with torch.autocast(x.device.type, enabled=False):\n"
        "        x = x.float()\n        y = x @ x\n        return y @ y  # <-\n"
    )
    assert found.index(island) >= len(found) - 2


@pytest.mark.parametrize(
    "code",
    [
        "def loss(model, batch):\n    return (model(batch) * 1e5).mean()  # <-\n",
        "loss = lambda m, b: (m(b) @ m(b)).mean()  # <-\n",
    ],
)
def test_no_island_is_made_around_the_whole_model(code):
    assert not any("autocast" in each for each in texts(code, cause="RANGE_OVERFLOW", op="mul"))


def test_every_proposal_is_python_and_none_is_what_was_there():
    code = line("return torch.log(torch.softmax(x, -1)).sum() / x.half().mean()")
    found = made(code, "x", cause="DOMAIN_ERROR", op="log")
    assert len({each.data for each in found}) == len(found) > 4
    for each in found:
        compile(each.data, "x.py", "exec")
        assert each.data != (HEAD + code).encode()


def test_a_lambda_in_a_call_is_changed_in_place():
    code = "task = dict(\n    loss=lambda m, b: (m(b) * 1e5).mean(),  # <-\n)\n"
    found = texts(code, cause="RANGE_OVERFLOW", op="mul")
    assert found[0] == code.replace("m(b) * 1e5", "m(b).float() * 1e5")


def test_a_patched_island_runs_in_float32_under_autocast():
    code = "def f(x):\n    return x @ x.T  # <-\n"
    patched = texts(code, "x", cause="RANGE_OVERFLOW", op="mm")[0]
    names: dict = {}
    exec(HEAD + patched, names)
    x = torch.full((8, 8), 200.0, dtype=torch.float16)
    with torch.autocast("cpu", torch.float16):
        assert float(names["f"](x).max()) == 320_000


LINEAR_ATTENTION = """def f(self, x, q, k, v):
    q, k = self.map(q), self.map(k)
    kv = torch.einsum("nd,ne->de", k, v)
    # sums of the keys
    norm = torch.einsum("nd,d->n", q, k.sum(dim=0))  # <-
    out = torch.einsum("nd,de->ne", q, kv) / norm.unsqueeze(-1)
    return self.to_out(out)
"""


def test_an_island_has_the_statements_beside_it_that_hang_together():
    known = {"cause": "RANGE_OVERFLOW", "op": "bmm", "half": "x q k v kv norm out"}
    found = [each for each in texts(LINEAR_ATTENTION, **known) if "enabled=False" in each]
    assert (
        LINEAR_ATTENTION.replace(
            """    # sums of the keys
    norm = torch.einsum("nd,d->n", q, k.sum(dim=0))  # <-
    out = torch.einsum("nd,de->ne", q, kv) / norm.unsqueeze(-1)
""",
            """    # sums of the keys
    with torch.autocast(q.device.type, enabled=False):
        q = q.float()
        norm = torch.einsum("nd,d->n", q, k.float().sum(dim=0))  # <-
        out = torch.einsum("nd,de->ne", q, kv.float()) / norm.unsqueeze(-1)
""",
        )
        in found
    )
    # A module's weights would be in float32, too, and the caller wants a return as it is.
    islands = [each for each in found if "def f(self, x, q, k, v):\n    with" not in each]
    assert len(islands) > 2
    assert all("\n    q, k = self.map" in each for each in islands)
    assert all("\n    return self.to_out" in each for each in islands)


def test_what_is_computed_with_later_is_not_cast_in_front_of_an_island():
    code = LINEAR_ATTENTION.replace("self.to_out(out)", "self.to_out(out) + q")
    found = texts(code, cause="RANGE_OVERFLOW", op="bmm", half="q k kv")
    assert any('"nd,de->ne", q.float(), kv.float())' in each for each in found)
    assert not any("        q = q.float()\n        norm" in each for each in found)


def test_a_format_that_is_taken_over_follows_where_its_tensor_is_made_in_float32():
    code = (
        "def f(self, x):\n    p = torch.softmax(2 * x, dim=-1)\n"
        "    pos = torch.arange(8, dtype=p.dtype, device=p.device)  # <-\n"
        "    return torch.sum(p * pos, dim=-1)\n"
    )
    known = {"cause": "PRECISION_LOSS", "op": "arange", "half": "x p", "dtype": "bfloat16"}
    wanted = code.replace("2 * x", "2 * x.float()")
    assert wanted in texts(code, **known)


def test_float32_arguments_come_before_an_island_of_the_function():
    code = (
        'def iou(p, t):\n    """IoU."""\n    # areas\n    a = (p[:, 2] - p[:, 0]) * p[:, 3]\n'
        "    return t / (a + 1e-7)  # <-\n"
    )
    found = made(code, "p t", cause="RANGE_OVERFLOW", op="div")
    wanted = code.replace("    # areas\n", "    # areas\n    p, t = p.float(), t.float()\n")
    grades = {each.data.decode().removeprefix(HEAD): each.grade for each in found}
    assert grades[wanted] == Grade.STATEMENTS
    module = code.replace("t / (", "self.head(t) / (")
    raised = module.replace("    # areas\n", "    # areas\n    p, t = p.float(), t.float()\n")
    assert raised not in texts(module, "p t", cause="RANGE_OVERFLOW", op="div")


def test_a_format_that_another_method_has_a_default_for_is_float32():
    code = (
        "class Adam16(torch.optim.Optimizer):\n"
        "    def __init__(self, params, state_dtype=torch.float16):\n"
        "        self.state_dtype = state_dtype\n\n"
        "    def step(self):\n"
        "        v = self.state[p]\n"
        "        p.sub_(p.grad / (v.sqrt() + self.eps))  # <-\n"
    )
    wanted = code.replace("=torch.float16", "=torch.float32")
    assert wanted in texts(code, cause="EPS_UNDERFLOW", op="div")


@pytest.mark.parametrize(
    ("keeps", "kept"),
    [
        ("self.keep = keep", "self.keep"),
        ("self.defaults = dict(state=keep)", 'group["state"]'),
        ('self.defaults = {"state": keep}', 'group["state"]'),
    ],
)
def test_before_the_default_what_is_made_in_its_format_is_float32_each_by_itself(keeps, kept):
    code = (
        "class Adam16(torch.optim.Optimizer):\n"
        "    def __init__(self, params, keep=torch.float16):\n"
        f"        {keeps}\n\n"
        "    def state_of(self, p, group):\n"
        f"        mean = torch.zeros_like(p, dtype={kept})\n"
        f"        return mean, p.square().to({kept}), p.to(p.dtype)\n\n"
        "    def step(self):\n"
        "        square.copy_(square + grad)  # <-\n"
    )
    found = made(code, cause="UNDERFLOW", op="copy_")
    texts = [each.data.decode().removeprefix(HEAD) for each in found]
    mean, square = f"dtype={kept}", f"to({kept})"
    square_too = code.replace(square, "to(torch.float32)")
    both = square_too.replace(mean, "dtype=torch.float32")
    at = texts.index(both)
    assert at < texts.index(code.replace("=torch.float16", "=torch.float32"))
    assert found[at].what == f"float32 in place of {kept}"
    assert found[at].parts == 2
    assert found[at].only is not None
    less = found[at].only({1})
    assert less is not None
    assert less.data.decode() == HEAD + square_too


def test_an_island_asks_nothing_of_what_only_a_lambda_knows():
    code = (
        "def f(x, i):\n    at = lambda table: table.gather(-1, i) + table  # <-\n"
        "    y = at(x)\n    return y\n"
    )
    found = texts(code, "x table", cause="RANGE_OVERFLOW", op="add")
    assert any("with torch.autocast(x.device.type, enabled=False)" in each for each in found)
    assert not any("table.device" in each or "table = table" in each for each in found)


def test_where_state_is_made_it_is_no_more_in_16_bits_nor_where_it_is_updated():
    text = (
        f"{HEAD}def zeros(p):\n    return torch.zeros_like(p, dtype=torch.half)\n\n\n"
        "def update(kept, p):\n    kept.add_(p.half())\n"
    )
    at_line = {word: text[: text.index(word)].count("\n") + 1 for word in ("zeros_like", "add_")}
    made_at, updated_at = (
        Site(SourceFile.of(Path("x.py"), text.encode(), line), line) for line in at_line.values()
    )
    found = [each.data.decode() for each in casts_in(updated_at, [made_at])]
    where_made = text.replace("torch.half", "torch.float32")
    assert found[0] == text.replace("p.half()", "p.to(torch.float32, copy=True)")
    assert where_made in found
    assert where_made.replace("p.half()", "p.float()") in found


def test_what_a_helper_is_given_by_a_cast_to_half_is_given_in_float32():
    code = "def loss(m, b):\n    return distance(m(b).half(), b).mean()  # <-\n"
    at = site(code)
    call = next(each for each in at.expressions if code_of(each) == "distance(m(b).half(), b)")
    end = at.source.end(call)
    made = [
        each.data.decode() for each in around(at, [CallSite(at, end, helpers=frozenset([end]))], [])
    ]
    assert any("distance(m(b).float(), b.float())" in each for each in made)


def test_what_a_helper_is_given_a_part_of_is_in_float32_from_where_it_is_made():
    code = (
        "def loss(m, b):\n"
        "    places = 40 + m(b).cumsum(-1)\n"
        "    return slope(places[:-1], places[1:])  # <-\n"
    )
    at = site(code)
    call = next(each for each in at.expressions if code_of(each).startswith("slope("))
    end = at.source.end(call)
    made = [
        each.data.decode() for each in around(at, [CallSite(at, end, helpers=frozenset([end]))], [])
    ]
    assert made[0] == HEAD + code.replace("m(b)", "m(b).float()")


def back(code: str, half: str = "", before=(), **known) -> list[str]:
    at = site(code, half, **known)
    several = [site(code.replace("# <-", "").replace(each, f"{each}  # <-"), half, **known)
               for each in before]  # fmt: skip
    return [each.data.decode().removeprefix(HEAD) for each in back_from(at, several)]


ANGLE = """def six(x):
    y = x / x.norm()
    return y


def angle(left, right, n):
    both = torch.bmm(left.transpose(1, 2), right)
    trace = both.diagonal(dim1=1, dim2=2).sum(dim=1)
    half = (trace - 1) / 2
    return torch.acos(half.clamp(-1, 1))  # <-
"""


def test_a_patch_reaches_back_to_the_product_that_makes_the_operand():
    found = back(ANGLE, "left both trace half", cause="CANCELLATION", op="acos")
    first = "    both = torch.bmm(left.transpose(1, 2), right)\n"
    island = (
        "    with torch.autocast(left.device.type, enabled=False):\n"
        "        both = torch.bmm(left.float().transpose(1, 2), right)\n"
    )
    assert ANGLE.replace(first, island) in found


def test_a_patch_reaches_back_to_a_helper_that_ran_before():
    before = ["y = x / x.norm()"]
    found = back(ANGLE, "x left both trace half", before, cause="CANCELLATION", op="acos")
    wanted = ANGLE.replace("    y = x /", "    x = x.float()\n    y = x /")
    assert any(each.startswith(wanted[: wanted.index("def angle")]) for each in found)


def test_the_operand_is_raised_where_it_is_made_beyond_views_of_it():
    code = (
        "def logp(logits, tokens):\n"
        "    every = logits[:, :-1].log_softmax(dim=-1)\n"
        "    chosen = every.gather(-1, tokens[:, 1:, None]).squeeze(-1)\n"
        "    return chosen.sum(dim=-1)  # <-\n"
    )
    found = back(code, "logits every chosen", cause="CANCELLATION", op="sum")
    assert found[0] == code.replace("[:, :-1].log", "[:, :-1].float().log")


def test_a_format_is_written_in_the_helper_that_makes_the_operand():
    code = (
        "def coefficients(like, n):\n"
        "    return table.to(device=like.device, dtype=like.dtype)[n]\n\n\n"
        "def weight(like, n):\n"
        "    return 1 / (1 - coefficients(like, n))  # <-\n"
    )
    helper = site(code.replace("  # <-", "").replace("[n]", "[n]  # <-"), "like")
    found = [each.data.decode() for each in made_by(site(code), [helper])]
    assert any("device=like.device, dtype=torch.float32)" in each for each in found)


def test_a_tensor_that_is_only_asked_for_its_format_is_not_cast():
    code = (
        "def counted(target, n, like):\n"
        "    ones = torch.ones(n, dtype=like.dtype, device=like.device)\n"
        "    zeros = torch.zeros(n, dtype=like.dtype)\n"
        "    return zeros.index_add_(0, target, ones)  # <-\n"
    )
    found = texts(code, "like ones zeros", cause="PRECISION_LOSS", op="index_add_")
    assert code.replace("dtype=like.dtype", "dtype=torch.float32") in found
    assert not any("like.float()" in each for each in found)


def test_what_a_product_takes_more_than_once_is_cast_once():
    code = "def gram(x):\n    return x @ x.transpose(-1, -2)  # <-\n"
    wanted = (
        "def gram(x):\n    x = x.float()\n"
        "    with torch.autocast(x.device.type, enabled=False):\n"
        "        return x @ x.transpose(-1, -2)  # <-\n"
    )
    assert wanted in back(code, "x", cause="RANGE_OVERFLOW", op="mm")


def test_the_logarithm_of_2_is_written_as_the_file_can():
    code = "def f(x):\n    return torch.log(torch.cosh(x))  # <-\n"
    assert "0.6931471805599453" in texts(code, cause="RANGE_OVERFLOW", op="cosh")[0]
    code = f"import math\n\n\n{code}"
    assert " - math.log(2)" in texts(code, cause="RANGE_OVERFLOW", op="cosh")[0]


HEADS = "def f(self, x, mean=0):\n    return self.spread(x), self.{}(x)  # <-\n"


@pytest.mark.parametrize(("head", "name"), [("head", "head"), ("mean", "mean_float32")])
def test_one_of_several_layers_is_in_float32(head, name):
    code = HEADS.format(head)
    wanted = (
        "def f(self, x, mean=0):\n"
        "    with torch.autocast(x.device.type, enabled=False):\n"
        f"        {name} = self.{head}(x.float())\n"
        f"    return self.spread(x), {name}  # <-\n"
    )
    found = made(code, cause="PRECISION_LOSS", op="addmm", half="x")
    mine = next(each for each in found if each.data.decode().endswith(wanted))
    both = [each for each in found if b"self.spread(x.float())" in each.data
            and f"self.{head}(x.float())".encode() in each.data]  # fmt: skip
    assert not mine.has_layers
    assert all(each.has_layers for each in both)
    assert both


RUNNING = (
    "def f(self, x):\n"
    "    self.mean = torch.lerp(self.mean.to(x.dtype), x.mean(0), self.rate)\n"
    "    self.var = torch.lerp(self.var.to(x.dtype), x.var(0), self.rate)  # <-\n"
    "    return x - self.mean\n"
)


def test_what_says_the_same_of_another_name_is_in_float32_too():
    for each in ("mean", "var"):
        wanted = f"torch.lerp(self.{each}.to(torch.float32), x.float().{each}(0), self.rate)"
        found = texts(RUNNING, "x", cause="STAGNATION", op="lerp")
        assert any("self.mean.to(torch.float32)" in e and wanted in e for e in found)
    one = RUNNING.replace("x.mean(0)", "x.mean(0) + 1")
    found = texts(one, "x", cause="STAGNATION", op="lerp")
    assert any("x.float().var(0)" in e and "x.float().mean(0)" not in e for e in found)


INNER = """def f(net, x):
    energy = net(x).sum()
    {}  # <-
    return force.square().mean()
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("force = -torch.autograd.grad(energy, x, create_graph=True)[0]",
         "force = -torch.autograd.grad(energy.float() * 4096, x, create_graph=True)[0] / 4096"),
        ("force = torch.autograd.grad(energy, x)[0].norm(dim=1)",
         "force = (torch.autograd.grad(energy.float() * 4096, x)[0] / 4096).norm(dim=1)"),
        ("(force,) = torch.autograd.grad(outputs=energy, inputs=x)",
         "(force,) = torch.autograd.grad(outputs=energy.float() * 4096, inputs=x)\n"
         "    force = force / 4096"),
        ("force, more = torch.autograd.grad(wide.mean(), (x, y))",
         "force, more = torch.autograd.grad(wide.mean() * 4096, (x, y))\n"
         "    force, more = force / 4096, more / 4096"),
    ],
)  # fmt: skip
def test_a_gradient_that_forward_asks_for_is_scaled(before, after):
    found = texts(INNER.format(before), "energy", cause="UNDERFLOW")
    assert found[0].replace("  # <-", "") == INNER.format(after).replace("  # <-", "")


def test_or_is_in_float32_with_what_it_is_of():
    code = INNER.format("force = torch.autograd.grad(energy, x)[0]")
    found = "\n".join(texts(code, "energy x", cause="UNDERFLOW"))
    assert (
        "enabled=False):\n"
        "        energy = net(x.float()).sum()\n"
        "        force = torch.autograd.grad(energy, x)[0]  # <-"
    ) in found


def test_a_format_that_is_an_argument_is_written_out():
    code = (
        "def f(slow, dtype):\n    slow.copy_(torch.lerp(slow.to(dtype), x.to(dtype), 0.1))  # <-\n"
    )
    found = texts(code, op="lerp", cause="PRECISION_LOSS")
    assert any("lerp(slow.to(torch.float32), x.to(torch.float32), 0.1)" in each for each in found)


def test_what_is_only_counted_is_not_cast():
    code = "def f(z, s):\n    s.copy_(torch.addmm(s, z.t(), z, alpha=1 / len(z)))  # <-\n"
    found = "\n".join(texts(code, "z", op="addmm", cause="PRECISION_LOSS"))
    assert "z.float().t(), z.float(), alpha=1 / len(z)" in found


def test_the_device_is_not_asked_of_what_a_loop_makes():
    code = "def f(pairs, z):\n    for slow in pairs:\n        slow.copy_(slow @ z)  # <-\n"
    found = "\n".join(texts(code, "slow z", op="mm", cause="PRECISION_LOSS"))
    assert "    with torch.autocast(z.device.type, enabled=False):\n        z = z.float()" in found
    assert "slow.copy_(slow.float() @ z)" in found
    assert "        for slow in pairs:" in found


def test_a_length_is_not_cast():
    code = (
        "def knots(raw, least):\n"
        "    share = least + (1 - least * raw.shape[-1] * raw.size(0)) * F.softmax(raw, dim=-1)\n"
        "    return torch.cumsum(share, dim=-1)  # <-\n"
    )
    found = texts(code, "raw share", cause="PRECISION_LOSS", op="cumsum")
    assert code.replace("softmax(raw", "softmax(raw.float()") in found
    assert not any(".shape[-1].float()" in each or ".size(0).float()" in each for each in found)


PARTS = """def forward(self, x):
    raw = self.net(x).view(-1, 2, 8)
    widths, heights = raw.unbind(1)
    return spline(widths, heights)  # <-
"""


def given(code: str, half: str) -> str:
    """What the helper at the line is given, in float32."""
    at = site(code, half)
    call = next(each for each in at.expressions if code_of(each).startswith("spline("))
    end = at.source.end(call)
    first = next(around(at, [CallSite(at, end, helpers=frozenset([end]))], []))
    return first.data.decode().removeprefix(HEAD)


def test_a_tensor_of_which_all_parts_are_cast_is_cast_once_where_it_is_made():
    wanted = PARTS.replace("self.net(x).view", "self.net(x).float().view")
    assert given(PARTS, "raw widths heights") == wanted


def test_a_part_is_cast_by_itself_where_not_all_are():
    code = PARTS.replace("widths, heights =", "widths, heights, slopes =")
    wanted = code.replace("spline(widths, heights)", "spline(widths.float(), heights.float())")
    assert given(code, "raw widths heights slopes") == wanted


GAPS = """def left(self, events, times, now):
    times, now = times.to(events.dtype), now.to(events.dtype)
    return events * torch.exp(times - now)  # <-
"""


def with_float32(code: str, half: str, wide: str) -> list[str]:
    at = site(code, half, cause="CANCELLATION", op="sub")
    first = HEAD.count("\n") + 2
    known = {name: {"float32"} for name in wide.split()}
    at.dtypes[first] |= known  # a line on, they are what they were cast to
    return [each.data.decode().removeprefix(HEAD) for each in proposals(at)]


def test_a_cast_of_what_is_float32_is_left_out():
    lines = GAPS.splitlines(keepends=True)
    assert lines[0] + lines[2] in with_float32(GAPS, "events times now", "times now")
    inside = GAPS.replace("times - now", "times.to(events.dtype) - now").replace(lines[1], "")
    wanted = lines[0] + lines[2].replace("now", "now.float()")
    assert wanted in with_float32(inside, "events now", "times")


def test_tensors_in_a_list_are_cast_from_the_start_of_the_function():
    code = (
        "def pairs(fields):\n"
        "    total, squares = fields[0], fields[0] * fields[0]\n"
        "    for each in fields[1:]:\n"
        "        total, squares = total + each, squares + each * each\n"
        "    return (total * total - squares).sum(-1)  # <-\n"
    )
    at = site(code, "total squares", cause="CANCELLATION", op="sub")
    at.dtypes[HEAD.count("\n") + 2] |= {"fields": {"list of float16"}}
    found = [each.data.decode().removeprefix(HEAD) for each in proposals(at)]
    head, *rest = code.splitlines(keepends=True)
    assert "".join([head, "    fields = [each.float() for each in fields]\n", *rest]) in found


def test_torch_is_imported_where_isort_has_it():
    text = "import numpy as np\nfrom other import a\nfrom torch import nn\n\nx = nn\n"
    wanted = text.replace("from other", "import torch\nfrom other")
    assert with_torch(text) == wanted
    text = "import numpy as np\nimport torch.nn.functional as F\n\nx = F\n"
    assert with_torch(text) == text.replace("import torch.nn", "import torch\nimport torch.nn")
    text = '"""Losses."""\n\nfrom __future__ import annotations\n\nx = 1\n'
    assert with_torch(text).endswith("import annotations\nimport torch\n\nx = 1\n")


def test_a_cast_to_the_format_of_another_is_left_out_where_a_loop_goes_on_with_it():
    code = (
        "def steps(start, drive):\n"
        "    state = start.type_as(drive)\n"
        "    for now in drive.unbind(1):\n"
        "        state = state + now / 8  # <-\n"
        "    return state\n"
    )
    at = site(code, "state now drive", cause="PRECISION_LOSS", op="add")
    at.dtypes[HEAD.count("\n") + 2] |= {"drive": {"float16"}, "start": {"float32"}}
    found = [each.data.decode().removeprefix(HEAD) for each in proposals(at)]
    assert code.replace("start.type_as(drive)", "start") in found


def test_a_cast_of_a_formula_of_float32_is_left_out():
    code = (
        "def f(drive, tau, decay, n):\n"
        "    leak = torch.exp(-tau / 2).to(drive.dtype)\n"
        "    return drive - leak * drive  # <-\n"
    )
    at = site(code, "drive leak", cause="PRECISION_LOSS", op="sub")
    at.dtypes[HEAD.count("\n") + 2] |= {"tau": {"float32"}}
    found = [each.data.decode().removeprefix(HEAD) for each in proposals(at)]
    assert code.replace(".to(drive.dtype)", "") in found
    at.dtypes[HEAD.count("\n") + 2] |= {"tau": {"float32", "bfloat16"}}
    found = [each.data.decode().removeprefix(HEAD) for each in proposals(at)]
    assert code.replace("drive.dtype", "torch.float32") in found


def test_casts_of_a_statement_are_left_out_together():
    code = (
        "def inverse(x, std, mean):\n"
        "    return x * std.to(x.dtype) + mean.to(x.dtype)  # <-\n"
    )  # fmt: skip
    at = site(code, "x", cause="RANGE_OVERFLOW", op="_to_copy")
    at.dtypes[HEAD.count("\n") + 2] |= {"std": {"float32"}, "mean": {"float32"}}
    wanted = code.replace(".to(x.dtype)", "")
    (found,) = [e for e in proposals(at) if e.data.decode().removeprefix(HEAD) == wanted]
    assert found.parts == 1


def test_what_a_sine_is_taken_of_is_cast_where_the_formula_begins():
    code = "def half_angle(theta, x):\n    b = (1 - torch.cos(theta)) / (theta * theta)  # <-\n"
    code += "    return b * x\n"
    first, *rest = code.splitlines(keepends=True)
    wanted = "".join([first, "    theta = theta.float()\n", *rest])
    assert wanted in texts(code, "theta x", cause="CANCELLATION", op="div")


def test_a_name_is_cast_in_front_of_what_takes_its_format_over():
    code = (
        "def f(count, r):\n"
        "    count = count.to(r.dtype)\n"
        "    total = count + r  # <-\n"
        "    return torch.lgamma(total) - torch.lgamma(r)\n"
    )
    first, *rest = code.splitlines(keepends=True)
    found = made(code, "count r", cause="PRECISION_LOSS", op="add")
    wanted = HEAD + "".join([first, "    r = r.float()\n", *rest])
    assert "r in float32 from here on" in [e.what for e in found if e.data.decode() == wanted]
    (both,) = [each for each in found if each.what == "count and r in float32 from here on"]
    assert both.only is not None
    less = both.only([1])
    assert less is not None
    assert less.what == "r in float32 from here on"


def test_a_cast_of_a_formula_of_what_is_cast_to_float32_and_a_number_is_left_out():
    code = (
        "def f(x, weight, n):\n"
        "    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + n).to(x.dtype)\n"
        "    return x * rstd * weight  # <-\n"
    )
    assert code.replace(".to(x.dtype)", "") in texts(code, "x rstd", cause="UNDERFLOW", op="mul")
    other = code.replace("x.float()", "x")
    wanted = other.replace("x.dtype", "torch.float32")
    assert wanted in texts(other, "x rstd", cause="UNDERFLOW", op="mul")


@pytest.mark.parametrize("cast", ["half()", "to(torch.float16)"])
def test_a_cast_of_a_module_that_was_seen_to_be_float32_is_left_out(cast):
    code = (
        "class Teacher(nn.Module):\n"
        "    def __init__(self, student):\n"
        f"        self.net = copy.deepcopy(student).{cast}.eval()\n\n"
        "    def follow(self, slow, fast):\n"
        "        slow.lerp_(fast, 0.01)  # <-\n"
    )
    at = site(code, op="lerp_", cause="STAGNATION", casts_of_float32=[HEAD.count("\n") + 3])
    found = [each.data.decode().removeprefix(HEAD) for each in proposals(at)]
    assert code.replace(f".{cast}", "") in found


def test_a_pair_that_assigns_a_name_to_itself_is_left_out():
    code = (
        "def misfit(recon, flux, sigma):\n"
        "    flux, sigma = flux.to(recon.dtype), sigma.to(recon.dtype).abs()\n"
        "    weight = 1.0 / sigma.square()  # <-\n"
        "    return (recon - flux).square() * weight\n"
    )
    wanted = code.replace(".to(recon.dtype)", "").replace(
        "flux, sigma = flux, sigma", "sigma = sigma"
    )
    assert wanted in with_float32(code, "recon flux sigma", "flux sigma")
    alone = code.replace(".abs()", "")
    wanted = "".join(alone.splitlines(keepends=True)[:1] + alone.splitlines(keepends=True)[2:])
    assert wanted in with_float32(alone, "recon flux sigma", "flux sigma")


def test_a_cast_that_is_all_of_a_block_is_a_cast_to_float32():
    code = (
        "def left(self, events, times, now):\n"
        "    if self.narrow:\n"
        "        times = times.to(torch.float16)\n"
        "    return events * torch.exp(times - now)  # <-\n"
    )
    at = site(code, "events times now", cause="CANCELLATION", op="sub")
    at.dtypes[HEAD.count("\n") + 3]["times"] = {"float32"}
    wanted = code.replace("float16", "float32")
    assert wanted in [each.data.decode().removeprefix(HEAD) for each in proposals(at)]


def test_a_cast_of_what_may_be_another_format_stays():
    found = with_float32(GAPS, "events times now", "times")
    assert GAPS.replace("events.dtype", "torch.float32") in found


LOGP = """def logp(logits, tokens):
    every = torch.log_softmax(logits[:, :-1] / 2, dim=-1)
    chosen = every.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return chosen.sum(dim=-1)  # <-
"""


def test_a_softmax_that_makes_the_operand_is_in_float32_before_the_operand():
    found = texts(LOGP, "logits every chosen", cause="CANCELLATION", op="sum")
    assert found[0] == LOGP.replace("[:, :-1] /", "[:, :-1].float() /")
    assert LOGP.replace("chosen.sum", "chosen.float().sum") in found[1:]


def test_a_softmax_of_a_helper_that_ran_before_is_in_float32():
    code = LOGP.replace("  # <-", "") + "\n\ndef loss(a, b):\n    return (a - b).mean()  # <-\n"
    helper = site(LOGP, "logits every chosen")
    (one,) = softmaxes_in(site(code, "a b", op="sub"), [helper])
    assert "logits[:, :-1].float() / 2" in one.data.decode()


def test_what_is_made_like_a_part_is_made_in_float32_at_the_line_first():
    code = (
        "def means(x, group, n):\n"
        "    total = x.new_zeros(n).index_add_(0, group, x[:, 0])\n"
        "    count = x.new_zeros(n).index_add_(0, group, torch.ones_like(x[:, 0]))  # <-\n"
        "    return total / count\n"
    )
    found = texts(code, "x total count", cause="PRECISION_LOSS", op="index_add_")
    first, second = (n for n, each in enumerate(code.splitlines()) if "new_zeros" in each)
    for each in found:
        changed = each.splitlines()
        if "ones_like(x[:, 0], dtype=torch.float32)" in changed[second]:
            assert changed[first] == code.splitlines()[first]
            assert "x.new_zeros(n, dtype=torch.float32)" in changed[second]
            return
    raise AssertionError(found)


@pytest.mark.parametrize("scale", ["(n * n)", "(n + 1)", "x.shape[-1]"])
def test_a_product_is_scaled_before_by_a_number_that_is_a_formula(scale):
    code = line(f"return torch.bmm(x, x.mT) / {scale}")
    found = texts(code, "x", cause="RANGE_OVERFLOW", op="bmm")
    assert found[0] == line(f"return torch.bmm(x / {scale}, x.mT)")


def test_a_product_is_not_scaled_before_by_a_tensor():
    code = line("return torch.bmm(x, x.mT) / (mask * 2)")
    found = texts(code, "x mask", cause="RANGE_OVERFLOW", op="bmm")
    assert not any("x / (mask" in each for each in found)


def left_of(each: Proposal, kept: list[int]) -> str | None:
    """What a proposal is with some of its parts."""
    assert each.only is not None
    less = each.only(kept)
    return None if less is None else less.data.decode().removeprefix(HEAD)


SQUARINGS = (
    "def f(x, n):\n"
    "    for _ in range(n):\n"
    "        x = x @ x  # <-\n"
    "    return x.mean(1)\n"
)  # fmt: skip


def test_an_island_goes_around_its_loop_and_casts_in_front():
    found = made(SQUARINGS, "x", op="mm", cause="PRECISION_LOSS")
    around = next(
        each for each in found if each.what == "lines 6 to 7 in float32, outside of autocast"
    )
    island = (
        "    with torch.autocast(x.device.type, enabled=False):\n"
        "        x = x.float()\n"
        "        for _ in range(n):\n"
        "            x = x @ x  # <-\n"
    )
    assert island in around.data.decode()
    idle = island.replace("        x = x.float()\n", "")
    assert idle in (left_of(around, [0]) or "")


def test_an_island_stays_in_a_loop_that_calls_layers():
    code = SQUARINGS.replace("  # <-\n", "  # <-\n        x = self.layer(x)\n")
    found = texts(code, "x", op="mm", cause="PRECISION_LOSS")
    assert any(
        "n):\n        with torch.autocast(x.device.type, enabled=False):" in e for e in found
    )


def test_what_a_loop_makes_and_reads_is_not_cast_in_front_of_it():
    code = (
        "def f(x, n):\n"
        "    for _ in range(n):\n"
        "        y = x + x\n"
        "        x = y @ y  # <-\n"
        "    return x\n"
    )
    found = "\n".join(texts(code, "x y", op="mm", cause="PRECISION_LOSS"))
    assert "        y = y.float()\n        for" not in found
    assert "y, x =" not in found


def test_the_casts_of_an_island_and_the_island_can_be_left_out():
    code = "def f(x, y):\n    z = x @ y  # <-\n    return z.sum()\n"
    whole = made(code, "x y", op="mm", cause="PRECISION_LOSS")[0]
    assert whole.parts == 3  # the island, and two names
    assert "x.float() @ y.float()" in whole.data.decode()
    assert "enabled=False):\n        z = x @ y.float()" in (left_of(whole, [0, 2]) or "")
    assert left_of(whole, [1, 2]) == code.replace("x @ y", "x.float() @ y.float()")


def test_statements_at_the_ends_of_an_island_can_be_left_out():
    code = (
        "def f(self, x):\n"
        "    a = self.first(x)\n"
        "    b = self.second(a)\n"
        "    return self.third(b)  # <-\n"
    )
    whole = next(
        each
        for each in made(code, "", op="addmm", cause="PRECISION_LOSS")
        if each.what == "the function in float32, outside of autocast"
    )
    assert (whole.parts, whole.statements) == (3, 3)
    middle = left_of(whole, [1]) or ""
    assert "    a = self.first(x)\n    with torch.autocast(" in middle
    assert "enabled=False):\n        b = self.second(a)\n    return" in middle
    assert left_of(whole, [0, 2]) is None
    assert left_of(whole, []) is None


@pytest.mark.parametrize("name", ["rand", "randn", "zeros"])
def test_what_is_made_like_another_tensor_is_made_in_float32_and_not_cast(name):
    code = f"def f(x):\n    u = torch.{name}_like(x)\n    return torch.log(u + 1e-9)  # <-\n"
    found = texts(code, "x u", op="log", cause="EPS_UNDERFLOW")
    cast = code.replace("u + 1e-9", "u.float() + 1e-9")
    like = code.replace("_like(x)", "_like(x, dtype=torch.float32)")
    assert found.index(like) < found.index(cast)


def test_what_a_loop_adds_up_is_made_in_float32():
    code = (
        "def f(x):\n"
        "    total = torch.zeros_like(x[0])\n"
        "    for each in x:\n"
        "        total = total + each  # <-\n"
        "    return total\n"
    )
    found = texts(code, "x total each", op="add", cause="PRECISION_LOSS")
    assert found[0] == code.replace("(x[0])", "(x[0], dtype=torch.float32)")
    assert "        total = total + each.float()" in found[1]


LOOP = "    for each in x:\n        level = level + each  # <-\n    return level\n"
ADDED = LOOP.replace("level + each", "level.sqrt() + each").replace("level = ", "level += ")


@pytest.mark.parametrize(
    ("head", "begins", "loop"),
    [
        ("def f(self, x):\n    level = self.inlet(x)\n",
         "def f(self, x):\n    level = self.inlet(x).float()\n", LOOP),
        ("def f(self, x):\n    level = self.inlet(x)\n",
         "def f(self, x):\n    level = self.inlet(x).float()\n", ADDED),
        ("def f(x, level):\n", "def f(x, level):\n    level = level.float()\n", LOOP),
        ("def f(x, n):\n    level, rate = n\n",
         "def f(x, n):\n    level, rate = n\n    level = level.float()\n", LOOP),
        ("def f(x, n):\n    if n is None:\n        level = x[0]\n    else:\n        level = n\n",
         "def f(x, n):\n    if n is None:\n        level = x[0]\n    else:\n        level = n\n"
         "    level = level.float()\n", LOOP),
    ],
    ids=["made", "added in place", "an argument", "a part", "one of two"],
)  # fmt: skip
def test_what_a_loop_goes_on_with_is_cast_before_it(head, begins, loop):
    found = texts(head + loop, "x level each", op="add", cause="PRECISION_LOSS")
    assert found[0] == begins + loop


def test_where_what_it_adds_is_cast_too_the_loop_still_begins_in_float32():
    code = f"def f(x, level):\n    # through time\n{LOOP}"
    found = texts(code, "x level each", op="add", cause="PRECISION_LOSS")
    assert found[1] == code.replace("    for", "    level = level.float()\n    for").replace(
        "level + each", "level + each.float()"
    )


def test_what_a_loop_makes_anew_each_time_is_cast_in_it():
    code = "def f(x, y):\n    for each in x:\n        y = each.sin()\n        z = y + 1  # <-\n"
    found = texts(code, "x y each", op="add", cause="PRECISION_LOSS")
    assert found[0] == code.replace("y + 1", "y.float() + 1")


def test_a_mask_of_ones_is_not_made_in_float32_to_promote_what_it_is_multiplied_by():
    code = (
        "def f(x):\n"
        "    y = torch.exp(x)\n"
        "    y = y * (1 - torch.eye(len(y), dtype=x.dtype))\n"
        "    return y / y.sum()  # <-\n"
    )
    found = texts(code, "x y", op="sum", cause="RANGE_OVERFLOW")
    assert not any("eye(len(y), dtype=torch.float32)" in each for each in found[:1])
    assert found[0] == code.replace("y.sum()", "y.float().sum()")


def test_a_cast_of_a_part_of_what_is_float32_is_left_out():
    code = "def f(self, i, x):\n    y = self.shares[i].to(x.dtype)  # <-\n    return x - y.log()\n"
    marked = site(code, "x y", op="_to_copy", cause="UNDERFLOW")
    for here in marked.dtypes.values():
        here["self.shares"] = {"float32"}
    found = [each.data.decode().removeprefix(HEAD) for each in proposals(marked)]
    assert found[0] == code.replace(".to(x.dtype)", "")


def test_a_cast_of_a_formula_of_float32_and_whole_numbers_is_left_out():
    code = "def f(self, n, x):\n    x = x - (self.slopes * (n + 1)).to(x.dtype)  # <-\n"
    marked = site(code, "x", op="sub", cause="RANGE_OVERFLOW")
    for here in marked.dtypes.values():
        here |= {"self.slopes": {"float32"}, "n": {"int64"}}
    assert proposals(marked)[0].data.decode() == HEAD + code.replace(".to(x.dtype)", "")


def test_a_cast_of_a_part_of_complex_numbers_is_left_out():
    code = "def f(x, z):\n    power = z.real.to(x.dtype) ** 2 + z.imag.to(x.dtype) ** 2  # <-\n"
    marked = site(code, "x", op="pow", cause="RANGE_OVERFLOW")
    for here in marked.dtypes.values():
        here |= {"z": {"complex64"}}
    assert proposals(marked)[0].data.decode() == HEAD + code.replace(".to(x.dtype)", "")


def test_a_tensor_that_is_cast_twice_is_cast_once_in_front():
    code = "def f(x):\n    return (x * x).sum(-1)  # <-\n"
    found = texts(code, "x", op="sum", cause="RANGE_OVERFLOW")
    assert found[0] == code.replace("    return", "    x = x.float()\n    return")
    parts = "def f(x):\n    return x[0] * x[1]  # <-\n"
    assert parts.replace("    return", "    x = x.float()\n    return") in texts(
        parts, "x", op="mul", cause="RANGE_OVERFLOW"
    )


def test_a_tensor_is_cast_in_front_where_its_name_is_another_one_below():
    code = "def f(x):\n    x = x * x  # <-\n    return x.sum()\n"
    found = texts(code, "x", op="mul", cause="RANGE_OVERFLOW")
    assert found[0] == code.replace("    x =", "    x = x.float()\n    x =")


def test_a_tensor_that_is_used_below_is_cast_where_it_has_to_be():
    code = "def f(x):\n    y = (x * x).sum(-1)  # <-\n    return x / y\n"
    found = texts(code, "x", op="sum", cause="RANGE_OVERFLOW")
    assert found[0] == code.replace("x * x", "x.float() * x.float()")


def given_here(code: str, half: str, *called: str) -> list[str]:
    """What helpers are given, in float32."""
    here = site(code, half, op="add", cause="PRECISION_LOSS")
    ends = {
        here.source.end(each)
        for each in here.roots
        if any(code_of(each).startswith(f"{name}(") for name in called)
    }
    found = given_to_helpers(CallSite(here, (0, 0), helpers=frozenset(ends)))
    return [each.data.decode().removeprefix(HEAD) for each in found]


def test_what_a_helper_is_given_is_cast_and_with_it_what_is_used_beside():
    code = "def f(x, n):\n    y = grid(n, like=x) + x.t()  # <-\n    return y\n"
    assert given_here(code, "x", "grid") == [code.replace("    y =", "    x = x.float()\n    y =")]
    alone = "def f(x, z):\n    y = spread(x) + z  # <-\n    return y\n"
    assert given_here(alone, "x z", "spread") == [alone.replace("(x) +", "(x.float()) +")]


def test_of_functions_in_float32_one_that_nothing_is_lost_without_is_left_as_it_is():
    lift = "def lift(x):\n    t = x.square().sum(-1)\n    return t.sqrt()"
    apart = "def apart(x, mask):\n    gap = x - mask  # <-\n    return gap.acosh()"
    at = site(f"{lift}\n\n\n{apart}\n", half="x mask")
    above = replace(at, line=6, source=SourceFile.of(at.source.path, at.source.data, 6))
    both = islands_in([above, at], at, reach.function)
    assert both is not None
    assert both.only is not None
    fewer = [each for number in range(both.parts) if (each := both.only({number})) is not None]
    kept = [each.data.decode().count(".float()") for each in (both, *fewer)]
    assert kept == [3, 1, 1, 1]
    assert [each.what for each in (both, *fewer)] == [
        "the functions at x.py:6 and x.py:11 in float32",
        "the function at x.py:11 in float32",
        "the function at x.py:11 in float32",
        "the function at x.py:6 in float32",
    ]


@pytest.mark.parametrize(("body", "has"), [("F.avg_pool2d(x, 3)", False), ("self.first(x)", True)])
def test_a_function_that_calls_methods_has_the_layers_that_these_call(body, has):
    code = (
        "class Likeness(torch.nn.Module):\n"
        f"    def blur(self, x):\n        return {body}\n\n"
        "    def forward(self, x, n):\n"
        "        mean = self.blur(x)\n"
        "        return self.blur(x * x) - mean * mean  # <-\n"
    )
    found = made(code, "x mean", cause="CANCELLATION", op="sub")
    assert {each.has_layers for each in found if each.grade is Grade.FUNCTION} == {has}
