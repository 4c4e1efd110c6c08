"""`bench pinned`: the recorded steps and the pool's bounds on them, torch's rule, the command and its verdicts."""

from __future__ import annotations

import json
import platform
import random
from pathlib import Path

import pytest
import torch

from chameleon_mm.bench import pinned
from chameleon_mm.bench._environment import processor_name
from chameleon_mm.bench._measure import Cell, Figure, Results, Waived
from chameleon_mm.device import resolve_device
from chameleon_mm.device.sim import SimDevice
from chameleon_mm.units import GIB, KIB, MIB
from tests.test_bench_themes import run_theme

NAMES = ("llama", "moe", "resnet", "varlen")


def path_of(name: str) -> Path:
    return pinned.TRACES / f"{name}.jsonl.gz"


# --- waste


def test_what_the_pool_promises_of_every_recorded_step() -> None:
    assert sorted(pinned.TRACES.iterdir()) == [path_of(name) for name in NAMES]
    assert sum(path.stat().st_size for path in pinned.TRACES.iterdir()) < MIB
    for name in NAMES:
        trace = pinned.read_trace(path_of(name))
        assert sum(nbytes for _, nbytes in trace) == 0, "every block is released, once"
        peak, reserved = pinned.played(trace)
        assert peak > 8 * GIB, name
        assert 1 <= reserved / peak <= pinned.MAX_RESERVED_RATIO == 1.10, name


def test_torchs_rule_keeps_what_it_reserved_for_a_size() -> None:
    # 700 takes the 1024 that 600 had; the last 600 comes while 700 has them.
    trace = [(0, 600), (1, 3000), (0, -600), (2, 700), (1, -3000), (3, 600), (2, -700), (3, -600)]
    assert pinned.reserved_by_torch(trace) == 1024 + 4096 + 1024
    assert [pinned.reserved_by_torch([(0, nbytes)]) for nbytes in (1, 512, 513, 4096, 4097)] == [1, 512, 1024, 4096, 8192]


@pytest.mark.gpu
def test_torchs_cache_goes_by_that_rule() -> None:
    def reserved() -> int:
        stats = torch.cuda.host_memory_stats()  # older releases call "reserved" what newer ones call "allocated"
        return int(stats.get("reserved_bytes.current", stats.get("allocated_bytes.current", 0)))

    torch.cuda.init()
    torch._C._host_emptyCache()
    draw, before, live, trace = random.Random(0), reserved(), dict[int, torch.Tensor](), list[tuple[int, int]]()
    for block in range(200):
        nbytes = draw.randrange(1, 64 * KIB)
        live[block] = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        trace.append((block, nbytes))
        if draw.random() < 0.7:
            gone = draw.choice(list(live))
            trace.append((gone, -live.pop(gone).numel()))
    assert reserved() - before == pinned.reserved_by_torch(trace)


# --- the command


@pytest.mark.slow
def test_a_run_writes_both_tables_and_every_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "read_trace", lambda path: [(0, 16 * MIB), (1, 24 * MIB), (0, -16 * MIB), (1, -24 * MIB)])
    target = tmp_path / "new" / "pinned.json"
    assert run_theme(pinned, "--device", "sim", "--repeats", "1", "--json", str(target)) == 0
    written = json.loads(target.read_text(encoding="utf-8"))
    assert written["schema"] == "chameleon_mm.bench.pinned/1"
    assert {"device", "simulated", "commit", "versions"} <= set(written)
    assert (written["device"], written["simulated"]) == (processor_name(), False), "no figure is the simulator's"
    rows = {part: {row["name"]: row["cells"] for row in table["rows"]} for part, table in written["tables"].items()}
    assert (set(rows["time"]), tuple(rows["waste"])) == ({"256 live", "100000 live"}, NAMES)
    for cells in rows["time"].values():
        assert all(cells[key]["median"] > 0 for key in ("pool", "event"))
        assert "CUDA GPU alone" in cells["torch"]["waived"]
    assert {key: cell["median"] for key, cell in rows["waste"]["moe"].items()} == {
        "peak": 40 / 1024, "pool": 1.0, "torch": 1.2,
    }  # fmt: skip
    assert len(written["bounds"]) == 4 + len(NAMES)
    assert "varlen: reserved / peak live" in {bound["name"] for bound in written["bounds"]}


def test_a_processor_is_called_what_the_kernel_calls_it(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    assert processor_name(info) == platform.machine()
    info.write_text("processor\t: 0\nmodel name\t: A B-1 @ 2 GHz\nprocessor\t: 1\nmodel name\t: another\n", encoding="utf-8")
    assert processor_name(info) == "A B-1 @ 2 GHz"


# --- the verdicts


def test_times_are_judged_where_the_fewest_blocks_live_and_their_growth_to_the_most(sim: SimDevice) -> None:
    table = Results("pinned time", sim, pinned._TIME)
    for live, pool, event in ((10, 4.0, 5.1), (100, 9.0, 6.0), (1000, 16.0, 5.1)):
        cells: dict[str, Cell] = {"torch": Waived("not measured")}
        cells |= {key: Figure.of([value], "us", simulated=False) for key, value in (("pool", pool), ("event", event))}
        table.add(f"{live} live", {"live": live}, cells)
    assert {bound.name: (bound.found, bound.held) for bound in pinned.time_bounds(table)} == {
        "PinnedPool, 10 live": (4.0, True),
        "PinnedPool, 1000 live over 10 live": (4.0, False),
        "PinnedPool with an event, 10 live": (5.1, False),
        "PinnedPool with an event, 1000 live over 10 live": (1.0, True),
    }


@pytest.mark.gpu
def test_everything_is_measured_on_a_gpu() -> None:
    report = pinned.measure(resolve_device("cuda"), live=[16], repeats=1)
    assert not report.failed
    assert all(bound.held for bound in report.bounds if bound.counted)
