"""GPU suite without a GPU: parts that pass, fail, crash and hang; the results kept; the results that never count as passed.
Also the rehearsal on the CUDA stand-in."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from chameleon_mm.bench import gpu_suite
from chameleon_mm.bench._environment import environment, result_name, write_record
from chameleon_mm.bench._measure import Column, Figure, Results, Waived
from chameleon_mm.bench._reclaim_gap import gaps_us, measure
from chameleon_mm.bench._report import Bound, Report
from chameleon_mm.bench._stand_in import NOT_MEASURED, computes_on_cpu, is_stand_in
from chameleon_mm.bench.gpu_suite import FIGURES, PARTS, Outcome, Part, allotted_s, read_tests, run_part
from chameleon_mm.device import resolve_device
from chameleon_mm.device.sim import SimDevice
from chameleon_mm.units import MIB
from tests._fakes import PlayedStandIn, scripted_part

ROOT = Path(__file__).resolve().parents[1]
RECORD = {
    "schema": "chameleon_mm.bench.x/1", "device": "Fake GPU", "simulated": False,
    "commit": "0" * 40, "versions": {}, "headline": "all well",
}  # fmt: skip


def part(theme: str, code: str, *, record: dict[str, Any] | None = RECORD, cap_s: float = 60, **more: Any) -> Part:
    """Part that writes `record` (if any) and then runs `code`, in which `out` is its file."""
    return scripted_part(theme, record, code, cap_s=cap_s, **more)


def run_alone(made: Part, tmp_path: Path, seconds: float = 60) -> Outcome:
    return run_part(made, tmp_path, seconds, cwd=ROOT)


def run_suite(parts: list[Part], out: Path, budget_s: float = 300, root: Path = ROOT) -> tuple[int, str]:
    console = Console(record=True, width=160, file=StringIO())
    return gpu_suite.run_suite(parts, out, budget_s, root, console), console.export_text()


def suite_record(out: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((out / result_name("gpu", "Fake GPU")).read_text(encoding="utf-8"))
    return record


@pytest.mark.parametrize(
    ("code", "record", "detail"),
    [
        (None, None, "could not be started"),
        ("sys.exit('it broke')", None, "it broke"),
        ("sys.exit(1)", RECORD, "all well"),
        ("os.abort()", None, "exit code -6"),
        ("", None, "wrote no result"),
        ("out.write_text('{')", None, "unreadable result"),
        ("out.write_text('7')", None, "unreadable result: expected a JSON object, got int"),
        ("out.write_text('[' * 100_000)", None, "unreadable result"),
        ("", {**RECORD, "simulated": True}, "expected a result of a real GPU"),
        ("", {key: value for key, value in RECORD.items() if key != "commit"}, "expected commit in its result"),
    ],
    ids=[
        "no command",
        "message",
        "exit code",
        "crash",
        "no record",
        "broken record",
        "number",
        "deep",
        "simulated",
        "no commit",
    ],
)
def test_a_part_that_fails(code: str | None, record: dict[str, Any] | None, detail: str, tmp_path: Path) -> None:
    made = Part(theme="copy", command=["/nonexistent/python"], cap_s=5, least_s=1)
    outcome = run_alone(made if code is None else part("copy", code, record=record), tmp_path)
    assert outcome.status == "failed"
    assert detail in outcome.detail


@pytest.mark.ci
def test_a_part_that_hangs_is_ended_with_its_children_and_its_record_kept(tmp_path: Path) -> None:
    child = "import subprocess; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    code = f"{child}; pathlib.Path(r'{tmp_path}', 'pid').write_text(str(child.pid)); time.sleep(600)"
    outcome = run_alone(part("probe", code), tmp_path, seconds=5)
    assert (outcome.status, outcome.detail) == ("failed", "stopped after 5 s")
    assert outcome.record == RECORD
    assert ended(int((tmp_path / "pid").read_text(encoding="utf-8")))


def ended(pid: int) -> bool:
    """True if the process is gone or an uncollected zombie. Waits up to 5 s: a signal takes time."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_a_suite_keeps_going_and_keeps_everything(tmp_path: Path) -> None:
    out = tmp_path / "results"
    rows = [{"name": f"D2H {size} MiB", "cells": {"pinned": {"median": rate}}} for size, rate in ((1, 20.0), (64, 55.25))]
    parts = [part("copy", "", record=RECORD | {"rows": rows}), part("pack", "sys.exit('it broke')", record=None)]
    code, text = run_suite(parts, out)
    assert code == 1
    assert [path.name for path in out.iterdir()] == [result_name("gpu", "Fake GPU")]
    record = suite_record(out)
    assert [entry["status"] for entry in record["parts"]] == ["passed", "failed"]
    assert (record["passed"], record["device"], record["simulated"]) == (False, "Fake GPU", False)
    assert {"commit", "dirty", "versions", "schema"} <= set(record)
    assert record["records"]["copy"]["headline"] == "all well"
    assert record["figures"]["link, to the host"] == "55.25 GB/s; both ways WAIVED: no such row"  # the largest copy
    assert record["figures"]["pinning"] == "WAIVED: reclaim left no record"
    assert text.index("the end of its output") < text.index("GPU suite on Fake GPU")  # the table comes last
    assert "it broke" in text


def test_a_suite_that_passes(tmp_path: Path) -> None:
    out = tmp_path / "results"
    assert run_suite([part("copy", ""), part("pack", "")], out)[0] == 0
    record = suite_record(out)
    assert record["passed"] is True
    assert [(entry["status"], entry["detail"]) for entry in record["parts"]] == [("passed", "all well")] * 2
    assert record["records"] == {"copy": RECORD, "pack": RECORD}


def test_without_a_device_nothing_else_runs_and_nothing_is_written(tmp_path: Path) -> None:
    out = tmp_path / "results"
    marker = tmp_path / "ran"
    parts = [part("copy", "sys.exit('got none')", record=None), part("pack", f"pathlib.Path(r'{marker}').touch()")]
    code, text = run_suite(parts, out)
    assert code == 1
    assert "no CUDA device" in text
    assert "got none" in text
    assert not marker.exists()
    assert not out.exists()


def test_parts_without_time_are_told_and_fail_the_run(tmp_path: Path) -> None:
    out = tmp_path / "results"
    late = Part(theme="pack", command=[sys.executable, "-c", ""], cap_s=100, least_s=100)
    code, _ = run_suite([part("copy", ""), late], out, budget_s=60)
    assert code == 1
    assert [(entry["status"], entry["detail"]) for entry in suite_record(out)["parts"]] == [
        ("passed", "all well"),
        ("not run", "no time left"),
    ]


def test_time_is_kept_for_later_parts() -> None:
    first, second = (Part(theme=theme, command=[], cap_s=100, least_s=30) for theme in ("a", "b"))
    assert allotted_s(first, 500, [second]) == 100
    assert allotted_s(first, 110, [second]) == 80
    assert allotted_s(first, 59, [second]) == 30  # not enough for both: the first to come runs
    assert allotted_s(second, 59, []) == 59
    assert allotted_s(second, 29, []) == 0
    for least_s in (0.0, 20.0):
        with pytest.raises(ValueError, match="0 < least_s <= cap_s"):
            Part(theme="copy", command=[], least_s=least_s, cap_s=10.0)


def junit(*cases: str) -> str:
    return f'<testsuites><testsuite name="pytest">{"".join(cases)}</testsuite></testsuites>'


PASSED = '<testcase classname="tests.test_a" name="test_one"/>'
FAILED = '<testcase classname="tests.test_a" name="test_two"><failure message="assert 1 == 2">...</failure></testcase>'
BROKEN = '<testcase classname="" name="tests.test_b"><error message="collection failure">...</error></testcase>'
SKIPPED = '<testcase classname="tests.test_a" name="test_three"><skipped message="needs two GPUs"/></testcase>'


def test_a_run_gives_at_most_twelve_figures_within_eight_minutes() -> None:
    themes = [made.theme for made in PARTS]
    assert len(set(themes)) == len(themes)
    assert not PARTS[0].is_tests  # its record says which device there is
    assert sum(made.least_s for made in PARTS) <= gpu_suite.BUDGET_S == 8 * 60
    assert len(FIGURES) == len({wanted.name for wanted in FIGURES}) <= 12
    assert {wanted.theme for wanted in FIGURES} == {made.theme for made in PARTS if not made.is_tests}


@pytest.mark.parametrize("made", PARTS, ids=lambda made: made.theme)
def test_the_real_commands_exist(made: Part) -> None:
    assert made.command[:2] == (sys.executable, "-m")
    assert importlib.util.find_spec(made.command[2]) is not None
    assert any("{out}" in argument for argument in made.command)


def test_a_figure_stands_beside_its_peers() -> None:
    wanted = next(wanted for wanted in FIGURES if wanted.name == "training, step")
    rows = [
        {"name": "quarter, planned", "cells": {"ratio": {"median": 1.18}}},
        {"name": "checkpointing", "cells": {"ratio": {"median": 1.32}}},
        {"name": "torch save_on_cpu", "cells": {"ratio": {"waived": "out of memory"}}},
        {"name": "TRL offloading", "cells": {"ratio": {"median": 1.5}}},
    ]
    told = wanted.told({"training": {"tables": {"peers": {"rows": rows}}}})
    assert told == (
        "1.18 x; checkpointing 1.32 x; torch save_on_cpu WAIVED: out of memory; TRL offloading 1.5 x; "
        "torchtune offloading WAIVED: no such row"
    )


@pytest.mark.parametrize(
    ("report", "returncode", "problem"),
    [
        (junit(PASSED, SKIPPED), 0, ""),
        (junit(PASSED, FAILED), 1, "1 passed, 1 failed, 0 errors, 0 skipped"),
        (junit(PASSED, BROKEN), 1, "1 passed, 0 failed, 1 errors, 0 skipped"),
        (junit(SKIPPED, SKIPPED), 0, "0 passed, 0 failed, 0 errors, 2 skipped: no GPU test passed"),
        (junit(), 5, "0 passed, 0 failed, 0 errors, 0 skipped"),
        (None, 3, "0 passed, 0 failed, 0 errors, 0 skipped"),
        (junit(PASSED), 2, "1 passed, 0 failed, 0 errors, 0 skipped"),
    ],
    ids=["passed", "failed", "error", "all skipped", "none", "no report", "interrupted"],
)
def test_verdict_of_a_test_run(report: str | None, returncode: int, problem: str, tmp_path: Path) -> None:
    target = tmp_path / "junit.xml"
    if report is not None:
        target.write_text(report, encoding="utf-8")
    record, found = read_tests(target, returncode)
    assert found == problem
    assert len(record["failures"]) == sum(case in (report or "") for case in (FAILED, BROKEN))


def test_gaps_are_paired_by_address() -> None:
    def entry(action: str, addr: int, time_us: int, size: int = MIB) -> dict[str, Any]:
        return {"action": action, "addr": addr, "time_us": time_us, "size": size}

    history = [
        entry("free_requested", 1, 10),
        entry("free_requested", 2, 11),
        entry("free_requested", 3, 12, size=512),  # too small to count
        entry("free_completed", 3, 13, size=512),
        entry("free_completed", 2, 14),
        entry("free_completed", 9, 15),  # asked for before the history began
        entry("free_requested", 2, 20),  # the same address again, never completed
        entry("free_completed", 1, 110),
    ]
    assert gaps_us(history, MIB) == [3.0, 100.0]


@pytest.mark.gpu
def test_blocks_that_were_copied_come_back_by_either_way() -> None:
    gap = measure(resolve_device("cuda")).tables["gap"]
    assert [row.name for row in gap.rows] == ["record_stream", "wait and drop"]
    peaks = [row.cells["peak"] for row in gap.rows]
    assert all(isinstance(peak, Figure) and peak.median <= 16 for peak in peaks)
    assert all(isinstance(row.cells["gap"], Waived) == gap.header["stand_in"] for row in gap.rows)


# --- a rehearsal on the CUDA stand-in never passes for a GPU's figure: what is marked, withheld, and written where
NAME = "CUDA stand-in, no GPU"
REHEARSED = {**RECORD, "device": NAME, "stand_in": True}
RATE = Column(key="rate", title="GB/s", formula="bytes / time")
PEAK = Column(key="peak", title="peak GiB", formula="bytes / 2**30", on_stand_in=True)


def table(rate: float = 55.5) -> Results:
    results = Results("copy", PlayedStandIn(), (RATE, PEAK))
    figures = {"rate": Figure.of([rate], "GB/s", simulated=False), "peak": Figure.of([1.25], "GiB", simulated=False)}
    results.add("H2D", {"bytes": 1}, figures)
    return results


def test_the_stand_in_is_known_by_its_name(sim: SimDevice) -> None:
    assert is_stand_in(NAME)
    assert not any(is_stand_in(name) for name in ("NVIDIA H200", sim.name, "AMD EPYC"))
    assert computes_on_cpu(PlayedStandIn())
    assert computes_on_cpu(sim)
    assert environment("copy", PlayedStandIn())["stand_in"] is True
    assert environment("copy", sim)["stand_in"] is False


def test_only_columns_that_the_stand_in_can_tell_keep_their_figures() -> None:
    results = table()
    assert results.rows[0].cells["rate"] == Waived(NOT_MEASURED)
    assert isinstance(results.rows[0].cells["peak"], Figure)
    console = Console(record=True, width=100, file=StringIO())
    results.show(console)
    for text in (console.export_text(), json.dumps(results.to_dict())):
        assert "55.5" not in text
        assert NOT_MEASURED in text
        assert NAME in text or "WAIVED" in text


def test_only_bounds_that_the_stand_in_can_tell_are_judged() -> None:
    bounds = [
        Bound(name="losses changed", limit=0, found=1.0, counted=True),
        Bound(name="peak / budget", limit=1, found=2.0, on_stand_in=True),
        Bound(name="rate", limit=50, found=55.5, at_most=False),
        Bound(name="no row", limit=1, found=Waived("none")),
    ]
    report = Report(header=environment("copy", PlayedStandIn()), tables={"copies": table()}, bounds=bounds)
    assert [bound.held for bound in report.bounds] == [False, False, None, None]
    assert [bound.found for bound in report.bounds[2:]] == [Waived(NOT_MEASURED), Waived("none")]
    assert "55.5" not in json.dumps(report.to_dict())


def test_the_folder_of_results_is_refused(tmp_path: Path) -> None:
    for where in ("bench/results/x.json", "bench/results/more/x.json", "chameleon_mm/bench/results/x.json"):
        with pytest.raises(ValueError, match=r"expected a folder other than bench/results.*name another one"):
            write_record(ROOT / where, REHEARSED)
        assert not (ROOT / where).exists()
    out = tmp_path / "bench" / "results"
    out.parent.mkdir()
    code, text = run_suite([scripted_part("copy", REHEARSED), scripted_part("pack", REHEARSED)], out, root=tmp_path)
    assert code == 1
    assert "expected a folder other than bench/results" in text
    assert "pack" not in text
    assert not out.exists()


def test_a_suite_says_what_it_is_and_a_record_of_the_stand_in_without_its_mark_fails(tmp_path: Path) -> None:
    out = tmp_path / "out"
    parts = [
        # The first runs before anything is known.
        scripted_part("copy", REHEARSED, "sys.exit(len(sys.argv) != 2)", rehearsal=("--small",)),
        scripted_part("pack", REHEARSED, "sys.exit(sys.argv[2:] != ['--small'])", rehearsal=("--small",)),
    ]
    code, text = run_suite(parts, out)
    assert code == 0, text
    assert f"GPU suite on {NAME}" in " ".join(text.split())
    assert "neither a GPU's times nor its rates" in text
    (path,) = out.iterdir()
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record["stand_in"] is True and record["device"] == NAME
    unmarked = {key: value for key, value in REHEARSED.items() if key != "stand_in"}
    code, text = run_suite([parts[0], scripted_part("pack", unmarked)], out)
    assert code == 1
    assert f'expected "stand_in": true in a result of {NAME}' in text


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_part_of_the_suite_runs_on_the_stand_in(tmp_path: Path) -> None:
    import torch

    if not is_stand_in(torch.cuda.get_device_name()):
        pytest.skip("this is a GPU: on it `make gpu` is the run, not its rehearsal")
    command = [sys.executable, "-m", "chameleon_mm.bench.gpu_suite", "--out", str(tmp_path), "--minutes", "12"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "COLUMNS": "200"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "GB/s" not in done.stdout
    (path,) = tmp_path.iterdir()
    written = json.loads(path.read_text(encoding="utf-8"))
    assert {entry["status"] for entry in written["parts"]} == {"passed"}
    records = {theme: record for theme, record in written["records"].items() if theme != "tests"}
    for theme, record in records.items():
        assert (record["stand_in"], is_stand_in(record["device"])) == (True, True), theme
    records.pop("hooks")  # the host's own times, which the stand-in does measure
    records["training"]["tables"].pop("small model")
    assert not [found for record in records.values() for found in figures(record) if found["unit"] not in UNITLESS]


UNITLESS = {"GiB", "1", ""}
"""Units of figures that are bytes or counts."""


def figures(record: Any) -> list[dict[str, Any]]:
    """Every figure with a value in a record."""
    if isinstance(record, list):
        return [found for entry in record for found in figures(entry)]
    if not isinstance(record, dict):
        return []
    here = [record] if {"median", "unit"} <= set(record) and record["median"] is not None else []
    return here + [found for entry in record.values() for found in figures(entry)]
