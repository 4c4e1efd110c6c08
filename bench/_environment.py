"""Header of a result file: the environment in which its numbers were measured.

    header = environment("copy", device)     # schema, device, simulated, stand_in, commit, dirty, versions, date
    path = results / result_name("copy", device.name)
    write_record(path, header | {...})       # not into bench/results, if it ran on the CUDA stand-in

The commit is read from the checkout that the code runs from, never passed in: a result cannot claim another tree.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from chameleon_mm.bench._stand_in import check_place, is_stand_in
from chameleon_mm.device.protocols import Device
from chameleon_mm.files import write_file

_DISTRIBUTIONS = ("chameleon-mm", "torch", "triton", "numpy", "cupy-cuda13x", "cupy-cuda12x", "cupy")
_GIT_TIMEOUT_S = 10


def environment(theme: str, device: Device) -> dict[str, Any]:
    """Header of a result file: theme, device, commit, versions, host and date (UTC)."""
    return {
        "schema": f"chameleon_mm.bench.{theme}/1",
        "theme": theme,
        "device": device.name,
        "simulated": device.simulated,
        "stand_in": is_stand_in(device.name),
        **commit(),
        "versions": versions(),
        "host": {"platform": platform.platform(), "machine": platform.machine(), "cpus": os.cpu_count()},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the installed distributions that may change a figure."""
    found = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Name of the first processor, from the kernel; the architecture if the kernel gives none."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [value.strip() for key, _, value in (line.partition(":") for line in lines) if key.strip() == "model name"]
    return names[0] if names and names[0] else platform.machine() or "unknown processor"


def checkout_root() -> Path | None:
    """Directory of the checkout that this module runs from; None: an installed wheel.

    Resolving first follows the link from the package to `bench/`. A wheel may be inside another project's repository (in a
    virtual environment), whose commit would be wrong here. The directory must therefore be this project's.
    """
    root = Path(__file__).resolve().parents[1]
    return root if (root / "pyproject.toml").is_file() and (root / "chameleon_mm" / "bench").exists() else None


def commit(root: Path | None = None) -> dict[str, Any]:
    """`{"commit": hash or "unknown", "dirty": bool or None}` of the checkout at `root` (default: the one that runs)."""
    unknown = {"commit": "unknown", "dirty": None}
    root = root or checkout_root()
    git = shutil.which("git")
    if root is None or git is None or not (root / ".git").exists():
        return unknown
    head = _git(git, root, "rev-parse", "--verify", "HEAD")
    if head is None:
        return unknown
    status = _git(git, root, "status", "--porcelain", "--untracked-files=no")
    return {"commit": head.strip(), "dirty": None if status is None else bool(status.strip())}


def _git(git: str, root: Path, *arguments: str) -> str | None:
    # safe.directory: a checkout copied to a machine may belong to another user there, and git refuses such a checkout.
    command = [git, "-c", f"safe.directory={root}", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def result_name(theme: str, device_name: str, date: str | None = None) -> str:
    """`<theme>_<device>_<date>.json`, in lower case; a hyphen replaces characters that a file name should not have. `date`:
    YYYY-MM-DD, today in UTC by default."""
    slug = re.sub(r"[^a-z0-9.]+", "-", device_name.lower()).strip("-") or "unknown"
    return f"{theme}_{slug}_{date or datetime.now(UTC).date().isoformat()}.json"


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write `record` to `path` as JSON, and make the folder if it is missing."""
    write_text(path, json.dumps(record, indent=1) + "\n", record)


def write_text(path: Path, text: str, header: Mapping[str, Any]) -> None:
    """Write `text`, a form of the result with this `header`, to `path`. Raises `ValueError` if `path` is in bench/results and
    the result is of the CUDA stand-in."""
    check_place(path, root=checkout_root(), stand_in=bool(header.get("stand_in")))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, text)
