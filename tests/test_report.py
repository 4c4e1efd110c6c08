"""Report: every figure in the dict, true statements, JSON that parses, and a page without surprises."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import chameleon_mm as cm
from chameleon_mm.device import Device
from chameleon_mm.swap.copy_queue import CopyQueue, Move
from chameleon_mm.swap.metrics import MAX_SPANS, CopySpan, Metrics
from chameleon_mm.units import MIB
from tests._programs import deep

PROMISED = {
    "steps", "detailed_steps", "plans", "plan_cache_hits", "bytes_swapped_out", "bytes_swapped_in", "bytes_reclaimed",
    "hidden_fraction", "stall_us", "peak_hbm_bytes", "hbm_budget_bytes", "peak_host_bytes", "host_reserved_bytes",
    "kept_by_reason", "fallbacks", "oom_retries", "simulated", "device", "bytes_recomputed", "bytes_held", "recompute_us",
    "recipes_banned", "host_bytes_wanted", "peak_reserved_bytes",
}  # fmt: skip


def made_up(**changed: object) -> cm.SwapReport:
    """A report of a session that never was."""
    report = cm.SwapReport(
        device="simulated H200",
        simulated=True,
        steps=3,
        timed_steps=3,
        detailed_steps=0,
        plans=0,
        plan_cache_hits=0,
        steps_by_phase={"recorded": 1, "planned": 2},
        planning_us=2500.0,
        planned_step_us=9000.0,
        planned_peak_bytes=30 * MIB,
        planned_bytes={"kept": 20 * MIB, "swapped": 10 * MIB, "recomputed": 0, "held": 0},
        measured_step_us=9100.0,
        bytes_swapped_out=10 * MIB,
        bytes_swapped_in=8 * MIB,
        bytes_reclaimed=8 * MIB,
        swap_ins_on_demand=1,
        prefetches=7,
        hidden_fraction=0.755,
        stall_us=1234.0,
        copy_us=5000.0,
        recompute_us=250.0,
        peak_hbm_bytes=30 * MIB,
        peak_hbm_at_most_bytes=30 * MIB,
        hbm_budget_bytes=32 * MIB,
        budget_misses=0,
        peak_reserved_bytes=None,
        peak_host_bytes=10 * MIB,
        host_reserved_bytes=1024 * MIB,
        host_bytes_wanted=9 * MIB,
        kept_by_reason={"leaf": 2, "small": 5},
        fallbacks=0,
        packed_groups=0,
        not_recomputed_by_reason={},
        recipes_banned=(),
        pageable_swap_outs=0,
        oom_retries=0,
        steps_run_again=0,
        lowered_budget_bytes=None,
        problems=(),
        spans=(CopySpan("out", 0.0, 100.0, MIB), CopySpan("in", 50.0, 250.0, MIB)),
    )
    return dataclasses.replace(report, **changed)  # type: ignore[arg-type]  # the names are checked by replace itself


UNMEASURED = {
    "hidden_fraction": None, "stall_us": None, "copy_us": None, "timed_steps": 0, "spans": (), "recompute_us": None,
}  # fmt: skip


def trained(device: Device, *, steps: int = 2, budget_bytes: int = 6 * MIB) -> cm.SwapReport:
    """A report of real copies: a chain deep enough that both lanes are used."""
    session = cm.SwapSession(hbm_budget=device.allocated_bytes() + budget_bytes, host_budget="64MiB", device=device)
    x = torch.randn(512, 512, device=device.torch_device, requires_grad=True)
    with session:
        for _ in range(steps):
            with session.step():
                train_deep_chain(x)
    return session.report()


def train_deep_chain(x: Tensor) -> None:
    out = deep(x, 8)
    out.sum().backward()
    x.grad = None


@pytest.fixture
def swapped(sim: cm.SimDevice) -> cm.SwapReport:
    report = trained(sim)
    assert report.bytes_swapped_out > 0 and report.bytes_swapped_in > 0
    return report


# --- for programs


def test_the_dict_has_every_promised_key(swapped: cm.SwapReport) -> None:
    assert set(swapped.to_dict()) >= PROMISED


@pytest.mark.parametrize("changed", [{}, UNMEASURED], ids=["measured", "not measured"])
def test_the_dict_goes_through_json(changed: dict[str, object]) -> None:
    figures = made_up(**changed).to_dict()
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures


def test_the_dict_is_the_callers_own() -> None:
    report = made_up()
    report.to_dict()["kept_by_reason"]["leaf"] = 99
    assert report.kept_by_reason == {"leaf": 2, "small": 5}


# --- for people


def test_the_text_says_simulated_beside_every_time() -> None:
    lines = dict(made_up(recomputed=4, bytes_recomputed=4 * MIB, recomputations=3, recipes_banned=("aten::mul",)).rows())
    assert "simulated" in lines["device"]
    assert lines["recomputed (simulated)"] == (
        "4 dropped, 4.00 MiB; 3 recomputations in 250.0 us, timed steps alone; 0 compared with the originals"
    )
    assert lines["not run again any more"] == "aten::mul"
    assert lines["stall (simulated)"] == "1.23 ms"
    assert lines["hidden share of copy time (simulated)"] == "75.5 %"
    assert not [label for label in dict(made_up(simulated=False, device="NVIDIA H200").rows()) if "simulated" in label]


def test_what_was_not_measured_says_so() -> None:
    lines = dict(made_up(**UNMEASURED).rows())
    assert lines["stall (simulated)"] == lines["hidden share of copy time (simulated)"] == "not measured"
    assert "None" not in str(made_up(**UNMEASURED))


def test_where_there_is_no_plan_the_text_says_so() -> None:
    nothing = made_up(
        planned_step_us=None, planned_peak_bytes=None, measured_step_us=None, steps_by_phase={}, plans=0, planning_us=0.0
    )
    lines = dict(nothing.rows())
    assert (lines["latest plan"], lines["what the steps were"]) == ("none", "none ended")
    assert "predicted" not in str(nothing)


def test_a_session_measures_the_steps_that_go_by_its_plan(sim: cm.SimDevice) -> None:
    report = trained(sim, steps=20, budget_bytes=10 * MIB)  # enough for two plans to be tried twice each, and times corrected
    assert (report.detailed_steps, report.plan_cache_hits) == (1, 19)
    assert report.steps_by_phase == {"recorded": 1, "planned": 19}
    assert report.planned_step_us is not None and report.planned_peak_bytes is not None
    assert report.planned_peak_bytes <= report.hbm_budget_bytes
    assert report.measured_step_us is not None and report.measured_step_us > 0


@pytest.mark.parametrize(
    ("at_least", "at_most", "held", "text"),
    [
        (32 * MIB, 32 * MIB, True, "32.0 MiB (budget 32.0 MiB, held)"),
        (33 * MIB, 33 * MIB, False, "33.0 MiB (budget 32.0 MiB, EXCEEDED by 1.00 MiB)"),
        (32 * MIB + 1, 32 * MIB + 1, False, "32.0 MiB (budget 32.0 MiB, EXCEEDED by 1 B)"),
        (20 * MIB, 32 * MIB, True, "at least 20.0 MiB, at most 32.0 MiB (budget 32.0 MiB, held)"),
        (20 * MIB, 33 * MIB, None, "not known whether held: the process had reached 33.0 MiB before"),
        (20 * MIB, None, None, "not known whether held: the device's peak statistics were reset"),
        (33 * MIB, 40 * MIB, False, "at least 33.0 MiB (budget 32.0 MiB, EXCEEDED by at least 1.00 MiB)"),
        (33 * MIB, None, False, "EXCEEDED by at least 1.00 MiB"),
        (0, 0, None, "not measured (budget 32.0 MiB)"),
    ],
)
def test_the_text_says_whether_the_budget_held(at_least: int, at_most: int | None, held: bool | None, text: str) -> None:
    report = made_up(peak_hbm_bytes=at_least, peak_hbm_at_most_bytes=at_most)
    assert report.budget_held is held
    assert text in dict(report.rows())["peak device memory"]
    assert ("held)" in str(report)) is (held is True and at_most != 0)


STEADY = {"steps": 8, "peak_hbm_bytes": 91 * MIB + MIB // 10, "peak_hbm_at_most_bytes": 91 * MIB + MIB // 10}
SHORT = {
    "steady": STEADY, "warm_up": {"steps": 2}, "steps_by_phase": {"recorded": 2, "planned": 8}, "hbm_budget_bytes": 92 * MIB,
    "unswapped_peak": {"parameters": 114 * MIB, "activations": MIB // 10}, "unswapped_step_us": 9000.0,
    "measured_step_us": 9198.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({}, "peak 114.1 -> 91.1 MiB, step +2.2 % (simulated), 8 of 8 steps by plan, after 2 of warm-up"),
        ({"simulated": False}, "peak 114.1 -> 91.1 MiB, step +2.2 %, 8 of 8 steps by plan, after 2 of warm-up"),
        (
            {
                "steady": {**STEADY, "peak_hbm_at_most_bytes": None},
                "unswapped_peak": {"activations": 2048 * MIB},
                "measured_step_us": None,
            },
            "peak 2.00 GiB -> at least 91.1 MiB, step +0.0 % predicted (simulated), 8 of 8 steps by plan, after 2 of warm-up",
        ),
        ({"warm_up": {"steps": 0}}, "peak 114.1 -> 91.1 MiB, step +2.2 % (simulated), 8 of 10 steps by plan"),
        (
            {"peak_hbm_bytes": 93 * MIB, "peak_hbm_at_most_bytes": None},
            "8 of 8 steps by plan, after 2 of warm-up, budget EXCEEDED",
        ),
        ({"unswapped_peak": {}, "unswapped_step_us": None}, "peak 91.1 MiB, 8 of 8 steps by plan, after 2 of warm-up"),
    ],
)
def test_the_first_line_is_the_answer(changed: dict[str, object], text: str) -> None:
    report = made_up(**{**SHORT, **changed})
    assert report.in_short.endswith(text) and ("EXCEEDED" in text or report.in_short == text)
    assert report.rows()[0] == ("in short", report.in_short)


def test_what_is_compared_with_is_the_step_without_a_session(sim: cm.SimDevice) -> None:
    """Plain PyTorch on the same device, by the device's own counter, from its second step on."""
    report = trained(sim, steps=4, budget_bytes=10 * MIB)
    x = torch.randn(512, 512, requires_grad=True)
    alone = cm.SimDevice()
    with alone.compute():
        for _ in range(2):
            alone.synchronize()
            alone.reset_peaks()
            train_deep_chain(x)
        alone.synchronize()
    assert sum(report.unswapped_peak.values()) == alone.peak_allocated_bytes()


def test_str_is_one_aligned_line_for_each_row() -> None:
    report = made_up()
    lines = str(report).splitlines()
    assert len(lines) == len(report.rows())
    width = max(len(label) for label, _ in report.rows())
    for line, (label, text) in zip(lines, report.rows(), strict=True):
        assert (line[:width].rstrip(), line[width : width + 2], line[width + 2 :]) == (label, "  ", text)


# --- the page and the trace: tests/test_report_page.py and tests/test_chrome_trace.py


def test_copy_time_is_that_of_the_spans(swapped: cm.SwapReport) -> None:
    assert swapped.copy_us == pytest.approx(sum(span.end_us - span.start_us for span in swapped.spans))
    assert swapped.stall_us is not None and swapped.hidden_fraction is not None and swapped.copy_us is not None
    assert swapped.hidden_fraction == pytest.approx(max(0.0, 1 - swapped.stall_us / swapped.copy_us))


# --- the metrics of the report


class Lane:
    """Two buffers and a queue of pieces of 1 MiB over a simulated GPU, metered."""

    def __init__(self, sim: cm.SimDevice, nbytes: int) -> None:
        self.sim = sim
        self.nbytes = nbytes
        self.queue = CopyQueue(sim, "d2h", out=True, piece_bytes=MIB)
        self.metrics = Metrics()
        self.hbm, self.host = sim.current_stream().alloc(nbytes), sim.alloc_pinned(nbytes)
        self.metrics.begin_step(sim.current_stream(), timed=True)
        self.move = self.queue.submit(Move(self.hbm.untyped_storage(), self.host, [sim.current_stream().record()], timed=True))
        self.metrics.moved(self.move, "out", nbytes)


def test_the_meter_never_waits_and_counts_each_piece_once(sim: cm.SimDevice) -> None:
    lane = Lane(sim, 3 * MIB + 500)
    assert len(lane.metrics.resolve()) <= 2  # as many as are handed over
    lane.queue.issue(lane.move)
    sim.synchronize()
    spans = lane.metrics.resolve()
    assert [span.nbytes for span in spans] == [MIB, MIB, MIB, 500]
    copy_us = lane.metrics.totals.copy_us
    assert copy_us == pytest.approx(sum(span.end_us - span.start_us for span in spans))
    assert lane.metrics.resolve() == spans
    assert lane.metrics.totals.copy_us == copy_us


def test_a_curtailed_move_counts_with_what_was_moved(sim: cm.SimDevice) -> None:
    lane = Lane(sim, 3 * MIB + 500)
    unsent = lane.queue.truncate(lane.move)
    sim.synchronize()
    assert sum(span.nbytes for span in lane.metrics.resolve()) == 3 * MIB + 500 - unsent
    assert unsent > 0


def test_an_overtaken_move_is_not_charged_for_what_overtook_it(sim: cm.SimDevice) -> None:
    """Copy time is time on the link: the pieces of a move, not what lies between them."""
    lane = Lane(sim, 3 * MIB + 500)
    host, hbm = sim.alloc_pinned(64 * MIB), sim.current_stream().alloc(64 * MIB)
    urgent = lane.queue.submit(Move(hbm.untyped_storage(), host, [sim.current_stream().record()]))
    lane.queue.issue(urgent)  # 1.2 ms, untimed, between the second and the third piece
    sim.synchronize()
    lane.queue.issue(lane.move)
    sim.synchronize()
    lane.metrics.resolve()
    assert lane.move.next_byte == 3 * MIB + 500
    assert 0 < lane.metrics.totals.copy_us < 200  # 57 us at 54.9 GB/s, and the host's launch time


def test_waits_are_the_stall(sim: cm.SimDevice) -> None:
    lane = Lane(sim, 3 * MIB + 500)
    compute = sim.current_stream()
    done = lane.queue.issue(lane.move)
    lane.metrics.wait(compute, done, "in")
    sim.synchronize()
    lane.metrics.resolve()
    first = lane.metrics.totals.stall_us
    assert first > 0
    lane.metrics.wait(compute, done, "in")  # complete by now: nothing more to wait for
    sim.synchronize()
    lane.metrics.resolve()
    assert lane.metrics.totals.stall_us - first < 2  # the host's time for two records and a wait


def test_an_untimed_step_records_no_timed_event(sim: cm.SimDevice) -> None:
    metrics, compute = Metrics(), sim.current_stream()
    metrics.begin_step(compute, timed=False)
    metrics.wait(compute, compute.record(), "in")
    sim.synchronize()
    assert metrics.resolve() == ()
    assert (metrics.totals.timed_steps, metrics.totals.stall_us, metrics.totals.hidden_fraction) == (0, 0.0, None)


def test_spans_of_all_steps_are_on_one_clock(sim: cm.SimDevice) -> None:
    """Though each step's are measured from its own beginning."""
    lane, compute = Lane(sim, MIB), sim.current_stream()
    begin = compute.record(timed=True)
    told, measured = [], []
    for _ in range(4):
        sim.synchronize()
        lane.metrics.begin_step(compute, timed=True)
        move = lane.queue.submit(Move(lane.hbm.untyped_storage(), lane.host, [compute.record()], timed=True))
        lane.metrics.moved(move, "out", MIB)
        piece = move.pieces[0]
        lane.queue.issue(move)
        sim.synchronize()
        told.append(lane.metrics.resolve()[-1].start_us)
        measured.append(piece.start.elapsed_us(begin))
    assert [b - a for a, b in pairwise(told)] == pytest.approx([b - a for a, b in pairwise(measured)])
    assert told == sorted(told)


def test_only_the_latest_spans_are_kept() -> None:
    metrics = Metrics()
    metrics.spans.extend(CopySpan("out", float(k), k + 0.5, 1) for k in range(MAX_SPANS + 5))
    spans = metrics.resolve()
    assert len(spans) == MAX_SPANS
    assert spans[0].start_us == 5.0
