"""`bench pack`: every way delivers the same bytes, what is waived, which bounds are decided by what, the picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from chameleon_mm.bench import pack
from chameleon_mm.bench._buffers import Buffers
from chameleon_mm.bench._measure import Column, Figure, Results, Waived
from chameleon_mm.bench._pack_ways import NAMES, Ways, Work, is_exact
from chameleon_mm.bench._report import Bound, Report, median_of, most, over
from chameleon_mm.bench._stand_in import NOT_MEASURED, is_stand_in
from chameleon_mm.device import Device, SimDevice, resolve_device
from chameleon_mm.device.protocols import Event
from chameleon_mm.swap.copy_queue import Thresholds
from chameleon_mm.units import KIB, MIB
from tests._fakes import UnsimulatedDevice
from tests.test_bench_copies import run_theme

CASES = [pack.Case(4 * KIB, 8), pack.Case(MIB, 1)]


def figure(value: float) -> Figure:
    return Figure.of([value], "GB/s", simulated=False)


@pytest.mark.parametrize("nbytes", [4 * KIB, 256 * KIB, 2 * MIB])
def test_every_way_delivers_the_bytes(device: Device, nbytes: int) -> None:
    assert [Thresholds().packs(n) for n in (4 * KIB, 256 * KIB, 2 * MIB)] == [True, False, False]
    with Buffers(device) as buffers:
        work = Work.of(buffers, nbytes, 3)
        ways = Ways(device, work).by_name()
        assert set(ways) == set(NAMES)
        running = {name: way for name, way in ways.items() if not isinstance(way, Waived)}
        assert "ours" in running
        assert {name for name, way in running.items() if not is_exact(device, work, way, work.expected)} == set()


def test_a_way_that_loses_a_byte_is_found(sim: SimDevice) -> None:
    with Buffers(sim) as buffers:
        work = Work.of(buffers, 4 * KIB, 2)
        loop = Ways(sim, work).by_name()["loop"]
        assert not isinstance(loop, Waived)

        def careless(start: Event) -> float:
            host_us = loop(start)
            sim.synchronize()
            work.host[-1] ^= 1
            return host_us

        expected = work.expected
        assert is_exact(sim, work, loop, expected)
        assert not is_exact(sim, work, careless, expected)


def test_the_simulators_figures_are_marked_and_the_rest_is_waived(sim: SimDevice) -> None:
    report = pack.measure(sim, CASES, repeats=1)
    for table in (report.tables["rates"], report.tables["host"]):
        assert [row.name for row in table.rows] == ["8 x 4 KiB", "1 x 1 MiB"]
        for row in table.rows:
            assert isinstance(ours := row.cells["ours"], Figure) and ours.simulated
        shown = [{name for name in NAMES if isinstance(row.cells[name], Figure)} for row in table.rows]
        assert shown == [{"ours", "pack", "loop"}, {"ours", "loop"}]
    first = report.bounds[0]
    assert (first.name, first.held, first.counted) == ("ways that delivered other bytes", True, True)
    decided = [bound.name for bound in report.bounds if bound.held is not None]
    assert decided == [first.name]


def test_what_does_not_fit_is_waived_and_the_rest_measured(sim: SimDevice) -> None:
    small = SimDevice(hbm_bytes=4 * MIB)
    report = pack.measure(small, [pack.Case(8 * MIB, 2), CASES[0]], repeats=1)
    lost, kept = report.tables["rates"].rows
    assert isinstance(lost.cells["ours"], Waived)
    assert isinstance(kept.cells["ours"], Figure)
    assert small.allocated_bytes() == 0


def rates_of(ours: float, loop: float, single: tuple[float, float]) -> Results:
    table = Results("pack", SimDevice(), [Column(key=key, title=key, formula="as said") for key in NAMES])
    waived: dict[str, Any] = {column.key: Waived("not here") for column in table.columns}
    for size in (4 * KIB, 16 * KIB):
        params = {"bytes": size, "tensors": 100}
        table.add("many", params, waived | {"ours": figure(ours), "loop": figure(loop)})
    cells = waived | {"ours": figure(single[0]), "loop": figure(single[1])}
    table.add("one", {"bytes": 16 * MIB, "tensors": 1}, cells)
    return table


@pytest.mark.parametrize(
    ("rates", "missed"),
    [
        (rates_of(45.0, 4.0, (55.0, 55.0)), []),
        (rates_of(45.0, 5.0, (55.0, 55.0)), ["loop", "loop"]),
        (rates_of(45.0, 4.0, (54.0, 55.0)), ["one: ours over a loop"]),
        (rates_of(40.0, 4.0, (55.0, 55.0)), ["share of the link"]),
    ],
)
def test_bounds_on_rates(rates: Results, missed: list[str]) -> None:
    names = [bound.name for bound in pack.rate_bounds(UnsimulatedDevice(), rates) if not bound.held]
    assert len(names) == len(missed)
    assert all(part in name for part, name in zip(missed, names, strict=True))


# --- the command


def test_the_command_writes_what_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "_CPU_SINGLES_BYTES", (MIB,))
    files = {name: tmp_path / "new" / f"pack.{name}" for name in ("json", "svg")}
    options = ["--json", str(files["json"]), "--svg", str(files["svg"])]
    assert run_theme(pack, "--device", "sim", "--sizes", "4KiB,64KiB", "--repeats", "1", *options) == 0
    written = json.loads(files["json"].read_text(encoding="utf-8"))
    assert (written["theme"], written["simulated"], set(written["tables"])) == ("pack", True, {"rates", "host"})
    assert all(all(row["exact"].values()) for row in written["tables"]["rates"]["rows"])
    assert "0 bounds held" not in written["headline"]
    picture = files["svg"].read_text(encoding="utf-8")
    assert "simulated, no GPU took part" in picture
    words = {"".join(text.itertext()) for text in ET.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")}
    assert {"ours", "pack", "loop", "GB/s", "size of one tensor", "4 KiB", "64 KiB"} <= words


# --- what reports and pictures are made of


def test_a_bound_is_held_missed_or_waived() -> None:
    least = Bound(name="rate", limit=2.0, found=3.0, unit="x", at_most=False)
    missed = Bound(name="time", limit=2.0, found=3.0, unit="us", counted=True)
    waived = Bound(name="rate", limit=2.0, found=Waived("no GPU"))
    assert [bound.held for bound in (least, missed, waived)] == [True, False, None]
    assert [str(bound) for bound in (least, missed, waived)] == [
        "held      rate: 3 x, at least 2", "NOT HELD  time: 3 us, at most 2", "WAIVED    rate: no GPU"
    ]  # fmt: skip
    header = {"theme": "x"}
    assert Report(header=header, tables={}, bounds=[least, waived]).headline == "1 of 2 bounds held, 1 waived"
    failed = Report(header=header, tables={}, bounds=[missed])
    assert (failed.failed, failed.headline) == (True, "0 of 1 bounds held, 0 waived; NOT held: time")
    assert not Report(header=header, tables={}, bounds=[Bound(name="time", limit=2.0, found=3.0)]).failed


def test_arithmetic_on_what_was_not_measured_is_waived() -> None:
    lost = Waived("no GPU")
    assert (over(6.0, 3.0), over(lost, 3.0), over(6.0, lost)) == (2.0, lost, lost)
    assert (most([1.0, lost, 3.0]), most([lost])) == (3.0, lost)
    assert (median_of(figure(5.0)), median_of(lost)) == (5.0, lost)


@pytest.mark.gpu
def test_a_gpus_figures_are_measured() -> None:
    report = pack.measure(resolve_device("cuda"), CASES, repeats=1)
    rows = report.tables["rates"].rows
    assert report.bounds[0].held
    if is_stand_in(report.header["device"]):
        reasons = {name: cell.reason for name in NAMES if isinstance(cell := rows[0].cells[name], Waived)}
        assert reasons == dict.fromkeys(NAMES, NOT_MEASURED)
        return
    assert all(isinstance(rows[0].cells[name], Figure) for name in NAMES)
    assert {name for name in NAMES if isinstance(rows[1].cells[name], Waived)} == {"pack"}
