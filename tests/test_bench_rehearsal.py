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

from chameleon_mm.bench import gpu_suite
from chameleon_mm.bench._environment import environment, write_record
from chameleon_mm.bench._measure import Column, Figure, Results, Waived
from chameleon_mm.bench._report import Bound, Report
from chameleon_mm.bench._stand_in import NOT_MEASURED, computes_on_cpu, is_stand_in
from chameleon_mm.bench.gpu_suite import Part
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


@pytest.mark.parametrize("where", ["bench/results/x.json", "bench/results/more/x.json", "chameleon_mm/bench/results/x.json"])
def test_the_folder_of_results_is_refused(where: str) -> None:
    with pytest.raises(ValueError, match=r"expected a folder other than bench/results.*name another one"):
        write_record(ROOT / where, RECORD)
    assert not (ROOT / where).exists()


def test_a_suite_refuses_the_folder_of_results_in_one_sentence(tmp_path: Path) -> None:
    out = tmp_path / "bench" / "results"
    out.parent.mkdir()
    code, text = run_suite([scripted_part("copy", RECORD), scripted_part("pack", RECORD)], out, root=tmp_path)
    assert code == 1
    assert "expected a folder other than bench/results" in text
    assert "pack" not in text
    assert not out.exists()


def test_a_suite_says_what_it_is(tmp_path: Path) -> None:
    out = tmp_path / "out"
    parts = [
        # The first runs before anything is known.
        scripted_part("copy", RECORD, "sys.exit(len(sys.argv) != 2)", rehearsal=("--small",)),
        scripted_part("pack", RECORD, "sys.exit(sys.argv[2:] != ['--small'])", rehearsal=("--small",)),
    ]
    code, text = run_suite(parts, out)
    assert code == 0, text
    assert f"GPU suite on {NAME}" in " ".join(text.split())
    assert "neither a GPU's times nor its rates" in text
    (path,) = out.iterdir()
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record["stand_in"] is True and record["device"] == NAME


def test_a_record_of_the_stand_in_without_its_mark_fails(tmp_path: Path) -> None:
    unmarked = {key: value for key, value in RECORD.items() if key != "stand_in"}
    code, text = run_suite([scripted_part("copy", RECORD), scripted_part("pack", unmarked)], tmp_path / "out")
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
    records.pop("hooks")  # the host's own times, which the stand-in does tell
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
