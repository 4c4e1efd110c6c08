"""NVIDIA's compute-sanitizer over the kernels: nothing outside their buffers is read or written.

    tool = find_tool(environment)                 none: WAIVED, and why
    check(place)                                  here, without it: compiles the kernels into Triton's cache on disk
    watch(tool, ..., "--fault")                   a read past a buffer: has to be noticed
    watch(tool, ...)                              all cases: have to be clean

    python3 -m chameleon_mm.bench._sanitizer --json memcheck.json

What runs under the tool has no caching allocator: inside one of its segments an access beyond a tensor is legal.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from chameleon_mm.bench._environment import environment, write_record
from chameleon_mm.bench._sanitized_kernels import check
from chameleon_mm.bench._sanitizer_log import MemcheckLog, Watched, problem_of_fault, problem_of_kernels
from chameleon_mm.bench._stand_in import NO_SANITIZER, is_stand_in
from chameleon_mm.device import resolve_device

NAME = "compute-sanitizer"

KERNELS = (
    "copy_kernel", "pack_kernel", "unpack_kernel", "narrow_kernel", "widen_kernel", "bools_to_bits_kernel",
    "bits_to_bools_kernel", "pack12_encode_kernel", "pack12_decode_kernel", "checksum_kernel",
)  # fmt: skip
"""What is instrumented. Torch's own kernels fill and compare here: watching them too would cost time and tell nothing."""

OPTIONS = (
    "--tool", "memcheck",
    # Memory alone: libraries make calls that fail on purpose, as when they ask a driver what it has.
    "--report-api-errors", "no",
    # A kernel that faults is ended and the rest still runs. A context that is gone would take the record with it.
    "--destroy-on-device-error", "kernel",
    # Behind every allocation, as far as two blocks of a kernel reach: no access beyond one lands in the next.
    "--padding", "32768",
    # The process that launches, and not the assembler that Triton might start.
    "--target-processes", "application-only",
    "--launch-timeout", "30",
    "--show-backtrace", "device",
    "--print-limit", "20",
    "--error-exitcode", "86",
    *(word for kernel in KERNELS for word in ("--kernel-name", f"kernel_substring={kernel}")),
)  # fmt: skip
"""As versions since 2021 know them."""

_VERSION_TIMEOUT_S = 10
_LEAST_S = 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 if the kernels are cleared, or the tool is not installed; 1 otherwise."""
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python3 -m chameleon_mm.bench._sanitizer", description=description)
    parser.add_argument("--device", default="cuda", help='"sim" under Triton\'s interpreter (default: %(default)s)')
    parser.add_argument("--json", metavar="FILE", type=Path, required=True, help="where the record goes")
    parser.add_argument("--seconds", type=float, default=45, metavar="N", help="time for everything (default: %(default)s)")
    args = parser.parse_args(arguments)
    console = Console()
    start = time.monotonic()
    try:
        device = resolve_device(args.device)
    except (RuntimeError, ValueError) as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        return 1
    record = environment("memcheck", device) | {"ok": False, "headline": "stopped before its end"}
    write_record(args.json, record)
    inherited = os.environ  # noqa: TID251 - where a tool lies is for the environment to say, and the tool inherits it
    tool = find_tool(inherited)
    if is_stand_in(device.name):
        record |= {"ok": True, "waived": NO_SANITIZER, "headline": f"WAIVED: {NO_SANITIZER}"}
    elif tool is None:
        reason = f"{NAME} is neither on PATH nor in CUDA_HOME, /usr/local/cuda* or NVIDIA's wheels"
        record |= {"ok": True, "waived": reason, "headline": f"WAIVED: {reason}"}
    else:
        record |= cleared(tool, device.torch_device, start + args.seconds, inherited)
    write_record(args.json, record)
    console.print_json(data=record)
    console.print(record["headline"], markup=False, highlight=False, soft_wrap=True)
    return 0 if record["ok"] else 1


def find_tool(
    environment: Mapping[str, str], *, toolkits: Path = Path("/usr/local"), wheels: Iterable[Path] | None = None
) -> Path | None:
    """Where compute-sanitizer is: on PATH, in a CUDA toolkit, or in one of NVIDIA's `wheels`; None if it is nowhere.

    `toolkits` is the folder of the usual `cuda*`; `wheels` the folders of packages, by default those that Python would import.
    """
    homes = [Path(environment[name]) for name in ("CUDA_HOME", "CUDA_PATH") if environment.get(name)]
    homes += sorted(toolkits.glob("cuda*"), reverse=True)
    homes += _wheels() if wheels is None else wheels
    folders = [environment.get("PATH", ""), *(str(home / "bin") for home in homes)]
    found = shutil.which(NAME, path=os.pathsep.join(filter(None, folders)))  # an empty one would be the current folder
    return None if found is None else Path(found)


def _wheels() -> list[Path]:
    """The folders of NVIDIA's wheels: they share a package without a file of its own, `nvidia`."""
    spec = importlib.util.find_spec("nvidia")
    folders = (spec.submodule_search_locations if spec else None) or ()
    return [home for folder in folders for home in sorted(Path(folder).iterdir())]


def cleared(tool: Path, place: torch.device, deadline: float, inherited: Mapping[str, str]) -> dict[str, Any]:
    """What the kernels do on `place` without `tool` and with it, until `deadline` by `time.monotonic`: a part of the record."""
    plain = check(place)
    about: dict[str, Any] = {"version": version_of(tool), "cases": plain["cases"], "wrong": plain["wrong"]}
    if plain["wrong"]:
        headline = f"{len(plain['wrong'])} of {plain['cases']} cases wrong without the tool; the first: {plain['wrong'][0]}"
        return about | {"ok": False, "headline": headline}
    # The one that is short comes first: no time is spent on a tool that sees nothing.
    fault = watch(tool, place, deadline, inherited, "--fault")
    about["fault"] = fault.to_dict()
    problem = problem_of_fault(fault)
    if not problem:
        kernels = watch(tool, place, deadline, inherited)
        about["kernels"] = kernels.to_dict()
        problem = problem_of_kernels(kernels, cases=plain["cases"])
    good = f"no memory errors in {plain['cases']} cases of {len(KERNELS)} kernels; a deliberate one is noticed"
    return about | {"ok": not problem, "headline": f"memcheck: {problem or good}"}


def watch(tool: Path, place: torch.device, deadline: float, inherited: Mapping[str, str], *options: str) -> Watched:
    """Run the kernels' program on `place` under `tool`, until `deadline` at most. What it prints goes where this prints."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        log, result = Path(folder, "memcheck.log"), Path(folder, "kernels.json")
        program = [sys.executable, "-m", "chameleon_mm.bench._sanitized_kernels", "--place", str(place), *options]
        returncode: int | None
        try:
            returncode = subprocess.run(
                [str(tool), *OPTIONS, "--log-file", str(log), *program, "--json", str(result)],
                env={**inherited, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
                stdin=subprocess.DEVNULL,
                timeout=max(_LEAST_S, deadline - start),
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            returncode = None  # what it started may live on: the suite ends this process's whole group
        return Watched(
            returncode=returncode,
            seconds=time.monotonic() - start,
            log=MemcheckLog.parse(log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""),
            record=json.loads(result.read_text(encoding="utf-8")) if result.exists() else None,
        )


def version_of(tool: Path) -> str:
    """As the tool says it, or why it says nothing."""
    try:
        done = subprocess.run([str(tool), "--version"], capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"not told: {error}"
    found = re.search(r"Version (\S+)", done.stdout)
    return found[1] if found else f"not told: {(done.stdout + done.stderr).strip()[:200]}"


if __name__ == "__main__":
    sys.exit(main())
