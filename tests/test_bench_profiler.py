"""`bench profiler`: that every way watches the same step, and that differences and bounds are worked out right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chameleon_mm.bench import profiler
from chameleon_mm.bench._measure import Figure, Waived
from chameleon_mm.bench.profiler import CALL_WATCH, DETAILED, HOOKS, LIGHT, NEW_STEP, NO_HOOKS, PASS_THROUGH, chain, peers
from chameleon_mm.device import SimDevice
from chameleon_mm.record.light_profiler import NOT_A_USE, LightProfiler, StepRecord
from tests.test_bench_copies import run_theme

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
