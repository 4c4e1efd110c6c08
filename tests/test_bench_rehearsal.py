"""A rehearsal on the CUDA stand-in never passes for a GPU's figure: what is marked, withheld, and written where."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from chameleon_mm.bench import _sanitizer, gpu_suite
from chameleon_mm.bench._environment import environment, write_record
from chameleon_mm.bench._measure import Column, Figure, Results, Waived
from chameleon_mm.bench._parts import Part
from chameleon_mm.bench._report import Bound, Report
from chameleon_mm.bench._stand_in import NO_SANITIZER, NOT_MEASURED, NOT_RUN, computes_on_cpu, is_stand_in, withheld
from chameleon_mm.device.sim import SimDevice
from tests._fakes import PlayedStandIn, scripted_part

ROOT = Path(__file__).resolve().parents[1]
NAME = "CUDA stand-in, no GPU"
RECORD = {
    "schema": "chameleon_mm.bench.x/1", "device": NAME, "simulated": False, "stand_in": True,
    "commit": "0" * 40, "versions": {}, "headline": "all well",
}  # fmt: skip
RATE = Column(key="rate", title="GB/s", formula="bytes / time")
PEAK = Column(key="peak", title="peak GiB", formula="bytes / 2**30", on_stand_in=True)


def table(rate: float = 55.5) -> Results:
    results = Results("copy", PlayedStandIn(), (RATE, PEAK))
    figures = {"rate": Figure.of([rate], "GB/s", simulated=False), "peak": Figure.of([1.25], "GiB", simulated=False)}
    results.add("H2D", {"bytes": 1}, figures)
    return results


def run_suite(parts: list[Part], out: Path, root: Path = ROOT) -> tuple[int, str]:
    console = Console(record=True, width=160, file=StringIO())
    return gpu_suite.run_suite(parts, out, 300, root, console), console.export_text()


def test_the_stand_in_is_known_by_its_name(sim: SimDevice) -> None:
    assert is_stand_in(NAME)
    assert not any(is_stand_in(name) for name in ("NVIDIA H200", sim.name, "AMD EPYC"))
    assert computes_on_cpu(PlayedStandIn())
    assert computes_on_cpu(sim)


def test_a_header_says_whether_it_is_the_stand_in(sim: SimDevice) -> None:
    assert environment("copy", PlayedStandIn())["stand_in"] is True
    assert environment("copy", sim)["stand_in"] is False


def test_only_columns_that_the_stand_in_can_tell_keep_their_figures() -> None:
    results = table()
    assert results.rows[0].cells["rate"] == Waived(NOT_MEASURED)
    assert isinstance(results.rows[0].cells["peak"], Figure)
    console = Console(record=True, width=100, file=StringIO())
    results.show(console)
    for text in (console.export_text(), results.markdown(), json.dumps(results.to_dict())):
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
    assert "55.5" not in json.dumps(report.to_dict()) + report.markdown()


def test_times_and_rates_are_withheld_and_bytes_are_not() -> None:
    record = {
        "exact": True, "peak_bytes": 3, "retry_us": 4, "gap": {"median": 1.5, "count": 7, "unit": "us"},
        "steps": [1.5, 2], "name": "x", "none": None, "bytes_swapped_out": 9, "hidden_fraction": 0,
    }  # fmt: skip
    assert withheld(record) == {
        "exact": True, "peak_bytes": 3, "retry_us": None, "gap": {"median": None, "count": 7, "unit": "us"},
        "steps": [None, 2], "name": "x", "none": None, "bytes_swapped_out": 9, "hidden_fraction": None,
    }  # fmt: skip


@pytest.mark.parametrize("where", ["bench/results/x.json", "bench/results/more/x.json", "chameleon_mm/bench/results/x.json"])
def test_the_folder_of_results_is_refused(where: str) -> None:
    with pytest.raises(ValueError, match=r"expected a folder other than bench/results.*name another one"):
        write_record(ROOT / where, RECORD)
    assert not (ROOT / where).exists()


def test_tables_are_written_elsewhere_alone(tmp_path: Path) -> None:
    for write in (table().write_json, table().write_markdown):
        with pytest.raises(ValueError, match="bench/results"):
            write(ROOT / "bench" / "results" / "x")
    table().write_json(tmp_path / "x.json")
    assert json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))["stand_in"] is True


def test_a_suite_refuses_the_folder_of_results_in_one_sentence(tmp_path: Path) -> None:
    out = tmp_path / "bench" / "results"
    out.parent.mkdir()
    code, text = run_suite([scripted_part("smoke", RECORD), scripted_part("copy", RECORD)], out, root=tmp_path)
    assert code == 1
    assert "expected a folder other than bench/results" in text
    assert "copy" not in text
    assert not out.exists()


def test_a_suite_says_what_it_is_and_what_it_did_not_run(tmp_path: Path) -> None:
    out = tmp_path / "out"
    timed = RECORD | {"step_us": [1.5], "peak_bytes": 3}
    parts = [
        # The first runs before anything is known.
        scripted_part("smoke", RECORD, "sys.exit(len(sys.argv) != 2)", rehearsal=("--small",)),
        scripted_part("copy", RECORD, "sys.exit(sys.argv[2:] != ['--small'])", rehearsal=("--small",)),
        scripted_part("demo", timed, withhold=True),
    ]
    code, text = run_suite(parts, out)
    assert code == 0, text
    assert f"GPU suite on {NAME}" in " ".join(text.split())
    assert NOT_MEASURED in text
    for what, why in NOT_RUN.items():
        assert f"{what}: {why}" in text
    records = {path.name.partition("_")[0]: json.loads(path.read_text(encoding="utf-8")) for path in out.iterdir()}
    assert set(records) == {"smoke", "copy", "demo", "suite"}
    assert all(record["stand_in"] is True and record["device"] == NAME for record in records.values())
    assert (records["demo"]["step_us"], records["demo"]["peak_bytes"]) == ([None], 3)
    assert records["suite"]["not_run"] == NOT_RUN


def test_a_record_of_the_stand_in_without_its_mark_fails(tmp_path: Path) -> None:
    unmarked = {key: value for key, value in RECORD.items() if key != "stand_in"}
    code, text = run_suite([scripted_part("smoke", RECORD), scripted_part("copy", unmarked)], tmp_path / "out")
    assert code == 1
    assert f'expected "stand_in": true in a result of {NAME}' in text


def test_compute_sanitizer_is_not_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_sanitizer, "resolve_device", lambda name: PlayedStandIn())
    monkeypatch.setattr(_sanitizer, "find_tool", lambda environment: Path(sys.executable))
    assert _sanitizer.main(["--json", str(tmp_path / "memcheck.json")]) == 0
    record = json.loads((tmp_path / "memcheck.json").read_text(encoding="utf-8"))
    assert (record["ok"], record["waived"], record["stand_in"]) == (True, NO_SANITIZER, True)


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
    for what, why in NOT_RUN.items():
        assert f"{what}: {why}" in done.stdout
    assert "GB/s" not in done.stdout
    records = {path.name.partition("_")[0]: json.loads(path.read_text(encoding="utf-8")) for path in tmp_path.iterdir()}
    assert set(records) == {"suite"} | {made.theme for made in gpu_suite.PARTS} - gpu_suite.IN_SUITE
    assert {entry["status"] for entry in records["suite"]["parts"]} == {"passed"}
    for theme, record in [*records.items(), *((theme, records["suite"][theme]) for theme in gpu_suite.IN_SUITE)]:
        assert (record["stand_in"], is_stand_in(record["device"])) == (True, True), theme
    small_model = records["training"]["tables"].pop("small model")  # the host's own times, which the stand-in does tell
    assert {found["unit"] for found in figures(small_model)} == {"ms", "x"}
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
