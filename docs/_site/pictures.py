"""Makes the pictures of the README, from a stored bench run.

    python docs/_site/pictures.py runs/bench-charlm-1

writes ``docs/images/bench.svg``, what the terminal shows of it, and ``docs/images/report.png``, the
top of its page as a browser draws it (Chromium, without a window). `make demo` makes such a run;
on a busy machine its figures are no example.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ampwise.report.stored import forms_of, load
from ampwise_lint.base.console import Console

IMAGES = Path(__file__).parents[1] / "images"
WIDTH, HEIGHT = 1000, 1350
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def main() -> None:
    """Make both pictures of the run that is named."""
    if len(sys.argv) != 2:
        sys.exit(f"usage: python {sys.argv[0]} RUN, the folder of a bench run")
    run = load(Path(sys.argv[1]))
    forms = forms_of(run)
    console = Console(record=True, width=80, file=io.StringIO())
    forms.render(run, console)
    console.save_svg(str(IMAGES / "bench.svg"), title="ampwise bench")
    photograph(forms.to_html(run), IMAGES / "report.png")


def photograph(page: str, target: Path) -> None:
    """Save the top of a page as a browser shows it."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(
            f"no browser: expected one of {', '.join(BROWSERS)} (Debian: apt install chromium)"
        )
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "report.html"
        source.write_text(page, encoding="utf-8")
        subprocess.run(  # noqa: S603 - the browser that was found
            [
                browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                f"--user-data-dir={folder}/profile", f"--window-size={WIDTH},{HEIGHT}",
                f"--screenshot={target}", source.as_uri(),
            ],
            check=True, capture_output=True, timeout=120,
        )  # fmt: skip


if __name__ == "__main__":
    main()
