"""The latest timed step as it ran: its copies, and where compute waited for them or made something again.

measured = latest_step(copies, timed)         # None: no step was timed, or copies of it are kept no more
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from chameleon_mm.report_page.step_picture import RECOMPUTE, STALL, Bar
from chameleon_mm.saved.timed_spans import CopySpan, TimedSpans


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """A step that was timed. Times count from its beginning; a copy may end after the step did."""

    number: int
    kind: str
    step_us: float
    end_us: float
    """End of the last of it all."""
    compute: tuple[Bar, ...]
    """Where compute waited, and where it made something again."""
    out: tuple[Bar, ...]
    back: tuple[Bar, ...]


def latest_step(copies: Iterable[CopySpan], timed: TimedSpans) -> MeasuredStep | None:
    """The latest step of `timed` with a copy in it, else the latest."""
    spans = sorted(copies, key=lambda span: span.start_us)
    begins = sorted(step.start_us for step in timed.steps)
    for step in sorted(timed.steps, key=lambda step: -step.start_us):
        until = min((begin for begin in begins if begin > step.start_us), default=float("inf"))
        inside = [span for span in spans if step.start_us <= span.start_us < min(until, step.end_us)]
        if inside or step is min(timed.steps, key=lambda step: step.start_us):
            break
    else:
        return None
    since = step.start_us
    waits = tuple(
        Bar(RECOMPUTE if wait.kind == "recompute" else STALL, wait.start_us - since, wait.end_us - since, -1)
        for wait in timed.waits
        if since <= wait.start_us < step.end_us
    )
    out, back = (
        tuple(
            Bar("copy", span.start_us - since, span.end_us - since, -1, span.nbytes) for span in inside if span.direction == way
        )
        for way in ("out", "in")
    )
    step_us = step.end_us - since
    return MeasuredStep(
        number=step.number,
        kind=step.kind,
        step_us=step_us,
        end_us=max([step_us, *(bar.end_us for bar in (*out, *back))]),
        compute=waits,
        out=out,
        back=back,
    )
