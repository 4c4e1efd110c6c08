"""The report states the peak as far as it is known, what each step was, and wrong uses."""

from __future__ import annotations

import ast
import logging
import re
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

import chameleon_mm as cm
from chameleon_mm.device import Device
from chameleon_mm.record.step_log import StepLog
from chameleon_mm.report.step_history import line_of
from chameleon_mm.swap.hook_counts import UNNAMED_STEPS
from chameleon_mm.swap.metrics import Metrics, StepKind
from chameleon_mm.units import MIB, format_size, parse_size
from tests._fakes import refusing
from tests._programs import deep, on_a_thread

PACKAGE = Path(cm.__file__).parent


def leaf(device: Device) -> Tensor:
    return torch.randn(256, 256, device=device.torch_device, requires_grad=True)  # 256 KiB


def opened(device: Device, budget_bytes: int = 16 * MIB) -> cm.SwapSession:
    return cm.SwapSession(device.allocated_bytes() + budget_bytes, "64MiB", device, min_bytes=0)


# --- the peak


def unseen(device: Device, nbytes: int) -> None:
    """Memory that is taken and given back where no hook looks."""
    with device.compute(), torch.no_grad():
        torch.zeros(nbytes, dtype=torch.uint8, device=device.torch_device)


def a_step(session: cm.SwapSession, x: Tensor) -> None:
    with session.step():
        deep(x * 2).sum().backward()


def test_a_peak_that_the_process_reached_before_is_no_proof(device: Device) -> None:
    """The budget is broken between two hooks: the device's own peak, of before, is higher, and hooks saw nothing of it."""
    before = 40 * MIB
    unseen(device, before)
    x = leaf(device)
    session = opened(device)
    with session:
        a_step(session, x)
        unseen(device, 20 * MIB)
    report = session.report()
    assert report.budget_held is None
    assert report.peak_hbm_at_most_bytes is not None
    assert 0 < report.peak_hbm_bytes < report.hbm_budget_bytes < before <= report.peak_hbm_at_most_bytes
    assert "at least" in dict(report.rows())["peak device memory"]


def test_from_a_fresh_peak_on_it_is_known(device: Device) -> None:
    x = leaf(device)
    device.reset_peaks()
    session = opened(device)
    with session:
        a_step(session, x)
        unseen(device, 20 * MIB)
    unseen(device, 40 * MIB)  # no longer the session's
    report = session.report()
    assert report.budget_held is False
    assert report.hbm_budget_bytes < report.peak_hbm_bytes < 40 * MIB
    assert report.peak_hbm_at_most_bytes == report.peak_hbm_bytes
    assert "EXCEEDED by" in dict(report.rows())["peak device memory"]


def test_a_higher_peak_of_before_may_still_be_within_the_budget(device: Device) -> None:
    device.reset_peaks()
    unseen(device, 12 * MIB)
    x = leaf(device)
    session = opened(device)
    with session:
        a_step(session, x)
    report = session.report()
    assert report.budget_held is True
    assert report.peak_hbm_bytes < (report.peak_hbm_at_most_bytes or 0)


def test_a_peak_that_was_reset_meanwhile_is_a_lower_bound(device: Device) -> None:
    x = leaf(device)
    device.reset_peaks()
    session = opened(device)
    with session:
        with session.step():
            unseen(device, 12 * MIB)
        unseen(device, 20 * MIB)
        device.reset_peaks()
        a_step(session, x)
    report = session.report()
    assert (report.budget_held, report.peak_hbm_at_most_bytes) == (None, None)
    assert 12 * MIB <= report.peak_hbm_bytes < report.hbm_budget_bytes


RESETS = {
    "at the top of each step": (True, False, False),
    "before each evaluation": (False, True, False),
    "behind each evaluation": (False, False, True),
    "never": (False, False, False),
}


@pytest.mark.parametrize("resets", RESETS.values(), ids=RESETS)
def test_steps_of_equal_peaks_hide_no_reset(resets: tuple[bool, bool, bool], device: Device) -> None:
    """The peak of evaluations between the steps is known only if the program did not reset it after them."""
    x = leaf(device)
    device.reset_peaks()
    session = opened(device)
    with session:
        for number in range(4):
            if resets[0]:
                device.reset_peaks()
            a_step(session, x)
            if resets[1]:
                device.reset_peaks()
            if number == 2:
                unseen(device, 40 * MIB)
            if resets[2]:
                device.reset_peaks()
    assert session.report().budget_held is (None if resets[0] or resets[2] else False)


def real_peaks(device: Device, reset: str, *, by_test: bool) -> tuple[list[int], cm.SwapReport]:
    """Peak of each step, as the program reads it, and the session's report. The program resets the device's peak at `reset`.
    `by_test`: it resets it at the beginning of each step as well, so that its readings are of the step alone."""
    x = leaf(device)
    peaks, most = list[int](), 0

    def point(name: str) -> None:
        nonlocal most
        if name == reset or (by_test and name == "top"):
            most = max(most, device.peak_allocated_bytes())
            device.reset_peaks()

    device.reset_peaks()
    session = opened(device)
    with session:
        for _ in range(4):
            point("top")
            most = 0
            with session.step():
                point("inside")
                unseen(device, 9 * MIB)  # after the step's middle, it is seen by no hook
                out = deep(x * 2).sum()
                point("middle")
                out.backward()
                del out
                point("end")
            peaks.append(max(most, device.peak_allocated_bytes()))
            x.grad = None
    return peaks, session.report()


def trained_on(sizes: Sequence[int], budget: str | None) -> tuple[list[int], str]:
    """Train on batches of these rows, in a session or without one. Return the peak of each step, and the report in short."""
    device = cm.SimDevice("h200")
    torch.manual_seed(0)
    with device.compute() if budget is None else nullcontext():
        model = torch.nn.Sequential(*(layer for _ in range(4) for layer in (torch.nn.Linear(256, 256), torch.nn.GELU())))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        peaks = []
        with nullcontext() if budget is None else cm.attach(model, hbm_budget=budget, device=device) as handle:
            for rows in sizes:
                if budget is None:
                    device.reset_peaks()
                model(torch.randn(rows, 256)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                peaks.append(device.peak_allocated_bytes())
    return peaks, "" if handle is None else handle.report().in_short


@pytest.mark.parametrize("sizes", [(8192, 2048) * 4 + (8192,), (8192, *(2048,) * 6), (*(8192,) * 3, *(2048,) * 4)])
@pytest.mark.parametrize("budget", ["1GiB", "60MiB"])
def test_the_peaks_in_short_are_of_the_same_kind_of_step(sizes: tuple[int, ...], budget: str) -> None:
    in_short = trained_on(sizes, budget)[1]
    found = re.match(r"peak (.*) -> (?:at least )?(.*?), .* after (\d) of warm-up", in_short)
    assert found is not None, in_short
    largest = max(trained_on(sizes, None)[0][max(2, int(found[3])) :])  # from the third step on there is all of the state
    unit = found[2].rpartition(" ")[2]
    assert found[1] + " " * (unit not in found[1]) + unit * (unit not in found[1]) == format_size(largest), in_short
    if budget == "60MiB":
        assert parse_size(found[2]) <= parse_size(budget)


@pytest.mark.parametrize("reset", ["never", "top", "inside", "middle", "end"])
def test_the_peak_of_a_step_is_the_peak_or_says_at_least(reset: str, device: Device, tmp_path: Path) -> None:
    """The peak that the program reads after a reset at each step's top is within the bounds, at any place of another reset."""
    real, _ = real_peaks(device, reset, by_test=True)
    _, report = real_peaks(device, reset, by_test=False)
    steps = report.step_figures
    for peak, step in zip(real, steps, strict=True):
        low, high = step.peak
        assert low <= peak and (high is None or peak <= high)
        assert f"HBM {step.peak} of" in line_of(step)
        assert str(step.peak) == f"{'at least ' if low != high else ''}{format_size(low)}"
    assert all(step.peak.at_most_bytes == peak for peak, step in zip(real, steps, strict=True)) or reset != "top"
    low, high = report.peak
    assert low <= max(real) and (high is None or max(real) <= high)
    report.save_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert str(report.peak) in page
    # Inside of a step, before its first hook: the next reading is as high again, so the reset is invisible.
    assert str(report.peak).startswith("at least") == (reset not in ("never", "inside"))


# --- what the steps were


def run_steps(device: Device, links: list[int], *, budget_bytes: int = 16 * MIB, plans: bool = True) -> cm.SwapReport:
    """A step for each number of links; -1: one that fails, 0: one without gradients."""
    x = leaf(device)
    budget = device.allocated_bytes() + budget_bytes
    session = cm.SwapSession(budget, "64MiB", device, min_bytes=0, plans=plans)
    with session:
        for count in links:
            out = x
            with pytest.raises(KeyError) if count < 0 else nullcontext(), session.step():
                for _ in range(abs(count)):
                    out = torch.tanh(out * 1.5)
                if count < 0:
                    raise KeyError
                with torch.no_grad() if not count else nullcontext():
                    total = out.sum()
                if count:
                    total.backward()
                del out, total
    return session.report()


@pytest.mark.parametrize(
    ("links", "expected"),
    [
        ([4, 4, 4], {"recorded": 1, "planned": 2}),
        ([2, 3, 4, 5, 6, 7], {"recorded": 3, "partly_planned": 3}),  # each as the last one, and longer
        ([4, 4, 6, 4], {"recorded": 1, "planned": 2, "partly_planned": 1}),  # one step is not expected to repeat
        ([4, -4, 4], {"recorded": 1, "planned": 1, "failed": 1}),
        ([4, 0, 0, 4], {"recorded": 2, "planned": 1, "by_rule": 1}),
    ],
    ids=["alike", "all new", "one that differs", "one that fails", "evaluations"],
)
def test_each_step_is_counted_as_what_it_was(links: list[int], expected: dict[str, int], sim: cm.SimDevice) -> None:
    report = run_steps(sim, links)
    assert report.steps_by_phase == expected
    assert sum(expected.values()) == len(links)
    assert report.detailed_steps == expected["recorded"]
    assert report.steps == len(links) - expected.get("failed", 0)


def test_without_plans_every_step_goes_by_the_rule(sim: cm.SimDevice) -> None:
    assert run_steps(sim, [4, 4, -4], plans=False).steps_by_phase == {"by_rule": 2, "failed": 1}


# --- how it is used


def train(session: cm.SwapSession, device: Device, how: str) -> None:
    x = leaf(device)

    def forward() -> Tensor:
        return deep(x * 2).sum()

    def on_another_thread() -> None:
        with device.compute():
            forward().backward()

    for _ in range(3):
        if how == "no step":
            forward().backward()
        elif how == "only the backward in it":
            out = forward()
            with session.step():
                out.backward()
        elif how == "only the forward in it":
            with session.step():
                out = forward()
            out.backward()
        else:
            around: dict[str, AbstractContextManager[object]] = {
                "gradients off": torch.no_grad(),
                "under other hooks": cm.save_on_cpu(device=device),
            }
            with around.get(how, nullcontext()), session.step():
                if how == "another thread":
                    on_a_thread(on_another_thread)
                elif how == "other hooks inside":
                    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                        forward().backward()
                elif how == "gradients off":
                    forward()
                else:
                    forward().backward()


NOTHING_RAN = "no hook of this session ran in any of its 3 steps"
PROBLEMS = {
    "no step": ["session.step() was never called", "default rule", "put each optimizer step"],
    "another thread": [NOTHING_RAN, threading.current_thread().name, "run the forward on that thread"],
    "other hooks inside": [NOTHING_RAN, "inside other saved-tensor hooks"],
    "under other hooks": [NOTHING_RAN, "only the innermost are called"],
    "gradients off": [NOTHING_RAN, "gradients were off", "torch.no_grad()"],
    "only the backward in it": [NOTHING_RAN, "the forward ran between the steps"],
    "only the forward in it": ["in 3 of 3 steps the forward ran inside of the step and the backward outside"],
}


@pytest.mark.parametrize("how", PROBLEMS)
def test_the_report_says_what_is_wrong(how: str, device: Device, caplog: pytest.LogCaptureFixture) -> None:
    session = opened(device, 4 * MIB)
    with caplog.at_level(logging.WARNING, "chameleon_mm"), session:
        train(session, device, how)
    (problem,) = session.report().problems
    assert all(words in problem for words in PROBLEMS[how])
    assert ("PROBLEM", problem) in session.report().rows()
    assert session.report().to_dict()["problems"] == [problem]
    assert [record.getMessage() for record in caplog.records] == [f"chameleon_mm: {problem}"]


def backward_passes(device: Device, count: int) -> None:
    x = leaf(device)
    for _ in range(count):
        deep(x * 2).sum().backward()


def test_a_training_without_steps_is_told_so_while_it_runs_and_once(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    session = opened(device, 4 * MIB)
    with caplog.at_level(logging.WARNING, "chameleon_mm"), session:
        backward_passes(device, UNNAMED_STEPS - 1)
        assert caplog.records == []
        backward_passes(device, 1)
        (record,) = caplog.records
        backward_passes(device, UNNAMED_STEPS)
    assert caplog.records == [record]
    assert record.getMessage() == f"chameleon_mm: {session.report().problems[0]}"
    assert "session.step() was never called" in record.getMessage()


def test_backward_passes_between_steps_are_no_missing_steps(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    session = opened(device, 4 * MIB)
    with caplog.at_level(logging.WARNING, "chameleon_mm"), session:
        with session.step():
            backward_passes(device, 1)
        backward_passes(device, 2 * UNNAMED_STEPS)
    assert not any("session.step() was never called" in record.getMessage() for record in caplog.records)


def test_who_has_no_steps_is_not_asked_for_them(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "chameleon_mm"), device.compute(), cm.save_on_cpu(device=device):
        backward_passes(device, 2 * UNNAMED_STEPS)
    assert caplog.records == []


def test_a_step_without_a_hook_that_breaks_the_budget_is_told_why(sim: cm.SimDevice, caplog: pytest.LogCaptureFixture) -> None:
    session = opened(sim)
    with caplog.at_level(logging.WARNING, "chameleon_mm"), session:
        for _ in range(2):
            with session.step():
                unseen(sim, 20 * MIB)
    said = [record.getMessage() for record in caplog.records]
    assert "none of the session's hooks ran" in said[0]
    assert NOTHING_RAN.replace("3", "2") in said[-1]
    assert not any("not in activations at all" in line for line in said)


def test_a_session_that_nothing_ran_in_is_told_so(sim: cm.SimDevice) -> None:
    session = opened(sim)
    assert session.report().problems == ()  # it may come yet
    with session:
        assert session.report().problems == ()
    (problem,) = session.report().problems
    assert "session.step() was never called, and autograd saved nothing" in problem


def test_a_session_that_is_used_as_it_is_meant_has_no_problem(device: Device) -> None:
    """Evaluations in steps of their own, and a step that failed, are nothing wrong."""
    session = opened(device)
    x = leaf(device)
    with session:
        with session.step(), torch.no_grad():
            deep(x * 2)
        with pytest.raises(KeyError), session.step():
            out = deep(x * 2).sum()
            raise KeyError
        out.backward()
        for _ in range(3):
            a_step(session, x)
        deep(x * 2)
    assert session.report().problems == ()
    assert "PROBLEM" not in str(session.report())


# --- warnings, each once


def test_a_warning_is_logged_once_and_counted(sim: cm.SimDevice, caplog: pytest.LogCaptureFixture) -> None:
    """Steps of three lengths, none of which has a plan within the budget: each plan that is tried is refused, one is logged."""
    x = leaf(sim)
    session = opened(sim, 600 * 1024)
    with caplog.at_level(logging.WARNING, "chameleon_mm"), session:
        for links in (4, 6, 8, 4, 6, 8):
            with session.step():
                kept = [torch.tanh(x * link) for link in range(links)]  # the program holds them all
                torch.stack(kept).sum().backward()
                del kept
    (logged,) = [record.getMessage() for record in caplog.records if "no plan for a step" in record.getMessage()]
    report = session.report()
    assert {text: count for text, count in report.warnings.items() if "no plan for a step" in text} == {logged: 2}
    assert ("WARNING", f"{logged} (2 of its kind)") in report.rows() and report.to_dict()["warnings"] == report.warnings
    most = max(step.peak_hbm_bytes for step in report.step_figures if step.kind is StepKind.BY_RULE)
    needs = f"one needs {format_size(sum(report.least_peak.values()))} or more"
    assert dict(report.rows())["latest plan"] == f"none: {needs}; steps by the default rule took up to {format_size(most)}"
    assert most > report.hbm_budget_bytes and min(step.peak_hbm_bytes for step in report.step_figures) > 0


def test_operators_that_no_recorder_can_write_down_are_told_once_and_counted(
    sim: cm.SimDevice, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepLog, "before", refusing(NotImplementedError, "no storage to look at"))
    x, session = leaf(sim), opened(sim)
    with caplog.at_level(logging.WARNING, "chameleon_mm"), session:
        for _ in range(3):
            a_step(session, x)
    (logged,) = [record.getMessage() for record in caplog.records]
    assert "this step gives no plan" in logged and session.report().warnings == {logged: 3}


def test_each_kind_of_warning_is_counted_for_itself(caplog: pytest.LogCaptureFixture) -> None:
    metrics, log = Metrics(), logging.getLogger("chameleon_mm.test")
    with caplog.at_level(logging.WARNING, "chameleon_mm"):
        for number in range(3):
            metrics.warn(log, "chameleon_mm: %d bytes stay", number)
        metrics.warn(log, "chameleon_mm: gone")
    assert [record.getMessage() for record in caplog.records] == ["chameleon_mm: 0 bytes stay", "chameleon_mm: gone"]
    assert dict(metrics.totals.warnings.values()) == {"chameleon_mm: 0 bytes stay": 3, "chameleon_mm: gone": 1}


# --- log lines


def log_messages() -> list[tuple[str, ast.expr]]:
    """Place and message of every logger call in the package."""
    files = [*PACKAGE.rglob("*.py"), *(PACKAGE / "kernels").rglob("*.py")]
    return [
        (f"{file.relative_to(PACKAGE)}:{node.lineno}", node.args[0])
        for file in files
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "_log"
        and node.func.attr != "isEnabledFor"
    ]


def test_every_log_line_names_the_library() -> None:
    """Without a logging configuration, Python prints a warning's message and no more."""
    messages = log_messages()
    assert len(messages) > 20
    for place, message in messages:
        assert isinstance(message, ast.Constant), place
        assert str(message.value).startswith("chameleon_mm: "), place
