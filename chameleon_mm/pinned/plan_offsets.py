"""Fixed offsets for the blocks of one step whose sizes and lifetimes are known: arithmetic alone, no memory.

    plan = plan_offsets([(nbytes, first_use, last_use), ...])       # in the order in which the step allocates them
    plan.offsets[i], plan.arena_bytes, plan.lower_bound_bytes

    place(order):  for request in order:  the smallest gap that holds it between the placed ones that live at the same time,
                                          the lowest of equals; above all of them where there is none
    plan:          place(largest first); where that misses the bound, place(longest-lived first) too; the smaller arena

Largest first is the greedy-by-size offset calculation of Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net
Inference" (arXiv 2001.03288, section 5). It leaves holes where lifetimes nest with the small ones outside. Longest-lived first
cannot: with nested lifetimes whatever lives beside a request when it is placed encloses it, and lies below without a hole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index

import numpy as np
import numpy.typing as npt

from chameleon_mm.pinned.free_list import DEFAULT_ALIGNMENT

_Integers = npt.NDArray[np.int64]

_MAX_TOTAL_BYTES = 1 << 62
"""Bound of all sizes together: sums are computed in 64 bits; no arena comes near."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffsetPlan:
    """Offsets of the blocks of a step in one arena. Requests that live at the same time never overlap."""

    sizes: tuple[int, ...]
    """Bytes of each request, as asked for, in the order of the requests."""
    offsets: tuple[int, ...]
    """Byte offset of each request in the arena, a multiple of `alignment`."""
    arena_bytes: int
    """Size of an arena that holds all of them: a multiple of `alignment`."""
    lower_bound_bytes: int
    """The most that lives at one time, each request rounded up to `alignment`: no arena can be smaller."""
    alignment: int

    def extent(self, position: int) -> tuple[int, int]:
        """The bytes [start, end) of the arena that the request at `position` takes, rounded up to the alignment."""
        start = self.offsets[position]
        return start, start + -(-self.sizes[position] // self.alignment) * self.alignment


def plan_offsets(requests: Sequence[tuple[int, int, int]], *, alignment: int = DEFAULT_ALIGNMENT) -> OffsetPlan:
    """Offsets for `requests`, each `(nbytes, first_use, last_use)`, in one arena as small as a greedy search finds.

    Uses are any integers that grow with time; a request lives from its first through its last, both included, so one may take
    the bytes of another whose last use is smaller than its own first. Zero bytes take nothing. Takes time that grows with the
    square of the number of requests: half a second for 5,000, twice that where the first order misses the bound.

    Raises `TypeError` for values that are no integers, `ValueError` for a negative size, a last use before the first, a
    request that is no triple, an alignment below 1, and for more bytes in all than 64 bits address.
    """
    step = index(alignment)
    if step < 1:
        raise ValueError(f"alignment: expected 1 byte or more, got {alignment}")
    checked = [_checked(position, request) for position, request in enumerate(requests)]
    rounded = [-(-nbytes // step) * step for nbytes, _, _ in checked]
    if sum(rounded) > _MAX_TOTAL_BYTES:
        raise ValueError(f"plan_offsets: expected at most {_MAX_TOTAL_BYTES} bytes in all, got {sum(rounded)}; check the sizes")
    first, last = _ranks(checked)
    size = np.array(rounded, dtype=np.int64)
    bound = _lower_bound(size, first, last)
    # Ties go to the one that is allocated first, so that equal requests give equal plans everywhere.
    offsets, arena = _place(size, first, last, np.argsort(-size, kind="stable"))
    if arena > bound:
        others, smaller = _place(size, first, last, np.lexsort((-size, first - last)))
        if smaller < arena:
            offsets, arena = others, smaller
    return OffsetPlan(
        sizes=tuple(nbytes for nbytes, _, _ in checked),
        offsets=tuple(offsets.tolist()),
        arena_bytes=arena,
        lower_bound_bytes=bound,
        alignment=step,
    )


def _checked(position: int, request: tuple[int, int, int]) -> tuple[int, int, int]:
    if len(request) != 3:
        raise ValueError(f"request {position}: expected (nbytes, first_use, last_use), got {request!r}")
    nbytes, first, last = (index(value) for value in request)
    if nbytes < 0:
        raise ValueError(f"request {position}: expected 0 bytes or more, got {nbytes}")
    if last < first:
        raise ValueError(f"request {position}: expected a last use at or after its first, {first}, got {last}")
    return nbytes, first, last


def _ranks(requests: Sequence[tuple[int, int, int]]) -> tuple[_Integers, _Integers]:
    """Ranks of first and last uses among all uses: uses of any size, nanoseconds too, then fit 64 bits."""
    uses = sorted({use for _, first, last in requests for use in (first, last)})
    rank = {use: place for place, use in enumerate(uses)}
    first = np.array([rank[first] for _, first, _ in requests], dtype=np.int64)
    last = np.array([rank[last] for _, _, last in requests], dtype=np.int64)
    return first, last


def _lower_bound(size: _Integers, first: _Integers, last: _Integers) -> int:
    if not len(size):
        return 0
    change = np.zeros(int(last.max()) + 2, dtype=np.int64)
    np.add.at(change, first, size)
    np.add.at(change, last + 1, -size)
    return int(np.cumsum(change).max())


def _place(size: _Integers, first: _Integers, last: _Integers, order: npt.NDArray[np.intp]) -> tuple[_Integers, int]:
    """Offsets by placing in `order`, and the arena that they need."""
    offsets = np.zeros(len(size), dtype=np.int64)
    arena = 0
    # What is placed, sorted by offset: start, end, first use, last use. The gaps between those that live at one time are then
    # what lies between an end, the furthest so far, and the next start.
    placed = np.empty((4, len(size)), dtype=np.int64)
    count = 0
    for request in order:
        need, born, dies = int(size[request]), first[request], last[request]
        if need == 0:
            continue
        starts, ends, firsts, lasts = placed[:, :count]
        beside = (firsts <= dies) & (lasts >= born)
        below = np.concatenate(([0], np.maximum.accumulate(ends[beside])))
        gaps = starts[beside] - below[:-1]
        fits = np.flatnonzero(gaps >= need)
        offset = int(below[fits[np.argmin(gaps[fits])]] if len(fits) else below[-1])
        offsets[request] = offset
        arena = max(arena, offset + need)
        at = int(np.searchsorted(starts, offset))
        placed[:, at + 1 : count + 1] = placed[:, at:count]
        placed[:, at] = offset, offset + need, born, dies
        count += 1
    return offsets, arena
