"""Files as they are found: encodings, notebooks, broken and foreign ones, links."""

from __future__ import annotations

import json
import os

import pytest

from ampwise_lint.base.errors import UsageError
from ampwise_lint.engine import check_file, find, lint
from ampwise_lint.settings import Settings
from ampwise_lint.source.project import Project
from ampwise_lint.source.text import MAX_BYTES, UnreadableError, read

BAD = """\
import torch
from torch.nn.utils import clip_grad_norm_


def train(model, loader, optimizer, scaler, criterion):
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
"""


def codes(path):
    return [each.code for each in check_file(path, Project(frozenset({path}))).findings]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'print "epoch", 1\n', "Python 2 code"),
        (b"try:\n    pass\nexcept OSError, error:\n    pass\n", "Python 2 code"),
        (b"def f(:\n    pass\n", "syntax error in line 1"),
        (b"scaler = 1\0\n", "null bytes"),
        (b"name = '\xff\xfe'\n", "not decodable"),
        (b"# coding: no-such-codec\n", "not decodable"),
        (b"x = " + b"(" * 3000 + b")" * 3000 + b"\n", ""),
        (b"x = " + b"-" * 100_000 + b"1\n", ""),
    ],
)
def test_what_cannot_be_read_is_skipped_with_the_reason(tmp_path, content, reason):
    file = tmp_path / "code.py"
    file.write_bytes(content)
    report = lint([file], use_cache=False)
    assert [each.path for each in report.skipped] == ["code.py"]
    assert reason in report.skipped[0].reason
    assert report.skipped[0].reason
    assert not report.findings


def test_a_huge_file_is_skipped(tmp_path):
    file = tmp_path / "data.py"
    file.write_text("x = 1\n" * (MAX_BYTES // 6 + 1))
    with pytest.raises(UnreadableError, match="larger than 4 MiB"):
        read(file)


def test_deep_code_is_skipped_and_not_a_crash(tmp_path):
    file = tmp_path / "deep.py"
    file.write_text("import torch\nloss.backward()\nx = " + " + ".join(["autocast"] * 5000) + "\n")
    report = lint([file], use_cache=False)
    assert report.skipped or report.findings == []


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1", "cp1251", "utf-16"])
def test_encodings(tmp_path, encoding):
    file = tmp_path / "code.py"
    head = "" if encoding.startswith("utf") else f"# -*- coding: {encoding} -*-\n"
    file.write_bytes((head + BAD).encode(encoding))
    if encoding == "utf-16":  # Python itself does not read it
        assert lint([file], use_cache=False).skipped
    else:
        assert codes(file) == ["AMP101"]


@pytest.mark.parametrize("ends", ["\r\n", "\r", "\n"])
def test_line_ends(tmp_path, ends):
    file = tmp_path / "code.py"
    file.write_bytes(BAD.replace("\n", ends).encode())
    found = check_file(file, Project(frozenset({file}))).findings
    assert [(each.code, each.line) for each in found] == [("AMP101", 11)]
    assert found[0].source.strip().startswith("clip_grad_norm_")


def test_columns_count_characters(tmp_path):
    file = tmp_path / "code.py"
    file.write_text(BAD.replace("        clip_grad", "        'ü€'; clip_grad"))
    (found,) = check_file(file, Project(frozenset({file}))).findings
    assert found.column == len("        'ü€'; ") + 1


def notebook(cells, **metadata):
    return json.dumps({"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5})


def cell(text, kind="code"):
    return {"cell_type": kind, "source": text.splitlines(keepends=True), "metadata": {}}


def test_notebooks_are_read_as_one_program_and_findings_name_the_cell(tmp_path):
    imports, function = BAD.split("\n\n\n")
    file = tmp_path / "train.ipynb"
    magics = (
        "!pip install torch\n%matplotlib inline\nimport os\nfor i in range(2):\n    !echo {i}\n"
    )
    file.write_text(
        notebook(
            [cell("# Training", "markdown"), cell(magics), cell("%%bash\nls -l"), cell(imports),
             cell("%%time\n" + function)],
            kernelspec={"language": "python"},
        )
    )  # fmt: skip
    (found,) = check_file(file, Project(frozenset({file}))).findings
    assert (found.code, found.cell, found.line) == ("AMP101", 5, 8)
    assert found.to_json()["cell"] == 5


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "not a notebook"),
        ("[]", "not a notebook"),
        ('{"cells": 5}', "not a notebook: cells is of type int"),
        ("[" * 100_000, "not a notebook: nested too deeply"),
        (notebook([cell("x <- 1")], kernelspec={"language": "R"}), "a notebook in R"),
        (notebook([cell("def f(:")]), "syntax error"),
        (notebook([{"cell_type": "code", "source": 5}]), "the source of a code cell is no text"),
    ],
)
def test_other_notebooks_are_skipped(tmp_path, content, reason):
    file = tmp_path / "book.ipynb"
    file.write_text(content)
    assert reason in lint([file], use_cache=False).skipped[0].reason


def test_folders_are_walked_without_environments_caches_and_links(tmp_path):
    for name in ("a.py", "pkg/b.py", "pkg/c.txt", ".hidden/d.py", "env/lib/e.py", "x/y.ipynb",
                 "__pycache__/f.py", "node_modules/g.py", "skip/h.py"):  # fmt: skip
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    (tmp_path / "env" / "pyvenv.cfg").touch()
    (tmp_path / "pkg" / "loop").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "again.py").symlink_to(tmp_path / "pkg" / "b.py")
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere")
    (tmp_path / ".#a.py").symlink_to("me@here.4711")
    settings = Settings(exclude=("skip",), root=tmp_path)
    found = {each.relative_to(tmp_path).as_posix() for each in find([tmp_path], settings)}
    # again.py is pkg/b.py: once is enough. gone.py is told of, and Emacs' lock is nothing to tell.
    assert found == {"a.py", "again.py", "gone.py", "x/y.ipynb"}
    named = [each.name for each in find([tmp_path / "env"], settings)]
    assert named == ["e.py"]


def test_a_path_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match=r"nope\.py: no such file or folder"):
        lint([tmp_path / "nope.py"])


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_one_may_not_read(tmp_path):
    file = tmp_path / "secret.py"
    file.write_text(BAD)
    file.chmod(0)
    assert "denied" in lint([file], use_cache=False).skipped[0].reason
