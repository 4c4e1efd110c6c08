"""The tests marked `gpu`, and a verdict that a run which tested nothing cannot pass.

pytest -m "gpu and not slow" tests --junitxml ...  -> passed, failed, errors, skipped, names of what failed
a test that hangs: its stacks into the output, then a failure of its own
interrupted when its time is over: pytest then still writes what is done

python3 -m chameleon_mm.bench.gpu_tests --json tests.json
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from chameleon_mm.bench._environment import checkout_root, environment, write_record
from chameleon_mm.bench._stand_in import STAND_IN, is_stand_in
from chameleon_mm.device import resolve_device

_GRACE_S = 10
_STACKS_AFTER_S = 60
_TEST_S = 90
_MAX_NAMED = 50
_REHEARSED = "tests/test_cuda_device.py"
_NOT_REHEARSED = f"{_REHEARSED} alone, as this is the {STAND_IN}: make test-cuda runs every test marked gpu on it"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 if at least one GPU test passed and none failed, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python3 -m chameleon_mm.bench.gpu_tests", description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", type=Path, required=True, help="where the record goes")
    parser.add_argument("--seconds", type=int, default=180, metavar="N", help="time for pytest (default: %(default)s)")
    args = parser.parse_args(arguments)
    console = Console()
    root = checkout_root()
    if root is None:
        console.print(
            "expected a checkout of the project, which holds its tests, got an installed package", style="red", soft_wrap=True
        )
        return 1
    try:
        header = environment("tests", resolve_device("cuda"))
    except RuntimeError as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        return 1
    stand_in = is_stand_in(header["device"])
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder, "junit.xml")
        returncode = _pytest(root, junit, args.seconds, where=_REHEARSED if stand_in else "tests")
        text = junit.read_text(encoding="utf-8") if junit.exists() else ""
    summary = summarise(text, returncode)
    if stand_in:
        summary["headline"] += f"; {_NOT_REHEARSED}"
    write_record(args.json, header | summary)
    console.print(summary["headline"], markup=False)
    return 0 if summary["ok"] else 1


def _pytest(root: Path, junit: Path, seconds: int, *, where: str) -> int:
    options = [
        "-m",
        "gpu and not slow",
        "-v",
        "-p",
        "no:cacheprovider",
        "--continue-on-collection-errors",
        f"--junitxml={junit}",
    ]
    # A backward that waits for ever on autograd's own thread never comes back to Python, where the timeout would end it: then
    # the stacks of all threads are what there is to go by.
    options += [f"--timeout={_TEST_S}", "-o", f"faulthandler_timeout={_STACKS_AFTER_S}"]
    process = subprocess.Popen([sys.executable, "-m", "pytest", *options, where], cwd=root)
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            return process.wait(timeout=_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


def summarise(junit: str, returncode: int) -> dict[str, Any]:
    """Counts, failures and verdict of a pytest run from its JUnit report and exit code.

    Not ok: a failure or error, an exit code other than 0, no test, or none that passed because every one was skipped.
    """
    cases = list(ET.fromstring(junit).iter("testcase")) if junit else []
    kinds: dict[str, list[str]] = {"failure": [], "error": [], "skipped": []}
    passed = 0
    for case in cases:
        name = "::".join(part for part in (case.get("classname"), case.get("name")) if part)
        found = next((child for child in case if child.tag in kinds), None)
        if found is None:
            passed += 1
        else:
            kinds[found.tag].append(f"{name}: {(found.get('message') or '').strip()[:300]}")
    failed, errors, skipped = (len(kinds[kind]) for kind in ("failure", "error", "skipped"))
    headline = f"{passed} passed, {failed} failed, {errors} errors, {skipped} skipped"
    if not cases:
        headline += ": no GPU test ran"
    elif skipped == len(cases):
        headline += ": every GPU test was skipped"
    elif returncode != 0 and not failed and not errors:
        headline += f": pytest stopped with exit code {returncode}"
    return {
        "ok": returncode == 0 and passed > 0 and not failed and not errors,
        "headline": headline,
        "passed": passed,
        "failed": failed,
        "errors": errors,
        "skipped": skipped,
        "returncode": returncode,
        "failures": (kinds["failure"] + kinds["error"])[:_MAX_NAMED],
        "skips": kinds["skipped"][:_MAX_NAMED],
    }


if __name__ == "__main__":
    sys.exit(main())
