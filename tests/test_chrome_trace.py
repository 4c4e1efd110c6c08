"""Trace file: the fields that Perfetto needs, and agreement with the report's numbers.

report -> save_trace -> JSON -> tracks and counters
"""

from __future__ import annotations

import json
import pickle
import re
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch.cuda import _memory_viz

import chameleon_mm as cm
from chameleon_mm.plan.trace import with_extra
from chameleon_mm.plan.unswapped_memory import peak_memory
from chameleon_mm.report.chrome_trace import COMPUTE, D2H, H2D, PID, STEPS, readings
from chameleon_mm.report.memory_snapshot import snapshot_of
from chameleon_mm.swap.metrics import StepSpan, TimedSpans
from chameleon_mm.units import MIB
from tests._report_sessions import gpt_report
from tests._traces import random_step
from tests.test_report import made_up

Event = dict[str, Any]


@pytest.fixture(scope="module")
def report() -> cm.SwapReport:
    return gpt_report()


def events_of(path: Path) -> list[Event]:
    """Return the events of a trace. Each has the fields that the format requires of its kind."""
    document = json.loads(path.read_text(encoding="utf-8"))
    events = document["traceEvents"]
    assert document["displayTimeUnit"] == "ms" and isinstance(events, list)
    for event in events:
        assert event["ph"] in {"M", "X", "C"} and isinstance(event["name"], str)
        if event.get("pid") != PID:
            continue
        assert isinstance(event["tid"], int) and isinstance(event["ts"], int | float) and isinstance(event["args"], dict)
        if event["ph"] == "X":
            assert event["dur"] >= 0
        elif event["ph"] == "C":
            assert all(isinstance(value, int) and value >= 0 for value in event["args"].values())
    return events


def saved(report: cm.SwapReport, tmp_path: Path) -> list[Event]:
    report.save_trace(tmp_path / "trace.json")
    return events_of(tmp_path / "trace.json")


def slices(events: list[Event]) -> dict[int, list[Event]]:
    """Our slices by track, in time's order."""
    found: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and event["pid"] == PID:
            found[event["tid"]].append(event)
    return {tid: sorted(of, key=lambda event: event["ts"]) for tid, of in found.items()}


def total_us(events: list[Event]) -> float:
    return sum(float(event["dur"]) for event in events)


def test_each_stream_is_a_track_with_a_name(report: cm.SwapReport, tmp_path: Path) -> None:
    names = {event["tid"]: event["args"]["name"] for event in saved(report, tmp_path) if event["name"] == "thread_name"}
    assert names == {
        STEPS: "steps (simulated clock)", COMPUTE: "compute: waits and recomputation (simulated clock)",
        D2H: "d2h: swap out (simulated clock)", H2D: "h2d: swap in (simulated clock)",
    }  # fmt: skip
    document = json.loads((tmp_path / "trace.json").read_text())
    about = ("device", "simulated", "steps", "steps_by_phase", "detailed_steps", "plans", "plan_cache_hits")
    assert document["otherData"] == {name: report.to_dict()[name] for name in about}
    made_up(simulated=False, device="a real one").save_trace(tmp_path / "real.json")
    text = (tmp_path / "real.json").read_text()
    assert "simulated clock" not in text and "chameleon_mm: a real one" in text


def test_the_tracks_add_up_to_the_reports_figures(report: cm.SwapReport, tmp_path: Path) -> None:
    tracks = slices(saved(report, tmp_path))
    assert total_us(tracks[D2H]) + total_us(tracks[H2D]) == pytest.approx(report.copy_us)
    assert sum(event["args"]["bytes"] for event in tracks[D2H]) == report.bytes_swapped_out
    assert sum(event["args"]["bytes"] for event in tracks[H2D]) == report.bytes_swapped_in
    again = [event for event in tracks[COMPUTE] if event["args"]["for"] == "recompute"]
    waits = [event for event in tracks[COMPUTE] if event["args"]["for"] != "recompute"]
    assert total_us(waits) == pytest.approx(report.stall_us) and report.stall_us
    assert total_us(again) == pytest.approx(report.recompute_us) and report.recompute_us
    steps = tracks[STEPS]
    assert steps[0]["ts"] == 0
    assert [step["args"]["kind"] for step in steps] == [figures.kind.value for figures in report.step_figures]
    assert [step["dur"] for step in steps] == pytest.approx([figures.step_us for figures in report.step_figures])
    assert [step["args"]["step"] for step in steps] == list(range(report.steps))
    assert tracks.keys() == {STEPS, COMPUTE, D2H, H2D}
    for track in tracks.values():  # nothing overlaps within one
        assert len(track) >= 4
        assert all(before["ts"] + before["dur"] <= after["ts"] + 1e-6 for before, after in pairwise(track))


def test_counters_stay_within_the_reports_peaks(report: cm.SwapReport, tmp_path: Path) -> None:
    values: dict[str, list[int]] = defaultdict(list)
    times: dict[str, list[float]] = defaultdict(list)
    for event in saved(report, tmp_path):
        if event["ph"] == "C":
            values[event["name"]].append(event["args"]["bytes"])
            times[event["name"]].append(event["ts"])
    hbm, budget = (f"{name} (simulated clock)" for name in ("HBM allocated", "HBM budget"))
    assert set(values) == {hbm, budget}
    assert 0 < max(values[hbm]) <= report.peak_hbm_bytes <= report.hbm_budget_bytes == max(values[budget])
    assert all(of == sorted(of) for of in times.values()), "a counter goes forward"


def test_readings_are_as_long_after_their_steps_begin_as_the_host_was() -> None:
    steps = (StepSpan(0, "recorded", 0.0, 90.0, 1000.0), StepSpan(1, "planned", 100.0, 190.0, 1050.0))
    memory = ((990.0, 1), (1000.0, 2), (1020.0, 3), (1060.0, 4))
    assert readings(TimedSpans(steps=steps, memory=memory)) == [(0.0, 2), (20.0, 3), (110.0, 4)]


def test_the_last_step_has_no_readings_of_the_next_one(sim: cm.SimDevice) -> None:
    """A report in the middle of a step: its readings would come after the step before, as if memory rose there."""
    x = torch.randn(256, 256, requires_grad=True)
    session = cm.SwapSession("64MiB", "64MiB", sim, min_bytes=0)

    def step(link: int, report: bool) -> list[float]:
        (torch.tanh(x * link).exp() * x).sum().backward()
        x.grad = None
        return [at_us for at_us, *_ in readings(session.report().timed)] if report else []

    with session:
        for _ in range(2):
            with session.step():
                step(2, report=False)
        sim.synchronize()
        before = [at_us for at_us, *_ in readings(session.report().timed)]
        with session.step():
            during = step(2, report=True)
    sim.synchronize()
    after = [at_us for at_us, *_ in readings(session.report().timed)]
    assert during == before == after[: len(before)] and len(before) < len(after)


# --- memory for torch's own viewer


def allocated_over(snapshot: dict[str, Any]) -> list[int]:
    """Bytes allocated after each event. Memory allocated at the end without an event existed from the beginning."""
    events = snapshot["device_traces"][0]
    alive = {b["address"]: b["size"] for seg in snapshot["segments"] for b in seg["blocks"] if b["state"] == "active_allocated"}
    grows = [{"alloc": 1, "free_completed": -1}.get(event["action"], 0) * event["size"] for event in events]
    now = sum(alive.values()) - sum(grows)
    return [now, *(now := now + by for by in grows)]


def test_the_memory_of_a_step_opens_in_torchs_own_viewer(report: cm.SwapReport, tmp_path: Path) -> None:
    report.save_memory_viz(tmp_path / "memory.pickle")
    snapshot = pickle.loads((tmp_path / "memory.pickle").read_bytes())
    assert (tmp_path / "memory.pickle").stat().st_size < MIB
    assert report.planned is not None
    over = allocated_over(snapshot)
    assert max(over) == peak_memory(report.planned.trace).nbytes and over[0] >= report.planned.trace.start_bytes
    # Torch's functions, as they run without a GPU: flame graphs, segments, the list of events, the page.
    for draw in (_memory_viz.segments, _memory_viz.memory):
        lines = draw(snapshot, format_flamegraph=str.splitlines)  # type: ignore[no-untyped-call]  # torch's
        assert sum(int(line.split()[-1]) for line in lines if ";active_allocated;" in line) == over[-1]
    assert re.search(r"_report_sessions\.py:\d+:blocks\.\d;blocks\.\d:0:addmm, activations", _memory_viz_frames(snapshot))
    assert "total_allocated" in _memory_viz.segsum(snapshot)
    events = snapshot["device_traces"][0]
    assert f"{len(events)} entries" in _memory_viz.trace(snapshot)
    assert "Active Memory Timeline" in _memory_viz.trace_plot(snapshot)


def _memory_viz_frames(snapshot: dict[str, Any]) -> str:
    """Frames of the allocations in the step, as torch's flame graphs write them."""
    events = [event for event in snapshot["device_traces"][0] if event["action"] == "alloc"]
    return "\n".join(";".join(_memory_viz._frames_fmt(event["frames"], reverse=True)) for event in events)


@pytest.mark.parametrize("seed", range(10))
def test_the_memory_of_any_step_is_that_of_its_trace(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = with_extra(random_step(Random(seed)), 3 * MIB)
    snapshot = snapshot_of(trace)
    assert max(allocated_over(snapshot)) == peak_memory(trace).nbytes
    taken = list[tuple[int, int]]()
    for event in snapshot["device_traces"][0]:
        where = event["addr"], event["addr"] + event["size"]
        if event["action"] == "alloc":
            assert all(where[1] <= begin or end <= where[0] for begin, end in taken), "no two live ones overlap"
            taken.append(where)
        elif event["action"] == "free_completed" and where in taken:
            taken.remove(where)
    _memory_viz.segsum(snapshot)
    monkeypatch.setattr("chameleon_mm.report.memory_snapshot.MOST_ALLOCATIONS", 5)
    assert sum(event["action"] == "alloc" for event in snapshot_of(trace)["device_traces"][0]) <= 5, "the largest are kept"


def test_a_report_of_nothing_is_a_trace_and_has_no_memory_to_show(tmp_path: Path) -> None:
    made_up(spans=(), timed=TimedSpans()).save_trace(str(tmp_path / "trace.json"))
    assert {event["ph"] for event in events_of(tmp_path / "trace.json")} == {"M"}
    with pytest.raises(ValueError, match="save_memory_viz: expected a session with a plan, got none; run a step"):
        made_up().save_memory_viz(tmp_path / "memory.pickle")
