"""Fetch the public files that fixes are tried on: ``python tests/lint/public_files.py FOLDER``.

``public_files.txt`` has one on each line: repository, commit, path. They are not ours to keep, so
they are read from GitHub each time; what is in the folder already is left.
"""

from __future__ import annotations

import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

LIST = Path(__file__).with_suffix(".txt")


def fetch(folder: Path) -> int:
    """Fill a folder; how many files could not be had."""
    failed = 0
    for line in LIST.read_text(encoding="utf-8").splitlines():
        repository, commit, path = line.split(maxsplit=2)
        file = folder / repository.replace("/", "+") / path
        if file.exists():
            continue
        place = urllib.parse.quote(f"{repository}/{commit}/{path}")
        url = f"https://raw.githubusercontent.com/{place}"
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                data = answer.read()
        except (urllib.error.URLError, TimeoutError) as error:
            print(f"{url}: not read ({error})", file=sys.stderr)
            failed += 1
            continue
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    return failed


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("name one folder, into which the files are to go")
    sys.exit(1 if fetch(Path(sys.argv[1])) else 0)
