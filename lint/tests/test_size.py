"""Files of sizes and shapes that nobody writes by hand: each is done in time, or says why not."""

from __future__ import annotations

import signal
import time

import pytest

from ampwise_lint import engine
from ampwise_lint.engine import check_file
from ampwise_lint.source.project import Project
from test_source import BAD

LOOP = """\
import torch


def train(model, loader, optimizer, scaler, x, a, b, c):
    for batch in loader:
        with torch.autocast("cuda"):
            loss = model(batch)
{body}
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""


def loop(*lines: str) -> str:
    """A training loop with some lines in it."""
    return LOOP.format(body="\n".join(f"        {line}" for line in lines))


def nested(header: str, depth: int, last: str) -> str:
    return loop(*(f"{' ' * n}{header.format(n=n)}" for n in range(depth)), " " * depth + last)


SHAPES = {
    "ifs in ifs": nested("if a > {n}:", 80, "optimizer.zero_grad()"),
    "loops in loops": nested("for i{n} in a:", 16, "optimizer.zero_grad()"),
    "functions in functions": nested("def f{n}():", 80, "loss.backward()"),
    "tries in tries": loop(
        *(f"{' ' * n}try:" for n in range(18)),
        f"{' ' * 18}a()",
        *(f"{' ' * n}finally: a()" for n in reversed(range(18))),
    ),
    "300 elifs": loop("if a == 0: b()", *(f"elif a == {n}: b({n})" for n in range(1, 300))),
    "300 elifs with steps": loop(
        "if a == 0: b()", *(f"elif a == {n}: optimizer.zero_grad()" for n in range(1, 300))
    ),
    "5,000 lines": loop(*(f"x{n} = torch.relu(x{n - 1})" for n in range(1, 5000))),
    "5,000 conditions": loop(*(f"if a.b{n}: scaler.unscale_(optimizer)" for n in range(5000))),
    "a sum of 2,000": loop("x = " + " + ".join(f"a.b{n}" for n in range(2000))),
    "and, 3,000 times": loop("x = " + " and ".join(f"a.b{n}" for n in range(3000))),
    "2,000 attributes": loop("x = a" + ".b" * 2000),
    "200 methods in a chain": loop("x = a" + ".b()" * 200),
    "200 calls in calls": loop("x = " + "a(" * 90 + ")" * 90),
    "a dict of 50,000": loop("x = {" + ", ".join(f"'{n}': {n}" for n in range(50_000)) + "}"),
    "a list of 100,000": loop("x = [" + ", ".join(map(str, range(100_000))) + "]"),
    "sums of itself": loop(*["x = x + x"] * 60),
    "conditions on itself": loop(*["x = x and x"] * 60, "if x: scaler.update()"),
    "pairs of itself": loop(*["x = (x, x)"] * 60, "a(x)", "if x == b: c(x)"),
    "lists of itself": loop("x = [a]", *["x = x + x"] * 60, "a(x)"),
    "dicts of itself": loop(*['x = {"a": x, "b": x}'] * 60, "torch.save(x, a)", "b(**x)"),
    "tensors of itself": loop(*["loss = loss + torch.exp(loss)"] * 60),
    "texts of itself": loop(*['x = f"{x}{x}"'] * 60, "a[x] = x"),
    "indices of itself": loop(*["x = a[x][x]"] * 60),
    "functions that call the next twice": "".join(
        f"def f{n}(x):\n    f{n + 1}(x)\n    return f{n + 1}(x)\n" for n in range(40)
    )
    + loop("f0(x)"),
    "500 loops": BAD + "\n".join(BAD.replace("def ", f"def f{n}_") for n in range(500)),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.timeout(120)
def test_large_and_deep_files_are_done_in_time_or_say_why_not(tmp_path, shape):
    path = tmp_path / "large.py"
    path.write_text(SHAPES[shape])
    began = time.process_time()
    checked = check_file(path, Project(frozenset({path})))
    assert time.process_time() - began < 15
    assert checked.skipped in (
        "",
        "too large to be walked to its end",
        "nested too deeply to be walked",
        "nested too deeply to parse",
    )


@pytest.mark.skipif(not hasattr(signal, "SIGVTALRM"), reason="no timer of processor time here")
def test_a_file_that_takes_too_long_is_left_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "SECONDS", 0.02)
    path = tmp_path / "large.py"
    path.write_text(SHAPES["5,000 lines"])
    checked = check_file(path, Project(frozenset({path})))
    assert checked.skipped.startswith("not done after")
