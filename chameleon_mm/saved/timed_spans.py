"""Data about what was timed in a session, on one clock: microseconds of the device since the first timed step began.

copies       CopySpan          each engine's, in order
compute      WaitSpan          where it waited for a copy, or recomputed something
steps        StepSpan          timed ones; the host's clock at the beginning of each
memory       MemorySample      as hooks found it, on the host's clock
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class StepKind(enum.Enum):
    """Kind of a step, known at its end: each step is of one."""

    RECORDED = "recorded"
    """Recorded operator by operator, to its end, for a plan to be made of it."""
    PLANNED = "planned"
    """Followed a plan from its first hook to its last."""
    PARTLY_PLANNED = "partly_planned"
    """Followed a plan for a part of it: it diverged, took more memory, or was recognised late."""
    BY_RULE = "by_rule"
    """Followed no plan: the default rule moved its tensors."""
    FAILED = "failed"
    """Ended by an exception."""

    def __str__(self) -> str:
        return self.value.replace("_", " ")


def hidden_fraction(stall_us: float, copy_us: float) -> float | None:
    """Share of the copies' time during which compute did not wait for them; None where nothing was copied."""
    return None if not copy_us else max(0.0, 1.0 - stall_us / copy_us)


@dataclass(frozen=True, slots=True)
class CopySpan:
    """One copy (a piece of a move) on the device's clock, in microseconds since the first timed step began."""

    direction: str
    start_us: float
    end_us: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class WaitSpan:
    """Time that compute waited for a copy, or recomputed something, on the clock of the copies."""

    kind: str
    """"out" or "in": direction of the copy that it waited for; "recompute": it waited for none."""
    start_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class StepSpan:
    """One timed step on the clock of the copies, and when the host began it."""

    number: int
    """Number of the step among all that ended, from 0 on."""
    kind: str
    start_us: float
    end_us: float
    host_us: float
    """The device's `host_us` as the host began the step: on a GPU not later than `start_us` is."""
    unix_ns: int
    """The same moment by the wall clock, as torch.profiler has it."""


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Memory as a hook of a timed step found it, on the host's clock `host_us`."""

    host_us: float
    hbm_bytes: int
    host_bytes: int
    """Pinned memory that live blocks held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedSpans:
    """The latest of what was timed beside copies."""

    waits: tuple[WaitSpan, ...] = ()
    steps: tuple[StepSpan, ...] = ()
    memory: tuple[MemorySample, ...] = ()
