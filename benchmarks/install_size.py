"""What an install of ampwise brings beside torch: packages and their sizes, core and extras.

ampwise's own wheels, the linter's among them, are built and installed without their dependencies
into a folder, and that is measured. What it depends on is followed through the metadata of the
packages installed here, as pip would (markers included), and a package's size is that of the files
its RECORD lists, byte code that pip compiled among them. What torch itself needs, and what it needs
that ampwise names too, is torch's. An extra counts what it adds to the core.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from _common import save

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = ("digits", "nvml", "tensorboard", "wandb", "mlflow")


def closure(requirements: Iterable[str]) -> set[str]:
    """Names of all packages that pip would install for some requirements, by what is here."""
    waiting = [Requirement(each) for each in requirements]
    found: set[tuple[str, str]] = set()
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        for extra in ("", *wanted.extras):
            if (name, extra) in found:
                continue
            found.add((name, extra))
            needs = map(Requirement, distribution(name).requires or ())
            waiting += [
                each for each in needs if not each.marker or each.marker.evaluate({"extra": extra})
            ]
    return {name for name, _ in found}


def size_bytes(name: str) -> int:
    """What the files of an installed package take."""
    files = [Path(str(each.locate())) for each in distribution(name).files or ()]
    return sum(each.stat().st_size for each in files if each.is_file())


def own_size_bytes() -> tuple[int, int]:
    """ampwise's own two wheels, and what they take installed."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, str(ROOT)]
        subprocess.run([*build, str(ROOT / "lint")], check=True)
        wheels = list(Path(folder).glob("*.whl"))
        target = Path(folder) / "installed"
        subprocess.run([*pip, "install", "--no-deps", "-t", str(target), *wheels], check=True)
        files = [each for each in target.rglob("*") if each.is_file()]
        return _bytes(wheels), _bytes(files)


def _bytes(files: Iterable[Path]) -> int:
    return sum(each.stat().st_size for each in files)


def listed(names: Iterable[str]) -> dict[str, float]:
    """Packages and their MB, the largest first."""
    sizes = {name: round(size_bytes(name) / 1e6, 2) for name in names}
    return dict(sorted(sizes.items(), key=lambda each: -each[1]))


def main() -> None:
    of_torch = closure(["torch"])
    core = closure(PROJECT["dependencies"]) - {"ampwise-lint"}
    wheel, installed = own_size_bytes()
    arms = {"core": listed(core - of_torch)}
    for name in EXTRAS:
        try:
            brings = closure(PROJECT["optional-dependencies"][name])
            arms[name] = listed(brings - core - of_torch)
        except PackageNotFoundError as missing:
            print(f"{name}: {missing} is not installed here")
    own = {"wheel_mb": round(wheel / 1e6, 2), "installed_mb": round(installed / 1e6, 2)}
    print(f"ampwise itself: {own['wheel_mb']} MB as a wheel, {own['installed_mb']} MB installed")
    print(f"torch: {len(of_torch)} packages, {sum(listed(of_torch).values()):,.0f} MB")
    for name, packages in arms.items():
        print(f"{name}: {len(packages)} packages, {sum(packages.values()):.1f} MB: {packages}")
    save("install-size", {"ampwise": own, "torch": listed(of_torch), "beside_torch_mb": arms})


if __name__ == "__main__":
    main()
