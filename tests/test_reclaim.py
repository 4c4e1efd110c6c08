"""Buffers on their way out: oldest first, none that is not copied without a wait, none that left by another way."""

from __future__ import annotations

import enum

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from chameleon_mm.swap.reclaim import ReclaimQueue


class Way(enum.Enum):
    """Way in which a buffer left the device, if it did."""

    PENDING = "pending"
    SWEPT = "swept"
    WAITED_FOR = "waited_for"
    ELSEWHERE = "elsewhere"


class Leaving:
    """An entry whose copy is complete when the test says so."""

    def __init__(self, nbytes: int, *, complete: bool = False) -> None:
        self.nbytes = nbytes
        self.complete = complete
        self.way = Way.PENDING

    @property
    def reclaimed(self) -> bool:
        return self.way is not Way.PENDING

    def reclaim_if_copied(self) -> bool:
        assert self.way is Way.PENDING, "asked of a buffer that is gone"
        if self.complete:
            self.way = Way.SWEPT
        return self.complete

    def reclaim(self) -> None:
        assert self.way is Way.PENDING, "given back twice"
        self.way = Way.WAITED_FOR


class Queue(RuleBasedStateMachine):
    """Any order of events: pending bytes are those of the entries, and no entry is passed over."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = ReclaimQueue()
        self.entries: list[Leaving] = []
        self.freed = 0

    @rule(nbytes=st.integers(0, 100), complete=st.booleans())
    def add(self, nbytes: int, complete: bool) -> None:
        self.entries.append(Leaving(nbytes, complete=complete))
        self.queue.add(self.entries[-1])

    @precondition(lambda self: self.entries)
    @rule(data=st.data(), elsewhere=st.booleans())
    def something_happens(self, data: st.DataObject, elsewhere: bool) -> None:
        entry = data.draw(st.sampled_from(self.entries))
        if elsewhere and entry.way is Way.PENDING:
            entry.way = Way.ELSEWHERE
        entry.complete = True

    @rule()
    def reclaim_complete(self) -> None:
        self.freed += self.queue.reclaim_complete()
        left = [entry for entry in self.entries if entry.way is Way.PENDING]
        assert not left or not left[0].complete

    @rule(at_most=st.integers(0, 200))
    def flush(self, at_most: int) -> None:
        self.freed += self.queue.reclaim_until(lambda: self.queue.pending_bytes <= at_most)
        assert self.queue.pending_bytes <= at_most

    @invariant()
    def the_oldest_go_first(self) -> None:
        given_back = [entry.way in (Way.SWEPT, Way.WAITED_FOR) for entry in self.entries if entry.way is not Way.ELSEWHERE]
        assert given_back == sorted(given_back, reverse=True)

    @invariant()
    def bytes_add_up(self) -> None:
        queued = self.entries[len(self.entries) - len(self.queue) :]
        assert self.queue.pending_bytes == sum(entry.nbytes for entry in queued) >= 0
        assert self.freed == sum(entry.nbytes for entry in self.entries if entry.way in (Way.SWEPT, Way.WAITED_FOR))


TestQueue = Queue.TestCase


@given(sizes=st.lists(st.integers(1, 50), min_size=1), wanted=st.integers(0, 300))
def test_a_flush_gives_back_no_more_than_it_must(sizes: list[int], wanted: int) -> None:
    entries = [Leaving(nbytes) for nbytes in sizes]
    queue = ReclaimQueue()
    for entry in entries:
        queue.add(entry)
    freed = queue.reclaim_until(lambda: sum(sizes) - queue.pending_bytes >= wanted)
    last = next((e.nbytes for e in reversed(entries) if e.way is Way.WAITED_FOR), 0)
    assert freed == sum(sizes) or freed >= wanted
    assert freed - last < wanted or freed == 0
