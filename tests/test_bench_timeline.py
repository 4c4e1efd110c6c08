"""`bench timeline`: the picture of a planned step shows the simulator's run, and so does the README's."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import pytest

from chameleon_mm.bench import timeline
from chameleon_mm.bench._timeline_run import Comparison, watched
from chameleon_mm.bench._timeline_svg import ROWS, followed, marks, timeline_svg
from chameleon_mm.tools.demo import GPTConfig
from tests.test_bench_themes import run_theme

COMMITTED = Path(__file__).resolve().parents[1] / "docs" / "timeline_simulated.svg"
CONFIG = GPTConfig(layers=2, width=64, heads=2, context=2048)
SHARE = 0.8
MARKS = ["save", "swap-out", "reclaim", "prefetch", "use"]


@pytest.fixture(scope="module")
def found() -> Comparison:
    """The two steps."""
    return watched("h200", CONFIG, SHARE)


def test_memory_stays_under_the_budget_to_the_byte(found: Comparison) -> None:
    assert found.planned.peak_bytes <= found.hbm_budget_bytes < found.unswapped.peak_bytes
    for step in (found.planned, found.unswapped):  # by the device's own counter: nothing rose between two readings unseen
        assert max(reading.allocated_bytes for reading in step.readings) == step.peak_bytes
        assert all(earlier.at_us <= later.at_us for earlier, later in pairwise(step.readings))
    assert found.planned.peak_bytes == found.plan.peak_bytes


def test_every_swap_went_by_its_action_of_the_plan(found: Comparison) -> None:
    swaps, actions = found.swaps(), sorted(found.plan.actions, key=lambda action: action.out_at)
    assert len(found.planned.copies) == 2 * len(swaps) > 0
    for swap, action in zip(swaps, actions, strict=True):
        assert swap.out.nbytes == swap.back.nbytes == action.nbytes
        assert swap.save_us <= swap.out.start_us < swap.out.end_us <= swap.reclaim_us
        assert swap.reclaim_us <= swap.prefetch_us <= swap.back.start_us < swap.back.end_us <= swap.use_us
        assert [mark.name for mark in marks(swap)] == MARKS
    assert followed(swaps) in swaps
    with pytest.raises(ValueError, match="expected a step with copies"):
        timeline.beside_kernels(found.unswapped)
    with pytest.raises(ValueError, match="expected a storage that moved"):
        followed([])


def test_kernels_are_the_same_in_both_steps(found: Comparison) -> None:
    planned, unswapped = ([(kernel.phase, kernel.end_us - kernel.start_us) for kernel in step.kernels]
                          for step in (found.planned, found.unswapped))  # fmt: skip
    assert [phase for phase, _ in planned] == [phase for phase, _ in unswapped]
    assert [us for _, us in planned] == pytest.approx([us for _, us in unswapped])
    assert all(earlier.end_us <= later.start_us + 1e-6 for earlier, later in pairwise(found.planned.kernels))


@pytest.mark.parametrize("which", ["drawn", "committed"])
def test_a_picture_says_that_it_is_simulated(which: str, found: Comparison) -> None:
    words = texts(timeline_svg(found) if which == "drawn" else COMMITTED.read_text(encoding="utf-8"))
    said = " ".join(words)
    assert "simulated H200" in said and "no GPU took part" in said and "(simulated)" in said
    assert {*ROWS, *MARKS, "budget"} <= set(said.split())


def texts(svg: str) -> list[str]:
    """Texts of a picture, axes included."""
    return ["".join(text.itertext()) for text in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_the_command_writes_what_was_asked_for(found: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "watched", lambda *_: found)
    svg, record = tmp_path / "new" / "timeline.svg", tmp_path / "timeline.json"
    assert run_theme(timeline, "--svg", str(svg), "--json", str(record)) == 0
    assert svg.read_text(encoding="utf-8") == timeline_svg(found)
    written = json.loads(record.read_text(encoding="utf-8"))
    unswapped, planned = (row["cells"] for row in written["rows"])
    assert (written["theme"], written["simulated"]) == ("timeline", True)
    assert "waived" in unswapped["out"]
    assert planned["out"]["median"] == planned["back"]["median"] == sum(a.nbytes for a in found.plan.actions) / (1 << 20)
    assert 0 < planned["beside"]["median"] <= 100


@pytest.mark.slow
def test_the_committed_picture_is_what_the_command_draws(tmp_path: Path) -> None:
    svg = tmp_path / "timeline.svg"
    assert run_theme(timeline, "--svg", str(svg)) == 0
    assert texts(svg.read_text(encoding="utf-8")) == texts(COMMITTED.read_text(encoding="utf-8"))
