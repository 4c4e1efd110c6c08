"""History of a session's steps: how many began and ended, what each took, and the most memory of all of them.

    history.open()                           # the session begins
    timed = history.begin(hbm_budget_bytes)  # a step does; then the executor's
    history.end(executor.end_step(...))      # its figures: at once, or once the device has come to the end of a timed one
    history.close(wait=True); history.figures()

Nothing waits for the device between steps: figures of a timed step are told at a later boundary, and in the steps' order.
"""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import replace
from itertools import starmap

from chameleon_mm.device import Device
from chameleon_mm.device.peak_watch import Peak, PeakWatch, peak_between
from chameleon_mm.executor import Executor
from chameleon_mm.pinned import PinnedPool
from chameleon_mm.progress import Progress
from chameleon_mm.saved.step_sums import StepSums
from chameleon_mm.saved.timed_spans import StepKind
from chameleon_mm.step_figures import StepFigures

ALWAYS_TIMED_STEPS = 3
TIMED_EVERY = 16
"""Steps are timed in full up to the first, then one in so many of the second: on a GPU, timing a copy or a wait costs two timed
events of 5 us on the host."""

MAX_FIGURES = 10_000
"""Latest steps whose figures are kept: a few MB."""

MAX_PENDING = 64
"""Steps that ended and whose figures are not complete, at most: the oldest one's are told without its times then."""


class StepHistory:
    """Steps of one session. Not thread-safe, but for `figures`: the thread that trains begins and ends steps."""

    def __init__(self, device: Device, executor: Executor, pool: PinnedPool, progress: Progress) -> None:
        self.completed = self.begun = 0
        self._device = device
        self._executor = executor
        self._metrics = executor.metrics
        self._pool = pool
        self._progress = progress
        self._watch: PeakWatch | None = None
        self._seen_bytes = 0
        """The most that was allocated at any check of memory before the step that runs."""
        self._running: tuple[int, int, float, int, int] | None = None
        """The running step's number and budget, and as it began the host's clock and the bytes that went out and came in so
        far; None: there is none, or the device could not be asked."""
        self._pending: deque[tuple[StepFigures, StepSums | None]] = deque()
        """Steps that ended, and that no one was told of: their figures without times, and the times, which are not complete."""
        self._figures: deque[StepFigures] = deque(maxlen=MAX_FIGURES)
        """Figures of the latest steps that were told."""

    # --- the session's peak

    def open(self) -> None:
        """Begin to watch the device's peak, or begin anew."""
        self.note_peak()
        self._watch = PeakWatch(self._device)
        self._seen_bytes = self._executor.budget.peak_seen_bytes = 0

    def note_peak(self) -> None:
        """Read the device's peak."""
        if self._watch is not None and not sys.is_finalizing():
            self._watch.note()

    def end_peak(self) -> None:
        """End the stretch of time whose peak is watched."""
        if self._watch is not None and not sys.is_finalizing():
            self._watch.end()

    def peak(self) -> Peak:
        """Bounds of the peak since `open`."""
        seen_bytes = max(self._seen_bytes, self._executor.budget.peak_seen_bytes)
        return Peak(0, 0) if self._watch is None else self._watch.peak(seen_bytes)

    # --- steps

    def begin(self, hbm_budget_bytes: int) -> bool:
        """Begin a step, before the executor does. Returns whether it is to be timed."""
        index, self.begun = self.begun, self.begun + 1
        totals, budget = self._metrics.totals, self._executor.budget
        self._running = None
        if self._executor.hook_lock.may_ask_device():
            self._settle()
            self.note_peak()  # a loop that resets the peak at its top has the same one at the end of each step
            self._pool.recent_peak_bytes()
            self._seen_bytes = max(self._seen_bytes, budget.peak_seen_bytes)
            budget.peak_seen_bytes, budget.peak_at_begin_bytes = 0, None
            if not self._executor.director.plans:  # else the executor reads it
                budget.peak_at_begin_bytes = self._device.peak_allocated_bytes()
            began_us = self._device.host_us
            self._running = index, hbm_budget_bytes, began_us, totals.bytes_swapped_out, totals.bytes_swapped_in
        return self._device.simulated or self.completed < ALWAYS_TIMED_STEPS or self.completed % TIMED_EVERY == 0

    def end(self, kind: StepKind | None) -> None:
        """End the step, of `kind` by what the executor says, when it is over for everybody else. Tells what is complete."""
        step, self._running = self._running, None
        if step is None or kind is None or self._watch is None:
            self.note_peak()
            return
        self._watch.note()
        index, hbm_budget_bytes, began_us, bytes_out, bytes_in = step
        totals, budget, sums = self._metrics.totals, self._executor.budget, self._metrics.step
        before_bytes, after_bytes = budget.peak_at_begin_bytes, self._watch.last_bytes
        peak = peak_between(after_bytes if before_bytes is None else before_bytes, after_bytes, budget.peak_seen_bytes)
        figures = StepFigures(
            index=index,
            kind=kind,
            simulated=self._device.simulated,
            host_us=self._device.host_us - began_us,
            peak_hbm_bytes=peak.at_least_bytes,
            peak_hbm_at_most_bytes=peak.at_most_bytes,
            hbm_budget_bytes=hbm_budget_bytes,
            host_bytes=self._pool.recent_peak_bytes(),
            bytes_out=totals.bytes_swapped_out - bytes_out,
            bytes_in=totals.bytes_swapped_in - bytes_in,
        )
        self._pending.append((figures, sums))
        self._settle()

    def close(self, *, wait: bool) -> None:
        """Tell all that is not told yet. `wait`: where somebody listens, first wait for the device, so that it is complete."""
        if not self._pending or sys.is_finalizing() or not self._executor.hook_lock.may_ask_device():
            return
        if self._progress.is_listened_to:
            if wait:
                self._device.synchronize()
            self._metrics.resolve()
            self._settle(all_of_them=True)

    def figures(self) -> tuple[StepFigures, ...]:
        """Figures of the latest steps that ended, oldest first; without times where the device is not done. Never waits."""
        return (*self._figures.copy(), *starmap(self._with_times, self._pending.copy()))

    def _settle(self, *, all_of_them: bool = False) -> None:
        """Tell the figures of the oldest steps, as far as they are complete."""
        pending = self._pending
        while pending and (
            all_of_them or len(pending) > MAX_PENDING or (sums := pending[0][1]) is None or self._metrics.is_complete(sums)
        ):
            figures = self._with_times(*pending.popleft())
            self._figures.append(figures)
            if self._progress.is_listened_to:
                self._progress.tell(figures)

    def _with_times(self, figures: StepFigures, sums: StepSums | None) -> StepFigures:
        """The figures with the step's times, where those are complete."""
        if sums is None or not self._metrics.is_complete(sums):
            return figures
        return replace(
            figures, step_us=sums.step_us, stall_us=sums.stall_us, copy_us=sums.copy_us, recompute_us=sums.recompute_us
        )
