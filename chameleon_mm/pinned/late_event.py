"""An event for memory that is dropped: recorded not when it goes, but when somebody first asks.

    block.release(after=LateEvent(record))     # in a finalizer: nothing of the device is called
    recorded(events)                           # at the next allocation, an ordinary call: now `record()` runs

What is recorded later covers more, never less. So a finalizer, which runs in the middle of any line, in a forked child and
while the interpreter ends, can promise an event without touching the device.
"""

from __future__ import annotations

from collections.abc import Callable

from chameleon_mm.device.protocols import Event


class LateEvent:
    """An event that stands for others: complete when everything is that `record` gives an event for, called once somebody asks.
    Thread-safe."""

    __slots__ = ("_events", "_record")

    def __init__(self, record: Callable[[], tuple[Event, ...]]) -> None:
        self._record = record
        self._events: tuple[Event, ...] | None = None

    @property
    def events(self) -> tuple[Event, ...]:
        """The real events, for a stream to wait on."""
        if self._events is None:
            self._events = self._record()  # by two threads at once: either's will do
        return self._events

    def query(self) -> bool:
        return all(event.query() for event in self.events)

    def synchronize(self) -> None:
        for event in self.events:
            event.synchronize()

    def elapsed_us(self, since: Event) -> float:
        raise ValueError("elapsed_us: expected a timed event, got one that only orders; record one with timed=True")


def recorded(events: tuple[Event, ...]) -> tuple[Event, ...]:
    """Replace the late events in `events` by those that they stand for: what a stream of the device can wait on."""
    for event in events:  # not `any`, whose generator takes longer than all of the rest
        if type(event) is LateEvent:
            break
    else:
        return events
    found: list[Event] = []
    for event in events:
        found.extend(event.events if isinstance(event, LateEvent) else (event,))
    return tuple(found)
