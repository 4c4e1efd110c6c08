"""`bench pack`: every way delivers the same bytes, what is waived, which bounds are decided by what, the picture."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import torch
from rich.console import Console

from chameleon_mm.bench import _pack_host, pack
from chameleon_mm.bench._buffers import Buffers
from chameleon_mm.bench._measure import Figure, Results, Waived
from chameleon_mm.bench._pack_ways import NAMES, Layout, Ways, Work, is_exact, measured
from chameleon_mm.bench._report import Bound, Report, median_of, most, over
from chameleon_mm.bench._stand_in import NO_TRITON, NOT_MEASURED, is_stand_in
from chameleon_mm.bench._svg import rates_svg
from chameleon_mm.device import Device, SimDevice, resolve_device
from chameleon_mm.device.packing import packed_offsets
from chameleon_mm.device.protocols import Event
from chameleon_mm.transfer import Path as Route
from chameleon_mm.transfer import Thresholds
from chameleon_mm.units import KIB, MIB

CASES = [pack.Case(4 * KIB, 8, "contiguous"), pack.Case(4 * KIB, 4, "strided"), pack.Case(MIB, 1, "contiguous")]


def figure(value: float) -> Figure:
    return Figure.of([value], "GB/s", simulated=False)


@pytest.mark.parametrize("layout", ["contiguous", "strided"])
@pytest.mark.parametrize("nbytes", [4 * KIB, 256 * KIB, 2 * MIB])
def test_every_way_delivers_the_bytes(device: Device, layout: Layout, nbytes: int) -> None:
    assert {Thresholds().path(n) for n in (4 * KIB, 256 * KIB, 2 * MIB)} == {Route.PACK, Route.BATCH, Route.DIRECT}
    with Buffers(device) as buffers:
        work = Work.of(device, buffers, nbytes, 3, layout)
        ways = Ways(device, work).by_name()
        assert set(ways) == set(NAMES)
        running = {name: way for name, way in ways.items() if not isinstance(way, Waived)}
        assert "ours" in running
        assert {name for name, way in running.items() if not is_exact(device, work, way, work.expected)} == set()


def test_more_tensors_than_a_carrier_holds_take_several(sim: SimDevice) -> None:
    with Buffers(sim) as buffers:
        work = Work.of(sim, buffers, 64 * KIB, 150, "contiguous")
        ours = Ways(sim, work).by_name()["ours"]
        assert not isinstance(ours, Waived)
        assert is_exact(sim, work, ours, work.expected)
        assert [span.nbytes for span in sim.copy_spans("d2h")][-1] == (150 - 2 * 64) * 64 * KIB


def test_a_way_that_loses_a_byte_is_found(sim: SimDevice) -> None:
    with Buffers(sim) as buffers:
        work = Work.of(sim, buffers, 4 * KIB, 2, "contiguous")
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


def test_a_strided_tensor_is_a_quarter_of_its_storage(sim: SimDevice) -> None:
    with Buffers(sim) as buffers:
        work = Work.of(sim, buffers, 4 * KIB, 2, "strided")
        assert [(tuple(t.shape), t.stride()) for t in work.tensors] == [((32, 128), (512, 1))] * 2
        assert work.tensors[0].untyped_storage().nbytes() == 4 * 2 * 4 * KIB
        assert torch.equal(work.expected[: 4 * KIB].view(32, 128), work.tensors[0])


def test_a_simulated_rate_keeps_within_the_link(sim: SimDevice) -> None:
    with Buffers(sim) as buffers:
        work = Work.of(sim, buffers, 16 * KIB, 32, "contiguous")
        ways = {name: way for name, way in Ways(sim, work).by_name().items() if not isinstance(way, Waived)}
        samples = {name: measured(sim, work, way) for name, way in ways.items()}
    assert set(samples) == {"ours", "pack", "loop", "batch"}
    assert all(0 < sample.gbps < sim.spec.d2h_gbps for sample in samples.values())
    assert samples["loop"].host_us >= sim.cost.copy_us
    assert samples["pack"].host_us < samples["loop"].host_us


def test_the_simulators_figures_stand_in_its_columns_and_the_rest_is_waived(sim: SimDevice) -> None:
    report = pack.measure(sim, CASES, repeats=1, counts=(4,))
    for table in (report.tables["rates"], report.tables["host"]):
        assert [row.name for row in table.rows] == ["8 x 4 KiB", "4 x 4 KiB, strided", "1 x 1 MiB"]
        for row in table.rows:
            for name in NAMES:
                assert isinstance(row.cells[name], Waived)
            assert isinstance(row.cells["sim_ours"], Figure)
        shown = [{name for name in NAMES if isinstance(row.cells["sim_" + name], Figure)} for row in table.rows]
        assert shown == [{"ours", "pack", "loop", "batch"}, {"ours"}, {"ours", "loop", "batch"}]
    first = report.bounds[0]
    assert (first.name, first.held, first.counted) == ("ways that delivered other bytes", True, True)
    decided = [bound.name for bound in report.bounds if bound.held is not None]
    assert decided == [first.name, "host us per packed tensor, 4 of them, before the launch"]


def test_what_does_not_fit_is_waived_and_the_rest_measured(sim: SimDevice) -> None:
    small = SimDevice(hbm_bytes=4 * MIB)
    report = pack.measure(small, [pack.Case(8 * MIB, 2, "contiguous"), CASES[0]], repeats=1, counts=(4,))
    lost, kept = report.tables["rates"].rows
    assert isinstance(lost.cells["sim_ours"], Waived)
    assert isinstance(kept.cells["sim_ours"], Figure)
    assert small.allocated_bytes() == 0


def rates_of(ours: float, loop: float, batch: float, single: tuple[float, float]) -> Results:
    sim = SimDevice()
    table = Results("pack", sim, pack._COLUMNS)
    waived: dict[str, Any] = {column.key: Waived("not here") for column in table.columns}
    for size in (4 * KIB, 16 * KIB):
        params = {"bytes": size, "tensors": 100, "layout": "contiguous"}
        table.add("many", params, waived | {"ours": figure(ours), "loop": figure(loop), "batch": figure(batch)})
    cells = waived | {"ours": figure(single[0]), "loop": figure(single[1])}
    table.add("one", {"bytes": 16 * MIB, "tensors": 1, "layout": "contiguous"}, cells)
    return table


@pytest.mark.parametrize(
    ("rates", "missed"),
    [
        (rates_of(45.0, 4.0, 20.0, (55.0, 55.0)), []),
        (rates_of(45.0, 5.0, 20.0, (55.0, 55.0)), ["loop", "loop"]),
        (rates_of(45.0, 4.0, 25.0, (55.0, 55.0)), ["batch", "batch"]),
        (rates_of(45.0, 4.0, 20.0, (54.0, 55.0)), ["best peer"]),
        (rates_of(40.0, 4.0, 20.0, (55.0, 55.0)), ["share of the link"]),
    ],
)
def test_bounds_on_rates(rates: Results, missed: list[str]) -> None:
    names = [bound.name for bound in pack.rate_bounds(SimDevice(), rates) if not bound.held]
    assert len(names) == len(missed)
    assert all(part in name for part, name in zip(missed, names, strict=True))


def test_host_time_before_a_launch_is_measured_anywhere(sim: SimDevice) -> None:
    table = _pack_host.measure(sim, (2, 5), repeats=1)
    assert [row.name for row in table.rows] == ["2 tensors", "5 tensors"]
    for row in table.rows:
        values = {key: median_of(cell) for key, cell in row.cells.items()}
        assert set(values) == {"same", "moved", "all", "back", "build"}
        assert all(isinstance(value, float) and value > 0 for value in values.values())


def test_all_of_it_renews_one_table_and_launches_nothing() -> None:
    stream = _pack_host._stream()
    tensors = [[torch.ones(KIB, dtype=torch.uint8) for _ in range(3)] for _ in range(2)]
    offsets, staging = packed_offsets([KIB] * 3).offsets, _pack_host._aligned(4 * KIB)
    staging.zero_()
    for batch in tensors:
        stream.pack(staging, batch, offsets)
        stream.unpack(batch, staging, offsets)
    assert not staging.any()
    assert all(bool(t.all()) for batch in tensors for t in batch)
    plan = stream._plans.plan("pack", staging, tensors[0], offsets)
    assert plan is not None
    assert plan._tables[0].words[0] == tensors[1][0].data_ptr()
    with pytest.raises(ValueError, match="within the staging buffer's 1024 bytes"):
        stream.unpack(tensors[0], staging[:KIB], offsets)
    with pytest.raises(ValueError, match="tensor 1 lies in it"):
        stream.pack(staging, [tensors[0][0], staging[KIB : 2 * KIB], tensors[0][2]], offsets)


# --- the command


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    pack.add_arguments(parser)
    return pack.run(parser.parse_args(arguments), Console(quiet=True))


def test_the_command_writes_what_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "_CPU_SINGLES_BYTES", (MIB,))
    files = {name: tmp_path / "new" / f"pack.{name}" for name in ("json", "md", "svg")}
    options = ["--json", str(files["json"]), "--markdown", str(files["md"]), "--svg", str(files["svg"])]
    assert run("--device", "sim", "--sizes", "4KiB,64KiB", "--repeats", "1", *options) == 0
    written = json.loads(files["json"].read_text(encoding="utf-8"))
    assert (written["theme"], written["simulated"], set(written["tables"])) == ("pack", True, {"rates", "host", "prepare"})
    assert all(all(row["exact"].values()) for row in written["tables"]["rates"]["rows"])
    assert "0 bounds held" not in written["headline"]
    assert "### bounds" in files["md"].read_text(encoding="utf-8")
    picture = files["svg"].read_text(encoding="utf-8")
    assert "simulated, no GPU took part" in picture
    assert len(ET.fromstring(picture).findall("{*}polyline")) == 4


@pytest.mark.parametrize("arguments", [["--sizes", "4000"], ["--sizes", "0"], ["--repeats", "0"], ["--device", "tpu"]])
def test_bad_usage_is_refused(arguments: list[str]) -> None:
    with pytest.raises(ValueError, match="expected"):
        run("--device", "sim", *arguments)


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


def test_a_picture_has_a_line_for_each_curve_and_higher_is_up() -> None:
    root = ET.fromstring(rates_svg("a < b", {"one": [(KIB, 10.0), (MIB, 50.0)], "two": [(KIB, 5.0)]}))
    lines = [line.get("points", "") for line in root.findall("{*}polyline")]
    (left, low), (right, high) = ([float(part) for part in point.split(",")] for point in lines[0].split())
    assert len(lines) == 2
    assert left < right
    assert high < low
    assert {"a < b", "1 KiB", "1 MiB", "0", "50", "one", "two"} <= {text.text for text in root.findall("{*}text")}
    with pytest.raises(ValueError, match="expected a point"):
        rates_svg("nothing", {"one": []})


@pytest.mark.gpu
def test_a_gpus_figures_stand_in_the_measured_columns() -> None:
    report = pack.measure(resolve_device("cuda"), CASES, repeats=1, counts=(4,))
    rows = report.tables["rates"].rows
    assert report.bounds[0].held
    if is_stand_in(report.header["device"]):
        reasons = {name: cell.reason for name in NAMES if isinstance(cell := rows[0].cells[name], Waived)}
        assert reasons == dict.fromkeys(NAMES, NOT_MEASURED) | {"zero": NO_TRITON}
        return
    assert all(isinstance(rows[0].cells[name], Figure) for name in NAMES)
    assert {name for name in NAMES if isinstance(rows[1].cells[name], Waived)} == {"batch"}
    assert {name for name in NAMES if isinstance(rows[2].cells[name], Waived)} == {"pack", "cat"}
