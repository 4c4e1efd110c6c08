"""`make release`: build what an index takes, check it, install it where nothing else is, and list the fields that still wait.

    dist/  <-  sdist, and the wheel out of it  ->  twine check  ->  a new environment: install the wheel, ask it for its version

Nothing is sent anywhere. Exit status 1, with the output, if a check fails; a field that waits is no failure.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def _run(*command: str | Path) -> str:
    done = subprocess.run(
        list(map(str, command)), check=False, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        sys.exit(f"{done.stdout}release: exit code {done.returncode} of {' '.join(map(str, command))}")
    return done.stdout


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def waiting(pyproject: dict[str, Any], citation: str, version: str) -> list[str]:
    """Fields that a release needs and that are empty or not true yet, a line each."""
    hooks = pyproject["tool"]["hatch"]["metadata"]["hooks"]
    (links,) = hooks["fancy-pypi-readme"]["substitutions"]
    found = []
    if links["replacement"] == r"\1":
        found.append("pyproject.toml: the project's address before `\\1`, without which an index page has dead links")
    if not pyproject["project"].get("urls"):
        found.append("pyproject.toml: [project.urls] (Homepage, Documentation, Changelog, Issues)")
    if "repository-code:" not in citation:
        found.append("CITATION.cff: repository-code and date-released")
    if f"## {version} (not released yet)" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"):
        found.append(f"CHANGELOG.md: the date of {version}")
    return found


def main() -> int:
    """Make `dist`, check it, and print what waits."""
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    _run(sys.executable, "-m", "build", "--outdir", dist)
    files = sorted(dist.iterdir())
    _run(sys.executable, "-m", "twine", "check", "--strict", *files)
    (wheel,) = dist.glob("*.whl")
    with tempfile.TemporaryDirectory() as folder:
        _run(sys.executable, "-m", "venv", folder)
        python = Path(folder) / "bin" / "python"
        _run(python, "-m", "pip", "install", "--quiet", "lazy-loader", "numpy", "rich")  # not torch, which is gigabytes
        _run(python, "-m", "pip", "install", "--quiet", "--no-deps", wheel)
        version = _run(Path(folder) / "bin" / "chameleon-mm", "--version").split()[-1]
    _say(f"dist, checked by twine: {', '.join(file.name for file in files)}; installed alone, it says {version}")
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for line in waiting(pyproject, (ROOT / "CITATION.cff").read_text(encoding="utf-8"), version):
        _say(f"waits for a value: {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
