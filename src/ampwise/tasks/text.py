"""charlm on the user's own text: ``text:PATH``, a file or a folder of files."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from ampwise.errors import TaskError
from ampwise.tasks.charlm import language_model, shaped
from ampwise.tasks.task import Task


def task(
    path: Path,
    size: Literal["tiny", "small", "base"] = "tiny",
    batches: int = 200,
    batch: int | None = None,
    context: int | None = None,
    dropout: float = 0.0,
    seed: int = 0,
) -> Task:
    """A language model over the bytes of a file, or of every file below a folder.

    The settings are those of `ampwise.tasks.charlm.task`.

    Raises
    ------
    TaskError
        When there is nothing to read, or too little.
    """
    if not path.exists():
        raise TaskError(f"task text:{path}: no such file or folder")
    files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    try:
        texts = [each.read_bytes() for each in files]
    except OSError as error:
        raise TaskError(
            f"task text:{path}: cannot read {error.filename}: {error.strerror}"
        ) from None
    if not any(texts):
        raise TaskError(f"task text:{path}: it is empty; expected text to train on")
    shape = shaped(f"text:{path}", size, batch=batch, context=context, dropout=dropout)
    return language_model(f"text-{size}", texts, shape, batches, seed)
