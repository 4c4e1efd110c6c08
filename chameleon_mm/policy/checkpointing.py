"""Estimates what full recomputation (activation checkpointing) of a step would cost and save, from its trace, for comparison.

forward    is cut into segments where the least crosses: what a later segment reads is kept, all else that a segment saves goes
backward   at the first use of something that went, its whole segment is run again, and all that it saves is there at once

Every operator of forward runs twice, wherever the cuts lie, so they lie where the peak is least. It is an estimate: a trace
does not tell a model's layers, so cuts are found by what crosses them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chameleon_mm.policy.unswapped_memory import Candidates, memory_curve, sum_over_time
from chameleon_mm.trace import StepPhase, Trace
from chameleon_mm.trace.trace import Int64s
from chameleon_mm.units import allocated_size


@dataclass(frozen=True, slots=True, kw_only=True)
class FullRecomputation:
    """A step under full recomputation, estimated."""

    segments: int
    peak_bytes: int
    """Peak of device memory, without the temporaries of the operators that run again."""
    step_us: float
    recomputed_us: float
    """Time of `step_us` in which forward runs once more."""


def full_recomputation(trace: Trace) -> FullRecomputation:
    """Estimate for `trace`, with the segments that lead to the least peak. O(ticks log ticks)."""
    step = _Segmenting(trace)
    best_peak, segments = step.peak(np.empty(0, np.int64)), 1
    parts = 2
    while parts <= 2 * len(step.cut_ticks):
        cuts = step.cut(parts)
        peak = step.peak(cuts)
        if peak < best_peak:
            best_peak, segments = peak, len(cuts) + 1
        parts = parts * 5 // 4 + 1
    forward_us = float(trace.op_us[trace.op_phase == StepPhase.FORWARD].sum())
    return FullRecomputation(
        segments=segments,
        peak_bytes=best_peak,
        step_us=trace.duration_us + forward_us,
        recomputed_us=forward_us,
    )


class _Segmenting:
    """Cuts of forward, and the peak that each set of them leads to."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._curve = memory_curve(trace)
        self._candidates = Candidates.of(trace)
        self._size = allocated_size(trace.tensor_bytes)
        self._born = trace.tensor_born.astype(np.int64)
        self._last_read = np.full(len(self._size), -1, np.int64)
        op = np.repeat(np.arange(len(trace.op_us)), np.diff(trace.read_offsets))
        forward = trace.op_phase[op] == StepPhase.FORWARD
        np.maximum.at(self._last_read, trace.read_tensors[forward], trace.op_tick[op[forward]])
        made = np.flatnonzero((self._born >= 0) & (self._last_read > self._born))
        crossing = sum_over_time(trace.num_ticks, self._size[made], self._born[made] + 1, self._last_read[made] + 1)
        self.cut_ticks: Int64s = trace.hook_tick[~trace.hook_use].astype(np.int64)
        """Ticks before which forward may be cut."""
        self._crossing = crossing[self.cut_ticks]
        c = self._candidates
        by_birth = np.argsort(self._born[c.tensor], kind="stable")
        so_far = np.concatenate(([0], np.cumsum(c.size[by_birth])))
        self._saved = so_far[np.searchsorted(self._born[c.tensor][by_birth], self.cut_ticks)]

    def cut(self, parts: int) -> Int64s:
        """Ticks at which forward is cut so that a segment saves about 1/`parts` of all, each where the least crosses nearby."""
        saved = self._saved
        goals = np.arange(1, parts) * (float(saved[-1]) / parts)
        edges = np.searchsorted(saved, np.concatenate((goals - goals[0] / 2, goals[-1:] + goals[0] / 2)))
        cuts = []
        for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            if low < high:
                cuts.append(low + int(self._crossing[low:high].argmin()))
        return self.cut_ticks[np.unique(np.array(cuts, np.int64))]

    def peak(self, cuts: Int64s) -> int:
        """Peak of device memory where forward is cut before the ticks `cuts`."""
        trace, c = self._trace, self._candidates
        segment = np.searchsorted(cuts, self._born, side="right")
        needed_by = np.searchsorted(cuts, self._last_read, side="right")
        crosses = (needed_by > segment) & (self._born >= 0)
        goes = ~crosses[c.tensor] & (self._born[c.tensor] >= 0)
        since = trace.hook_tick[c.first[goes]].astype(np.int64)
        first_use = np.full(len(cuts) + 1, trace.num_ticks, np.int64)
        np.minimum.at(first_use, segment[c.tensor[goes]], trace.hook_tick[c.use[goes]])
        until = np.maximum(since, first_use[segment[c.tensor[goes]]])
        level = self._curve - sum_over_time(trace.num_ticks, c.size[goes], since, until)
        # What crosses a cut and would have died is kept until the segment that reads it has run again.
        dead = trace.tensor_dies.astype(np.int64) + 1
        kept_until = first_use[needed_by]
        kept = np.flatnonzero(crosses & (dead < kept_until) & (kept_until < trace.num_ticks))
        level += sum_over_time(trace.num_ticks, self._size[kept], dead[kept], kept_until[kept])
        return int(level.max(initial=0)) if len(level) else trace.start_bytes
