"""`bench planner`: the steps that it makes up, its tables and bounds, the command."""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from chameleon_mm.bench import THEMES, planner
from chameleon_mm.bench._measure import Cell, Figure, Results, Waived
from chameleon_mm.bench._planner_traces import LayerShape, layer_chain, pipeline_chain, step_of
from chameleon_mm.device.sim import SimDevice
from chameleon_mm.policy import Candidates, memory_curve


@pytest.mark.parametrize("operators", [1000, 4000])
def test_a_step_has_the_operators_saves_and_hooks_that_it_should(operators: int) -> None:
    trace = step_of(operators)
    saved = len(np.unique(trace.hook_tensor[trace.hook_tensor >= 0]))
    assert (len(trace.op_us), saved, len(trace.hook_tick)) == (operators, operators * 25 // 1000, operators * 150 // 1000)
    assert len(Candidates.of(trace)) == saved - 1, "all but the last, which is used at once"


def test_a_chain_saves_what_its_layers_do() -> None:
    shape = LayerShape(tokens=128, hidden=64, ffn=160)
    trace = layer_chain(shape, 3)
    row, wide = 2 * 128 * 64, 2 * 128 * 160
    assert sum(nbytes for _, _, nbytes in shape.parts()) == 8 * row + 4 * wide
    assert int(memory_curve(trace).max()) == trace.start_bytes + 3 * (8 * row + 4 * wide)
    assert trace.duration_us == pytest.approx(3 * 3 * sum(us for _, us, _ in shape.parts()))


def test_a_pipeline_has_all_forwards_first_and_uses_the_first_micro_batch_first() -> None:
    shape = LayerShape(tokens=128, hidden=64, ffn=160)
    trace, chain = pipeline_chain(shape, 3, 2), layer_chain(shape, 6)
    assert int(memory_curve(trace).max()) == int(memory_curve(chain).max())
    assert trace.duration_us == pytest.approx(chain.duration_us)
    saved, used = ([hook.tensor for hook in trace.hooks if hook.use is use] for use in (False, True))
    assert saved == sorted(saved)
    assert [saved.index(tensor) for tensor in used] == [*range(23, -1, -1), *range(47, 23, -1), *range(71, 47, -1)]


def run(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    parser = argparse.ArgumentParser()
    planner.add_arguments(parser)
    target = tmp_path / "new" / "planner.json"
    console = Console(width=100, record=True, file=io.StringIO())
    code = planner.run(parser.parse_args(["--device", "sim", "--json", str(target), *arguments]), console)
    return code, json.loads(target.read_text(encoding="utf-8")), console.export_text()


def test_a_run_writes_both_parts_and_every_bound(tmp_path: Path) -> None:
    markdown = tmp_path / "planner.md"
    code, written, text = run(tmp_path, "--operators", "2000,1000", "--repeats", "1", "--markdown", str(markdown))
    assert code == 0
    assert written["schema"] == "chameleon_mm.bench.planner/1"
    assert {"device", "simulated", "commit", "versions"} <= set(written)
    rows = {part: {row["name"]: row["cells"] for row in table["rows"]} for part, table in written["tables"].items()}
    assert list(rows["speed"]) == ["1,000 operators", "2,000 operators"]
    assert "waived" in rows["speed"]["1,000 operators"]["growth"]
    assert rows["speed"]["2,000 operators"]["ms"]["simulated"] is False
    assert list(rows["quality"]) == [
        f"{order}s={tokens}, {less}x less" for order in ("", "pipeline, ") for tokens in planner.TOKENS for less in planner.LESS
    ]
    assert all(cell["simulated"] for cells in rows["quality"].values() for cell in cells.values())
    bounds = {bound["name"]: bound["held"] for bound in written["bounds"]}
    assert bounds["planning, 100,000 operators"] is None
    assert bounds["planning, exponent of its growth"] is None
    assert bounds["s=4096, 4x less: of T*"] is True
    assert bounds["s=32768, 4x less: over swap-first"] is True
    assert bounds["pipeline, s=4096, 8x less: over swap-everything"] is True
    assert len(bounds) == 3 + 2 * (3 * 2 + 1) + 2 * 3
    for shown in (text, markdown.read_text(encoding="utf-8")):
        assert "s=4096, 4x less: over swap-first" in shown


@pytest.mark.parametrize("part", planner.PARTS)
def test_one_part_alone(part: str, tmp_path: Path) -> None:
    _, written, _ = run(tmp_path, "--parts", part, "--operators", "1000", "--layers", "8", "--repeats", "1")
    assert list(written["tables"]) == [part]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--parts", "speed,quantity"],
        ["--operators", "1000,many"],
        ["--operators", "10"],
        ["--layers", "0"],
        ["--repeats", "0"],
        ["--device", "abacus"],
    ],
)
def test_bad_usage_raises_before_anything_is_written(arguments: list[str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected"):
        run(tmp_path, *arguments)
    assert not (tmp_path / "new").exists()


def test_the_command_line_knows_it() -> None:
    assert THEMES["planner"] == planner.__name__


def speed(sim: SimDevice, times: dict[int, float]) -> Results:
    results = Results("planner speed", sim, planner._SPEED)
    for operators, ms in times.items():
        cells: dict[str, Cell] = {"ms": Figure.of([ms], "ms", simulated=False), "growth": Waived("not looked at")}
        results.add(f"{operators}", {"operators": operators}, cells)
    return results


def test_times_are_judged_at_two_sizes_and_growth_from_ten_thousand_on(sim: SimDevice) -> None:
    times = {1_000: 90.0, 10_000: 4.0, 100_000: 40.0, 1_000_000: 625.0}
    bounds = planner.speed_bounds(speed(sim, times))
    assert [bound.held for bound in bounds] == [True, False, True]
    assert bounds[-1].found == pytest.approx(np.log10(625.0 / 4.0) / 2)
    assert [bound.held for bound in planner.speed_bounds(speed(sim, {100_000: 51.0}))] == [False, None, None]


def test_quality_is_counted_and_swap_first_is_judged_at_four_times_less(sim: SimDevice) -> None:
    results = Results("planner quality", sim, planner._QUALITY)
    for order, less, ideal in (("", 2, 0.98), ("", 4, 0.96), ("pipeline, ", 4, 0.9)):
        values = {"longer": 1.2, "ideal": ideal, "first": 1.05, "everything": 1.5}
        cells: dict[str, Cell] = {key: Figure.of([value], "x", simulated=True) for key, value in values.items()}
        results.add(f"{order}{less}x", {"order": order, "tokens": 1, "less": less}, cells)
    verdicts = {bound.name: (bound.held, bound.counted) for bound in planner.quality_bounds(results)}
    assert verdicts == {
        "2x: of T*": (True, True),
        "2x: over swap-everything": (True, True),
        "4x: of T*": (False, True),
        "4x: over swap-everything": (True, True),
        "4x: over swap-first": (False, True),
        "pipeline, 4x: over swap-everything": (True, True),
    }
