"""What a step needs of the device, and in which order it uses what it saved: as the previous step did.

headroom.need(position)               -> bytes to leave free until the next look at memory, from the previous step
order.upcoming(index)                 -> saved storages in the order in which the previous step used them
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from math import ceil


class Headroom:
    """How far allocation climbs between two looks at memory, learned from the previous step.

    Position k is the k-th look of a step. The growth of the allocation odometer from look k to look k+1 bounds the peak in
    between: nothing that was allocated and freed again is missed. In the first step, after one that did not end, and beyond the
    last look of the previous one there is no answer (None): the caller then keeps as much free as it can.

    A climb beyond what was foreseen says that this step is larger, a longer batch say: all later answers of the step grow in
    the same proportion. Where nothing at all was foreseen there is no proportion, and no answer for the rest of the step.
    """

    WINDOW = 2
    """Neighbours on each side that count too, so that a sequence shifted by a look or two is still covered."""

    def __init__(self) -> None:
        self._known: list[int] = []
        self._growing: list[int] = []
        self._scale: float | None = 1.0
        """How many times larger than the previous step this one is, as far as it went."""

    def record(self, growth_bytes: int) -> None:
        """The growth since the previous look of this step; at its end, since the last one."""
        predicted = self.need()
        if predicted is not None and self._scale is not None and growth_bytes > predicted:
            self._scale = self._scale * growth_bytes / predicted if predicted else None
        self._growing.append(growth_bytes)

    @property
    def position(self) -> int:
        """Which look of the step this is, from 0."""
        return len(self._growing)

    def need(self, ahead: int = 0) -> int | None:
        """Bytes to leave free until the next look, or the most until any of the next `ahead` looks."""
        position = self.position
        if self._scale is None or position >= len(self._known):
            return None
        return ceil(self._scale * max(self._known[max(0, position - self.WINDOW) : position + self.WINDOW + 1 + ahead]))

    def most(self) -> int | None:
        """The most bytes until any look of the previous step, in proportion to how much larger this one is. None: not known."""
        if self._scale is None or not self._known:
            return None
        return ceil(self._scale * max(self._known))

    def end_step(self) -> None:
        """The step is over: the next one is expected to be like it."""
        self._known, self._growing, self._scale = self._growing, [], 1.0

    def forget(self) -> None:
        """The step did not end as it began (an exception): learn nothing from it."""
        self._growing = []
        self.end_step()


class LargestGrowth:
    """The most that allocation climbed between two looks at memory in any step so far: what to leave free, where it is known.

    Not of one look, as `Headroom` has it, but of all: it holds for steps that do the same in another order. It says nothing of
    a step that saves more than was ever saved (a longer batch), from the first save on that is larger than any of that number
    before; and nothing before a first step has ended.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []
        """Largest save of all steps that ended, by its number in the step."""
        self._most: int | None = None
        self._forget_step()

    def _forget_step(self) -> None:
        self._saved: list[int] = []
        self._most_now = 0
        self._larger = False

    def saved(self, nbytes: int) -> None:
        """The next save of this step is of so many bytes."""
        number = len(self._saved)
        self._larger |= number >= len(self._sizes) or nbytes > self._sizes[number]
        self._saved.append(nbytes)

    def record(self, growth_bytes: int) -> None:
        """Allocation grew so much between two looks."""
        self._most_now = max(self._most_now, growth_bytes)

    @property
    def nbytes(self) -> int | None:
        """None: not known."""
        return None if self._larger or self._most is None else max(self._most, self._most_now)

    def end_step(self, *, completed: bool) -> None:
        """Ends the step. One that did not complete teaches nothing."""
        if completed:
            self._most = max(self._most or 0, self._most_now)
            self._sizes = [max(pair) for pair in zip_longest(self._sizes, self._saved, fillvalue=0)]
        self._forget_step()


@dataclass(slots=True)
class UseOrder:
    """In which order backward asks for what forward saved: as the previous step did; the first time, last saved first."""

    _learned: list[int] = field(default_factory=list)
    _position: dict[int, int] = field(default_factory=dict)
    _current: dict[int, None] = field(default_factory=dict)

    def used(self, index: int) -> None:
        """Storage number `index` of this step is used now."""
        self._current.setdefault(index)

    def upcoming(self, index: int, at_most: int) -> Iterator[int]:
        """Numbers of the storages likely to be used after `index`, soonest first."""
        position = self._position.get(index)
        if position is None:
            return iter(range(index - 1, max(-1, index - 1 - at_most), -1))
        return islice(self._learned, position + 1, position + 1 + at_most)

    def rank(self, index: int) -> int:
        """Where `index` stands in the expected order: higher is later. Not seen before: sooner than what was."""
        return self._position.get(index, -index)

    def forget(self) -> None:
        """The step did not end as it began: what it used teaches nothing."""
        self._current = {}

    def end_step(self) -> None:
        """The step is over: the next one is expected to use what it saves in the same order."""
        self._learned = list(self._current)
        self._position = {index: position for position, index in enumerate(self._learned)}
        self._current = {}
