"""Mending notebooks: what changes, and that nothing else does."""

from __future__ import annotations

import json

import pytest

from ampwise_lint.fix import fix_file
from ampwise_lint.settings import Settings

SETUP = """\
%matplotlib inline
import torch
from torch.nn.utils import clip_grad_norm_

model = torch.nn.Linear(4, 2).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cuda")  # \u00e9chelle"""
LOOP = """\
%%time
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = torch.nn.functional.cross_entropy(model(x), y)
    %timeit -n1 model(x)
    scaler.scale(loss).backward()
    # keeps steps small
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
!nvidia-smi  # how much is left
"""
SHELL = "%%bash\npip list # of this machine\n    ls"
MENDED = LOOP.replace(
    "    # keeps steps small\n", "    # keeps steps small\n    scaler.unscale_(optimizer)\n"
)


def book(*sources: str) -> dict[str, object]:
    cells: list[dict[str, object]] = [
        {"cell_type": "markdown", "metadata": {}, "source": ["for x in loader:"]}
    ]
    for number, source in enumerate(sources):
        cells.append(
            {
                "cell_type": "code",
                "execution_count": number,
                "id": f"cell-{number}",
                "metadata": {"collapsed": 1e-05},
                "outputs": [{"name": "stdout", "text": ["%a \u00fc\n"], "output_type": "stream"}],
                "source": source.splitlines(keepends=True),
            }
        )
    kernel = {"language": "python", "display_name": "Python 3", "name": "python3"}
    return {
        "nbformat_minor": 5, "nbformat": 4, "metadata": {"kernelspec": kernel}, "cells": cells
    }  # fmt: skip


def mend(path, *codes: str, unsafe: bool = False) -> int:
    return fix_file(path, frozenset({path}), Settings(select=codes), unsafe)


LAYOUTS = {
    "jupyter": lambda b: json.dumps(b, indent=1, ensure_ascii=False) + "\n",
    "escaped": lambda b: json.dumps(b, indent=1) + "\n",
    "tabs": lambda b: json.dumps(b, indent="\t", ensure_ascii=False),
    "one line": json.dumps,
    "compact": lambda b: json.dumps(b, separators=(",", ":")),
    "crlf": lambda b: (json.dumps(b, indent=2) + "\n").replace("\n", "\r\n"),
    "mark": lambda b: "\ufeff" + json.dumps(b, indent=1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_the_source_of_the_mended_cell_changes(tmp_path, layout):
    path = tmp_path / "train.ipynb"
    written = LAYOUTS[layout](book(SETUP, SHELL, LOOP, "loss"))
    path.write_bytes(written.encode())
    assert mend(path, "AMP101") == 1
    assert path.read_bytes().decode() == LAYOUTS[layout](book(SETUP, SHELL, MENDED, "loss"))
    assert mend(path, "AMP101") == 0
    assert path.read_bytes().decode() == LAYOUTS[layout](book(SETUP, SHELL, MENDED, "loss"))


def test_a_source_may_be_a_string_and_of_an_old_format(tmp_path):
    path = tmp_path / "train.ipynb"

    def old(loop: str) -> str:
        cells = [{"cell_type": "code", "input": each} for each in (SETUP, loop)]
        return json.dumps({"worksheets": [{"cells": cells}], "nbformat": 3}, indent=1)

    path.write_text(old(LOOP))
    assert mend(path, "AMP101") == 1
    assert path.read_text() == old(MENDED)


def test_an_edit_across_cells_is_left_out(tmp_path):
    """The update moves behind the step, which is in another cell."""
    path = tmp_path / "train.ipynb"
    criterion = "criterion = torch.nn.BCELoss()"
    loop = LOOP.replace(
        "torch.nn.functional.cross_entropy(model(x)", "criterion(model(x).sigmoid()"
    )
    written = json.dumps(book(f"{SETUP}\n{criterion}", loop))
    path.write_text(written)
    assert mend(path, "AMP209", unsafe=True) == 0
    assert path.read_text() == written
    path.write_text(json.dumps(book(SETUP, f"{criterion}\n{loop}".replace("%%time\n", ""))))
    assert mend(path, "AMP209", unsafe=True) == 1
    assert "BCEWithLogitsLoss" in path.read_text()


def test_an_edit_that_would_move_a_magic_is_left_out(tmp_path):
    path = tmp_path / "train.ipynb"
    loop = """\
for x, y in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        %timeit -n1 1
    scaler.step(optimizer)
    scaler.update()
"""
    written = json.dumps(book(SETUP, loop))
    path.write_text(written)
    assert mend(path, "AMP201") == 0
    assert path.read_text() == written
    path.write_text(json.dumps(book(SETUP, loop.replace("        %timeit -n1 1\n", ""))))
    assert mend(path, "AMP201") == 1


def test_a_new_first_line_of_a_cell_stays_in_it(tmp_path):
    """Between cells there is nothing that a statement could slip past."""
    path = tmp_path / "train.ipynb"
    first = "for epoch in range(3):\n    scaler = torch.amp.GradScaler('cuda')\n"
    loop = (
        first
        + "    for x, y in loader:\n"
        + "".join(f"    {line}\n" for line in LOOP.splitlines()[2:-1] if "%" not in line)
    )
    path.write_text(json.dumps(book(SETUP, "# before\nx = 1\n\n", f"# loop\n{loop}")))
    assert mend(path, "AMP110", unsafe=True) == 1
    cells = json.loads(path.read_text())["cells"]
    assert "".join(cells[2]["source"]) == "# before\nx = 1\n\n"
    assert cells[3]["source"][:3] == [
        "# loop\n", "scaler = torch.amp.GradScaler('cuda')\n", "for epoch in range(3):\n"
    ]  # fmt: skip
