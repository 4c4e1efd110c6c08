"""`bench copy` and `bench overlap` on the simulator: who is waived, what the figures must obey."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console

from chameleon_mm.bench import copy, overlap
from chameleon_mm.bench._overlap_work import Sample, Sizes
from chameleon_mm.bench._stand_in import NOT_MEASURED, is_stand_in
from chameleon_mm.bench.overlap import WAYS
from chameleon_mm.device import SimDevice, resolve_device
from chameleon_mm.units import MIB

SMALL = Sizes(gemm=640, stream_elements=4 * MIB, dtype=torch.float32, chunk_bytes=MIB, target_us=100)


def run_theme(module: ModuleType, *arguments: str) -> int:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return int(module.run(parser.parse_args(arguments), Console(quiet=True)))


def rows(results: Any) -> dict[str, Any]:
    return {row["name"]: row["cells"] for row in results.to_dict()["rows"]}


def is_measured(cell: dict[str, Any]) -> bool:
    """Whether it is a GPU's figure, or says that the CUDA stand-in has none."""
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
        "compute": [Sample(100.0, 100.0)], "copies": [Sample(50.0, 0.0)],
        "serial": [Sample(150.0, 100.0)], "together": [Sample(150.0, 125.0)],
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
    assert 0.3 < packed["kept"]["median"] <= 1.0  # at these sizes the host's time to pack is what limits
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
