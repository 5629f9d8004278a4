"""From the word on the command line to a Task, and one clear line for each way it can go wrong."""

from __future__ import annotations

import json
import pickle
import sys
import traceback
from pathlib import Path
from textwrap import dedent

import pytest

from ampwise.cli.main import main
from ampwise.errors import TaskError
from ampwise.tasks import load_task

BODY = """
import torch
from ampwise import Task

def task({arguments}):
    {first}
    return Task(
        name={name},
        model=lambda: torch.nn.Linear(2, 1),
        batches=lambda: [torch.ones(4, 2)],
        loss=lambda model, batch: model(batch).mean(),
    )
"""


@pytest.fixture(autouse=True)
def _imports_undone(monkeypatch):
    """What a task adds to `sys.path` and `sys.modules` is gone after the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if "." not in name or name.partition(".")[0] not in before:
            sys.modules.pop(name, None)


def write(path: str, text: str) -> str:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(dedent(text))
    return path


def task_file(
    path: str = "mine.py", arguments: str = "", name: str = "'x'", first: str = ""
) -> str:
    return write(path, BODY.format(arguments=arguments, name=name, first=first))


# -- where a task is found ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["charlm", "digits"])
def test_built_in_by_name(name):
    assert load_task(name).name.startswith(name)


@pytest.mark.parametrize(
    "path", ["mine.py", "a folder/mine.py", "odd:name/mine.py", "my-task.py", "a.py:b/mine.py"]
)
@pytest.mark.parametrize("suffix", ["", ":task"])
def test_file_with_and_without_function(path, suffix):
    assert load_task(task_file(path) + suffix).name == "x"


def test_absolute_path(tmp_path):
    assert load_task(task_file(str(tmp_path / "mine.py"))).name == "x"


@pytest.mark.parametrize("suffix", ["", ":task"])
def test_module_in_the_working_folder(suffix):
    task_file("package_of_mine/inner.py")
    assert load_task(f"package_of_mine.inner{suffix}").name == "x"


def test_siblings_import_by_name():
    write("folder/sibling_of_mine.py", "NAME = 'sibling'")
    path = task_file("folder/mine.py", name="NAME", first="from sibling_of_mine import NAME")
    assert load_task(path).name == "sibling"


def test_siblings_import_relatively_inside_a_package():
    write("proj/pack_of_mine/__init__.py", "")
    write("proj/pack_of_mine/sibling.py", "NAME = 'relative'")
    path = task_file("proj/pack_of_mine/mine.py", name="NAME", first="from .sibling import NAME")
    assert load_task(path).name == "relative"


def test_classes_of_a_task_file_pickle():
    path = write(
        "pickled_task.py",
        BODY.format(arguments="", name="'x'", first="") + "class Item:\n    pass\n",
    )
    load_task(path)
    item = sys.modules["pickled_task"].Item()
    assert type(pickle.loads(pickle.dumps(item))) is type(item)


def test_a_file_named_like_a_loaded_module_does_not_replace_it():
    import random

    assert load_task(task_file("random.py")).name == "x"
    assert sys.modules["random"] is random


def test_a_file_is_read_anew_each_time():
    load_task(task_file(name="'before'"))
    assert load_task(task_file(name="'after, and longer'")).name == "after, and longer"


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("a folder/my-task.py", "my-task"),
        ("a folder/my-task.py:task", "my-task"),
        ("a folder/my-task.py:make", "make"),
        ("package_of_mine.inner", "inner"),
        ("package_of_mine.inner:make", "make"),
    ],
)
def test_a_task_without_a_name_is_called_by_its_function_or_file(spec, name):
    for path in ("a folder/my-task.py", "package_of_mine/inner.py"):
        write(path, BODY.format(arguments="", name="''", first="") + "make = task\n")
    assert load_task(spec).name == name


def test_reports_call_a_task_by_its_function(capsys):
    task_file("my.py", name="''")
    write("my.py", Path("my.py").read_text() + "make = task\n")
    assert main(["train", "my.py:make", "--precision", "fp32", "--steps", "2", "--json", "-"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["task"], Path(said["folder"]).name) == ("make", "make-fp32-1")


# -- settings ----------------------------------------------------------------------------------------

ARGUMENTS = (
    "a: int = 1, b: float = 1.0, c: bool = False, d: str = '', e: 'int | None' = 3, "
    "f: 'Literal[\"x\", \"y\"]' = 'x', g: 'Path' = None, h=7, i=True, j: 'list[int]' = None"
)


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("a", "-3", "-3"),
        ("b", "1e-3", "0.001"),
        ("c", "true", "True"),
        ("c", "off", "False"),
        ("d", "12", "'12'"),
        ("e", "none", "None"),
        ("e", "4", "4"),
        ("f", "y", "'y'"),
        ("h", "8", "8"),
        ("i", "no", "False"),
    ],
)
def test_settings_are_converted_as_the_function_declares(key, text, expected):
    source = "from typing import Literal\nfrom pathlib import Path\n"
    source += BODY.format(arguments=ARGUMENTS, name=f"repr({key})", first="")
    assert load_task(write("mine.py", source), {key: text}).name == expected


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("a", "1.5", "a='1.5' does not fit: expected int"),
        ("b", "much", "expected float"),
        ("c", "maybe", "expected true or false"),
        ("f", "z", "expected one of x, y"),
        ("h", "x", "expected int"),
        ("j", "1,2", "expected list[int]"),
        ("bb", "1", "no setting 'bb': expected one of a, b, c"),
    ],
)
def test_settings_that_do_not_fit(key, text, message):
    source = "from typing import Literal\nfrom pathlib import Path\n"
    path = write("mine.py", source + BODY.format(arguments=ARGUMENTS, name="''", first=""))
    with pytest.raises(TaskError) as raised:
        load_task(path, {key: text})
    assert message in str(raised.value)


def test_the_nearest_setting_is_named():
    with pytest.raises(TaskError, match="did you mean 'size'"):
        load_task("charlm", {"sise": "tiny"})


def test_a_required_argument_can_be_set():
    path = task_file(arguments="width: int", name="str(width + 1)")
    assert load_task(path, {"width": "4"}).name == "5"


def test_keyword_arguments_take_anything():
    path = task_file(arguments="**settings", name="settings['width']")
    assert load_task(path, {"width": "4"}).name == "4"


def test_annotations_for_type_checkers_only_do_not_stop_a_task():
    assert (
        load_task(task_file(arguments="a: 'Unknown' = 1", name="str(a + 1)"), {"a": "2"}).name
        == "3"
    )


# -- errors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("missing.py", "task file 'missing.py' does not exist"),
        ("mien.py", "did you mean 'mine.py'"),
        ("folder.py", "is a folder"),
        ("mine.py:tusk", "there is no function 'tusk' in mine.py; did you mean 'task'"),
        ("mine.py:zzz", "it defines task"),
        ("mine.py:torch", "is of type module: expected a function"),
        ("charlm2", "did you mean 'charlm'"),
        ("no.such.module", "no such built-in task, file or module; built in are charlm"),
        ("..", "no such built-in task, file or module"),
        ("", "no such built-in task, file or module"),
        ("text", "write text:PATH"),
        ("text:", "write text:PATH"),
        ("needs.py", "needs width: pass --set width=VALUE"),
        ("nothing.py", "returned NoneType: expected an ampwise.Task (is a return missing?)"),
        ("exits.py", "called sys.exit(3)"),
        ("not_fresh.py", "Task(model=...) is of type Linear: expected a function"),
        ("not_called.py", "Task(batches=...) is of type list: expected a function"),
    ],
)
def test_one_clear_line_for_each_way_to_go_wrong(spec, message):
    task_file()
    task_file("needs.py", arguments="width")
    write("nothing.py", "def task():\n    pass")
    write("exits.py", "import sys\nsys.exit(3)")
    start = "import torch\nfrom ampwise import Task\ndef task():\n    return Task("
    rest = "loss=lambda model, batch: model(batch).mean())"
    write("not_fresh.py", f"{start}model=torch.nn.Linear(2, 1), batches=lambda: [], {rest}")
    write("not_called.py", f"{start}model=lambda: torch.nn.Linear(2, 1), batches=[1], {rest}")
    Path("folder.py").mkdir()
    with pytest.raises(TaskError) as raised:
        load_task(spec)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("source", "kind", "line"),
    [
        ("import torch\n1 / 0", ZeroDivisionError, "1 / 0"),
        ("def task():\n    raise KeyError('x')", KeyError, "raise KeyError('x')"),
        ("import not_there_at_all", ModuleNotFoundError, "import not_there_at_all"),
        ("def task(:\n    pass", SyntaxError, None),
    ],
)
@pytest.mark.parametrize("spec", ["broken_task.py", "broken_task"])
def test_a_tasks_own_error_comes_through_marked_with_its_traceback(spec, source, kind, line):
    write("broken_task.py", source)
    with pytest.raises(kind) as raised:
        load_task(spec)
    assert "broken_task" in raised.value.__ampwise_user__
    if line is not None:
        assert line in [each.line for each in traceback.extract_tb(raised.value.__traceback__)]


def test_a_file_that_fails_leaves_no_half_made_module():
    write("broken_task.py", "1 / 0")
    with pytest.raises(ZeroDivisionError):
        load_task("broken_task.py")
    assert "broken_task" not in sys.modules
