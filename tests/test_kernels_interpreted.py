"""Runs the kernels' numerics under Triton's interpreter, in a process of its own.

The interpreter is switched on by an environment variable that Triton reads when a kernel is defined, and would leave its mark
on every other test of this process. The tests themselves stand beside the others of their kernel, with the parameter
"interpreter"; on a machine with a GPU the same ones run there too.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="is what runs this process")
@pytest.mark.parametrize("name", ["checksum", "pack"])
def test_kernels_are_exact_under_the_interpreter(name: str) -> None:
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/test_kernels_{name}.py",
        "-k", "interpreter", "-m", "not slow",
    ]  # fmt: skip
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.findall(r"(\d+) passed", done.stdout)[-1]) > 0
    assert "skipped" not in done.stdout
