"""Chrome trace of a session's timed copies, waits, steps and memory, for Perfetto and chrome://tracing.

    write_trace(path, copies, timed, ...)       # time zero is the beginning of the first timed step

It has one process, with a track each for steps, compute, d2h and h2d, and a counter of device memory.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from chameleon_mm.files import write_file
from chameleon_mm.swap.metrics import CopySpan, StepSpan, TimedSpans
from chameleon_mm.units import format_size

PID = 2_000_000_000
"""Number of our process in the file: larger than any number that an operating system assigns, so it is unique."""

STEPS, COMPUTE, D2H, H2D = 1, 2, 3, 4
"""Numbers of the tracks."""

_TRACKS = {STEPS: "steps", COMPUTE: "compute: waits and recomputation", D2H: "d2h: swap out", H2D: "h2d: swap in"}
_OF_COPIES = {"out": D2H, "in": H2D}
_WAITS = {"out": "wait for a swap out", "in": "wait for a swap in", "recompute": "recompute"}


def write_trace(
    path: str | Path, copies: Sequence[CopySpan], timed: TimedSpans, *, hbm_budget_bytes: int, about: Mapping[str, Any]
) -> None:
    """Write the file. `about`: other figures for the file, including "device" and "simulated"."""
    events = list(_events(copies, timed, hbm_budget_bytes, about))
    write_file(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(about)}))


def _events(
    copies: Sequence[CopySpan], timed: TimedSpans, hbm_budget_bytes: int, about: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield the events, on the clock of the spans."""
    clock = " (simulated clock)" if about["simulated"] else ""
    yield _named("process_name", 0, name=f"chameleon_mm: {about['device']}{clock}")
    for tid, name in _TRACKS.items():
        yield _named("thread_name", tid, name=f"{name}{clock}")
        yield _named("thread_sort_index", tid, sort_index=tid)
    for step in timed.steps:
        what = {"step": step.number, "kind": step.kind}
        yield _slice(STEPS, f"step {step.number} ({step.kind.replace('_', ' ')})", "step", step.start_us, step.end_us, what)
    for wait in timed.waits:
        yield _slice(COMPUTE, _WAITS[wait.kind], "wait", wait.start_us, wait.end_us, {"for": wait.kind})
    for span in copies:
        name, tid = f"swap_{span.direction} {format_size(span.nbytes)}", _OF_COPIES[span.direction]
        yield _slice(tid, name, "copy", span.start_us, span.end_us, {"bytes": span.nbytes})
    for at_us, nbytes in readings(timed):
        yield _counter(f"HBM allocated{clock}", at_us, nbytes)
    for step in timed.steps:
        yield _counter(f"HBM budget{clock}", step.start_us, hbm_budget_bytes)


def readings(timed: TimedSpans) -> list[tuple[float, int]]:
    """Return (time, bytes) of each memory reading, in order. A reading's time after its step's beginning is that of the host's
    clock. Readings of steps that are not stored or have not ended are omitted."""
    steps: list[StepSpan] = sorted(timed.steps, key=lambda step: step.host_us)
    begins_us = [step.host_us for step in steps]
    found = []
    for host_us, nbytes in timed.memory:
        i = bisect_right(begins_us, host_us) - 1
        if i >= 0:
            found.append((steps[i].start_us + host_us - steps[i].host_us, nbytes))
    return sorted(found)


def _named(what: str, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": PID, "tid": tid, "ts": 0, "args": args}


def _slice(tid: int, name: str, cat: str, start_us: float, end_us: float, args: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X", "name": name, "cat": cat, "pid": PID, "tid": tid, "ts": start_us,
        "dur": max(0.0, end_us - start_us), "args": args,
    }  # fmt: skip


def _counter(name: str, at_us: float, nbytes: int) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": PID, "tid": 0, "ts": at_us, "args": {"bytes": nbytes}}
