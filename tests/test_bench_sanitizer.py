"""compute-sanitizer without a GPU: what its log says, where it is found, stand-ins that see, miss, crash and hang."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from chameleon_mm.bench import _sanitizer
from chameleon_mm.bench._sanitizer import KERNELS, OPTIONS, cleared, find_tool
from chameleon_mm.bench._sanitizer_log import MemcheckLog, Watched, problem_of_fault, problem_of_kernels

ROOT = Path(__file__).resolve().parents[1]
CASES = 5
CPU = torch.device("cpu")

CLEAN = """========= COMPUTE-SANITIZER
========= ERROR SUMMARY: 0 errors
"""
ONE = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 1 bytes
=========     at copy_kernel+0x3f0 in copy.py:73
=========     by thread (0,0,0) in block (0,0,0)
=========     Access at 0x7f1a4b200040 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f1a4b200000 of size 64 bytes
=========
========= ERROR SUMMARY: 1 error
"""
SEVERAL = """loading
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 16 bytes
=========     at 0x1c0 in unpack_kernel
=========     by thread (31,0,0) in block (2,0,0)
=========     Address 0x7f1a4b200410 is out of bounds
=========
========= Misaligned __global__ read of size 4 bytes
=========     at unpack_kernel+0x90
=========     by thread (1,0,0) in block (0,0,0)
=========     Address 0x7f1a4b200001 is misaligned
=========
not one of its lines: ERROR SUMMARY: 9 errors
========= Target application returned an error
========= ERROR SUMMARY: 1204 errors
"""
CRASHED = """========= COMPUTE-SANITIZER
========= Error: process didn't terminate successfully
=========     The application may have hit an error when dereferencing Unified Memory from the host.
========= Error: Target application terminated before first instrumented API call
"""
INCOMPLETE = """========= COMPUTE-SANITIZER
========= Unable to find injection library libsanitizer-collection.so
"""
CUT_SHORT = "========= COMPUTE-SANITIZER\n"


@pytest.mark.parametrize(
    ("text", "errors", "reports", "complaint"),
    [
        (CLEAN, 0, [], ""),
        (ONE, 1, ["Invalid __global__ read of size 1 bytes at copy_kernel+0x3f0 in copy.py:73"], ""),
        (
            SEVERAL,
            1204,
            [
                "Invalid __global__ write of size 16 bytes at 0x1c0 in unpack_kernel",
                "Misaligned __global__ read of size 4 bytes at unpack_kernel+0x90",
            ],
            "Target application returned an error",
        ),
        (CRASHED, None, [], "Error: Target application terminated before first instrumented API call"),
        (INCOMPLETE, None, [], "Unable to find injection library libsanitizer-collection.so"),
        (CUT_SHORT, None, [], ""),
        ("", None, [], ""),
    ],
    ids=["clean", "one", "several", "crashed", "incomplete", "cut short", "nothing"],
)
def test_a_log_is_read(text: str, errors: int | None, reports: list[str], complaint: str) -> None:
    assert MemcheckLog.parse(text).to_dict() == {"errors": errors, "reports": reports, "complaint": complaint}


def test_only_the_first_reports_are_kept() -> None:
    report = "========= Invalid __global__ read of size 1 bytes\n=========     at copy_kernel+0x10\n"
    assert len(MemcheckLog.parse(report * 30).reports) == 10


def watched(
    text: str = CLEAN, returncode: int | None = 0, record: dict[str, Any] | None = None, *, unwritten: bool = False
) -> Watched:
    record = None if unwritten else record or {"cases": CASES, "wrong": []}
    return Watched(returncode=returncode, seconds=30.0, log=MemcheckLog.parse(text), record=record)


@pytest.mark.parametrize(
    ("run", "problem"),
    [
        (watched(), ""),
        (watched(SEVERAL, 86), "1204 memory errors; the first: Invalid __global__ write of size 16 bytes"),
        (watched(CUT_SHORT, None), "stopped after 30 s"),
        (watched(CLEAN, None), "stopped after 30 s"),
        (watched(CRASHED, 255), "no summary, exit code 255: Error: Target application terminated before"),
        (watched("", 127), "no summary, exit code 127: nothing else in its log"),
        (watched(unwritten=True, returncode=1), "left no record, exit code 1"),
        (
            watched(record={"cases": CASES, "wrong": ["pack, 3 bytes"]}, returncode=1),
            "1 cases wrong under the tool; .* pack, 3",
        ),
        (watched(record={"cases": 3, "wrong": []}), "expected 5 cases under the tool, got 3"),
        (watched(returncode=3), "ended with exit code 3"),
    ],
    ids=["clean", "errors", "stopped", "stopped late", "crashed", "no log", "no record", "wrong", "fewer cases", "exit code"],
)
def test_kernels_are_cleared_by_a_clean_run_of_all_cases_alone(run: Watched, problem: str) -> None:
    found = problem_of_kernels(run, cases=CASES)
    assert re.search(problem, found) if problem else found == ""


@pytest.mark.parametrize(
    ("run", "problem"),
    [
        (watched(ONE, 86, unwritten=True), ""),
        (watched(CLEAN), "went unnoticed"),
        (watched(CUT_SHORT, None), "deliberate fault: stopped after 30 s"),
        (watched(INCOMPLETE, 13), "deliberate fault: the tool wrote no summary, exit code 13: Unable to find"),
    ],
    ids=["noticed", "unnoticed", "stopped", "incomplete"],
)
def test_a_tool_that_misses_a_fault_clears_nothing(run: Watched, problem: str) -> None:
    found = problem_of_fault(run)
    assert re.search(problem, found) if problem else found == ""


def stand_in(folder: Path, code: str = "") -> Path:
    """A program of the tool's name that knows `log`, `result` and whether `fault`, and runs `code`."""
    tool = folder / "compute-sanitizer"
    folder.mkdir(parents=True, exist_ok=True)
    tool.write_text(
        f"""#!{sys.executable}
import json, os, pathlib, subprocess, sys, time
if sys.argv[1:] == ["--version"]:
    print("NVIDIA (R) Compute Sanitizer\\nVersion 2025.2.1.0 (build 1) (public-release)")
    sys.exit()
program = sys.argv[sys.argv.index({sys.executable!r}):]
log = pathlib.Path(sys.argv[sys.argv.index("--log-file") + 1])
result = pathlib.Path(program[program.index("--json") + 1])
fault = "--fault" in program
assert os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
clean, one, several, crashed = {[CLEAN, ONE, SEVERAL, CRASHED]!r}
right = json.dumps({{"cases": {CASES}, "wrong": []}})
{code}
""",
        encoding="utf-8",
    )
    tool.chmod(0o755)
    return tool


NOTICED = "if fault: log.write_text(one); sys.exit(86)\n"


@pytest.mark.parametrize(
    ("code", "headline", "ran"),
    [
        (NOTICED + "log.write_text(clean); result.write_text(right)", "no memory errors in 5 cases of 4 kernels", True),
        (NOTICED + "log.write_text(several); result.write_text(right); sys.exit(86)", "1204 memory errors", True),
        (NOTICED + "log.write_text(crashed); sys.exit(255)", "the tool wrote no summary, exit code 255", True),
        (NOTICED + "os.abort()", "the tool wrote no summary, exit code -6", True),
        ("log.write_text(clean); result.write_text(right)", "went unnoticed", False),
        ("time.sleep(600)", "deliberate fault: stopped after", False),
    ],
    ids=["clean", "errors", "program crashed", "tool crashed", "sees nothing", "hangs"],
)
def test_what_a_tool_finds_is_told(
    code: str, headline: str, ran: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sanitizer, "check", lambda place: {"cases": CASES, "wrong": []})
    seconds = 0 if "sleep" in code else 60
    about = cleared(stand_in(tmp_path, code), CPU, time.monotonic() + seconds, os.environ)
    assert headline in about["headline"]
    assert about["ok"] is ("no memory errors" in headline)
    assert ("kernels" in about) is ran  # no time is spent on a tool that sees nothing
    assert about["version"] == "2025.2.1.0"


def test_kernels_that_are_wrong_anyway_need_no_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sanitizer, "check", lambda place: {"cases": CASES, "wrong": ["copy, 17 bytes"]})
    about = cleared(stand_in(tmp_path, "raise SystemExit('it was run')"), CPU, time.monotonic() + 60, os.environ)
    assert (about["ok"], "fault" in about) == (False, False)
    assert about["headline"] == "1 of 5 cases wrong without the tool; the first: copy, 17 bytes"


@pytest.mark.parametrize(
    ("where", "environment"),
    [
        ("on the path", lambda tmp: {"PATH": str(tmp / "on the path")}),
        ("home/bin", lambda tmp: {"PATH": str(tmp), "CUDA_HOME": str(tmp / "home")}),
        ("home/bin", lambda tmp: {"CUDA_PATH": str(tmp / "home"), "CUDA_HOME": ""}),
        ("local/cuda-13.0/bin", lambda tmp: {"PATH": ""}),
        ("nvidia/cu13/bin", lambda tmp: {"PATH": ""}),
        ("nvidia/cuda_sanitizer_api/bin", lambda tmp: {}),
    ],
)
def test_the_tool_is_found(where: str, environment: Callable[[Path], dict[str, str]], tmp_path: Path) -> None:
    places: dict[str, Any] = {
        "toolkits": tmp_path / "local", "wheels": [tmp_path / "nvidia" / name for name in ("cu13", "cuda_sanitizer_api")],
    }  # fmt: skip
    assert find_tool(environment(tmp_path), **places) is None
    tool = stand_in(tmp_path / where)
    assert find_tool(environment(tmp_path), **places) == tool
    tool.chmod(0o644)  # not to be run: not a tool
    assert find_tool(environment(tmp_path), **places) is None


def test_a_wheel_beside_torch_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = stand_in(tmp_path / "nvidia" / "cu13" / "bin")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / "nvidia")])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "nvidia" else None)
    assert find_tool({}, toolkits=tmp_path) == tool
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert find_tool({}, toolkits=tmp_path) is None


def test_without_the_tool_the_part_is_waived_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_sanitizer, "find_tool", lambda environment: None)
    target = tmp_path / "new" / "memcheck.json"
    assert _sanitizer.main(["--device", "sim", "--json", str(target)]) == 0
    record = json.loads(target.read_text(encoding="utf-8"))
    assert record["waived"].startswith("compute-sanitizer is neither on PATH nor in CUDA_HOME")
    assert record["headline"] == f"WAIVED: {record['waived']}"
    assert {"schema", "device", "simulated", "commit", "versions"} <= set(record)
    assert record["headline"] in capsys.readouterr().out


def test_what_was_not_finished_is_not_ok(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record is there before the first kernel is: whatever happens then."""

    def stop(*_: object) -> dict[str, Any]:
        raise KeyboardInterrupt

    monkeypatch.setattr(_sanitizer, "find_tool", lambda environment: tmp_path)
    monkeypatch.setattr(_sanitizer, "cleared", stop)
    target = tmp_path / "memcheck.json"
    with pytest.raises(KeyboardInterrupt):
        _sanitizer.main(["--device", "sim", "--json", str(target)])
    record = json.loads(target.read_text(encoding="utf-8"))
    assert (record["ok"], record["headline"]) == (False, "stopped before its end")


def test_every_kernel_is_instrumented() -> None:
    files = [*(ROOT / "kernels").glob("*.py"), ROOT / "bench" / "_copy_kernel.py"]
    sources = [path.read_text(encoding="utf-8") for path in files]
    assert set(KERNELS) == {name for text in sources for name in re.findall(r"^def (\w+_kernel)\(", text, re.MULTILINE)}
    assert OPTIONS.count("--kernel-name") == len(KERNELS)


@pytest.mark.thorough  # test_bench_sanitized_kernels.py runs the same cases in every run, without the program around them
@pytest.mark.slow
def test_the_whole_of_it_with_a_stand_in_that_runs_the_program(tmp_path: Path) -> None:
    code = "done = subprocess.run(program); log.write_text(one if fault else clean); sys.exit(86 if fault else done.returncode)"
    stand_in(tmp_path / "bin", code)
    target = tmp_path / "memcheck.json"
    command = [
        sys.executable,
        "-m",
        "chameleon_mm.bench._sanitizer",
        "--device",
        "sim",
        "--json",
        str(target),
        "--seconds",
        "250",
    ]
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "PATH": f"{tmp_path / 'bin'}{os.pathsep}/usr/bin"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280, check=False)
    record = json.loads(target.read_text(encoding="utf-8"))
    assert (done.returncode, record["ok"]) == (0, True), done.stdout + done.stderr
    assert record["cases"] > 500
    assert (record["kernels"]["errors"], record["fault"]["errors"]) == (0, 1)
