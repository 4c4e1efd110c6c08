"""Memory that a plan's actions leave allocated: of the device at each tick, of the host at most. Exact, without time.

at a hook    whole reclaims    reclaims in part                     copies back, the use's own first
             - size            + head, - size                       + size; then, of one in part, - head

A storage that moves in part leaves its head in a buffer of its own, so for a moment both are allocated.
"""

from __future__ import annotations

import numpy as np

from chameleon_mm.policy.memory import sum_over_time
from chameleon_mm.policy.moves import Moves
from chameleon_mm.trace import Trace
from chameleon_mm.trace.trace import Int64s

HOST_BLOCK_BYTES = 4096
"""Bytes of which blocks of pinned memory are multiples."""


def moments_in_part(moves: Moves, left: Int64s) -> dict[int, int]:
    """Bytes allocated at most within each hook at which a storage goes or returns in part, by hook: its head and the whole of
    it are both allocated for a moment. `left`: (hooks,) bytes allocated once each hook is done."""
    parts = moves.head.nonzero()[0].tolist()
    if not parts:
        return {}
    columns = (moves.head, moves.freed, moves.reclaim_at, moves.in_at, moves.use_at)
    head, freed, reclaim_at, in_at, use_at = (column.tolist() for column in columns)
    leave: dict[int, list[int]] = {hook: [] for j in parts for hook in (reclaim_at[j], in_at[j])}
    back: dict[int, list[int]] = {hook: [] for hook in leave}
    for j in parts:
        leave[reclaim_at[j]].append(j)
    for j, hook in enumerate(in_at):
        if hook in back:
            back[hook].insert(0 if hook == use_at[j] else len(back[hook]), j)
    most = {}
    for hook, leaving in leave.items():
        # From the hook's end backwards: copies back raised the level, and before them reclaims lowered it.
        now = highest = int(left[hook])
        for j in reversed(back[hook]):
            highest = max(highest, now + head[j])
            now -= freed[j]
        for j in reversed(leaving):
            now += freed[j]
            highest = max(highest, now + head[j])
        most[hook] = highest
    return most


def pinned_peak(num_hooks: int, moves: Moves, last_use: Int64s) -> int:
    """The most pinned memory: a block is held from its copy out's hook to the last use, both included."""
    blocks = -(-moves.nbytes // HOST_BLOCK_BYTES) * HOST_BLOCK_BYTES
    return int(sum_over_time(num_hooks, blocks, moves.out_at, last_use + 1).max(initial=0))


class PlannedMemory:
    """Computes the memory that plans for one trace leave allocated. `curve`: the trace's memory, nothing swapped."""

    def __init__(self, trace: Trace, curve: Int64s) -> None:
        self._tick = trace.hook_tick
        self._curve = curve
        self._movable = np.flatnonzero(trace.hook_tensor >= 0)
        """Hooks about a storage that may move."""

    def allocated(self, moves: Moves) -> Int64s:
        """(ticks,) most device memory allocated during each."""
        level = self._left(moves)
        for hook, nbytes in moments_in_part(moves, level[self._tick]).items():
            tick = self._tick[hook]
            level[tick] = max(int(level[tick]), nbytes)
        return level

    def growth_until_next_check(self, moves: Moves, allocated: Int64s) -> Int64s:
        """(hooks,) most growth of device memory from when a hook's reclaims are done until those of the next hook that
        reclaims, or is about a storage that may move. With what is allocated then it never passes the plan's peak. `allocated`:
        of these actions, as `allocated` returns it."""
        if not len(self._tick):
            return np.zeros(0, np.int64)
        checks = np.union1d(np.append(self._movable, 0), moves.reclaim_at)
        back = np.zeros(len(self._tick), np.int64)
        np.add.at(back, moves.in_at, moves.freed)
        reclaimed = self._left(moves)[self._tick] - back
        ticks = self._tick[checks]
        highest = np.maximum.reduceat(allocated, ticks)
        highest[:-1] = np.maximum(highest[:-1], allocated[ticks[1:]])
        since = np.searchsorted(checks, np.arange(len(self._tick)), side="right") - 1
        return np.asarray(highest[since] - reclaimed)

    def _left(self, moves: Moves) -> Int64s:
        """(ticks,) allocated during each, at hooks once they are done."""
        since, until = self._tick[moves.reclaim_at], self._tick[moves.in_at]
        return self._curve - sum_over_time(len(self._curve), moves.freed, since, until)
