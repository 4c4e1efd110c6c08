"""One script for a machine with a GPU: smoke, tests, memory checks, benches, demo and probe under one time budget.

for part in (smoke, tests, memcheck, copy, overlap, training, profiler, demo, probe):    # each a process of its own
    run it for as long as it may; its record to OUT/<theme>_<device>_<date>.json, or into the suite's own; rewrite that
summary last; exit 1 if anything failed or could not be run
on the CUDA stand-in of our tests: a rehearsal in small sizes, marked in every record, and never written to bench/results

python3 -m chameleon_mm.bench.gpu_suite --out bench/results            # from a bare checkout; at most 8 minutes
python3 -m chameleon_mm.bench.gpu_suite --out bench/results --smoke    # its first minute
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from chameleon_mm.bench._environment import checkout_root, commit, result_name, write_record
from chameleon_mm.bench._parts import Outcome, Part, allotted_s, run_part
from chameleon_mm.bench._stand_in import NOT_MEASURED, NOT_RUN, STAND_IN, check_place

MAX_FILES = 8
"""JSON files that one run may leave, the suite's own included."""

_PYTHON = sys.executable
_BENCH = (_PYTHON, "-m", "chameleon_mm", "bench")
_TO_JSON = ("--device", "cuda", "--json", "{json}")

SMOKE = Part(theme="smoke", command=(_PYTHON, "-m", "chameleon_mm.bench.gpu_smoke", "--json", "{json}"), cap_s=110, least_s=20)
PARTS = (
    SMOKE,
    Part(
        theme="tests",
        command=(_PYTHON, "-m", "chameleon_mm.bench.gpu_tests", "--json", "{json}", "--seconds", "{seconds}"),
        cap_s=150,
        least_s=40,
    ),
    Part(
        theme="memcheck",
        command=(_PYTHON, "-m", "chameleon_mm.bench._sanitizer", "--json", "{json}", "--seconds", "{seconds}"),
        cap_s=60,
        least_s=45,
    ),
    Part(theme="copy", command=(*_BENCH, "copy", *_TO_JSON), cap_s=60, least_s=30),
    Part(theme="overlap", command=(*_BENCH, "overlap", *_TO_JSON), cap_s=60, least_s=35),
    Part(
        theme="training",
        command=(*_BENCH, "training", *_TO_JSON),
        cap_s=170,
        least_s=130,
        rehearsal=("--layers", "2", "--width", "64", "--heads", "2", "--ffn", "224", "--batch", "16", "--steps", "1"),
    ),
    Part(
        theme="profiler",
        command=(*_BENCH, "profiler", *_TO_JSON, "--repeats", "15"),
        cap_s=40,
        least_s=20,
        rehearsal=("--repeats", "2", "--saves", "50"),
    ),
    Part(
        theme="demo",
        command=(_PYTHON, "-m", "chameleon_mm", "demo", *_TO_JSON),
        cap_s=90,
        least_s=45,
        rehearsal=("--steps", "3", "--layers", "4", "--width", "64", "--heads", "2", "--context", "1024", "--batch", "4"),
        withhold=True,
    ),
    Part(
        theme="probe",
        command=(_PYTHON, "-m", "chameleon_mm.bench.probe", "--json", "{json}", "--seconds", "{seconds}"),
        cap_s=220,
        least_s=100,
    ),
)
"""What runs, in this order. The first says which device there is: without its record nothing else starts."""

IN_SUITE = frozenset({"memcheck", "profiler"})
"""Parts without a file of their own: their records are in the suite's, under their themes."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 if every part passed, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python3 -m chameleon_mm.bench.gpu_suite", description=__doc__.splitlines()[0])
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="folder for the JSON records")
    parser.add_argument("--minutes", type=float, default=8.0, metavar="N", help="time for everything (default: %(default)s)")
    parser.add_argument("--smoke", action="store_true", help="only the first minute: versions, a copy each way, a swapped step")
    args = parser.parse_args(arguments)
    console = Console()
    root = checkout_root()
    if root is None:
        console.print(
            "expected a checkout of the project (its tests are part of the run), got an installed package", style="red"
        )
        return 1
    if args.minutes <= 0:
        parser.error(f"--minutes: expected more than 0, got {args.minutes}")
    parts = (SMOKE,) if args.smoke else PARTS
    return run_suite(parts, args.out.resolve(), 60 * args.minutes, root, console)


def run_suite(parts: Sequence[Part], out: Path, budget_s: float, root: Path, console: Console) -> int:
    """Run `parts` from the checkout at `root`, keep their records in `out`, print the summary. Returns the exit code.

    Raises `ValueError` if the parts would leave more than `MAX_FILES` files.
    """
    files = sum(part.theme not in IN_SUITE for part in parts)
    if files + 1 > MAX_FILES:
        raise ValueError(
            f"gpu suite: expected at most {MAX_FILES - 1} parts with files beside its own record, got {files}; merge some"
        )
    start = time.monotonic()
    outcomes: list[Outcome] = []
    header: dict[str, Any] | None = None
    with tempfile.TemporaryDirectory() as folder:
        for position, part in enumerate(parts):
            seconds = allotted_s(part, budget_s - (time.monotonic() - start), parts[position + 1 :])
            if position and header is None:
                outcome = Outcome(theme=part.theme, status="not run", detail="no CUDA device was found to run it on")
            elif not seconds:
                outcome = Outcome(theme=part.theme, status="not run", detail="no time left")
            else:
                console.print(f"{part.theme}: at most {seconds:.0f} s ...", highlight=False)
                inherited = os.environ  # noqa: TID251 - for the parts, which are processes of their own; nothing here reads it
                rehearsal = bool(header and header.get("stand_in"))
                outcome = run_part(part, Path(folder), seconds, cwd=root, environment=inherited, rehearsal=rehearsal)
            outcomes.append(outcome)
            header = header or outcome.record
            if header is None:
                continue
            try:
                check_place(out, root=root, stand_in=bool(header.get("stand_in")))
            except ValueError as error:
                console.print(str(error), style="red", markup=False, soft_wrap=True)
                return 1
            if outcome.record is not None and part.theme not in IN_SUITE:
                write_record(out / result_name(part.theme, header["device"]), outcome.record)
            # After every part: whatever ends this run early, what is done stays told.
            write_record(out / result_name("suite", header["device"]), _suite_record(header, outcomes, budget_s, root))
    _summary(outcomes, header, console)
    return 0 if all(outcome.status == "passed" for outcome in outcomes) else 1


def _suite_record(header: dict[str, Any], outcomes: Sequence[Outcome], budget_s: float, root: Path) -> dict[str, Any]:
    about: dict[str, Any] = {
        key: header[key] for key in ("device", "simulated", "stand_in", "versions", "host", "gpu", "date") if key in header
    }
    return {
        "schema": "chameleon_mm.bench.suite/1",
        "theme": "suite",
        **about,
        **commit(root),
        "budget_s": budget_s,
        "passed": all(outcome.status == "passed" for outcome in outcomes),
        **({"not_run": NOT_RUN} if header.get("stand_in") else {}),
        "parts": [outcome.to_dict() for outcome in outcomes],
        **{outcome.theme: outcome.record for outcome in outcomes if outcome.theme in IN_SUITE and outcome.record is not None},
    }


def _summary(outcomes: Sequence[Outcome], header: dict[str, Any] | None, console: Console) -> None:
    for outcome in outcomes:
        if outcome.status == "failed" and outcome.tail:
            console.rule(f"{outcome.theme}: the end of its output")
            console.print(outcome.tail, markup=False, highlight=False)
    table = Table(title=f"GPU suite on {header['device']}" if header else "GPU suite: no CUDA device")
    for title in ("part", "result", "s", ""):
        table.add_column(title, overflow="fold")
    colours = {"passed": "green", "failed": "red", "not run": "yellow", "waived": "yellow"}
    for outcome in outcomes:
        waived = outcome.status == "passed" and "waived" in (outcome.record or ())
        status = "waived" if waived else outcome.status
        detail = outcome.detail.replace("[", r"\[")
        table.add_row(outcome.theme, f"[{colours[status]}]{status}[/]", f"{outcome.seconds:.0f}", detail)
    console.print(table)
    if header and header.get("stand_in"):
        console.print(f"A rehearsal on the {STAND_IN}. Times and rates: {NOT_MEASURED}.", markup=False, soft_wrap=True)
        for what, why in NOT_RUN.items():
            console.print(f"{what}: {why}", markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
