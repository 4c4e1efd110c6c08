"""History of a session's steps: numbers of begun and ended steps, figures of each, and the memory peak over all.

    history.open()                           # the session begins
    timed = history.begin(hbm_budget_bytes)  # a step begins, before the executor's
    history.end(executor.end_step(...))      # reports figures at once, or when the device has finished a timed step
    history.close(wait=True); history.figures()

Nothing waits for the device between steps. Figures of a timed step are reported between later steps, in order.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import starmap
from statistics import median
from typing import Any

from chameleon_mm.device import Device
from chameleon_mm.device.peak_watch import Peak, PeakWatch
from chameleon_mm.errors import describe
from chameleon_mm.pool.pool import PinnedPool
from chameleon_mm.swap.executor import Executor
from chameleon_mm.swap.metrics import StepKind, StepSums, hidden_fraction
from chameleon_mm.units import format_size, format_us

# --- Figures of one step of a session: time, memory, bytes moved, waits


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """Figures of a step that ended. Sizes are bytes, `_us` microseconds of the device's clock (virtual on the simulator)."""

    index: int
    """Number of the step, from 0 on. Each run of a step counts, so a step that ran again has two numbers."""
    kind: StepKind
    simulated: bool
    step_us: float | None = None
    """Time from the step's beginning to its end on the device's clock; None: step and copies were not timed."""
    host_us: float
    """Time from the step's beginning to its end on the host's clock. The host may be far ahead. Virtual on the simulator."""
    peak_hbm_bytes: int
    """Maximum device memory allocated in the step; a lower bound, seen by hooks, if `peak_hbm_at_most_bytes` differs."""
    peak_hbm_at_most_bytes: int | None
    """Upper bound of that maximum; None: unknown. Both bounds equal the peak if the step took more than all earlier steps since
    the device's peak was reset."""
    hbm_budget_bytes: int
    host_bytes: int
    """Maximum pinned memory that live blocks of the session's pool held in the step."""
    bytes_out: int
    """Bytes of saved tensors copied out in the step, a part of `bytes_swapped_out`. `bytes_in`: bytes copied back."""
    bytes_in: int
    stall_us: float | None = None
    """Time that compute waited for copies."""
    copy_us: float | None = None
    """Time that the step's copies ran, sum of both directions."""
    tokens: int | None = None
    """Tokens, padding included, of the batches that an attached model was trained with; None: not known. See `tokens_in`."""
    warm_up: bool = False
    """True if the session makes plans, but no step so far followed a plan from its first hook to its last."""

    @property
    def peak(self) -> Peak:
        """Both bounds of the peak. Its text says "at least" where they differ."""
        return Peak(self.peak_hbm_bytes, self.peak_hbm_at_most_bytes)

    @property
    def hidden_fraction(self) -> float | None:
        """Share of the copies' time during which compute did not wait for them; None if none was timed."""
        return None if self.copy_us is None or self.stall_us is None else hidden_fraction(self.stall_us, self.copy_us)

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary of all figures, ready for JSON."""
        return {**dataclasses.asdict(self), "kind": self.kind.value, "hidden_fraction": self.hidden_fraction}


def sums_of(steps: Sequence[StepFigures]) -> dict[str, Any]:
    """Return number of `steps`, highest peak, median time, and stalls, copies, hidden share of timed steps. None: unknown."""
    names = ("step_us", "stall_us", "copy_us")
    us = {name: [us for step in steps if (us := getattr(step, name)) is not None] for name in names}
    at_most = [step.peak_hbm_at_most_bytes for step in steps]
    return {
        "steps": len(steps),
        "peak_hbm_bytes": max((step.peak_hbm_bytes for step in steps), default=0),
        "peak_hbm_at_most_bytes": None if None in at_most else max((nbytes or 0 for nbytes in at_most), default=0),
        "step_us": median(us["step_us"]) if us["step_us"] else None,
        "stall_us": sum(us["stall_us"]) if us["stall_us"] else None,
        "copy_us": sum(us["copy_us"]) if us["copy_us"] else None,
        "hidden_fraction": hidden_fraction(sum(us["stall_us"]), sum(us["copy_us"])),
    }


def log_values(steps: Sequence[StepFigures]) -> dict[str, float]:
    """Return the known figures of the latest `steps` for a training log; empty without a step.

    "swap_step_us": median time, by the host's clock if none was timed. "swap_tokens_per_s": tokens of the steps of which they
    are known over the time of these steps, by the same clock. "swap_peak_at_least_bytes": the highest peak that hooks
    saw; "swap_peak_bytes": the highest peak. "swap_budget_bytes": the latest. "swap_bytes_out", "swap_stall_us": means of a
    step, the second of the timed ones.
    """
    if not steps:
        return {}
    sums, stalls = sums_of(steps), [step.stall_us for step in steps if step.stall_us is not None]
    peak_bytes, at_most_bytes = sums["peak_hbm_bytes"], sums["peak_hbm_at_most_bytes"]
    timed = [step for step in steps if step.step_us is not None] or steps
    counted = [(step.tokens, step.step_us or step.host_us) for step in timed if step.tokens is not None]
    counted_us = sum(us for _, us in counted)
    values = {
        "swap_step_us": sums["step_us"] or median(step.host_us for step in steps),
        "swap_tokens_per_s": 1e6 * sum(tokens for tokens, _ in counted) / counted_us if counted_us else None,
        "swap_peak_at_least_bytes": peak_bytes,
        "swap_peak_bytes": peak_bytes if peak_bytes == at_most_bytes else None,
        "swap_budget_bytes": steps[-1].hbm_budget_bytes,
        "swap_bytes_out": sum(step.bytes_out for step in steps) / len(steps),
        "swap_stall_us": sums["stall_us"] / len(stalls) if stalls else None,
    }
    return {name: value for name, value in values.items() if value is not None}


# --- Reports of each step's figures while a session runs: lines on stderr, or calls of a function

_log = logging.getLogger(__name__)

_KIND_WIDTH = max(len(str(kind)) for kind in StepKind)


def teller_of(progress: object) -> Callable[[StepFigures], object] | None:
    """Return the function to call with the figures of each step; None: there is none. Raises `TypeError`."""
    if progress is True:
        return lambda figures: sys.stderr.write(f"{line_of(figures)}\n")
    if callable(progress) and not isinstance(progress, type):
        return progress
    if progress is not False:
        raise TypeError(
            f"progress: expected True, False or a function, got {describe(progress)}; pass True for a line a step on "
            f"stderr, or a function that is called with each step's StepFigures"
        )
    return None


def line_of(figures: StepFigures) -> str:
    """Return the line on a step."""
    over = " EXCEEDED" if figures.peak_hbm_bytes > figures.hbm_budget_bytes else ""
    parts = [
        f"step {figures.index}",
        f"{figures.kind!s:<{_KIND_WIDTH}}",
        f"HBM {figures.peak} of {format_size(figures.hbm_budget_bytes)}{over}",
        f"host {format_size(figures.host_bytes)}",
    ]
    if figures.hidden_fraction is not None:
        parts.append(f"hidden {100 * figures.hidden_fraction:.0f} %")
    if figures.stall_us is not None:
        parts.append(f"stall {format_us(figures.stall_us)}")
        if figures.simulated:
            parts.append("simulated")
    return "  ".join([*parts, "warm-up"] if figures.warm_up else parts)


ALWAYS_TIMED_STEPS = 3
TIMED_EVERY = 16
"""Interval of timed steps after the first `ALWAYS_TIMED_STEPS`, which are all timed. On a GPU, timing a copy or a wait costs
two timed events of 5 us each on the host."""

_PASSED = {
    StepKind.RECORDED: "a step of which nothing was known",
    StepKind.PARTLY_PLANNED: "a step unlike the planned ones",
    StepKind.BY_RULE: "a step that follows no plan",
}
"""Kinds of steps that may exceed the budget without a warning of the planner, and their names in warnings."""

MAX_FIGURES = 10_000
"""Maximum number of latest steps whose figures are stored: a few MB."""

MAX_PENDING = 64
"""Maximum number of ended steps with incomplete figures. If there are more, the oldest is reported without times."""


class StepHistory:
    """Steps of one session. Only `figures` is thread-safe. The training thread begins and ends steps."""

    def __init__(
        self, device: Device, executor: Executor, pool: PinnedPool, tell: Callable[[StepFigures], object] | None
    ) -> None:
        """`tell`: called with the figures of each step. An error in it is logged and ends the calls, not the training."""
        self.completed = self.begun = self.began_bytes = 0
        self.device, self.pool, self._tell = device, pool, tell
        self._executor, self.metrics = executor, executor.metrics
        self._watch: PeakWatch | None = None
        self._peak_is_over = False
        self._last_peak_bytes = self._warned = 0
        self._tokens: int | None = None
        """Tokens of the running step; None: not known."""
        self._running: tuple[int, int, float, int, int] | None = None
        """Number and budget of the running step; host clock and total bytes out and in at its beginning. None: no step runs, or
        the device must not be called."""
        self._pending: deque[tuple[StepFigures, StepSums | None]] = deque()
        """Ended steps not reported yet: their figures without times, and their incomplete times."""
        self._figures: deque[StepFigures] = deque(maxlen=MAX_FIGURES)
        """Figures of the latest reported steps."""

    # --- the session's peak

    def open(self) -> None:
        """Start or restart the watch of the device's peak."""
        peak_bytes = self.device.peak_allocated_bytes()
        self._watch, self._executor.budget.peak_watch = PeakWatch(peak_bytes), PeakWatch(peak_bytes)
        self.began_bytes = self.device.allocated_bytes()
        self._watch.note(peak_bytes, self.began_bytes)

    def note_peak(self) -> None:
        """Read the device's peak."""
        if self._watch is not None and not self._peak_is_over and not sys.is_finalizing():
            peak_bytes, of_step = self.device.peak_allocated_bytes(), self._executor.budget.peak_watch
            of_step.note(peak_bytes)
            self._watch.include(of_step)
            self._watch.note(peak_bytes)

    def end_peak(self) -> None:
        """End the interval whose peak is watched."""
        self.note_peak()
        self._peak_is_over = True

    def peak(self) -> Peak:
        """Return the bounds of the peak from `open` to the last `note_peak`."""
        return Peak(0, 0) if self._watch is None else self._watch.peak()

    # --- steps

    def begin(self, hbm_budget_bytes: int) -> bool:
        """Begin a step, before the executor does. Returns True if the step should be timed."""
        index, self.begun = self.begun, self.begun + 1
        totals, budget = self.metrics.totals, self._executor.budget
        self._running = self._tokens = None
        if self._executor.hook_lock.may_ask_device():
            self._settle()
            self.note_peak()  # a loop may reset the peak at its top, so it may be equal at the end of each step
            self._tell_between(hbm_budget_bytes)
            self.pool.recent_peak_bytes()
            self.began_bytes = self.device.allocated_bytes()
            budget.peak_watch = PeakWatch(budget.peak_watch.last_bytes)
            began_us = self.device.host_us
            self._running = index, hbm_budget_bytes, began_us, totals.bytes_swapped_out, totals.bytes_swapped_in
            self._warned = self._num_warnings()
        return self.device.simulated or self.completed < ALWAYS_TIMED_STEPS or self.completed % TIMED_EVERY == 0

    def count_tokens(self, tokens: int) -> None:
        """Add `tokens` to those of the running step."""
        self._tokens = tokens + (self._tokens or 0)

    def end(self, kind: StepKind | None) -> None:
        """End the step, after all other parts. `kind`: result of the executor. Reports complete steps."""
        step, self._running = self._running, None
        self.note_peak()
        if step is None or kind is None:
            return
        index, hbm_budget_bytes, began_us, bytes_out, bytes_in = step
        totals, sums, peak = self.metrics.totals, self.metrics.step, self._executor.budget.peak_watch.peak()
        self._last_peak_bytes = peak.at_least_bytes
        self._tell_excess(kind, peak.at_least_bytes, hbm_budget_bytes)
        figures = StepFigures(
            index=index,
            kind=kind,
            simulated=self.device.simulated,
            host_us=self.device.host_us - began_us,
            peak_hbm_bytes=peak.at_least_bytes,
            peak_hbm_at_most_bytes=peak.at_most_bytes,
            hbm_budget_bytes=hbm_budget_bytes,
            host_bytes=self.pool.recent_peak_bytes(),
            bytes_out=totals.bytes_swapped_out - bytes_out,
            bytes_in=totals.bytes_swapped_in - bytes_in,
            tokens=self._tokens,
            warm_up=self._executor.director.plans and not totals.steps_by_kind[StepKind.PLANNED],
        )
        self._pending.append((figures, sums))
        self._settle()

    def _tell_excess(self, kind: StepKind, peak_bytes: int, hbm_budget_bytes: int) -> None:
        """Warn if a step exceeded its budget and no other warning came in it."""
        if kind in _PASSED and peak_bytes > hbm_budget_bytes and self._num_warnings() == self._warned:
            told = f"chameleon_mm: {_PASSED[kind]} passed the budget by %s; raise hbm_budget by as much if it goes on"
            self.metrics.warn(_log, told, format_size(peak_bytes - hbm_budget_bytes))

    def _tell_between(self, hbm_budget_bytes: int) -> None:
        """Warn if memory exceeded the budget since the last step, by more than in that step."""
        peak_bytes = self._executor.budget.peak_watch.peak().at_least_bytes
        if peak_bytes > max(hbm_budget_bytes, self._last_peak_bytes):
            told = "chameleon_mm: memory outside of steps, where nothing moves, as in an evaluation, passed the budget by %s"
            self.metrics.warn(_log, told, format_size(peak_bytes - hbm_budget_bytes))

    def _num_warnings(self) -> int:
        return sum(count for _, count in self.metrics.totals.warnings.values())

    def close(self, *, wait: bool) -> None:
        """Report all remaining steps, if there is a listener. `wait`: first wait for the device, so that they are complete."""
        if not self._pending or sys.is_finalizing() or not self._executor.hook_lock.may_ask_device():
            return
        if self._tell is not None:
            if wait:
                self.device.synchronize()
            self.metrics.resolve()
            self._settle(all_of_them=True)

    def figures(self) -> tuple[StepFigures, ...]:
        """Return figures of the latest ended steps, oldest first; without times if the device has not finished. Never waits."""
        return (*self._figures.copy(), *starmap(self._with_times, self._pending.copy()))

    def figures_since(self, index: int) -> list[StepFigures]:
        """Return the complete figures of steps from number `index` on. A timed step is complete once the device has run it."""
        if self._executor.hook_lock.may_ask_device():
            self._settle()
        return [figures for figures in self._figures.copy() if figures.index >= index]

    def _settle(self, *, all_of_them: bool = False) -> None:
        """Report the figures of the oldest steps, up to the first incomplete one."""
        pending = self._pending
        while pending and (
            all_of_them or len(pending) > MAX_PENDING or (sums := pending[0][1]) is None or self.metrics.is_complete(sums)
        ):
            figures = self._with_times(*pending.popleft())
            self._figures.append(figures)
            try:
                if self._tell is not None:
                    self._tell(figures)
            except Exception:  # noqa: BLE001 - an error in a user's function must not end a long training
                self._tell = None
                # Only the text: a log record with the error would keep its frames and their tensors alive.
                said = traceback.format_exc()
                _log.warning("chameleon_mm: progress: telling step %d raised; it is not told again:\n%s", figures.index, said)

    def _with_times(self, figures: StepFigures, sums: StepSums | None) -> StepFigures:
        """Add the step's times to the figures, if they are complete."""
        if sums is None or not self.metrics.is_complete(sums):
            return figures
        return replace(figures, step_us=sums.step_us, stall_us=sums.stall_us, copy_us=sums.copy_us)
