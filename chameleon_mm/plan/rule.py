"""Default rule, for steps without a plan: each saved storage that can be moved is moved. Its limits, and its forecasts from the
previous step.

forecast.need(ahead)                  -> bytes to keep free until the next check of memory
order.upcoming(index)                 -> saved storages in the order in which the previous step used them
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from math import ceil

from chameleon_mm.units import MIB

MIN_BYTES = MIB
"""Default minimum size of a storage that moves. In dense LLMs, tensors below 1 MiB are 0.1 % of the bytes and 20 % of the
copies."""

DEFAULT_BUDGET_SHARE = 0.9
"""Budget as a share of the device's capacity, if none is given. The rest is for fragmentation and memory outside the
allocator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on the device memory that swapping may use."""

    hbm_budget_bytes: int | None = None
    """Maximum allocated bytes; None: no budget, only the two limits below."""
    leaving_bytes: int | None = None
    """Device memory that copies out may hold before compute waits for the oldest; None: only the budget decides."""
    ahead_bytes: int | None = None
    """Device memory that prefetches may hold before their first use; None: only the budget decides."""


class Headroom:
    """Forecast of the growth of allocation between two checks of memory, learned from the previous step.

    Position k is the k-th check of a step. The growth of the cumulative allocation from check k to check k + 1 bounds the peak
    in between, because frees do not lower it. There is no forecast (None) in the first step, after a failed step, and beyond
    the last check of the previous step. Then the caller keeps as much memory free as it can.

    If the growth exceeds the forecast, this step is larger, for example a longer batch. Its later forecasts then grow in the
    same proportion. If the exceeded forecast was 0, the rest of the step has no forecast.
    """

    WINDOW = 2
    """Number of neighbour checks on each side that a forecast covers, in case the sequence is shifted by one or two checks."""

    def __init__(self) -> None:
        self._known: list[int] = []
        self._growing: list[int] = []
        self._scale: float | None = 1.0
        """Factor by which this step is larger than the previous one, as far as seen."""

    def record(self, growth_bytes: int) -> None:
        """Record the growth since the previous check of this step; at the end of the step, since the last check."""
        at, scale = len(self._growing), self._scale
        # A forecast is at least the known growth of this very check, so it is usually not computed.
        if scale is not None and at < len(self._known) and growth_bytes > scale * self._known[at]:
            predicted = self.need()
            if predicted is not None and growth_bytes > predicted:
                self._scale = scale * growth_bytes / predicted if predicted else None
        self._growing.append(growth_bytes)

    @property
    def position(self) -> int:
        """Number of the next check in this step, from 0."""
        return len(self._growing)

    def need(self, ahead: int = 0) -> int | None:
        """Return the bytes to keep free until the next check, or until the `ahead` checks after it; None: unknown."""
        position = self.position
        if self._scale is None or position >= len(self._known):
            return None
        return ceil(self._scale * max(self._known[max(0, position - self.WINDOW) : position + self.WINDOW + 1 + ahead]))

    def most(self, ahead: int = 0) -> int | None:
        """Return the maximum of `need` over all positions of the previous step, in bytes, scaled by the size of this step.
        None: unknown."""
        if self._scale is None or not self._known:
            return None
        return ceil(self._scale * max(self._known))

    def end_step(self, *, completed: bool = True) -> None:
        """End the step, and expect the next step to be like it. After an exception (not `completed`), make no forecast."""
        self._known, self._growing, self._scale = (self._growing if completed else []), [], 1.0


@dataclass(slots=True)
class UseOrder:
    """Order in which backward uses saved storages, as in the previous step. In the first step: last saved first."""

    _learned: list[int] = field(default_factory=list)
    _position: dict[int, int] = field(default_factory=dict)
    _current: dict[int, None] = field(default_factory=dict)

    def used(self, index: int) -> None:
        """Record that storage number `index` of this step is used now."""
        self._current.setdefault(index)

    def upcoming(self, index: int, at_most: int) -> Iterator[int]:
        """Return the numbers of the storages expected to be used after `index`, soonest first."""
        position = self._position.get(index)
        if position is None:
            return iter(range(index - 1, max(-1, index - 1 - at_most), -1))
        return islice(self._learned, position + 1, position + 1 + at_most)

    def rank(self, index: int) -> int:
        """Return the rank of `index` in the expected order: higher is later. Unknown storages come before known ones."""
        return self._position.get(index, -abs(index))

    def end_step(self, *, completed: bool = True) -> None:
        """End the step. If it `completed`, expect the next step to use its saved storages in the same order."""
        current, self._current = self._current, {}
        if completed and (current or self._learned):
            self._learned = list(current)
            self._position = {index: position for position, index in enumerate(self._learned)}
