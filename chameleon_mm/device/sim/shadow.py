"""Vector clocks: is there a happens-before between two accesses to one address?

    clock[actor] = how much of that actor's work is ordered before here
    touch(bytes, write): for each earlier access to any of them, one of the two a write, by another actor:
        ordered  <=>  clock[earlier.actor] >= earlier.tick        else SimRaceError, naming both

An actor is a stream or the host. A tick counts an actor's accesses. This is the happens-before test of FastTrack (Flanagan
and Freund, PLDI 2009), over sets of bytes instead of variables.
"""

from __future__ import annotations

from typing import NamedTuple

from chameleon_mm.device.sim.extent import Extent, covers, overlap, share_bytes
from chameleon_mm.device.sim.late_copy import LateCopy
from chameleon_mm.errors import SimRaceError

Clock = dict[int, int]

HOST = -1
"""Number of the host as an actor; streams count from 0."""


def join(clock: Clock, other: Clock) -> None:
    """Order everything that is ordered before `other` before `clock` too."""
    for actor, tick in other.items():
        if clock.get(actor, 0) < tick:
            clock[actor] = tick


class Access(NamedTuple):
    """One read or write of some bytes of a buffer. `label` says by what.

    `reuse`: a write that stands for the memory's next owner, not an operator's. `spoils`: a speculative copy, of which this
    is the read: an operator's unordered write is no race with it, it makes what arrives of those bytes undefined.
    """

    extent: Extent
    write: bool
    actor: int
    tick: int
    label: str
    reuse: bool = False
    spoils: LateCopy | None = None


class Shadow:
    """The accesses to one buffer that a later one may still have to be ordered after."""

    __slots__ = ("accesses", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.accesses: list[Access] = []

    def touch(self, new: Access, clock: Clock) -> None:
        """Record `new`, made where `clock` is what is ordered before. Raises `SimRaceError` for an unordered conflict."""
        self.check(new, clock)
        self.accesses = [old for old in self.accesses if not _stands_for(new, old)]
        self.accesses.append(new)

    def check(self, new: Access, clock: Clock) -> None:
        """Raise `SimRaceError` if an earlier access conflicts with `new` and is not ordered before `clock`."""
        for old in self.accesses:
            if old.actor == new.actor or not (old.write or new.write) or clock.get(old.actor, 0) >= old.tick:
                continue
            if share_bytes(old.extent, new.extent):
                if old.spoils is not None and not new.reuse:
                    start, both = overlap(old.extent, new.extent)
                    old.spoils.spoil(start - old.extent.start, both)
                    continue
                raise SimRaceError(
                    f"{self.name}: {_describe(new)} is not ordered after {_describe(old)}; "
                    f"expected an event of the earlier one waited on (or seen complete) before the later one was issued"
                )

    def foreign_to(self, actor: int) -> bool:
        """Whether anyone but `actor` has touched the buffer: only then can handing it back to `actor` race."""
        return any(access.actor != actor for access in self.accesses)


def _stands_for(new: Access, old: Access) -> bool:
    """Whether whoever is ordered after `new`, and so sees all it was ordered after, needs no look at `old` any more.

    A write was checked against all that it covers; a read only follows its own actor's reads.
    """
    return (new.write or (not old.write and old.actor == new.actor)) and covers(new.extent, old.extent)


def _describe(access: Access) -> str:
    start, end, pattern = access.extent
    among = "bytes" if pattern is None else "bytes among"
    return f"{'write' if access.write else 'read'} of {among} [{start}, {end}) by {access.label}"
