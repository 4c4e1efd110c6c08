"""The latest timed step as it ran: its copies, and where compute waited for them or made something again.

measured = latest_step(copies, timed)         # None: no step was timed, or copies of it are kept no more
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from chameleon_mm.report_page.step_picture import RECOMPUTE, STALL, Bar
from chameleon_mm.saved.timed_spans import CopySpan, TimedSpans, WaitSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """A step that was timed. Times count from its beginning; a copy may end after the step did."""

    number: int
    kind: str
    step_us: float
    end_us: float
    compute: tuple[Bar, ...]
    """Bars of the times in which compute waited, or made something again."""
    out: tuple[Bar, ...]
    back: tuple[Bar, ...]


def latest_step(copies: Iterable[CopySpan], timed: TimedSpans) -> MeasuredStep | None:
    """The latest step of `timed` in which a copy began; where there is none, the latest step."""
    if not timed.steps:
        return None
    steps = sorted(timed.steps, key=lambda step: step.start_us)
    spans = list(copies)
    begins_us = [step.start_us for step in steps]
    with_copies = {bisect_right(begins_us, span.start_us) - 1 for span in spans}
    which = max(with_copies - {-1}, default=len(steps) - 1)
    step = steps[which]
    until_us = begins_us[which + 1] if which + 1 < len(steps) else inf

    def inside(span: CopySpan | WaitSpan) -> bool:
        return step.start_us <= span.start_us < until_us

    compute = (
        Bar(RECOMPUTE if wait.kind == "recompute" else STALL, wait.start_us - step.start_us, wait.end_us - step.start_us, -1)
        for wait in timed.waits
        if inside(wait)
    )
    out, back = (
        tuple(
            Bar("copy", span.start_us - step.start_us, span.end_us - step.start_us, -1, span.nbytes)
            for span in sorted(spans, key=lambda span: span.start_us)
            if span.direction == direction and inside(span)
        )
        for direction in ("out", "in")
    )
    step_us = step.end_us - step.start_us
    return MeasuredStep(
        number=step.number,
        kind=step.kind,
        step_us=step_us,
        end_us=max([step_us, *(bar.end_us for bar in (*out, *back))]),
        compute=tuple(compute),
        out=out,
        back=back,
    )
