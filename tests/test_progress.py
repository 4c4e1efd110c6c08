"""Figures that a session gives of each step: they add up to the report. Also its lines and calls; no bit changes."""

from __future__ import annotations

import io
import json
import logging
import math
import random
import sys
import weakref
from collections import Counter
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import chameleon_mm as cm
from chameleon_mm.device import Device
from chameleon_mm.device.peak_watch import Peak, PeakWatch
from chameleon_mm.pool.free_list import FreeList
from chameleon_mm.report import step_history
from chameleon_mm.report.step_history import StepFigures, line_of, sums_of
from chameleon_mm.swap.metrics import StepKind
from chameleon_mm.units import GIB, MIB, format_us
from tests._fakes import refusing

pytestmark = pytest.mark.usefixtures("no_gc")

STEPS = 7
SHAPE = 128, 64


class Training:
    """A small model in training; the same from the same seed, with a session around its steps or without."""

    def __init__(self, device: Device) -> None:
        torch.manual_seed(3)
        blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
        self.model = nn.Sequential(*blocks).to(device.torch_device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.batches = [torch.randn(SHAPE).to(device.torch_device) for _ in range(STEPS)]

    def step(self, number: int) -> Tensor:
        loss: Tensor = self.model(self.batches[number]).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def swapped(self, device: Device, **settings: Any) -> tuple[list[Tensor], cm.SwapReport]:
        """Train within a session. Returns the bits of it and the report."""
        session = session_on(device, **settings)
        with session:
            losses = []
            for number in range(STEPS):
                with session.step():
                    losses.append(self.step(number))
        return self.bits(losses), session.report()

    def bits(self, losses: list[Tensor]) -> list[Tensor]:
        state = [value["momentum_buffer"] for value in self.optimizer.state.values()]
        return [tensor.detach().cpu().clone() for tensor in (*losses, *self.model.parameters(), *state)]


def session_on(device: Device, **settings: Any) -> cm.SwapSession:
    """Return a session in which every saved tensor moves unless a plan keeps it."""
    budget = device.allocated_bytes() + 8 * MIB
    return cm.SwapSession(device=device, **{"hbm_budget": budget, "host_budget": "32MiB", "min_bytes": 0, **settings})


def plain(device: Device) -> list[Tensor]:
    """The same training in plain PyTorch."""
    training = Training(device)
    return training.bits([training.step(number) for number in range(STEPS)])


def figures(**changed: Any) -> StepFigures:
    some: dict[str, Any] = {
        "index": 12, "kind": StepKind.PLANNED, "simulated": False, "step_us": 9000.0, "host_us": 9100.0,
        "peak_hbm_bytes": 14 * GIB + GIB // 5, "peak_hbm_at_most_bytes": 14 * GIB + GIB // 5, "hbm_budget_bytes": 16 * GIB,
        "host_bytes": 3 * GIB, "bytes_out": 5 * GIB, "bytes_in": 5 * GIB, "stall_us": 1200.0, "copy_us": 60000.0,
    }  # fmt: skip
    return StepFigures(**{**some, **changed})


# --- the figures


@pytest.mark.parametrize("plans", [True, False])
def test_the_figures_of_all_steps_add_up_to_the_reports(device: Device, plans: bool) -> None:
    _, report = Training(device).swapped(device, plans=plans)
    steps = report.step_figures
    assert [step.index for step in steps] == list(range(STEPS))
    assert Counter(step.kind.value for step in steps) == report.steps_by_phase
    assert sum(step.bytes_out for step in steps) == report.bytes_swapped_out > 0
    assert sum(step.bytes_in for step in steps) == report.bytes_swapped_in > 0
    timed = [step for step in steps if step.step_us is not None]
    assert len(timed) == report.timed_steps
    for name in ("stall_us", "copy_us"):
        told, each = getattr(report, name), [getattr(step, name) for step in timed]
        # The same terms in another order: the last digits of a sum of floats may differ.
        assert math.isclose(math.fsum(each), told, rel_tol=1e-9, abs_tol=1e-6), name
        assert all(getattr(step, name) is None for step in steps if step not in timed)
    assert report.copy_us is not None
    assert report.copy_us > 0
    assert all(step.step_us > 0 and step.stall_us <= step.step_us for step in timed)  # type: ignore[operator]  # timed ones
    assert max(step.host_bytes for step in steps) == report.peak_host_bytes
    assert {step.hbm_budget_bytes for step in steps} == {report.hbm_budget_bytes}
    assert {step.simulated for step in steps} == {device.simulated}


def test_the_largest_peak_of_a_step_is_the_reports(sim: cm.SimDevice) -> None:
    _, report = Training(sim).swapped(sim)
    peaks = [step.peak_hbm_bytes for step in report.step_figures]
    assert max(peaks) == report.peak_hbm_bytes
    assert all(0 < step.peak_hbm_bytes <= step.peak_hbm_at_most_bytes for step in report.step_figures)  # type: ignore[operator]  # nobody reset it


def test_a_peak_between_steps_is_of_none(sim: cm.SimDevice) -> None:
    training, session = Training(sim), session_on(sim, hbm_budget="64MiB")
    with session:
        for number in range(3):
            with session.step():
                training.step(number)
            torch.empty(32 * MIB, dtype=torch.uint8).zero_()
    report = session.report()
    assert report.peak_hbm_bytes >= 32 * MIB
    assert max(step.peak_hbm_bytes for step in report.step_figures) < 32 * MIB


def test_without_plans_a_gpu_times_the_first_steps_alone(device: Device) -> None:
    _, report = Training(device).swapped(device, plans=False)
    timed = [step.step_us is not None for step in report.step_figures]
    assert timed == ([True] * STEPS if device.simulated else [True] * 3 + [False] * (STEPS - 3))


def test_a_step_that_an_exception_ends_has_figures_and_its_own_kind(device: Device) -> None:
    training, told = Training(device), list[StepFigures]()
    session = session_on(device, progress=told.append)
    with session:
        for number in range(4):
            with suppress(KeyError), session.step():
                loss = training.model(training.batches[number]).sum()
                if number == 2:
                    raise KeyError(number)
                loss.backward()
            del loss
    assert [step.kind is StepKind.FAILED for step in told] == [False, False, True, False]
    assert session.report().step_figures == tuple(told)
    assert session.pool.stats().num_live == 0


def test_the_latest_figures_are_kept_and_not_more(sim: cm.SimDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_history, "MAX_FIGURES", 3)
    told = list[StepFigures]()
    _, report = Training(sim).swapped(sim, progress=told.append)
    assert [step.index for step in told] == list(range(STEPS))
    assert report.step_figures == tuple(told[-3:])


def test_a_step_is_told_in_order_once_the_device_has_come_to_its_end(sim: cm.SimDevice) -> None:
    """The host is ahead of the device, and waits for it neither in a step nor between two."""
    told, pending = list[int](), list[int]()
    session = session_on(sim, hbm_budget="64MiB", progress=lambda step: told.append(step.index))
    x = torch.randn(1024, 1024, requires_grad=True)
    with session:
        for number in range(4):
            with session.step():
                (x @ x @ x).exp().sum().backward()
            pending.append(number + 1 - len(told))
            before_us = sim.host_us
            assert session.report().step_figures[-1].index == number
            assert sim.host_us - before_us < 50  # the price of some queries, and of no wait
    assert max(pending) > 0
    assert told == list(range(4))
    assert all(step.step_us is not None for step in session.report().step_figures)


def test_a_step_that_is_never_complete_holds_up_no_more_than_so_many(
    sim: cm.SimDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_history, "MAX_PENDING", 2)
    monkeypatch.setattr("chameleon_mm.swap.metrics.Metrics.is_complete", lambda self, sums: False)
    told = list[StepFigures]()
    session = session_on(sim, progress=told.append)
    with session:
        for number in range(5):
            with session.step():
                pass
            assert [step.index for step in told] == list(range(max(0, number - 1)))
    assert [(step.index, step.step_us) for step in told] == [(number, None) for number in range(5)]


def test_a_report_holds_figures_that_are_no_part_of_its_dict(sim: cm.SimDevice) -> None:
    _, report = Training(sim).swapped(sim)
    assert "step_figures" not in report.to_dict()
    assert "StepFigures" not in repr(report)
    first = json.loads(json.dumps(report.step_figures[0].to_dict()))
    assert first["kind"] == report.step_figures[0].kind.value
    assert first["hidden_fraction"] == report.step_figures[0].hidden_fraction


@pytest.mark.parametrize(
    ("copy_us", "stall_us", "hidden"), [(100.0, 25.0, 0.75), (100.0, 130.0, 0.0), (0.0, 0.0, None), (None, None, None)]
)
def test_the_hidden_share_is_what_compute_did_not_wait_for(
    copy_us: float | None, stall_us: float | None, hidden: float | None
) -> None:
    assert figures(copy_us=copy_us, stall_us=stall_us).hidden_fraction == hidden


# --- what they stand on


@pytest.mark.parametrize(
    ("before", "readings", "peak"),
    [
        (10, [(15, 12)], Peak(15, 15)),  # this step went further than any before it
        (10, [(10, 7)], Peak(7, 10)),
        (10, [(8, 7)], Peak(8, None)),  # the program reset it
        (10, [(8, 7), (12, 3)], Peak(12, None)),  # and it was higher later on
        (10, [(14, 7), (9, 3), (14, 3)], Peak(14, None)),
    ],
)
def test_bounds_of_a_peak_by_readings_of_the_devices(before: int, readings: list[tuple[int, int]], peak: Peak) -> None:
    watch, whole = PeakWatch(before), PeakWatch(before)
    for reading, seen in readings:
        watch.note(reading, seen)
    whole.note(readings[-1][0])
    whole.include(watch)
    assert watch.peak() == whole.peak() == peak


@pytest.mark.parametrize("seed", range(10))
def test_the_recent_peak_of_a_free_list_is_the_most_since_it_was_asked_for(seed: int) -> None:
    rng, units, live, most = random.Random(seed), FreeList(1 << 20), list[int](), 0
    for _ in range(200):
        if rng.random() < 0.5 or not live:
            offset = units.allocate(rng.randrange(1, 50_000))
            live += [] if offset is None else [offset]
        elif rng.random() < 0.9:
            units.free(live.pop(rng.randrange(len(live))))
        else:
            assert units.recent_peak() == most
            most = 0
        most = max(most, units.live_bytes)
    assert units.recent_peak() == most <= units.peak_live_bytes


# --- no bit changes


@pytest.mark.parametrize("way", ["lines", "function", "raising function"])
def test_training_is_bit_identical_to_plain_pytorch(
    device: Device, way: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    def looks_and_raises(step: StepFigures) -> None:
        torch.randn(4).sum()  # on the host's generator: this training draws nothing after its beginning
        raise ZeroDivisionError(step.index)

    told: dict[str, object] = {"lines": True, "function": lambda step: None, "raising function": looks_and_raises}
    bits, _ = Training(device).swapped(device, progress=told[way])
    expected = plain(device)
    assert len(bits) == len(expected)
    assert all(map(torch.equal, bits, expected))


# --- a function


def test_an_error_in_the_function_is_logged_once_and_holds_nothing(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    calls, held = list[int](), list["weakref.ref[Tensor]"]()

    def broken(step: StepFigures) -> None:
        in_its_frame = torch.zeros(8)
        held.append(weakref.ref(in_its_frame))
        calls.append(step.index)
        raise ZeroDivisionError("in my own code")

    _, report = Training(device).swapped(device, progress=broken)
    assert calls == [0]
    assert [ref() for ref in held] == [None]
    (record,) = [record for record in caplog.records if record.name == "chameleon_mm.report.step_history"]
    assert record.levelno == logging.WARNING
    assert "telling step 0 raised" in record.getMessage()
    assert "in my own code" in record.getMessage()
    assert record.exc_info is None
    assert len(report.step_figures) == report.steps == STEPS


def test_an_error_in_the_function_does_not_take_the_place_of_the_steps(device: Device) -> None:
    session = session_on(device, progress=refusing(ZeroDivisionError))
    with pytest.raises(KeyError) as caught, session, session.step():
        raise KeyError("the step's own")
    assert caught.value.__context__ is None


def test_an_interrupt_in_the_function_ends_the_training_with_the_step_over(sim: cm.SimDevice) -> None:
    training, session = Training(sim), session_on(sim, hbm_budget="64MiB", progress=refusing(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt), session:
        for number in range(STEPS):
            with session.step():
                training.step(number)
    assert session.pool.stats().num_live == 0
    with pytest.raises(cm.SessionClosedError, match="closed"), session.step():
        raise AssertionError("the step began")


# --- a step that runs again


@pytest.mark.parametrize("raises", [False, True])
def test_a_step_that_runs_again_is_two_and_the_function_makes_none_run_again(device: Device, raises: bool) -> None:
    training, told, runs = Training(device), list[StepFigures](), Counter[int]()

    def step(number: int) -> Tensor:
        runs[number] += 1
        loss: Tensor = training.model(training.batches[number]).pow(2).mean()
        loss.backward()
        if (number, runs[number]) == (2, 1):
            raise torch.OutOfMemoryError("out of memory: injected. Tried to allocate 1.00 MiB.")
        training.optimizer.step()
        training.optimizer.zero_grad()
        return loss.detach()

    progress: Any = refusing(torch.OutOfMemoryError, "in my own code") if raises else told.append
    session = session_on(device, model=training.model, progress=progress)
    with session:
        losses = [session.run_step(partial(step, number)) for number in range(STEPS)]
    report = session.report()
    assert all(map(torch.equal, training.bits(losses), plain(device)))
    assert runs == Counter({**dict.fromkeys(range(STEPS), 1), 2: 2})
    assert [step.kind is StepKind.FAILED for step in report.step_figures] == [False, False, True, *[False] * (STEPS - 2)]
    budgets = [step.hbm_budget_bytes for step in report.step_figures]
    assert budgets == [report.hbm_budget_bytes] * 3 + [report.lowered_budget_bytes] * (STEPS - 2)
    assert raises or told == list(report.step_figures)


# --- lines


def test_a_line_says_phase_memory_and_what_copies_cost() -> None:
    assert line_of(figures()) == "step 12  planned         HBM 14.2 GiB of 16.0 GiB  host 3.00 GiB  hidden 98 %  stall 1.20 ms"
    assert line_of(figures(simulated=True)).endswith("  stall 1.20 ms  simulated")


def test_steps_before_the_first_that_follows_a_plan_are_warm_up(device: Device) -> None:
    _, report = Training(device).swapped(device)
    kinds, warm_up = [step.kind for step in report.step_figures], [step.warm_up for step in report.step_figures]
    first = kinds.index(StepKind.PLANNED)
    assert warm_up == [True] * first + [False] * (STEPS - first) and first > 0
    assert [line_of(step).endswith("  warm-up") for step in report.step_figures] == warm_up
    early, steady = report.step_figures[:first], report.step_figures[first:]
    assert (report.warm_up, report.steady) == (sums_of(early), sums_of(steady))
    assert steady and report.steady["steps"] == len(steady)
    timed = [step for step in steady if step.step_us is not None]
    assert math.isclose(report.steady["stall_us"], math.fsum(step.stall_us or 0 for step in timed), abs_tol=1e-6)
    assert f"{STEPS - first} of {STEPS - first} steps by plan, after {first} of warm-up" in report.in_short
    stall = dict(report.rows())["stall (simulated)" if device.simulated else "stall"]
    assert stall == f"{format_us(report.stall_us or 0)}, after the warm-up {format_us(report.steady['stall_us'])}"


def test_without_plans_no_step_is_warm_up(device: Device) -> None:
    _, report = Training(device).swapped(device, plans=False)
    assert not any(step.warm_up for step in report.step_figures)
    assert f"0 of {STEPS} steps by plan" in report.in_short and "warm-up" not in str(report)


def test_sums_of_steps_say_what_is_known_of_them() -> None:
    some = [figures(peak_hbm_bytes=5, peak_hbm_at_most_bytes=9), figures(peak_hbm_bytes=8, peak_hbm_at_most_bytes=8)]
    found = sums_of([*some, figures(step_us=None, stall_us=None, copy_us=None, peak_hbm_bytes=1, peak_hbm_at_most_bytes=1)])
    assert (found["steps"], found["peak_hbm_bytes"], found["peak_hbm_at_most_bytes"]) == (3, 8, 9)
    assert (found["step_us"], found["stall_us"], found["copy_us"]) == (9000.0, 2400.0, 120_000.0)
    assert found["hidden_fraction"] == 0.98
    assert sums_of([figures(peak_hbm_at_most_bytes=None)])["peak_hbm_at_most_bytes"] is None
    assert sums_of([]) | {"steps": 0, "stall_us": None, "hidden_fraction": None} == sums_of([])


def test_a_line_leaves_out_what_was_not_measured() -> None:
    untimed = figures(step_us=None, stall_us=None, copy_us=None, kind=StepKind.PARTLY_PLANNED)
    assert line_of(untimed) == "step 12  partly planned  HBM 14.2 GiB of 16.0 GiB  host 3.00 GiB"
    assert "hidden" not in line_of(figures(copy_us=0.0, stall_us=0.0))


def test_a_line_says_that_a_budget_was_exceeded() -> None:
    over = figures(peak_hbm_bytes=17 * GIB, peak_hbm_at_most_bytes=17 * GIB)
    assert "HBM 17.0 GiB of 16.0 GiB EXCEEDED  " in line_of(over)
    assert "HBM 512 B of 16.0 GiB  " in line_of(figures(peak_hbm_bytes=512, peak_hbm_at_most_bytes=512))
    assert "HBM at least 14.2 GiB of 16.0 GiB  " in line_of(figures(peak_hbm_at_most_bytes=17 * GIB))
    unknown = line_of(figures(peak_hbm_bytes=17 * GIB, peak_hbm_at_most_bytes=None))
    assert "HBM at least 17.0 GiB of 16.0 GiB EXCEEDED  " in unknown


def test_a_session_writes_a_line_a_step_to_stderr(device: Device, capsys: pytest.CaptureFixture[str]) -> None:
    _, report = Training(device).swapped(device, progress=True)
    said = capsys.readouterr()
    assert said.err.splitlines() == [line_of(step) for step in report.step_figures]
    assert said.out == ""
    assert all(("simulated" in line) == device.simulated for line in said.err.splitlines()[:3])


def test_a_session_says_nothing_unless_it_was_asked_to(device: Device, capsys: pytest.CaptureFixture[str]) -> None:
    Training(device).swapped(device)
    assert capsys.readouterr() == ("", "")


def test_a_closed_stderr_stops_the_lines_and_not_the_training(
    sim: cm.SimDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    _, report = Training(sim).swapped(sim, progress=True)
    assert report.steps == STEPS
    assert sum("raised; it is not told again" in record.getMessage() for record in caplog.records) == 1
