"""What to check and how, from ``[tool.ampwise.lint]`` and the command line."""

from __future__ import annotations

import fnmatch
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ampwise_lint.base.errors import UsageError, nearest
from ampwise_lint.findings import Finding
from ampwise_lint.rules import all_rules

KEYS = ("select", "ignore", "exclude", "per-file-ignores", "baseline")


@dataclass(frozen=True, slots=True)
class Settings:
    """Which findings are wanted. Codes may be prefixes: ``AMP1`` is all of AMP1xx."""

    select: tuple[str, ...] = ()
    """Nothing: all."""
    ignore: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    """Patterns of paths that are not read."""
    per_file_ignores: Mapping[str, tuple[str, ...]] = field(
        default_factory=dict[str, tuple[str, ...]]
    )
    baseline: Path | None = None
    root: Path = field(default_factory=Path.cwd)
    """The folder that patterns and the baseline's paths are relative to."""

    def wants(self, finding: Finding) -> bool:
        """Whether a finding is to be reported."""
        if self.select and not _matches(finding.code, self.select):
            return False
        if _matches(finding.code, self.ignore):
            return False
        path = self.relative(finding.path)
        return not any(
            _matches(finding.code, codes) and path_matches(path, pattern)
            for pattern, codes in self.per_file_ignores.items()
        )

    def excludes(self, path: Path) -> bool:
        """Whether a file or folder is not to be read."""
        relative = self.relative(str(path))
        return any(path_matches(relative, pattern) for pattern in self.exclude)

    def relative(self, path: str) -> str:
        """A path as patterns and the baseline name it."""
        try:
            return Path(path).absolute().relative_to(self.root).as_posix()
        except ValueError:
            return Path(path).as_posix()

    def with_flags(
        self,
        select: Iterable[str],
        ignore: Iterable[str],
        exclude: Iterable[str],
        baseline: Path | None,
    ) -> Settings:
        """The same with what the command line says, which wins."""
        select, ignore = codes(select, "--select"), codes(ignore, "--ignore")
        return replace(
            self,
            select=select or self.select,
            ignore=(*self.ignore, *ignore),
            exclude=(*self.exclude, *exclude),
            baseline=baseline or self.baseline,
        )


def _matches(code: str, prefixes: Iterable[str]) -> bool:
    return any(code.startswith(each) for each in prefixes)


def path_matches(path: str, pattern: str) -> bool:
    """Whether a path, its name, or a folder above it fits a pattern."""
    pattern = pattern.rstrip("/")
    parts = path.split("/")
    folders = ["/".join(parts[: count + 1]) for count in range(len(parts))]
    return any(fnmatch.fnmatch(each, pattern) for each in (*folders, *parts))


def codes(given: Iterable[str], where: str) -> tuple[str, ...]:
    """Codes, prefixes of codes and names of rules, as codes.

    Raises
    ------
    UsageError
        For one that fits no rule.
    """
    rules = all_rules()
    by_name = {rule.name: code for code, rule in rules.items()}
    found: list[str] = []
    for each in given:
        for word in each.replace(",", " ").split():
            code = by_name.get(word, word.upper())
            if code == "ALL":
                code = "AMP"
            if not any(known.startswith(code) for known in rules):
                legal = [*rules, *by_name]
                raise UsageError(
                    f"{where} {word!r}: expected a rule's code, its beginning, or its name"
                    f"{nearest(word, legal)}"
                )
            found.append(code)
    return tuple(found)


def load_settings(start: Path) -> Settings:
    """Read ``[tool.ampwise.lint]`` of the nearest ``pyproject.toml`` at or above a path.

    Raises
    ------
    UsageError
        For a file that speaks of ampwise and does not parse, an unknown key, or a value of the
        wrong kind.
    """
    start = start.absolute()
    for folder in (start, *start.parents):
        file = folder / "pyproject.toml"
        if file.is_file():
            return _read(file)
    return Settings(root=start if start.is_dir() else start.parent)


def _read(file: Path) -> Settings:
    table: Any = _content(file)
    for name in ("tool", "ampwise", "lint"):
        table = table.get(name, {})
        if not isinstance(table, dict):
            raise UsageError(f"{file}: {name}: expected a table, got {table!r}")
    for key in table:
        if key not in KEYS:
            raise UsageError(
                f"{file}: [tool.ampwise.lint] has no key {key!r}: expected one of "
                f"{', '.join(KEYS)}{nearest(key, KEYS)}"
            )
    lists = {key: _words(file, key, table.get(key, [])) for key in ("select", "ignore", "exclude")}
    per_file: Any = table.get("per-file-ignores", {})
    if not isinstance(per_file, dict):
        raise UsageError(f"{file}: per-file-ignores: expected a table of pattern = [codes]")
    baseline: Any = table.get("baseline")
    return Settings(
        select=codes(lists["select"], f"{file}: select"),
        ignore=codes(lists["ignore"], f"{file}: ignore"),
        exclude=tuple(lists["exclude"]),
        per_file_ignores={
            pattern: codes(_words(file, pattern, each), f"{file}: per-file-ignores")
            for pattern, each in per_file.items()
        },
        baseline=file.parent / str(baseline) if baseline else None,
        root=file.parent,
    )


def _content(file: Path) -> dict[str, Any]:
    """What stands in a file; nothing where a mistake in it is another tool's affair."""
    text = "ampwise"  # who knows what is in a file that cannot be read
    try:
        text = file.read_text(encoding="utf-8")
        return tomllib.loads(text)
    except (OSError, ValueError) as error:
        if "ampwise" not in text:
            return {}
        raise UsageError(f"{file}: not readable as TOML: {error}") from None


def _words(file: Path, key: str, value: Any) -> list[str]:
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise UsageError(f"{file}: {key}: expected a list of strings, got {value!r}")
    return value
