"""Memory that a step takes beyond what its trace has: found at the step's first hook, or between two checks of memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import or_

from chameleon_mm.trace import TensorKind, Trace
from chameleon_mm.trace.recurring import outliving_bytes, there_before, with_extra, with_spikes

RECENT_STEPS = 16
"""Steps that must do with less memory before plans count on less: one in so many may well take more again, as an evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraMemory:
    """Bytes beyond a trace's. Those of `spikes` are allocated and freed again between two checks of memory, at a tick that is
    known."""

    extra_bytes: int = 0
    spikes: Mapping[int, int] = field(default_factory=dict)

    def __or__(self, other: ExtraMemory) -> ExtraMemory:
        ticks = {*self.spikes, *other.spikes}
        spikes = {tick: max(self.spikes.get(tick, 0), other.spikes.get(tick, 0)) for tick in sorted(ticks)}
        return ExtraMemory(extra_bytes=max(self.extra_bytes, other.extra_bytes), spikes=spikes)

    @classmethod
    def most_of(cls, taken: Iterable[ExtraMemory]) -> ExtraMemory:
        """The most that any of `taken` is, all the time and at each tick."""
        return reduce(or_, taken, cls())

    def exceeds(self, other: ExtraMemory, by_bytes: int) -> bool:
        """Whether it is more than `other`, all the time or at some tick, by more than `by_bytes`."""
        if self.extra_bytes - other.extra_bytes > by_bytes:
            return True
        return any(nbytes - other.spikes.get(tick, 0) > by_bytes for tick, nbytes in self.spikes.items())

    def added_to(self, trace: Trace) -> Trace:
        extra_bytes = self.extra_bytes
        gradients = outliving_bytes(trace, {TensorKind.GRADIENT})
        if 0 < gradients <= extra_bytes:  # they are kept and filled with zeros
            trace, extra_bytes = there_before(trace, {TensorKind.GRADIENT}), extra_bytes - gradients
        if extra_bytes:
            trace = with_extra(trace, extra_bytes)
        return with_spikes(trace, self.spikes) if self.spikes else trace
