"""`bench profiler`: that every way watches the same step, and that shares and bounds are worked out right."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from chameleon_mm.bench import _profiler_peers as ways
from chameleon_mm.bench import profiler
from chameleon_mm.bench._llama import Shape
from chameleon_mm.bench._measure import Figure, Waived
from chameleon_mm.bench._profiler_peers import (
    DETAILED,
    HOOKS,
    LIGHT,
    NEW_STEP,
    NO_HOOKS,
    PASS_THROUGH,
    TORCH,
    chain,
    facts_of,
    layers,
    peers,
)
from chameleon_mm.device import SimDevice
from chameleon_mm.profiler.light import LightProfiler
from chameleon_mm.profiler.step_record import StepRecord

ROWS = [NO_HOOKS, HOOKS, LIGHT, NEW_STEP, PASS_THROUGH, DETAILED, TORCH]


def small(num_layers: int) -> Shape:
    return Shape(layers=num_layers, width=16, heads=2, ffn=24, seq=4, batch=1, dtype="bfloat16")


# --- what is watched


def test_the_chain_saves_as_often_as_it_says(sim: SimDevice) -> None:
    facts = facts_of(chain(sim, 17))
    assert (facts.saves, facts.storages) == (17, 17)


def test_each_layer_has_the_same_to_watch(sim: SimDevice) -> None:
    one, two, three = (facts_of(layers(sim, small(count))) for count in (1, 2, 3))
    assert three.saves - two.saves == two.saves - one.saves == one.saves
    assert three.operators - two.operators == two.operators - one.operators
    # As a decoder of this shape has it: RMS norms in fp32, rotations, SwiGLU.
    assert 38 <= one.saves <= 44
    assert 200 <= two.operators - one.operators <= 300
    assert one.storages < one.saves


# --- every way


@pytest.mark.parametrize("name", ROWS)
def test_every_way_runs_the_step_once_and_leaves_nothing_behind(name: str, sim: SimDevice) -> None:
    step = chain(sim, 5)
    runs = []

    def counted() -> None:
        runs.append(name)
        step()

    us = peers(sim)[name](counted)
    assert runs == [name]
    assert us >= 0
    assert facts_of(step).saves == 5


def test_the_light_profiler_sees_all_of_the_step(sim: SimDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    records: list[StepRecord] = []

    class Kept(LightProfiler):
        def end_step(self) -> StepRecord:
            records.append(super().end_step())
            return records[-1]

    monkeypatch.setattr(ways, "LightProfiler", Kept)
    stack, watched = layers(sim, small(2)), peers(sim)
    watched[LIGHT](stack)
    (record,) = records
    assert record.num_saves == facts_of(stack).saves
    assert record.num_hooks >= 2 * record.num_saves
    watched[LIGHT](stack)
    assert records[1] is record  # it was followed to its end
    for _ in range(2):
        watched[NEW_STEP](stack)
    assert records[2].features == records[3].features == record.features
    assert records[2] is not records[3]
    assert record not in records[2:]


def test_torchs_profiler_does_not_tell_each_start_and_stop(sim: SimDevice, capfd: pytest.CaptureFixture[str]) -> None:
    peers(sim)[TORCH](chain(sim, 3))
    assert capfd.readouterr().err == ""
    os.write(2, b"heard again")
    assert capfd.readouterr().err == "heard again"


def test_without_a_recorder_it_is_waived(sim: SimDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "_RECORDER", "chameleon_mm.profiler.no_such_module")
    report = profiler.measure(sim, saves=5, num_layers=1, repeats=1)
    row = {row.name: row for row in report.tables["host time"].rows}[DETAILED]
    assert all(isinstance(cell, Waived) and "no detailed recorder" in cell.reason for cell in row.cells.values())
    assert [bound.held is None for bound in report.bounds] == [False, True]


# --- what is worked out


def test_differences_are_taken_within_a_round() -> None:
    per_save = {HOOKS: [1.0, 5.0, 1.0], LIGHT: [2.0, 7.0, 1.5]}
    per_layer = {HOOKS: [10.0, 30.0, 20.0], LIGHT: [15.0, 33.0, 24.0], DETAILED: [110.0, 230.0, 320.0]}
    cells = {name: profiler._cells(name, per_save, per_layer) for name in (HOOKS, LIGHT)}
    over = cells[LIGHT]["save_over"]
    assert isinstance(over, Figure)
    assert (over.median, over.count, over.simulated) == (1.0, 3, False)
    assert isinstance(cells[HOOKS]["save_over"], Waived)
    assert isinstance(cells[HOOKS]["save"], Figure)
    cells[DETAILED] = profiler._cells(DETAILED, per_layer, per_layer)
    save, share = profiler._bounds(cells)
    assert (save.found, save.held, save.counted) == (1.0, True, False)
    assert share.found == 1 - 4.0 / 200.0
    assert share.held is True


# --- the command


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    profiler.add_arguments(parser)
    return profiler.run(parser.parse_args(arguments), Console(quiet=True))


def test_the_command_writes_every_row(tmp_path: Path) -> None:
    target = tmp_path / "profiler.json"
    assert run("--device", "sim", "--saves", "5", "--layers", "1", "--repeats", "2", "--json", str(target)) == 0
    written = json.loads(target.read_text(encoding="utf-8"))
    assert written["theme"] == "profiler"
    table = written["tables"]["host time"]
    assert [row["peer"] for row in table["rows"]] == ROWS
    assert all(column["simulated"] is False for column in table["columns"])
    assert [bound["limit"] for bound in written["bounds"]] == [1.2, 0.9]


@pytest.mark.parametrize("option", ["--saves", "--layers", "--repeats"])
def test_bad_usage_is_refused(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option}: expected 1 or more, got 0"):
        run("--device", "sim", option, "0")


@pytest.mark.gpu
def test_a_gpus_step_is_watched_by_every_way() -> None:
    from chameleon_mm.device import resolve_device

    report = profiler.measure(resolve_device("cuda"), saves=50, num_layers=1, repeats=3)
    assert [row.name for row in report.tables["host time"].rows] == ROWS
    assert not report.failed
