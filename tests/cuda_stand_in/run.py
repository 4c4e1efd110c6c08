"""Runs the tests marked `gpu` on the stand-in: in mode late all, in mode early all but `limits.LATE_ALONE`, with threads some.

    .venv-cuda/bin/python -m tests.cuda_stand_in.run [--thorough] [pytest's arguments]

--thorough: what is marked so, in mode late alone.

Exits with 0 if every mode's tests passed, each skip was explained, and some ran; says so in one line for each mode.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import torch

from tests.cuda_stand_in import control

WITH_THREADS = (
    "tests/test_cuda_device.py",
    "tests/test_compute_streams.py",
    "tests/test_pinned_events.py",
    "tests/test_pinned_pool.py",
    "tests/test_recompute_exact.py",
    "tests/test_threads.py",
    "tests/test_transfer.py",
)
"""Tests of host threads and real concurrency. The other tests show nothing here beyond the two exact modes."""


def problem() -> str | None:
    """Why nothing that ran here would be a test of the CUDA build on the stand-in; None: it would."""
    if torch.version.cuda is None:
        return f"expected torch's CUDA build, got {torch.__version__}; build it anew: rm -r .venv-cuda; make test-cuda"
    if not control.is_loaded():
        return "expected the stand-in as torch's CUDA runtime, found another; on a machine with a GPU run `make gpu`"
    return None


def run_mode(mode: str, arguments: list[str], *, thorough: bool) -> int:
    """Run pytest in one mode of the runtime. Returns its exit status: 5 where no test was found."""
    markers = "gpu and thorough" if thorough else "gpu and not thorough"
    command = [sys.executable, "-m", "pytest", "-m", markers, "--every-skip-explained", "-q", *arguments]
    return subprocess.run(command, env={**os.environ, "CUDA_STAND_IN_MODE": mode}, check=False).returncode


def main(arguments: list[str]) -> int:
    if (reason := problem()) is not None:
        sys.stderr.write(f"test-cuda: {reason}\n")
        return 1
    thorough = "--thorough" in arguments
    arguments = [word for word in arguments if word != "--thorough"]
    chosen = any(word.startswith("tests") for word in arguments)
    runs = [("late", arguments)] if thorough else [("late", arguments), ("early", arguments)]
    if not chosen and not thorough:
        runs.append(("threads", [*arguments, *WITH_THREADS]))
    statuses = {}
    for mode, words in runs:
        begin = time.monotonic()
        statuses[mode] = run_mode(mode, words, thorough=thorough)
        seconds = time.monotonic() - begin
        outcome = {0: "passed", 5: "failed: no test ran"}.get(statuses[mode], f"failed (pytest's exit status {statuses[mode]})")
        sys.stdout.write(f"test-cuda: {mode}: {outcome} in {seconds:.0f} s\n")
        sys.stdout.flush()
    return int(any(statuses.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
