"""`bench hooks`: which tensors move, what is taken from what, what is said of the device beneath. No test looks at times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chameleon_mm.bench import hooks
from chameleon_mm.bench._hooks_peers import BY_HAND, DROPPED, IDENTITY, Sample
from chameleon_mm.bench._measure import Figure, Results, Waived
from chameleon_mm.bench._stand_in import STAND_IN, is_stand_in
from chameleon_mm.device import Device, SimDevice
from tests.test_bench_copies import run_theme

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
            # By plan: all but the share that the budget leaves, and some that a plan keeps beside the first and the last.
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
    # What is measured is the other test's: here it would only take time.
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
