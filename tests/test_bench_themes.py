"""Benches of copies, overlap, hooks, profilers and packing on the simulator: no test looks at a real time."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import torch
from rich.console import Console

from chameleon_mm.bench import copy, hooks, overlap, pack, profiler
from chameleon_mm.bench._buffers import Buffers
from chameleon_mm.bench._hooks_peers import BY_HAND, DROPPED, IDENTITY, Sample
from chameleon_mm.bench._measure import Column, Figure, Results, Waived
from chameleon_mm.bench._options import OPTIONS
from chameleon_mm.bench._overlap_work import Sample as Overlapped
from chameleon_mm.bench._overlap_work import Sizes
from chameleon_mm.bench._pack_ways import NAMES, Ways, Work, is_exact
from chameleon_mm.bench._report import Bound, Report, median_of, most, over
from chameleon_mm.bench._stand_in import NOT_MEASURED, STAND_IN, is_stand_in
from chameleon_mm.bench.overlap import WAYS
from chameleon_mm.bench.profiler import CALL_WATCH, DETAILED, HOOKS, LIGHT, NEW_STEP, NO_HOOKS, PASS_THROUGH, chain, peers
from chameleon_mm.device import Device, SimDevice, resolve_device
from chameleon_mm.device.protocols import Event
from chameleon_mm.record.light_profiler import NOT_A_USE, LightProfiler, StepRecord
from chameleon_mm.swap.swap_outs import PACK_BELOW_BYTES
from chameleon_mm.units import KIB, MIB
from tests._fakes import UnsimulatedDevice

# --- bench copy, bench overlap: who is waived, what the figures must obey


SMALL = Sizes(gemm=640, stream_elements=4 * MIB, dtype=torch.float32, chunk_bytes=MIB, target_us=100)


def run_theme(module: ModuleType, *arguments: str) -> int:
    parser = argparse.ArgumentParser()
    OPTIONS[module.__name__.rpartition(".")[2]](parser)
    return int(module.run(parser.parse_args(arguments), Console(quiet=True)))


def rows(results: Any) -> dict[str, Any]:
    return {row["name"]: row["cells"] for row in results.to_dict()["rows"]}


def is_measured(cell: dict[str, Any]) -> bool:
    """True if the cell is a GPU's figure, or says that the CUDA stand-in has none."""
    if is_stand_in(resolve_device("cuda").name):
        return cell == {"waived": NOT_MEASURED}
    return cell.get("simulated") is False


def test_copy_writes_what_it_measured(tmp_path: Path) -> None:
    target = tmp_path / "copy.json"
    assert run_theme(copy, "--device", "sim:a100", "--sizes", "64KiB,1MiB", "--repeats", "2", "--json", str(target)) == 0
    written = json.loads(target.read_text(encoding="utf-8"))
    assert (written["theme"], written["simulated"]) == ("copy", True)
    assert [row["name"] for row in written["rows"]] == [
        f"{way} {size}" for size in ("64.0 KiB", "1.00 MiB") for way in ("H2D", "D2H", "both ways")
    ]


def test_simulated_copies_keep_within_the_link_and_what_is_not_measured_is_waived() -> None:
    sim, ways = SimDevice(hbm_bytes=16 * MIB), ("H2D", "D2H", "both ways")
    cells = rows(copy.measure(sim, [4 * MIB, 32 * MIB], repeats=2))
    h2d, d2h, both = (cells[f"{way} 4.00 MiB"]["pinned"]["median"] for way in ways)
    assert 0.8 * sim.spec.h2d_gbps < h2d <= sim.spec.h2d_gbps
    assert 0.8 * sim.spec.d2h_gbps < d2h <= sim.spec.d2h_gbps
    assert max(h2d, d2h) < both <= sim.spec.duplex_gbps
    for way in ways:
        assert cells[f"{way} 4.00 MiB"]["pinned"]["simulated"] is True
        assert all("waived" in cells[f"{way} 4.00 MiB"][key] for key in ("pageable", "ratio"))
        assert all("waived" in cell for cell in cells[f"{way} 32.0 MiB"].values()), "it does not fit"
    assert sim.allocated_bytes() == 0


def test_a_device_that_overlaps_nothing_hides_nothing() -> None:
    rounds = {
        "compute": [Overlapped(100.0, 100.0)], "copies": [Overlapped(50.0, 0.0)],
        "serial": [Overlapped(150.0, 100.0)], "together": [Overlapped(150.0, 125.0)],
    }  # fmt: skip
    cells = overlap.derive(SimDevice(), rounds, MIB)
    hidden, slowdown = cells["hidden"].to_dict(), cells["slowdown"].to_dict()
    assert (hidden["median"], slowdown["median"]) == (0.0, 1.25)


def test_simulated_copies_cost_the_host_and_hide_but_for_that() -> None:
    report = overlap.measure(SimDevice(), SMALL, repeats=1).to_dict()
    assert all(bound["held"] is None for bound in report["bounds"])
    assert report["simulated"] is True
    tables = {part: {row["name"]: row["cells"] for row in table["rows"]} for part, table in report["tables"].items()}
    assert {part: list(rows) for part, rows in tables.items()} == {
        "hidden": [f"{work}, {ways}" for work in ("gemm", "mul") for ways in WAYS],
        "saturated": [f"gemm, {ways}" for ways in WAYS],
        "packed": ["gemm, packed D2H"],
    }
    assert all(cell["simulated"] for table in tables.values() for cells in table.values() for cell in cells.values())
    for cells in tables["hidden"].values():
        assert 1.0 <= cells["slowdown"]["median"] < 1.25
        assert 0.5 < cells["hidden"]["median"] <= 1.0
    for cells in tables["saturated"].values():  # the link never pauses
        assert 1.0 <= cells["slowdown"]["median"] < 1.25
        assert 0.9 < cells["kept"]["median"] <= 1.0
        assert cells["gbps"]["median"] > 30
    (packed,) = tables["packed"].values()
    assert 0.3 < packed["kept"]["median"] <= 1.0  # at these sizes the host's time to pack is the limit
    assert packed["slowdown"]["median"] >= 1.0
    assert packed["gbps"] == tables["saturated"]["gemm, D2H"]["gbps"]


@pytest.mark.gpu
def test_a_gpus_overlap_decides_the_bounds() -> None:
    device = resolve_device("cuda")
    report = overlap.measure(device, overlap.sizes_for(device) if is_stand_in(device.name) else SMALL, repeats=1)
    assert all((bound.held is None) == is_stand_in(device.name) for bound in report.bounds)
    for table in report.tables.values():
        assert all(is_measured(cell) for row in rows(table).values() for cell in row.values())


@pytest.mark.gpu
def test_a_gpus_copies_are_measured() -> None:
    cells = rows(copy.measure(resolve_device("cuda"), [1 * MIB], repeats=1))
    for way in ("H2D", "D2H"):
        row = cells[f"{way} 1.00 MiB"]
        assert all(is_measured(row[key]) for key in ("pinned", "pageable", "ratio"))
    both = cells["both ways 1.00 MiB"]
    assert is_measured(both["pinned"])
    assert all("waived" in both[key] for key in ("pageable", "ratio"))


# --- bench hooks: which tensors move, what is taken from what, what is said of the device beneath; no test looks at times


STAYS = ("stays, save_on_cpu", "stays, session")
LEAVES = (
    BY_HAND,
    "moves by the rule, alone",
    "moves by the rule, packed",
    "moves by plan, alone",
    "moves by plan, packed",
    DROPPED,
)
SAVES = 50


def test_a_row_is_taken_from_hooks_that_do_nothing_round_by_round() -> None:
    identity = [Sample(10.0, 20.0, 0.0), Sample(20.0, 40.0, 0.0)]
    ours = [Sample(25.0, 65.0, 0.5), Sample(50.0, 70.0, 0.5)]
    row = hooks.cells("stays", ours, identity)
    assert {key: cell.median for key, cell in row.items() if isinstance(cell, Figure)} == {
        "save": 37.5,
        "use": 67.5,
        "save_over": (15 + 30) / 2,
        "use_over": (45 + 30) / 2,
        "both_over": (60 + 60) / 2,
        "ratio": (90 / 30 + 120 / 60) / 2,
        "left": 50.0,
    }
    assert {key for key, cell in hooks.cells(IDENTITY, identity, identity).items() if isinstance(cell, Waived)} == {
        "save_over", "use_over", "both_over", "ratio",
    }  # fmt: skip


@pytest.mark.slow
def test_every_way_is_measured_and_what_it_says_leaves_the_device(device: Device) -> None:
    results = hooks.measure(device, saves=SAVES, repeats=1)
    rows = {row.name: row.cells for row in results.rows}
    assert list(rows) == [IDENTITY, *STAYS, *LEAVES]
    left = {name: cells["left"] for name, cells in rows.items()}
    for name, cell in left.items():
        assert isinstance(cell, Figure)
        if name in LEAVES:
            # A plan moves all but the share that the budget leaves, and may keep some besides the first and the last.
            assert 50 < cell.median <= 100, name
        else:
            assert cell.median == 0, name
    for name in (*STAYS, *LEAVES):
        assert all(isinstance(cell, Figure) for cell in rows[name].values())


def test_bounds_are_told_for_what_was_measured(sim: SimDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = [Sample(1.0, 1.0, 0.0)]
    results = Results("hooks", sim, hooks.COLUMNS)
    for name, sample in (("stays, session", Sample(3.0, 2.5, 0.0)), ("moves by plan, alone", Sample(15.0, 9.0, 1.0))):
        results.add(name, {}, hooks.cells(name, [sample], identity))
    assert [bound.held for bound in hooks.bounds(results, sim)] == [None] * 3  # most of it are the simulator's accounts
    monkeypatch.setattr(SimDevice, "simulated", False)
    told = hooks.bounds(results, sim)
    assert [(bound.name, bound.found, bound.held) for bound in told] == [
        ("stays, session: save and use over hooks that do nothing", 3.5, True),
        ("moves by plan, alone: save over a hook that does nothing", 14.0, False),
        ("moves by plan, alone: use over a hook that does nothing", 8.0, True),
    ]


def test_what_is_written_says_what_lies_beneath(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Another test checks the measurements; here they would only take time.
    monkeypatch.setattr(hooks, "peers", lambda device, saves: {IDENTITY: lambda: Sample(1.0, 1.0, 0.0)})
    target = tmp_path / "hooks.json"
    name = "sim" if device.simulated else "cuda"
    assert run_theme(hooks, "--device", name, "--saves", str(SAVES), "--repeats", "1", "--json", str(target)) == 0
    written: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
    assert (written["theme"], written["stand_in"]) == ("hooks", is_stand_in(device.name))
    assert {"commit", "versions", "device", "simulated"} <= set(written)
    assert list(written["tables"]) == ["saved tensors"]
    for table in written["tables"].values():
        assert not any(column["simulated"] for column in table["columns"])
    notes = written["tables"]["saved tensors"]["notes"]
    beneath = next(note for note in notes if note.startswith("beneath the hooks"))
    expected = "the simulator" if device.simulated else STAND_IN if is_stand_in(device.name) else "CUDA's runtime"
    assert expected in beneath


# --- bench profiler: every way watches the same step, differences and bounds are worked out right


ROWS = [NO_HOOKS, HOOKS, LIGHT, NEW_STEP, PASS_THROUGH, CALL_WATCH, DETAILED]


@pytest.mark.parametrize("name", ROWS)
def test_every_way_runs_the_step_once(name: str, sim: SimDevice) -> None:
    step = chain(sim, 5)
    runs = []

    def counted() -> None:
        runs.append(name)
        step()

    assert peers(sim)[name](counted) >= 0
    assert runs == [name]


def test_the_light_profiler_sees_all_of_the_step(sim: SimDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    records: list[StepRecord] = []

    class Kept(LightProfiler):
        def end_step(self) -> StepRecord:
            records.append(super().end_step())
            return records[-1]

    monkeypatch.setattr(profiler, "LightProfiler", Kept)
    step, watched = chain(sim, 17), peers(sim)
    watched[LIGHT](step)
    (record,) = records
    assert (record.save_of.count(NOT_A_USE), record.num_hooks) == (17, 34)
    watched[LIGHT](step)
    assert records[1] is record  # it was followed to its end
    for _ in range(2):
        watched[NEW_STEP](step)
    assert records[2].features == records[3].features == record.features
    assert records[2] is not records[3]
    assert record not in records[2:]


def test_differences_are_taken_within_a_round() -> None:
    taken = {HOOKS: [10.0, 50.0, 10.0], LIGHT: [20.0, 70.0, 15.0], DETAILED: [110.0, 250.0, 310.0]}
    rows = {name: profiler.cells(name, taken, 10) for name in taken}
    over = rows[LIGHT]["over"]
    assert isinstance(over, Figure)
    assert (over.median, over.count, over.simulated) == (1.0, 3, False)
    assert isinstance(rows[HOOKS]["over"], Waived)
    save, share = profiler.bounds(rows)
    assert (save.found, save.held, save.counted) == (1.0, True, False)
    assert (share.found, share.held) == (1 - 1.0 / 20.0, True)


def test_the_command_writes_every_row(tmp_path: Path) -> None:
    target = tmp_path / "profiler.json"
    assert run_theme(profiler, "--device", "sim", "--saves", "5", "--repeats", "2", "--json", str(target)) == 0
    written = json.loads(target.read_text(encoding="utf-8"))
    assert written["theme"] == "profiler"
    table = written["tables"]["host time"]
    assert [row["peer"] for row in table["rows"]] == ROWS
    assert all(column["simulated"] is False for column in table["columns"])
    assert [bound["limit"] for bound in written["bounds"]] == [1.2, 0.9]


# --- bench pack: every way delivers the same bytes, what is waived, which bounds are decided by what, the picture


CASES = [pack.Case(4 * KIB, 8), pack.Case(MIB, 1)]


def figure(value: float) -> Figure:
    return Figure.of([value], "GB/s", simulated=False)


@pytest.mark.parametrize("nbytes", [4 * KIB, 256 * KIB, 2 * MIB])
def test_every_way_delivers_the_bytes(device: Device, nbytes: int) -> None:
    assert [n < PACK_BELOW_BYTES for n in (4 * KIB, 256 * KIB, 2 * MIB)] == [True, False, False]
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


def test_the_simulators_figures_are_marked_and_the_rest_is_waived() -> None:
    small = SimDevice(hbm_bytes=4 * MIB)
    report = pack.measure(small, [*CASES, pack.Case(8 * MIB, 2)], repeats=1)
    for table in (report.tables["rates"], report.tables["host"]):
        assert [row.name for row in table.rows] == ["8 x 4 KiB", "1 x 1 MiB", "2 x 8 MiB"]
        for row in table.rows[:2]:
            assert isinstance(ours := row.cells["ours"], Figure) and ours.simulated
        shown = [{name for name in NAMES if isinstance(row.cells[name], Figure)} for row in table.rows]
        assert shown == [{"ours", "pack", "loop"}, {"ours", "loop"}, set()], "the last does not fit"
    first = report.bounds[0]
    assert (first.name, first.held, first.counted) == ("ways that delivered other bytes", True, True)
    decided = [bound.name for bound in report.bounds if bound.held is not None]
    assert decided == [first.name]
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
