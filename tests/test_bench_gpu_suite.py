"""The GPU suite without a GPU: parts that pass, fail, crash and hang, what is kept of them, and what never counts as passed."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from chameleon_mm.bench import gpu_suite
from chameleon_mm.bench._environment import result_name
from chameleon_mm.bench._parts import Outcome, Part, allotted_s, read_record, run_part
from chameleon_mm.bench.gpu_tests import summarise
from tests._fakes import scripted_part

ROOT = Path(__file__).resolve().parents[1]
RECORD = {
    "schema": "chameleon_mm.bench.x/1", "device": "Fake GPU", "simulated": False,
    "commit": "0" * 40, "versions": {}, "headline": "all well",
}  # fmt: skip


def part(theme: str, code: str, *, record: dict[str, Any] | None = RECORD, cap_s: float = 60, **more: Any) -> Part:
    """A part that writes `record` (if any) and then runs `code`, in which `out` is its file; it is told its time."""
    return scripted_part(theme, record, code, arguments=("{seconds}",), cap_s=cap_s, **more)


def run_alone(made: Part, tmp_path: Path, seconds: float = 60) -> Outcome:
    return run_part(made, tmp_path, seconds, cwd=ROOT, environment=os.environ)


def run_suite(parts: list[Part], out: Path, budget_s: float = 300) -> tuple[int, str]:
    with (out.parent / "console").open("w", encoding="utf-8") as file:
        console = Console(record=True, width=160, file=file)
        return gpu_suite.run_suite(parts, out, budget_s, ROOT, console), console.export_text()


def suite_record(out: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((out / result_name("suite", "Fake GPU")).read_text(encoding="utf-8"))
    return record


def test_a_part_that_passes(tmp_path: Path) -> None:
    outcome = run_alone(part("copy", ""), tmp_path)
    assert (outcome.status, outcome.detail, outcome.record) == ("passed", "all well", RECORD)


def test_a_part_runs_in_the_checkout_and_knows_its_time(tmp_path: Path) -> None:
    code = "assert int(sys.argv[2]) < 60; assert pathlib.Path('pyproject.toml').exists()"
    assert run_alone(part("copy", code), tmp_path).status == "passed"


@pytest.mark.parametrize(
    ("code", "record", "detail"),
    [
        ("sys.exit('it broke')", None, "it broke"),
        ("sys.exit(1)", RECORD, "all well"),
        ("os.abort()", None, "exit code -6"),
        ("", None, "wrote no result"),
        ("out.write_text('{')", None, "unreadable result"),
        ("", {**RECORD, "simulated": True}, "expected a result of a real GPU"),
        ("", {key: value for key, value in RECORD.items() if key != "commit"}, "expected commit in its result"),
    ],
    ids=["message", "exit code", "crash", "no record", "broken record", "simulated", "no commit"],
)
def test_a_part_that_fails(code: str, record: dict[str, Any] | None, detail: str, tmp_path: Path) -> None:
    outcome = run_alone(part("copy", code, record=record), tmp_path)
    assert outcome.status == "failed"
    assert detail in outcome.detail


def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    missing = Part(theme="copy", command=["/nonexistent/python"], cap_s=5, least_s=1)
    outcome = run_alone(missing, tmp_path)
    assert (outcome.status, "could not be started" in outcome.detail) == ("failed", True)


def test_a_part_that_hangs_is_ended_with_its_children_and_its_record_kept(tmp_path: Path) -> None:
    child = "import subprocess; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    code = f"{child}; pathlib.Path(r'{tmp_path}', 'pid').write_text(str(child.pid)); time.sleep(600)"
    outcome = run_alone(part("probe", code), tmp_path, seconds=5)
    assert (outcome.status, outcome.detail) == ("failed", "stopped after 5 s")
    assert outcome.record == RECORD
    assert ended(int((tmp_path / "pid").read_text(encoding="utf-8")))


def ended(pid: int) -> bool:
    """Whether the process is gone, or a zombie that nobody has collected. It has a moment for it: a signal takes its time."""
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
    parts = [part("smoke", ""), part("tests", "sys.exit('2 failed')", record=None), part("copy", "")]
    code, text = run_suite(parts, out)
    assert code == 1
    assert sorted(path.name for path in out.iterdir()) == sorted(result_name(t, "Fake GPU") for t in ("copy", "smoke", "suite"))
    record = suite_record(out)
    assert [entry["status"] for entry in record["parts"]] == ["passed", "failed", "passed"]
    assert (record["passed"], record["device"], record["simulated"]) == (False, "Fake GPU", False)
    assert {"commit", "dirty", "versions", "schema"} <= set(record)
    assert text.index("the end of its output") < text.index("GPU suite on Fake GPU")  # the table comes last
    assert "2 failed" in text


def test_memory_checks_are_kept_in_the_suites_own_record(tmp_path: Path) -> None:
    out = tmp_path / "results"
    found = RECORD | {"headline": "memcheck: no memory errors", "cases": 612}
    assert run_suite([part("smoke", ""), part("memcheck", "", record=found)], out)[0] == 0
    assert suite_record(out)["memcheck"] == found
    assert sorted(path.name for path in out.iterdir()) == sorted(result_name(t, "Fake GPU") for t in ("smoke", "suite"))


def test_a_memory_error_fails_the_suite_and_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "results"
    found = RECORD | {"headline": "memcheck: 3 memory errors"}
    code, text = run_suite([part("smoke", ""), part("memcheck", "sys.exit(1)", record=found)], out)
    assert code == 1
    assert "memcheck: 3 memory errors" in text
    assert suite_record(out)["memcheck"] == found


def test_a_waived_part_says_so_and_passes(tmp_path: Path) -> None:
    out = tmp_path / "results"
    found = RECORD | {"waived": "no such tool", "headline": "WAIVED: no such tool"}
    code, text = run_suite([part("smoke", ""), part("memcheck", "", record=found)], out)
    assert code == 0
    row = next(line for line in text.splitlines() if "memcheck" in line and "WAIVED" in line)
    assert "waived" in row and "no such tool" in row


def test_a_suite_that_passes(tmp_path: Path) -> None:
    out = tmp_path / "results"
    assert run_suite([part("smoke", ""), part("copy", "")], out)[0] == 0
    assert suite_record(out)["passed"] is True


def test_without_a_device_nothing_else_runs_and_nothing_is_written(tmp_path: Path) -> None:
    out = tmp_path / "results"
    marker = tmp_path / "ran"
    parts = [part("smoke", "sys.exit('got none')", record=None), part("copy", f"pathlib.Path(r'{marker}').touch()")]
    code, text = run_suite(parts, out)
    assert code == 1
    assert "no CUDA device" in text
    assert "got none" in text
    assert not marker.exists()
    assert not out.exists()


def test_a_failed_smoke_with_a_device_does_not_stop_the_rest(tmp_path: Path) -> None:
    out = tmp_path / "results"
    assert run_suite([part("smoke", "sys.exit(1)"), part("copy", "")], out)[0] == 1
    assert [entry["status"] for entry in suite_record(out)["parts"]] == ["failed", "passed"]


def test_parts_without_time_are_told_and_fail_the_run(tmp_path: Path) -> None:
    out = tmp_path / "results"
    late = Part(theme="copy", command=[sys.executable, "-c", ""], cap_s=100, least_s=100)
    code, _ = run_suite([part("smoke", ""), late], out, budget_s=60)
    assert code == 1
    assert [(entry["status"], entry["detail"]) for entry in suite_record(out)["parts"]] == [
        ("passed", "all well"),
        ("not run", "no time left"),
    ]


def test_time_is_kept_for_later_parts() -> None:
    first, second = (Part(theme=theme, command=[], cap_s=100, least_s=30) for theme in ("a", "b"))
    assert allotted_s(first, 500, [second]) == 100
    assert allotted_s(first, 110, [second]) == 80
    assert allotted_s(first, 59, [second]) == 30  # not enough for both: who comes first runs
    assert allotted_s(second, 59, []) == 59
    assert allotted_s(second, 29, []) == 0


def test_the_real_parts_fit_the_files_and_the_time() -> None:
    themes = {made.theme for made in gpu_suite.PARTS}
    assert len(themes) == len(gpu_suite.PARTS)
    assert len(themes - gpu_suite.IN_SUITE) < gpu_suite.MAX_FILES
    assert themes >= gpu_suite.IN_SUITE
    assert gpu_suite.PARTS[0] is gpu_suite.SMOKE
    assert sum(made.least_s for made in gpu_suite.PARTS) <= 8 * 60
    with pytest.raises(ValueError, match="at most 7 parts with files"):
        gpu_suite.run_suite([gpu_suite.SMOKE] * 8, Path(), 1, ROOT, Console(quiet=True))


@pytest.mark.parametrize("made", gpu_suite.PARTS, ids=lambda made: made.theme)
def test_the_real_commands_exist(made: Part) -> None:
    assert made.command[:2] == (sys.executable, "-m")
    assert importlib.util.find_spec(made.command[2]) is not None
    assert "{json}" in made.command


def test_bad_usage_of_the_suite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended_with:
        gpu_suite.main(["--out", str(tmp_path), "--minutes", "0"])
    assert ended_with.value.code == 2
    assert "expected more than 0" in capsys.readouterr().err


@pytest.mark.parametrize("times", [(0.0, 10.0), (20.0, 10.0)])
def test_bad_times_of_a_part(times: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="0 < least_s <= cap_s"):
        Part(theme="copy", command=[], least_s=times[0], cap_s=times[1])


def test_a_record_of_another_kind_is_no_record(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"device": "Fake GPU", "simulated": false}', encoding="utf-8")
    assert read_record(tmp_path / "x.json") == (None, "expected schema, commit, versions in its result, got none")


def junit(*cases: str) -> str:
    return f'<testsuites><testsuite name="pytest">{"".join(cases)}</testsuite></testsuites>'


PASSED = '<testcase classname="tests.test_a" name="test_one"/>'
FAILED = '<testcase classname="tests.test_a" name="test_two"><failure message="assert 1 == 2">...</failure></testcase>'
BROKEN = '<testcase classname="" name="tests.test_b"><error message="collection failure">...</error></testcase>'
SKIPPED = '<testcase classname="tests.test_a" name="test_three"><skipped message="needs two GPUs"/></testcase>'


@pytest.mark.parametrize(
    ("report", "returncode", "ok", "headline"),
    [
        (junit(PASSED, SKIPPED), 0, True, "1 passed, 0 failed, 0 errors, 1 skipped"),
        (junit(PASSED, FAILED), 1, False, "1 passed, 1 failed, 0 errors, 0 skipped"),
        (junit(PASSED, BROKEN), 1, False, "1 passed, 0 failed, 1 errors, 0 skipped"),
        (junit(SKIPPED, SKIPPED), 0, False, "0 passed, 0 failed, 0 errors, 2 skipped: every GPU test was skipped"),
        (junit(), 5, False, "0 passed, 0 failed, 0 errors, 0 skipped: no GPU test ran"),
        ("", 3, False, "0 passed, 0 failed, 0 errors, 0 skipped: no GPU test ran"),
        (junit(PASSED), 2, False, "1 passed, 0 failed, 0 errors, 0 skipped: pytest stopped with exit code 2"),
    ],
    ids=["passed", "failed", "error", "all skipped", "none", "no report", "interrupted"],
)
def test_verdict_of_a_test_run(report: str, returncode: int, ok: bool, headline: str) -> None:
    summary = summarise(report, returncode)
    assert (summary["ok"], summary["headline"]) == (ok, headline)


def test_failures_are_named() -> None:
    assert summarise(junit(PASSED, FAILED, BROKEN), 1)["failures"] == [
        "tests.test_a::test_two: assert 1 == 2",
        "tests.test_b: collection failure",
    ]
