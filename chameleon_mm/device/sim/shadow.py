"""Vector clocks: is there a happens-before between two accesses to one address?

    clock[actor] = how much of that actor's work is ordered before here
    touch(range, write): for each earlier overlapping access, one of the two a write, by another actor:
        ordered  <=>  clock[earlier.actor] >= earlier.tick        else SimRaceError, naming both

An actor is a stream or the host. A tick counts an actor's accesses. This is the happens-before test of FastTrack (Flanagan
and Freund, PLDI 2009), over byte ranges instead of variables.
"""

from __future__ import annotations

from typing import NamedTuple

from chameleon_mm.errors import SimRaceError

Clock = dict[int, int]


def join(clock: Clock, other: Clock) -> None:
    """Everything ordered before `other` is now ordered before `clock` too."""
    for actor, tick in other.items():
        if clock.get(actor, 0) < tick:
            clock[actor] = tick


class Access(NamedTuple):
    """One read or write of bytes [start, end) of a buffer."""

    start: int
    end: int
    write: bool
    actor: int
    tick: int
    label: str


class Shadow:
    """The accesses to one buffer that a later one may still have to be ordered after."""

    __slots__ = ("accesses",)

    def __init__(self) -> None:
        self.accesses: list[Access] = []

    def touch(self, new: Access, clock: Clock) -> None:
        """Record `new`, made where `clock` is what is ordered before. Raises `SimRaceError` for an unordered conflict."""
        self.check(new, clock)
        # A write ordered after everything it covers stands for all of it; a read stands for its own actor's earlier reads.
        kept = [old for old in self.accesses if not self._covers(new, old)]
        kept.append(new)
        self.accesses = kept

    def check(self, new: Access, clock: Clock) -> None:
        for old in self.accesses:
            if not (old.write or new.write) or old.actor == new.actor:
                continue
            if old.start < new.end and new.start < old.end and clock.get(old.actor, 0) < old.tick:
                raise SimRaceError(
                    f"{_describe(new)} is not ordered after {_describe(old)}; "
                    f"expected an event of the earlier one waited on (or seen complete) before the later one was issued"
                )

    def foreign_to(self, actor: int) -> bool:
        """Whether anyone but `actor` has touched the buffer: only then can handing it back to `actor` race."""
        return any(access.actor != actor for access in self.accesses)

    @staticmethod
    def _covers(new: Access, old: Access) -> bool:
        if new.start > old.start or new.end < old.end:
            return False
        return new.write or (not old.write and old.actor == new.actor)


def _describe(access: Access) -> str:
    return f"{'write' if access.write else 'read'} of bytes [{access.start}, {access.end}) by {access.label}"
