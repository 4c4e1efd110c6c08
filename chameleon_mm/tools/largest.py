"""Search for the largest batch, row or number of layers that fits a GPU and a host. Sizes are tried on shapes only.

    answer = largest("batch", request_of)            # request_of(8): the request with a batch of 8
    answer.size, answer.next.bound                   # 37, Bound.DEVICE: 38 takes more than the device's budget

Sizes double until one does not fit; then the gap is halved. In turn with that, a size is tried at which the line through the
memory of two others meets what is there. Arithmetic over a recorded step decides whether memory suffices. A plan then says what
the step at the answer takes. If more than activations are swapped, a session runs its first steps there instead. While these
exceed the budget, the answer shrinks, three times at most.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from chameleon_mm.errors import InfeasibleBudget
from chameleon_mm.plan.planner import generate_plan
from chameleon_mm.plan.unswapped_memory import least_memory, peak_memory
from chameleon_mm.tools.prediction import Way, link_of, predict
from chameleon_mm.tools.session_on_shapes import (
    RunRequest,
    SessionRun,
    beside,
    host_bytes_beside,
    left_beside_window,
    record,
    run_session,
)
from chameleon_mm.tools.workload import ModelUnusable
from chameleon_mm.units import format_size, format_us

SIZES = ("batch", "seq", "layers")

SEQ_STEP = 64
"""Number of tokens by which rows grow, because kernels work on multiples of it."""

MOST = 1 << 20
"""Largest size to try, in units of 1 or `SEQ_STEP`. The memory of some models does not grow with their size."""

_FARTHEST = 64
"""Times by which a size grows at most from one that fits."""

_STEPS = 2
"""Number of steps that a session runs at an answer: the first by the default rule, the second by a plan."""

_SMALLER = (0.02, 0.05, 0.1)
"""Shares by which a size is reduced, in turn, while a session's first steps exceed the budget. The default rule takes a few
percent more memory than the arithmetic."""


class Bound(enum.StrEnum):
    """Limit that excludes larger sizes."""

    DEVICE = "device"
    HOST = "host"
    MODEL = "the model itself"
    """The model itself: it cannot be built larger, for example because of a table of positions."""
    NOTHING = "nothing that was looked at"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A size, and the memory that it needs."""

    size: int
    bound: Bound | None
    """Limit that the size exceeds; None: it fits."""
    device_bytes: int = 0
    """Minimum device memory for which there is a plan, without the window of swapped parameters."""
    device_left_bytes: int = 0
    """Bytes of the budget that are available for `device_bytes`, without the window."""
    host_bytes: int = 0
    """Minimum pinned memory for the size."""
    said: str = ""
    """Error message of the model or the session that rejects this size; empty if neither does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    what: str
    """Element of `SIZES`."""
    size: int | None
    """Largest size that fits; None: not even the smallest does."""
    next: Tried
    """Size that does not fit, with the reason; `Bound.NOTHING`: no such size was found."""
    hbm_budget_bytes: int
    host_budget_bytes: int | None
    run: SessionRun | None = None
    """First steps of a session at `size`, if it swaps more than activations."""
    ways: tuple[Way, ...] = ()
    """Step at `size` without swapping and with a plan, if activations alone are swapped."""

    @property
    def fits(self) -> bool:
        """True if there is such a size and its session keeps within the budget."""
        return self.size is not None and (self.run is None or self.run.holds)

    def to_dict(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "size": self.size,
            "bound": self.next.bound,
            "hbm_budget_bytes": self.hbm_budget_bytes,
            "host_budget_bytes": self.host_budget_bytes,
            "next": asdict(self.next),
            "session": None if self.run is None else self.run.to_dict(),
            "ways": [asdict(way) for way in self.ways],
        }


def largest(what: str, request_of: Callable[[int], RunRequest], *, recompute: Collection[str] = ()) -> Largest:
    """Find the largest size of `what` that fits. `request_of(size)` and its build may raise `ModelUnusable` for a size that the
    model rejects. recompute: base names of operators that plans may run again, if only activations are swapped.

    Raises `ModelUnusable` if the model rejects even the smallest size.
    """
    by = SEQ_STEP if what == "seq" else 1
    low, high = _search(partial(_try, request_of, recompute), by)
    if low is None and high.bound is Bound.MODEL:
        raise ModelUnusable(high.said)
    size, run, ways = None if low is None else low.size, None, list[Way]()
    if size is not None and (request := request_of(size)).swapped:
        size, run, high = _run_at(size, high, request_of, by)
    elif size is not None:
        budgets = request.hbm_budget_bytes, request.host_budget_bytes
        prediction = predict(record(request), request.spec, *budgets, recompute)
        ways += prediction.ways[:2] if prediction.infeasible is None else ()
    named = {name: getattr(request_of(by), name) for name in ("hbm_budget_bytes", "host_budget_bytes")}
    return Largest(what=what, size=size, next=high, run=run, ways=tuple(ways), **named)


def _run_at(size: int, high: Tried, request_of: Callable[[int], RunRequest], by: int) -> tuple[int | None, SessionRun, Tried]:
    """Run the session at `size`, then at a few smaller sizes, until one keeps within the budget. Returns the last size (None:
    even the smallest exceeds the budget), its run, which may exceed the budget, and the smallest size that does not fit."""
    run = run_session(request_of(size), steps=range(_STEPS), counted=False)
    for share in _SMALLER:
        if run.holds:
            break
        most = max((step.peak_bytes for step in run.steps), default=0)
        bound = Bound.DEVICE if most else Bound.HOST
        high = Tried(size=size, bound=bound, device_bytes=most, device_left_bytes=run.hbm_budget_bytes, said=run.refused or "")
        if size <= by:
            return None, run, high
        size = max(by, size - max(by, int(size * share) // by * by))
        run = run_session(request_of(size), steps=range(_STEPS), counted=False)
    return size, run, high


def _search(try_: Callable[[int], Tried], by: int) -> tuple[Tried | None, Tried]:
    """Double sizes, then halve the gap, in turn with guesses. Return the largest size that fits (None: none does), and the next
    one."""
    before: Tried | None = None
    low: Tried | None = None
    high, guessed = try_(by), False
    while high.bound is None:
        before, low, size = low, high, 2 * high.size
        guessed = before is not None and not guessed
        if before is not None and guessed:
            size = max(low.size + by, min(_reaching(before, low, by), _FARTHEST * low.size))
        if size > MOST * by:
            return low, Tried(size=size, bound=Bound.NOTHING)
        high = try_(size)
    while low is not None and high.size - low.size > by:
        size, guessed = (low.size + high.size) // 2 // by * by, not guessed
        if guessed:
            size = min(max(_reaching(low, high, by), low.size + by), high.size - by)
        tried = try_(size)
        low, high = (tried, high) if tried.bound is None else (low, tried)
    return low, high


def _reaching(one: Tried, other: Tried, by: int) -> int:
    """Largest size that fits if memory grows as from `one` to `other`; 0: it does not grow, or is not known."""
    grown_bytes = other.device_bytes - one.device_bytes
    if grown_bytes <= 0:
        return 0
    left_bytes = one.device_left_bytes - one.device_bytes
    return (one.size + (other.size - one.size) * left_bytes // grown_bytes) // by * by


def _try(request_of: Callable[[int], RunRequest], recompute: Collection[str], size: int) -> Tried:
    try:
        request = request_of(size)
        step = record(request, in_buckets=True)
    except ModelUnusable as error:
        return Tried(size=size, bound=Bound.MODEL, said=str(error))
    trace, host, bound = beside(step, request.swapped), request.host_budget_bytes, None
    left = left_beside_window(step, request.swapped, request.hbm_budget_bytes)
    elsewhere = host_bytes_beside(step, request.swapped, request.hbm_budget_bytes)
    needed = least_memory(trace).nbytes
    if needed > left:
        bound = Bound.DEVICE
    elif host is not None and elsewhere > host:
        bound = Bound.HOST
    elif host is not None:
        recompute = () if request.swapped else recompute
        try:
            generate_plan(trace, left, host - elsewhere, link_of(request.spec), drafts=0, recompute=recompute)
        except InfeasibleBudget:
            bound = Bound.HOST
    host_bytes = elsewhere + max(0, peak_memory(trace).nbytes - left)
    return Tried(size=size, bound=bound, device_bytes=needed, device_left_bytes=left, host_bytes=host_bytes)


def say(found: Largest) -> list[str]:
    """Return lines about the found size, and the limit that excludes larger sizes."""
    host = "" if found.host_budget_bytes is None else f" and {format_size(found.host_budget_bytes)} of pinned host memory"
    within = f"within {format_size(found.hbm_budget_bytes)} of device memory{host}"
    over = found.next
    if found.size is None:
        lines = [f"largest {found.what}: none, not even {over.size} fits {within}"]
    else:
        lines = [f"largest {found.what}: {found.size} {within}"]
    match over.bound:
        case Bound.DEVICE:
            needed, there = format_size(over.device_bytes), format_size(over.device_left_bytes)
            lines.append(f"what binds is device memory: {over.size} takes {needed} of {there}, with all moved that may be")
        case Bound.HOST:
            lines.append(f"what binds is pinned host memory: {over.size} takes {format_size(over.host_bytes)} of it or more")
        case Bound.MODEL:
            lines.append(f"what binds is the model: {over.said}")
        case _:
            lines.append(f"nothing binds up to {over.size}")
    if len(found.ways) > 1:
        unswapped, planned = found.ways
        slower = f"{planned.step_us / unswapped.step_us - 1:.1%} longer than unswapped" if unswapped.step_us else "no time"
        lines.append(f"a step at {found.size} takes {format_us(planned.step_us)} (predicted), {slower}")
    if found.run is not None and found.size is not None and found.run.steps:
        step, most = found.run.steps[-1], max(step.peak_bytes for step in found.run.steps)
        keep = "keep" if found.run.holds else "do not keep"
        lines.append(
            f"a session's first {len(found.run.steps)} steps {keep} within the budget: {format_size(most)} at most, the last "
            f"takes {format_us(step.step_us)}, {format_size(found.run.host_bytes)} are pinned (predicted)"
        )
    return lines
