"""Makes the environment of the stand-in: torch's CUDA build on a machine without a GPU.

    python3 -m tests.cuda_stand_in.install .venv-cuda        # about two minutes, 3 GB; the versions are in versions.py

Steps: a virtual environment; torch without the NVIDIA packages; what the tests need; our runtime in place of NVIDIA's; and two
entry points: by one `import torch` loads our operators in every process of that environment, by the other pytest our plugin.

Needs the standard library alone, and is run by the machine's own Python.
"""

from __future__ import annotations

import ctypes.util
import platform
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
import zipfile
from pathlib import Path

from tests.cuda_stand_in import versions
from tests.cuda_stand_in.build import BuildError, build

ROOT = Path(__file__).resolve().parents[2]

ROOM_BYTES = 4 * 1024**3
"""Free space that is asked for: the environment takes 3 GB, and pip unpacks there."""

TOOLS = {"g++": "g++", "nm": "binutils", "readelf": "binutils"}
"""Programs that building needs -> the package that has them on Debian and Ubuntu."""

_CHECK = """
import torch
from tests.cuda_stand_in import control
assert torch.version.cuda, "torch is not the CUDA build"
assert control.is_loaded(), "torch found another CUDA runtime than the stand-in"
assert torch.ones(3, device="cuda").sum().item() == 3
"""


class InstallError(Exception):
    """The environment cannot be made here; the message says how to proceed."""


def driver() -> str | None:
    """The NVIDIA driver of this machine, by the name of a file of it; None: there is none."""
    version = Path("/proc/driver/nvidia/version")
    return ctypes.util.find_library("cuda") or (str(version) if version.exists() else None)


def check_machine(at: Path) -> None:
    """Raises `InstallError` before anything is made, where the stand-in cannot be or is not wanted."""
    found = f"{platform.system()} on {platform.machine()}"
    if found != "Linux on x86_64":
        raise InstallError(f"expected Linux on x86_64, for which torch's CUDA build and the stubs are, got {found}")
    if (found_driver := driver()) is not None:
        raise InstallError(
            f"expected a machine without an NVIDIA driver, found {found_driver}; run `make gpu`, which measures the real one"
        )
    for tool, package in TOOLS.items():
        if shutil.which(tool) is None:
            raise InstallError(
                f"expected the program {tool}, which builds the runtime, found none; install your system's package ({package})"
            )
    free_bytes = shutil.disk_usage(at.parent).free
    if free_bytes < ROOM_BYTES:
        raise InstallError(
            f"expected {ROOM_BYTES / 1e9:.1f} GB free at {at.parent} for torch's CUDA build and what it needs, "
            f"found {free_bytes / 1e9:.1f} GB; make room, or name another place"
        )


def install(at: Path) -> None:
    """Make the environment at `at`, in place of one that is there. Raises `InstallError`."""
    at = at.resolve()
    check_machine(at)
    shutil.rmtree(at, ignore_errors=True)
    venv.create(at, with_pip=True)
    python = at / "bin" / "python"
    _pip(python, "install", "--no-deps", versions.TORCH)
    _pip(python, "install", *versions.TORCH_NEEDS, *needed_by_tests())
    _pip(python, "install", "--no-deps", *versions.CUDA_PACKAGES)
    site = Path(_run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    with tempfile.TemporaryDirectory() as headers:
        _pip(python, "download", "--no-deps", "--dest", headers, *versions.CUDA_HEADERS)
        for wheel in Path(headers).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(headers)
        try:
            missing = build(site / "torch", Path(headers) / "nvidia" / "cu13" / "include", site / "nvidia" / "cu13" / "lib")
            sys.stdout.write(f'test-cuda: symbols of the runtime that answer "not there": {" ".join(missing)}\n')
        except BuildError as error:
            raise InstallError(str(error)) from error
    _register(site)
    _run(python, "-c", _CHECK)


def needed_by_tests() -> list[str]:
    """Requirements of the project and its extra `dev`, without torch and triton, which are here, and without lint."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    here = {"torch", "triton", *versions.NOT_NEEDED}
    return [requirement for requirement in wanted if not here & {requirement.split(";")[0].split(">")[0].strip()}]


def _register(site: Path) -> None:
    """Have `import torch` load our operators, and find the checkout."""
    (site / "cuda_stand_in.pth").write_text(f"{ROOT}\n")
    info = site / "cuda_stand_in-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cuda-stand-in\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[torch.backends]\ncuda_stand_in = tests.cuda_stand_in.compute:install\n"
        "[pytest11]\ncuda_stand_in = tests.cuda_stand_in.pytest_plugin\n"
    )


def _pip(python: Path, *arguments: str) -> None:
    _run(python, "-m", "pip", *arguments[:1], "--quiet", "--disable-pip-version-check", *arguments[1:])


def _run(*command: str | Path) -> str:
    done = subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no message"]
        raise InstallError(f"`{' '.join(map(str, command[1:4]))} ...` failed: {last[0]}")
    return done.stdout


def main() -> int:
    if len(sys.argv) != 2:
        sys.stderr.write("usage: python3 -m tests.cuda_stand_in.install FOLDER\n")
        return 2
    try:
        install(Path(sys.argv[1]))
    except InstallError as error:
        sys.stderr.write(f"test-cuda: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
