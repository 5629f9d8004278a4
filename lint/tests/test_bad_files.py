"""One bad file never ends a check: it is named, with the reason, and the others are checked."""

from __future__ import annotations

import itertools
import json
import os
import socket
from pathlib import Path

import pytest

from ampwise_lint import engine
from ampwise_lint.engine import lint
from ampwise_lint.fix import fix_files
from ampwise_lint.main import main
from ampwise_lint.settings import Settings
from ampwise_lint.torch_model.python_functions import FUNCTIONS
from test_source import BAD, cell, notebook

FIXED = BAD.replace("        clip", "        scaler.unscale_(optimizer)\n        clip")


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("AMPWISE_CACHE", str(tmp_path_factory.mktemp("cache")))


def reasons(report) -> dict[str, str]:
    return {each.path: each.reason for each in report.skipped}


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)  # relative: the system's names of sockets are short


BROKEN = {
    "five.ipynb": (lambda path: path.write_text('{"cells": 5}'), "cells is of type int"),
    "nul.py": (lambda path: path.write_bytes(b"x = 1\0"), "null bytes"),
    "latin.py": (lambda path: path.write_bytes(b"x = '\xff'"), "not decodable"),
    "syntax.py": (lambda path: path.write_text("def f(:"), "syntax error in line 1"),
    "deep.py": (lambda path: path.write_text("x = " + "-" * 100_000 + "1"), "nested too deeply"),
    "chain.py": (lambda path: path.write_text("x = a" + ".b" * 100_000), "nested too deeply"),
    "pipe.py": (os.mkfifo, "a pipe (FIFO)"),
    "socket.py": (make_socket, "a socket"),
    "link.py": (lambda path: path.symlink_to("nowhere"), "a link to nothing"),
    "circle.py": (lambda path: path.symlink_to("circle.py"), "symbolic links"),
}


def test_calls_whose_arguments_are_not_known_are_walked():
    calls = [f"{name}({given})" for name in FUNCTIONS for given in ("", "*pair", "**named")]
    lines = "".join(f"        {each}\n" for each in calls)
    Path("train.py").write_text(BAD.replace("        clip", f"{lines}        clip"))
    report = lint([Path("train.py")], jobs=1)
    assert not report.skipped
    assert [each.code for each in report.findings] == ["AMP101"]


@pytest.mark.parametrize("jobs", [1, 2])
def test_bad_files_are_named_and_the_others_are_checked(tmp_path, jobs):
    for name, (make, _) in BROKEN.items():
        make(tmp_path / name)
    Path(os.fsdecode(b"name\xff.py")).write_text(BAD)
    Path("folder.py").mkdir()  # a folder as any other
    Path("folder.py/train.py").write_text(BAD)
    Path("train.py").write_text(BAD)
    for _ in range(2):  # the second time with what the cache holds
        report = lint([tmp_path], jobs=jobs)
        assert [each.path for each in report.findings] == ["folder.py/train.py", "train.py"]
        assert report.files == len(BROKEN) + 3
        found = reasons(report)
        assert found.pop("name\\xff.py") == "its name is not UTF-8; rename it"
        assert found.keys() == BROKEN.keys()
        for name, reason in found.items():
            assert BROKEN[name][1] in reason, name


@pytest.mark.parametrize("form", ["text", "json", "github", "sarif"])
def test_a_name_that_is_not_utf_8_can_be_shown(form, capsysbinary):
    pytest.importorskip("jinja2")
    Path(os.fsdecode(b"name\xff.py")).write_text(BAD)
    Path("train.py").write_text(BAD)
    assert main(["--format", form, "--html", "o.html", "--write-baseline", "b.json"]) == 2
    assert main(["--format", form, "--html", "o.html"]) == 1
    capsysbinary.readouterr().out.decode()
    assert "name\\xff.py" in Path("o.html").read_text(encoding="utf-8")


def everywhere(value, other):
    """`value` with `other` in one place, for all places."""
    yield other
    if isinstance(value, dict | list):
        for key, each in list(value.items() if isinstance(value, dict) else enumerate(value)):
            for changed in everywhere(each, other):
                copy = value.copy()
                copy[key] = changed
                yield copy


def test_notebooks_with_wrong_types_everywhere(tmp_path):
    whole = json.loads(notebook([cell("# T", "markdown"), cell(BAD)], kernelspec={"language": "R"}))
    whole["metadata"]["kernelspec"]["language"] = "python"
    third = {"worksheets": [{"cells": whole["cells"]}], "metadata": {}, "nbformat": 3}
    file = tmp_path / "book.ipynb"
    checked = mended = 0
    for book, other in itertools.product((whole, third), (None, 5, "", [[]], {"a": 1})):
        for changed in everywhere(book, other):
            file.write_text(json.dumps(changed))
            report = lint([file], jobs=1, use_cache=False)
            assert not any("a bug in ampwise" in each.reason for each in report.skipped), changed
            checked += not report.skipped
            mended += bool(fix_files(report, [file], Settings(), unsafe=True).files)
    assert checked > 100
    assert mended > 50


def test_a_file_that_vanishes(tmp_path, monkeypatch):
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text(BAD)
    find = engine.find

    def found_then_gone(paths, settings):
        yield from find(paths, settings)
        (tmp_path / "a.py").unlink()

    monkeypatch.setattr(engine, "find", found_then_gone)
    report = lint([tmp_path], use_cache=False)
    assert reasons(report) == {"a.py": "gone since it was found"}
    assert [each.path for each in report.findings] == ["b.py"]


def test_a_folder_that_cannot_be_listed_is_named(tmp_path, monkeypatch):
    (tmp_path / "shut").mkdir()
    (tmp_path / "train.py").write_text(BAD)
    scandir = os.scandir

    def guarded(path):
        if os.fspath(path).endswith("shut"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", guarded)
    report = lint([tmp_path], use_cache=False)
    assert reasons(report) == {"shut": "not a file: a folder that cannot be listed"}
    assert len(report.findings) == 1


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RecursionError(), "nested too deeply"),
        (MemoryError(), "takes more memory than there is"),
        (OSError("lost"), "a bug in ampwise: OSError: lost"),
    ],
)
def test_whatever_happens_to_one_file_the_others_go_on(tmp_path, monkeypatch, error, reason):
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text(BAD)
    read_text = engine.read_text

    def read(path):
        if path.name == "a.py":
            raise error
        return read_text(path)

    monkeypatch.setattr(engine, "read_text", read)
    report = lint([tmp_path], jobs=1, use_cache=False)
    assert reason in reasons(report)["a.py"]
    assert [each.path for each in report.findings] == ["b.py"]


def test_a_file_that_gets_its_process_killed(tmp_path, monkeypatch):
    for number in range(8):
        (tmp_path / f"train_{number}.py").write_text(BAD)
    read_text = engine.read_text
    monkeypatch.setattr(
        engine, "read_text", lambda path: os._exit(9) if "_3" in path.name else read_text(path)
    )
    report = lint([tmp_path], jobs=2, use_cache=False)
    assert reasons(report) == {
        "train_3.py": "the process that checked it was killed; out of memory?"
    }
    assert len(report.findings) == 7


# -- exit codes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "code", "last"),
    [
        (["notes.txt"], 2, "1 file: not read"),
        (["notes.txt", "clean.py"], 2, "1 of 2 files: no findings; 1 not read"),
        (["notes.txt", "train.py"], 1, "1 of 2 files: 1 error; --fix mends 1; 1 not read"),
        (["syntax.py", "clean.py"], 2, "1 of 2 files: no findings; 1 not read"),
        (["syntax.py", "notes.txt"], 2, "2 files: none read"),
        (["clean.py"], 0, "1 file: no findings"),
        (["script"], 1, "1 file: 1 error; --fix mends 1"),
        (["script.cgi"], 1, "1 file: 1 error; --fix mends 1"),
    ],
)
def test_what_was_not_read_is_no_clean_bill(capsys, names, code, last):
    Path("notes.txt").write_text("AMP in a few words\n")
    Path("clean.py").write_text(FIXED)
    Path("train.py").write_text(BAD)
    Path("syntax.py").write_text("def f(:")
    Path("script").write_text(BAD)
    Path("script.cgi").write_text("#!/usr/bin/env python3\n" + BAD)
    for extra in ([], ["--statistics"]):
        assert main([*names, *extra]) == code
        said = capsys.readouterr().out.splitlines()
        assert said[-1] == last
        for name in {"notes.txt", "syntax.py"} & set(names):
            assert any(line.startswith(f"{name}: not read: ") for line in said)


def test_help_says_the_exit_codes(capsys):
    assert main(["--help"]) == 0
    assert "2 no findings, but a file could not" in " ".join(capsys.readouterr().out.split())


# -- fixing ----------------------------------------------------------------------------------------


def test_a_link_stays_a_link_and_its_target_is_mended(tmp_path):
    (tmp_path / "real").mkdir()
    target = tmp_path / "real" / "code.py"
    target.write_text(BAD)
    link = tmp_path / "train.py"
    link.symlink_to(Path("real", "code.py"))
    assert main(["--fix", "train.py"]) == 0
    assert os.readlink(link) == "real/code.py"
    assert target.read_text() == FIXED
    assert [each.name for each in target.parent.iterdir()] == ["code.py"]


@pytest.mark.parametrize("mode", [0o755, 0o600, 0o664])
def test_fix_keeps_the_mode(mode):
    file = Path("train.py")
    file.write_text(BAD)
    file.chmod(mode)
    assert main(["--fix"]) == 0
    assert file.stat().st_mode & 0o7777 == mode
    assert file.read_text() == FIXED


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_fix_keeps_the_owner():
    file = Path("train.py")
    file.write_text(BAD)
    os.chown(file, 65534, 65534)
    assert main(["--fix"]) == 0
    assert (file.stat().st_uid, file.stat().st_gid) == (65534, 65534)


@pytest.mark.parametrize(
    ("head", "encoding", "ends"),
    [
        ("", "utf-8-sig", "\n"),
        ("", "utf-8-sig", "\r\n"),
        ("# -*- coding: utf-8 -*-\n# für später\n", "utf-8-sig", "\r\n"),
        ("# -*- coding: cp1251 -*-\n# позже\n", "cp1251", "\n"),
        ("#!/usr/bin/env python3\n# vim: set fileencoding=latin-1 :\n# für\n", "latin-1", "\r\n"),
        ("", "utf-8", "\r"),
    ],
)
def test_fix_keeps_bytes_around_what_it_mends(head, encoding, ends):
    file = Path("train.py")
    file.write_bytes((head + BAD).replace("\n", ends).encode(encoding))
    assert main(["--fix"]) == 0
    assert file.read_bytes() == (head + FIXED).replace("\n", ends).encode(encoding)


def test_fix_keeps_mixed_line_ends_and_a_missing_last_one():
    file = Path("train.py")
    lines = BAD.rstrip("\n").split("\n")
    mixed = "".join(f"{line}{end}" for line, end in zip(lines, itertools.cycle(["\n", "\r\n"])))
    file.write_bytes(mixed.removesuffix("\n").encode())
    before = file.read_bytes().splitlines(keepends=True)
    assert main(["--fix"]) == 0
    after = file.read_bytes().splitlines(keepends=True)
    (new,) = [index for index, line in enumerate(after) if b"unscale_" in line]
    assert after[:new] + after[new + 1 :] == before


def test_a_file_that_cannot_be_written_does_not_keep_others_from_being_mended(monkeypatch, capsys):
    from ampwise_lint import fix

    for name in ("a.py", "b.py"):
        Path(name).write_text(BAD)
    write = fix.atomic_write

    def guarded(path, content):
        if path.name == "a.py":
            raise PermissionError(13, "Permission denied")
        write(path, content)

    monkeypatch.setattr(fix, "atomic_write", guarded)
    assert main(["--fix"]) == 1
    assert capsys.readouterr().err == "ampwise: error: cannot write a.py: Permission denied\n"
    assert (Path("a.py").read_text(), Path("b.py").read_text()) == (BAD, FIXED)


# -- the page --------------------------------------------------------------------------------------


def test_the_page_has_all_findings_and_escapes_what_it_quotes(capsys):
    pytest.importorskip("jinja2")
    Path("a&b.py").write_text(BAD.replace("1.0)", "1.0)  # <script>alert('x')</script>"))
    Path("broken.py").write_text("x = <b>")
    book = notebook([cell("# T", "markdown"), cell(BAD)])
    Path("book.ipynb").write_text(book)
    assert main(["--html", "found.html"]) == 1
    assert capsys.readouterr().err == "wrote found.html\n"
    page = Path("found.html").read_text(encoding="utf-8")
    assert "<h1>2 of 3 files: 2 errors; --fix mends 2; 1 not read</h1>" in page
    assert "<h2>a&amp;b.py</h2>" in page
    assert "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;" in page
    assert "<script" not in page
    assert "AMP101 clip-before-unscale, line 11, column 9" in page
    assert "AMP101 clip-before-unscale, cell 2, line 11, column 9" in page
    assert "scaler.unscale_(optimizer) before clipping" in page
    assert page.count("Fix: --fix makes it.") == 2
    assert '<td class="why">broken.py</td><td class="why">syntax error in line 1' in page
    assert main(["--html", "found.html", "--json", "-"]) == 1
    said = capsys.readouterr()
    assert said.err == "replaced found.html\n"
    assert json.loads(said.out)["files"] == 3


def test_the_page_of_clean_code():
    pytest.importorskip("jinja2")
    Path("train.py").write_text(FIXED)
    assert main(["--html", "found.html"]) == 0
    page = Path("found.html").read_text(encoding="utf-8")
    assert "<h1>1 file: no findings</h1>" in page
    assert "<h2>" not in page
