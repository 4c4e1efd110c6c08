"""`make gpu`: the tests marked `gpu`, and the benches behind the twelve figures of docs/measure.md, within eight minutes.

for part in PARTS:                 # each in a separate process, so that its crash or hang ends nothing else
    run it within its time; keep its record; rewrite OUT/gpu_<device>_<date>.json
print the figures as one table; exit 1 if anything failed or could not be run
on the CUDA stand-in of our tests: a rehearsal in small sizes, marked in its record, and never written to bench/results

python3 -m chameleon_mm.bench.gpu_suite --out bench/results            # from a bare checkout
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rich.console import Console
from rich.table import Table

from chameleon_mm.bench._environment import checkout_root, commit, result_name, write_record
from chameleon_mm.bench._stand_in import STAND_IN, check_place, is_stand_in

BUDGET_S = 8 * 60.0

_GRACE_S = 5.0
_POLL_S = 0.02
_TAIL_CHARACTERS = 4000
_MOST_NAMED = 50

Status = Literal["passed", "failed", "not run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Command, and limits of its time."""

    theme: str
    command: Sequence[str]
    """`{out}` stands for the file to write: a benchmark's record, or the JUnit report of tests."""
    cap_s: float
    least_s: float
    """Minimum time for a start of the part; earlier parts reserve it."""
    rehearsal: Sequence[str] = ()
    """More arguments on the CUDA stand-in, where a CPU does the work."""
    is_tests: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.least_s <= self.cap_s:
            raise ValueError(f"part {self.theme}: expected 0 < least_s <= cap_s, got {self.least_s} and {self.cap_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a part."""

    theme: str
    status: Status
    detail: str
    """Line for the summary."""
    seconds: float = 0.0
    tail: str = ""
    record: dict[str, Any] | None = field(default=None, repr=False)

    def to_dict(self) -> dict[str, Any]:
        about = {"theme": self.theme, "status": self.status, "detail": self.detail, "seconds": round(self.seconds, 1)}
        return about if self.status == "passed" else about | {"tail": self.tail}


class Wanted(NamedTuple):
    """Figure of the table, and the cells of a part's record that contain it."""

    name: str
    theme: str
    table: str | None
    """None: the record has only one table."""
    rows: tuple[str, ...]
    """Prefixes of row names: ours, then its peers'. For each prefix, the last row with it counts."""
    column: str
    unit: str

    def told(self, records: Mapping[str, Mapping[str, Any]]) -> str:
        """Text of the figure and of its peers' by name; WAIVED and the reason if there is none."""
        record = records.get(self.theme)
        if record is None:
            return f"WAIVED: {self.theme} left no record"
        rows = (record if self.table is None else record.get("tables", {}).get(self.table, {})).get("rows", ())
        texts = []
        for beginning in self.rows:
            cells = [row["cells"][self.column] for row in rows if row["name"].startswith(beginning)]
            if not cells:
                text = "WAIVED: no such row"
            elif "waived" in cells[-1]:
                text = f"WAIVED: {cells[-1]['waived']}"
            else:
                text = f"{cells[-1]['median']:.4g} {self.unit}".rstrip()
            texts.append(text if beginning == self.rows[0] else f"{beginning} {text}")
        return "; ".join(texts)


_MODULE = (sys.executable, "-m")
_BENCH = (*_MODULE, "chameleon_mm", "bench")
_SIX_BLOCKS = (*_BENCH, "training", "--layers", "6")
"""With nine blocks, what an H200's host has room for, the peers took longer than the part's time."""
_FEW_SAVES = ("--saves", "50", "--repeats", "1")
_SMALL_LLAMA = ("--layers", "2", "--width", "64", "--heads", "2", "--ffn", "224", "--batch", "16", "--steps", "1")
_ONE_BLOCK = ("--layers", "1", *_SMALL_LLAMA[2:])
_TO_JSON = ("--device", "cuda", "--json", "{out}")
_TESTS = (
    *_MODULE, "pytest", "-m", "gpu and not slow", "-v", "-p", "no:cacheprovider", "--continue-on-collection-errors",
    "--ignore-glob=*/test_frameworks_*",  # they need the packages of the extra `stack`, and no GPU
    # No timeout ends a backward that waits for ever on autograd's own thread: the dumped stacks then show the cause.
    *(("-n", str(min(14, os.cpu_count() or 1)), "--dist", "worksteal") if find_spec("xdist") else ()),
    "--timeout=90", "-o", "faulthandler_timeout=60", "--junitxml={out}",
)  # fmt: skip

PARTS = (
    Part(theme="copy", command=(*_BENCH, "copy", *_TO_JSON), cap_s=45, least_s=25),
    Part(theme="tests", command=_TESTS, cap_s=120, least_s=50, rehearsal=("-n0", "tests/test_cuda_device.py"), is_tests=True),
    Part(theme="pack", command=(*_BENCH, "pack", *_TO_JSON), cap_s=60, least_s=30, rehearsal=("--sizes", "16KiB")),
    Part(theme="overlap", command=(*_BENCH, "overlap", *_TO_JSON), cap_s=60, least_s=35, rehearsal=("--repeats", "1")),
    Part(theme="reclaim", command=(*_MODULE, "chameleon_mm.bench._reclaim_gap", "--json", "{out}"), cap_s=30, least_s=15),
    Part(theme="hooks", command=(*_BENCH, "hooks", *_TO_JSON), cap_s=60, least_s=25, rehearsal=_FEW_SAVES),
    Part(theme="training", command=(*_SIX_BLOCKS, *_TO_JSON), cap_s=220, least_s=160, rehearsal=_SMALL_LLAMA),
    Part(theme="compiled", command=(*_SIX_BLOCKS, "--compile", *_TO_JSON), cap_s=90, least_s=40, rehearsal=_ONE_BLOCK),
)
"""Parts in the order in which they run. The first names the device: without its record nothing else starts."""

_OURS = "quarter, planned"
_PEERS = (_OURS, "checkpointing", "torch save_on_cpu", "TRL offloading", "torchtune offloading")
_AGAINST = "planned against measured"

FIGURES = (
    Wanted("link, to the host", "copy", None, ("D2H", "both ways"), "pinned", "GB/s"),
    Wanted("small copies, 64 KiB", "copy", None, ("D2H 64.0 KiB",), "pinned", "GB/s"),
    Wanted("many of 16 KiB, packed", "pack", "rates", ("4096 x 16 KiB",), "ours", "GB/s"),
    Wanted("pinning", "reclaim", "pinning", ("alloc_pinned",), "rate", "GB/s"),
    Wanted("GEMM beside copies", "overlap", "saturated", ("gemm, both ways",), "slowdown", "x"),
    Wanted("reclaim gap", "reclaim", "gap", ("wait and drop", "record_stream"), "gap", "us"),
    Wanted("hooks of a tensor that moves", "hooks", "saved tensors", ("moves by plan, alone",), "both_over", "us"),
    Wanted("training, step", "training", "peers", _PEERS, "ratio", "x"),
    Wanted("training, peak", "training", "peers", _PEERS, "peak_allocated_gib", "GiB"),
    Wanted("compiled training, step", "compiled", "peers", (_OURS, "checkpointing", "memory budget 0.5"), "ratio", "x"),
    Wanted("plan, error of step", "training", _AGAINST, (f"{_OURS}: step",), "error", "%"),
    Wanted("plan, error of peak", "training", _AGAINST, (f"{_OURS}: peak",), "error", "%"),
)
"""Figures that a run proves, at most twelve: docs/measure.md has them in a table."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Return exit code 0 if every part passed, else 1."""
    parser = argparse.ArgumentParser(prog="python3 -m chameleon_mm.bench.gpu_suite", description=__doc__.splitlines()[0])
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="folder for the JSON record")
    minutes = "for everything (default: %(default)g)"
    parser.add_argument("--minutes", type=float, default=BUDGET_S / 60, metavar="N", help=minutes)
    args = parser.parse_args(arguments)
    console = Console()
    root = checkout_root()
    if root is None:
        console.print("expected a checkout, whose tests are part of the run, got an installed package", style="red")
        return 1
    return run_suite(PARTS, args.out.resolve(), 60 * args.minutes, root, console)


def run_suite(parts: Sequence[Part], out: Path, budget_s: float, root: Path, console: Console) -> int:
    """Run `parts` from the checkout at `root`, keep their records in `out`, print the summary. Returns the exit code."""
    start = time.monotonic()
    outcomes: list[Outcome] = []
    header: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for position, part in enumerate(parts):
            seconds = allotted_s(part, budget_s - (time.monotonic() - start), parts[position + 1 :])
            if position and not header:
                outcome = Outcome(theme=part.theme, status="not run", detail="no CUDA device was found to run it on")
            elif not seconds:
                outcome = Outcome(theme=part.theme, status="not run", detail="no time left")
            else:
                console.print(f"{part.theme}: at most {seconds:.0f} s ...", highlight=False)
                outcome = run_part(part, Path(folder), seconds, cwd=root, rehearsal=bool(header.get("stand_in")))
            outcomes.append(outcome)
            if not header and outcome.record is not None:
                about = ("device", "simulated", "stand_in", "versions", "host", "date")
                header = {key: outcome.record[key] for key in about if key in outcome.record}
            if not header:
                continue
            try:
                check_place(out, root=root, stand_in=bool(header.get("stand_in")))
            except ValueError as error:
                console.print(str(error), style="red", markup=False, soft_wrap=True)
                return 1
            # After every part: if the run ends early, the record has all parts that are done.
            write_record(out / result_name("gpu", header["device"]), _record(header, outcomes, budget_s, root))
    _summary(outcomes, header, console)
    return 0 if all(outcome.status == "passed" for outcome in outcomes) else 1


def allotted_s(part: Part, remaining_s: float, later: Sequence[Part]) -> float:
    """Seconds that `part` may take: the remaining time less the minimum times of all later parts, between its own minimum and
    maximum. 0: not even its minimum remains, so do not start it."""
    if remaining_s < part.least_s:
        return 0.0
    free = remaining_s - sum(other.least_s for other in later)
    return min(part.cap_s, max(free, part.least_s))


def run_part(part: Part, folder: Path, seconds: float, *, cwd: Path, rehearsal: bool = False) -> Outcome:
    """Run `part` in `cwd` for at most `seconds`; it writes into `folder`. Raises nothing for failures of the part."""
    target, log = folder / f"{part.theme}.out", folder / f"{part.theme}.log"
    command = [argument.format(out=target) for argument in (*part.command, *(part.rehearsal if rehearsal else ()))]
    start = time.monotonic()
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                command, cwd=cwd, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            return Outcome(theme=part.theme, status="failed", detail=f"could not be started: {error}")
        timed_out = not _wait(process, seconds)
    took, tail = time.monotonic() - start, log.read_text(encoding="utf-8", errors="replace")[-_TAIL_CHARACTERS:]
    record, problem = read_tests(target, process.returncode) if part.is_tests else read_record(target)
    headline = (record or {}).get("headline", "")
    if timed_out:
        problem = f"stopped after {seconds:.0f} s"
    elif process.returncode != 0:
        lines = [line.strip() for line in tail.splitlines() if line.strip()]
        problem = headline or (lines[-1][:200] if lines else f"exit code {process.returncode}")
    return Outcome(
        theme=part.theme, status="failed" if problem else "passed", detail=problem or headline, seconds=took, tail=tail,
        record=record,
    )  # fmt: skip


def read_record(path: Path) -> tuple[dict[str, Any] | None, str]:
    """JSON record at `path`, and its fault: absent, unreadable, without its environment, or simulated."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None, "wrote no result"
    except (OSError, ValueError, RecursionError) as error:
        return None, f"wrote an unreadable result: {error}"
    if not isinstance(record, dict):
        return None, f"wrote an unreadable result: expected a JSON object, got {type(record).__name__}"
    missing = [key for key in ("schema", "device", "simulated", "commit", "versions") if key not in record]
    if missing:
        return None, f"expected {', '.join(missing)} in its result, got none"
    if is_stand_in(record["device"]) and record.get("stand_in") is not True:
        return None, f'expected "stand_in": true in a result of {record["device"]}, got none'
    if record["simulated"] is not False:
        return None, f"expected a result of a real GPU, got one of {record['device']}"
    return record, ""


def read_tests(path: Path, returncode: int) -> tuple[dict[str, Any], str]:
    """Counts and failures of a pytest run, by its JUnit report, and its fault: the failures, or that no test passed."""
    cases = list(ET.fromstring(path.read_text(encoding="utf-8")).iter("testcase")) if path.exists() else []
    kinds: dict[str, list[str]] = {"failure": [], "error": [], "skipped": []}
    for case in cases:
        name = "::".join(part for part in (case.get("classname"), case.get("name")) if part)
        found = next((child for child in case if child.tag in kinds), None)
        if found is not None:
            kinds[found.tag].append(f"{name}: {(found.get('message') or '').strip()[:300]}")
    failed, errors, skipped = map(len, kinds.values())
    passed = len(cases) - failed - errors - skipped
    headline = f"{passed} passed, {failed} failed, {errors} errors, {skipped} skipped"
    record = {"headline": headline, "failures": (kinds["failure"] + kinds["error"])[:_MOST_NAMED]}
    if failed or errors or returncode:
        return record, headline
    return record, "" if passed else f"{headline}: no GPU test passed"


def _wait(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """True if the process ended in time. Its whole process group is ended when this returns or raises."""
    try:
        return _ended(process, seconds)
    finally:
        # The process has its own group (start_new_session). It is not collected yet, so no other group can have its number.
        # Pytest, when interrupted, writes the results of the tests that are done.
        with suppress(ProcessLookupError):
            for number in (signal.SIGINT, signal.SIGTERM):
                os.killpg(process.pid, number)
                _ended(process, _GRACE_S)
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # a hang in the driver may survive even SIGKILL: go on without it
            process.wait(timeout=_GRACE_S)


def _ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """True if the process ends within `seconds`. Does not collect its exit status."""
    end_at = time.monotonic() + seconds
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > end_at:
            return False
        time.sleep(_POLL_S)
    return True


def figures(outcomes: Sequence[Outcome]) -> dict[str, str]:
    """Figures of the run's table, by name."""
    records = {outcome.theme: outcome.record for outcome in outcomes if outcome.record is not None}
    return {wanted.name: wanted.told(records) for wanted in FIGURES}


def _record(header: dict[str, Any], outcomes: Sequence[Outcome], budget_s: float, root: Path) -> dict[str, Any]:
    return {
        "schema": "chameleon_mm.bench.gpu/1",
        "theme": "gpu",
        **header,
        **commit(root),
        "budget_s": budget_s,
        "passed": all(outcome.status == "passed" for outcome in outcomes),
        "figures": figures(outcomes),
        "parts": [outcome.to_dict() for outcome in outcomes],
        "records": {outcome.theme: outcome.record for outcome in outcomes if outcome.record is not None},
    }


def _summary(outcomes: Sequence[Outcome], header: dict[str, Any], console: Console) -> None:
    for outcome in outcomes:
        if outcome.status == "failed" and outcome.tail:
            console.rule(f"{outcome.theme}: the end of its output")
            console.print(outcome.tail, markup=False, highlight=False)
    table = Table(title=f"GPU suite on {header['device']}" if header else "GPU suite: no CUDA device")
    for title in ("part", "result", "s", ""):
        table.add_column(title, overflow="fold")
    colours = {"passed": "green", "failed": "red", "not run": "yellow"}
    for outcome in outcomes:
        status = f"[{colours[outcome.status]}]{outcome.status}[/]"
        table.add_row(outcome.theme, status, f"{outcome.seconds:.0f}", outcome.detail.replace("[", r"\["))
    console.print(table)
    if header:
        for name, text in figures(outcomes).items():
            console.print(f"{name}: {text}", markup=False, highlight=False, soft_wrap=True)
    if header.get("stand_in"):
        console.print(f"A rehearsal on the {STAND_IN}: it has neither a GPU's times nor its rates.", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
