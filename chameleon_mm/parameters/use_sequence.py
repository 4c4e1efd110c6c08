"""Sequence in which a step uses what may be away, learned from the step before: what comes next, and when each is used again.

    sequence = UseSequence(first_guess)      # keys: numbers of what is used
    sequence.begin_step(); sequence.note(key) ...; sequence.end_step(completed=True)
    sequence.distance(key)                   # uses from now to that of `key`, into the next step
    sequence.upcoming()                      # keys from now on, into the next step

The sequence of a step that completed is the guess for the next one. A use that is not where the guess has it moves the place to
its next occurrence; one that is nowhere moves nothing. A wrong guess costs time, nothing else.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator

UNKNOWN = 1 << 30
"""Distance of what no step is known to use."""


class UseSequence:
    """Keys in order of use. Pure Python, not thread-safe."""

    def __init__(self, first_guess: Iterable[int]) -> None:
        self._at = 0
        self._seen: list[int] = []
        self._in_step = False
        self._latest: int | None = None
        self._expect(list(first_guess))

    def begin_step(self) -> None:
        """Begin a step: what is used from now on is learned."""
        self._at, self._seen, self._in_step, self._latest = 0, [], True, None

    def end_step(self, *, completed: bool) -> None:
        """End the step; the next is expected to be as this one if it `completed`."""
        self._in_step, self._at, self._latest = False, 0, None
        if completed and self._seen:
            self._expect(self._seen)

    def note(self, key: int) -> bool:
        """Note that `key` is used. Returns whether that is another use than the one before."""
        if key == self._latest:
            return False
        self._latest = key
        if self._in_step:
            self._seen.append(key)
            places = self._places.get(key, ())
            at = bisect_left(places, self._at)
            if at < len(places):
                self._at = places[at] + 1
        return True

    def distance(self, key: int) -> int:
        """Number of uses from now to that of `key`; `UNKNOWN` where no step is known to use it."""
        places = self._places.get(key)
        if not places:
            return UNKNOWN
        at = bisect_left(places, self._at)
        return places[at] - self._at if at < len(places) else len(self._expected) - self._at + places[0]

    def upcoming(self) -> Iterator[int]:
        """The keys that are used next, each once: those of the rest of this step, then those of the next one."""
        found: set[int] = set()
        for key in (*self._expected[self._at :], *self._expected[: self._at]):
            if key not in found:
                found.add(key)
                yield key

    def _expect(self, keys: list[int]) -> None:
        self._expected = keys
        places = defaultdict[int, list[int]](list)
        for place, key in enumerate(keys):
            places[key].append(place)
        self._places = dict(places)
