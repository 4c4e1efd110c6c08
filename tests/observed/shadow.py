"""Race detector for the accesses to one buffer: whether two that share a byte are ordered, one happening before the other.

    clock[actor] = how much of that actor's work is ordered before here
    touch(bytes, write): for each earlier access to any of them, one of the two a write, by another actor:
        ordered  <=>  clock[earlier.actor] >= earlier.number        else SimRaceError, naming both

An actor is a stream or the host, which numbers its accesses. This is the happens-before test of FastTrack (Flanagan
and Freund, PLDI 2009), over sets of bytes instead of variables. The sets are exact: two columns of one matrix share no byte,
though their spans overlap.

extent_of(t)        -> Extent(start, end, pattern)      # pattern None: every byte of [start, end)
share_bytes(a, b)   -> by their spans where both are dense, else byte by byte
overlap(a, b)       -> where the bytes that lie in both begin, and a flag for each from there on
covers(a, b)        -> whether a holds every byte of b; may say no where it does
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from chameleon_mm.device.sim import SimStream
from tests.observed.errors import SimRaceError
from tests.observed.late_copy import LateCopy

Actor = SimStream | None
"""A stream, or the host."""

HOST: Actor = None

Clock = dict[Actor, int]


class Extent(NamedTuple):
    """Bytes of a storage: all of [start, end), or a pattern from start: pairs of a count and a stride in bytes, innermost
    first."""

    start: int
    end: int
    pattern: tuple[tuple[int, int], ...] | None = None


def extent_of(t: Tensor) -> Extent:
    """The bytes of a strided tensor within its storage; an empty one covers [0, 0)."""
    count, item = t.numel(), t.element_size()
    if count == 0:
        return Extent(0, 0)
    start = int(t.storage_offset()) * item
    if t.is_contiguous():
        return Extent(start, start + count * item)
    steps = sorted((int(step), int(size)) for size, step in zip(t.shape, t.stride(), strict=True) if size > 1 and step > 0)
    reach, dense = 1, True  # reach: elements up to the end of the last; dense: no stride leaps over that end
    for stride, size in steps:
        dense = dense and stride <= reach
        reach += stride * (size - 1)
    pattern = None if dense else ((item, 1), *((size, stride * item) for stride, size in steps))
    return Extent(start, start + reach * item, pattern)


def share_bytes(a: Extent, b: Extent) -> bool:
    """True if any byte lies in both. Call it last: if spans overlap and one has gaps, time and memory grow with the tensors."""
    if max(a.start, b.start) >= min(a.end, b.end):
        return False
    if a.pattern is None and b.pattern is None:
        return True
    return bool(np.any(overlap(a, b)[1]))


def overlap(a: Extent, b: Extent) -> tuple[int, npt.NDArray[np.bool_]]:
    """First byte that may lie in both, and a flag for each byte from there on: whether it does. Their spans must intersect."""
    start, end = max(a.start, b.start), min(a.end, b.end)
    return start, _mask(a, start, end) & _mask(b, start, end)


def covers(a: Extent, b: Extent) -> bool:
    """True if `a` certainly holds every byte of `b`: it is dense, or the same."""
    return a == b or (a.pattern is None and a.start <= b.start and b.end <= a.end)


def _mask(extent: Extent, start: int, end: int) -> npt.NDArray[np.bool_]:
    """Return a flag for each byte of [start, end)."""
    if extent.pattern is None:
        return np.ones(end - start, dtype=np.bool_)
    offsets = np.full(1, extent.start - start, dtype=np.int64)
    for count, stride in extent.pattern:
        offsets = (offsets[:, None] + np.arange(count, dtype=np.int64) * stride).ravel()
    mask = np.zeros(end - start, dtype=np.bool_)
    mask[offsets[(offsets >= 0) & (offsets < end - start)]] = True
    return mask


def join(clock: Clock, other: Clock) -> None:
    """Order everything that is ordered before `other` before `clock` too."""
    for actor, number in other.items():
        if clock.get(actor, 0) < number:
            clock[actor] = number


class Access(NamedTuple):
    """Read or write of some bytes of a buffer. `label` names the operation.

    `reuse`: a write that represents the memory's next owner, not an operator. `spoils`: the speculative copy that makes this
    read of its source. An operator's unordered write is no race with that read: it makes the copied bytes undefined.
    """

    extent: Extent
    write: bool
    actor: Actor
    number: int
    label: str
    reuse: bool = False
    spoils: LateCopy | None = None


class Shadow:
    """Accesses to one buffer that a later one may have to be ordered after."""

    __slots__ = ("accesses", "gone", "name", "owner")

    def __init__(self, name: str, owner: Actor) -> None:
        self.name = name
        self.owner = owner
        """To which the memory goes back."""
        self.gone = ""
        """Operation that gave the memory back although the storage still exists. Any later access is an error."""
        self.accesses: list[Access] = []

    def touch(self, new: Access, clock: Clock) -> None:
        """Record `new`, whose earlier work is given by `clock`. Raises `SimRaceError` for an unordered conflict."""
        self.check(new, clock)
        self.accesses = [old for old in self.accesses if not _stands_for(new, old, clock)]
        self.accesses.append(new)

    def check(self, new: Access, clock: Clock) -> None:
        """Raise `SimRaceError` if an earlier access conflicts with `new` and is not ordered before `clock`."""
        for old in self.accesses:
            if old.actor == new.actor or not (old.write or new.write) or clock.get(old.actor, 0) >= old.number:
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


def _stands_for(new: Access, old: Access, clock: Clock) -> bool:
    """True if an actor ordered after `new`, and so after everything before `new`, need not check `old`.

    A write was found ordered after all that it covers, except a speculative copy that it spoiled, which still reads. A read
    only follows its own actor's reads.
    """
    if old.spoils is not None and old.actor != new.actor and clock.get(old.actor, 0) < old.number:
        return False
    return (new.write or (not old.write and old.actor == new.actor)) and covers(new.extent, old.extent)


def _describe(access: Access) -> str:
    start, end, pattern = access.extent
    among = "bytes" if pattern is None else "bytes among"
    return f"{'write' if access.write else 'read'} of {among} [{start}, {end}) by {access.label}"
