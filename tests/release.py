"""`make release`: build what an index takes, check it, install it where nothing else of ours is, and list the fields that wait.

    dist/  <-  sdist, and the wheel out of it; a wheel of chameleon-mm-native for each Python, with helpers for each given torch
           ->  twine check
           ->  a new environment without torch: install the wheel, ask it for its version
           ->  for each given environment one with its packages: install chameleon-mm[native] from dist, use the helpers

    python -m tests.release PYTHON ...        # interpreters of environments, each with a torch to build helpers for

Nothing is sent anywhere. Exit status 1, with the output, if a check fails; a field that waits is no failure.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chameleon_mm.device import TESTED_TORCH

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = ROOT / "tests" / "native_wheel"
_TAG = """
import sys, sysconfig
python = "cp%d%d" % sys.version_info[:2]
print(python, python, sysconfig.get_platform().replace("-", "_").replace(".", "_"), sep="-")
"""
_PURELIB = "import sysconfig; print(sysconfig.get_path('purelib'))"
_USE = """
import torch, chameleon_mm as cm
from pathlib import Path
from chameleon_mm.device import native
from chameleon_mm.tools.doctor import helpers

if torch.version.cuda is None:  # a simulated device; CUDA's operators need a GPU
    layers = [torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)) for _ in range(4)]
    model = torch.nn.Sequential(*layers)
    with cm.SwapSession("6MiB", device="sim", min_bytes=0) as session:  # of 11 MiB: some is recomputed
        for _ in range(3):
            with session.step():
                model(torch.randn(1024, 64)).sum().backward()
    assert not native.useful() or native._loaded, "the session took no helper"
print(helpers(Path("/")).replace("\\n", ", "))
wrong = [str(path) for path in native._loaded if not path.is_relative_to(Path(cm.__file__).parents[1])]
assert not wrong and len(native._loaded) == len(native.useful()), f"helpers from elsewhere, or none: {wrong}"
"""


def _run(*command: str | Path, **environment: str) -> str:
    done = subprocess.run(
        list(map(str, command)),
        check=False, cwd=ROOT, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
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


def native_project(at: Path, version: str, tag: str) -> None:
    """Make the project of `chameleon-mm-native` in the folder `at`, without helpers."""
    shutil.copytree(TEMPLATE, at)
    shutil.copy(ROOT / "LICENSE", at)
    text = (at / "pyproject.toml").read_text(encoding="utf-8")
    for before, after in (('"TAG"', f'"{tag}"'), ('version = "0"', f'version = "{version}"'), ("mm==0", f"mm=={version}")):
        text = text.replace(before, after)
    (at / "pyproject.toml").write_text(text, encoding="utf-8")


def native_wheels(pythons: Sequence[Path], version: str, dist: Path) -> list[str]:
    """Build the helpers with each of `pythons`, and a wheel of `chameleon-mm-native` for each of their tags into `dist`.

    Return the releases and builds of torch that have helpers, as `cp311: 2.13-cpu`.
    """
    with tempfile.TemporaryDirectory() as folder:
        for python in pythons:
            tag = _run(python, "-c", _TAG).strip()
            at = Path(folder) / tag
            if not at.exists():
                native_project(at, version, tag)
            _run(python, "-m", "chameleon_mm", "native", "--into", at)
        for at in Path(folder).iterdir():
            _run(sys.executable, "-m", "build", "--wheel", "--outdir", dist, at)
        made = {(path.parents[1].name, *path.name.split("-")[1:3]) for path in Path(folder).glob("*/chameleon_mm_native/*.so")}
    return sorted(f"{tag.split('-')[0]}: {release}-{kind}" for tag, release, kind in made)


def check_alone(wheel: Path) -> str:
    """Install `wheel` where there is no torch, which is gigabytes. Return the version that it prints."""
    with tempfile.TemporaryDirectory() as folder:
        _run(sys.executable, "-m", "venv", folder)
        python = Path(folder) / "bin" / "python"
        _run(python, "-m", "pip", "install", "--quiet", "lazy-loader", "numpy", "rich")
        _run(python, "-m", "pip", "install", "--quiet", "--no-deps", wheel)
        (line,) = _run(python.with_name("chameleon-mm"), "--version").splitlines()
    return line.split()[-1]


def check_native(python: Path, dist: Path) -> str:
    """Install `chameleon-mm[native]` from `dist`, with the other packages of the environment of `python`.

    Return what the doctor says of the helpers that a session there took.
    """
    with tempfile.TemporaryDirectory() as folder:
        _run(python, "-m", "venv", folder)
        fresh = Path(folder) / "bin" / "python"
        theirs, ours = (Path(_run(of, "-c", _PURELIB).strip()) for of in (python, fresh))
        for entry in theirs.iterdir():
            if "chameleon_mm" not in entry.name and "stand_in" not in entry.name and not (ours / entry.name).exists():
                (ours / entry.name).symlink_to(entry)
        what = ["chameleon-mm[native]"]
        if python != Path(sys.executable):  # it may lack NVIDIA's packages, without which torch's requirements are not met
            what = ["--no-deps", "chameleon-mm", "chameleon-mm-native"]
        _run(fresh, "-m", "pip", "install", "--quiet", "--no-index", "--find-links", dist, *what)
        return _run(fresh, "-I", "-W", "ignore", "-c", _USE, HOME=folder).splitlines()[-1]


def main(pythons: Sequence[Path]) -> int:
    """Make `dist`, check it, and print what waits."""
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    _run(sys.executable, "-m", "build", "--outdir", dist)
    (wheel,) = dist.glob("*.whl")
    version = check_alone(wheel)
    made = native_wheels(pythons, version, dist)
    files = sorted(dist.iterdir())
    _run(sys.executable, "-m", "twine", "check", "--strict", *files)
    _say(f"dist, checked by twine: {', '.join(file.name for file in files)}; installed alone, it says {version}")
    for python in pythons:
        _say(f"installed with the packages of {python}: {check_native(python, dist)}")
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for line in waiting(pyproject, (ROOT / "CITATION.cff").read_text(encoding="utf-8"), version):
        _say(f"waits for a value: {line}")
    (oldest,) = (int(line.split(".")[-1]) for line in pyproject["project"]["dependencies"] if line.startswith("torch>="))
    builds = [(minor, kind) for minor in range(oldest, TESTED_TORCH[1] + 1) for kind in ("cpu", "cuda")]
    wanted = {
        f"{TESTED_TORCH[0]}.{minor}-{kind}" for minor, kind in builds if kind == "cuda" or minor < 14
    }  # see native.useful
    without = sorted(wanted - {line.split()[-1] for line in made})
    _say(f"helpers are built for {', '.join(made)}; waits for an environment: {', '.join(without) or 'none'}")
    _say(
        "the wheels of helpers are tagged for this machine: build them in a manylinux image, and have auditwheel check the tag"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main([Path(python).absolute() for python in sys.argv[1:]] or [Path(sys.executable)]))
