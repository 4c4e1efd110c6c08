"""The link between host and device: one copy engine per direction, each FIFO, both sharing what the link carries at once.

    start = max(when the stream is ready, when the engine is free)
    end   = start + latency + bytes at this direction's rate, or at what the other direction leaves while it is busy

Times are fixed when a copy is issued. A copy that starts beside one already going the other way gets the rest of the duplex
rate; the earlier one keeps its own. The sum is the link's measured duplex rate, which is what plans depend on.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

COPY_LATENCY_US = 3.1
"""Fixed cost of one DMA copy on a PCIe 5 GPU: 4 MiB reach 53.2 of 55.4 GB/s, so 90 % of the rate comes at 1.6 MB."""


class Span(NamedTuple):
    """One copy's time on its engine, in virtual microseconds."""

    start_us: float
    end_us: float
    nbytes: int


@dataclass(slots=True)
class CopyEngine:
    """The copy engine of one direction. `rate_gbps` alone, `shared_gbps` while the other direction is busy (1e9 bytes a
    second)."""

    rate_gbps: float
    shared_gbps: float
    free_at_us: float = 0.0
    spans: deque[Span] = field(default_factory=deque)

    def schedule(self, nbytes: int, ready_us: float, other: CopyEngine) -> Span:
        """Queue a copy that may start at `ready_us`; returns when it runs."""
        start = max(ready_us, self.free_at_us)
        clock = start + COPY_LATENCY_US
        left = float(nbytes)
        for beside in other.spans:
            if left <= 0:
                break
            if beside.end_us <= clock:
                continue
            alone = max(0.0, beside.start_us - clock)
            clock, left = _advance(clock, left, self.rate_gbps, alone)
            clock, left = _advance(clock, left, self.shared_gbps, max(0.0, beside.end_us - clock))
        clock += left / (self.rate_gbps * 1e3)
        span = Span(start, clock, nbytes)
        self.spans.append(span)
        self.free_at_us = clock
        return span

    def forget_before(self, now_us: float) -> None:
        """Drop spans that nothing issued from now on can run beside."""
        while self.spans and self.spans[0].end_us < now_us:
            self.spans.popleft()


def _advance(clock_us: float, left_bytes: float, rate_gbps: float, at_most_us: float) -> tuple[float, float]:
    """Move bytes at a rate for at most a time: the new clock and what is left."""
    per_us = rate_gbps * 1e3
    needed = left_bytes / per_us
    if needed <= at_most_us:
        return clock_us + needed, 0.0
    return clock_us + at_most_us, left_bytes - at_most_us * per_us
