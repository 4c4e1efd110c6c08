"""The moves of a plan as arrays, a row for each storage that moves: the order of what they ask for, and the memory they leave.

moves = Moves.of(plan.actions, trace)     a hundred thousand actions are arithmetic, not a loop
moves.actions(tensors)                    the other way around
in_order(moves)                           events in the order that plan.py sets down: the one place that computes it
PlannedMemory(trace, curve)               of the device at each tick; `pinned_peak`: of the host at most. Exact, without time.

at a hook    whole reclaims    reclaims in part                     copies back, the use's own first
             - size            + head, - size                       + size; then, of one in part, - head

A storage that moves in part leaves its head in a buffer of its own, so for a moment both are allocated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np

from chameleon_mm.policy.memory import sum_over_time
from chameleon_mm.policy.plan import Action
from chameleon_mm.trace import Trace
from chameleon_mm.trace.trace import Int64s
from chameleon_mm.units import allocated_size

RECLAIM, RECLAIM_IN_PART, OUT, USE, BACK = range(5)
"""Kinds of events, in the order in which they happen at one hook."""

HOST_BLOCK_BYTES = 4096
"""Bytes of which blocks of pinned memory are multiples."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Moves:
    """Columns of (n,) in the plan's order. Whoever makes them knows which storage each row is."""

    nbytes: Int64s
    """Bytes that cross the link."""
    stays: Int64s
    """Bytes of each storage that do not move."""
    head: Int64s
    """Device memory of what does not move. 0: all of the storage moves."""
    freed: Int64s
    """Device memory that is reclaimed."""
    out_at: Int64s
    reclaim_at: Int64s
    in_at: Int64s
    use_at: Int64s

    @classmethod
    def freeing(cls, freed: Int64s, size: Int64s, nbytes: Int64s, hooks: Sequence[Int64s]) -> Moves:
        """Moves that free `freed` of the `size` that storages of `nbytes` take, multiples of 512. `hooks`: the last columns."""
        head, (out_at, reclaim_at, in_at, use_at) = size - freed, hooks
        return cls(
            nbytes=nbytes - head,
            stays=head,
            head=head,
            freed=freed,
            out_at=out_at,
            reclaim_at=reclaim_at,
            in_at=in_at,
            use_at=use_at,
        )

    @classmethod
    def of(cls, actions: Sequence[Action], trace: Trace) -> Moves:
        """Columns of `actions`. Raises `IndexError` for a tensor that `trace` does not have."""
        rows = [(a.tensor, a.nbytes, a.out_at, a.reclaim_at, a.in_at, a.use_at) for a in actions]
        tensor, nbytes, out_at, reclaim_at, in_at, use_at = np.array(rows, np.int64).reshape(-1, 6).T
        whole = trace.tensor_bytes[tensor]
        head = allocated_size(whole - nbytes)
        return cls(
            nbytes=nbytes,
            stays=whole - nbytes,
            head=head,
            freed=allocated_size(whole) - head,
            out_at=out_at,
            reclaim_at=reclaim_at,
            in_at=in_at,
            use_at=use_at,
        )

    def __len__(self) -> int:
        return len(self.nbytes)

    def take(self, which: Int64s) -> Moves:
        """The moves of the rows `which`, in that order."""
        return replace(self, **{column.name: getattr(self, column.name)[which] for column in fields(self)})

    def actions(self, tensors: Sequence[int]) -> tuple[Action, ...]:
        """The moves as actions. `tensors`: (n,) numbers in the trace."""
        columns = (self.nbytes, self.out_at, self.reclaim_at, self.in_at, self.use_at)
        return tuple(
            Action(tensor=tensor, nbytes=nbytes, out_at=out_at, reclaim_at=reclaim_at, in_at=in_at, use_at=use_at)
            for tensor, nbytes, out_at, reclaim_at, in_at, use_at in zip(
                tensors, *(column.tolist() for column in columns), strict=True
            )
        )

    def away(self, num_hooks: int) -> Int64s:
        """(num_hooks,) bytes of device memory that are away from each hook until the next."""
        return sum_over_time(num_hooks, self.freed, self.reclaim_at, self.in_at)


class Events(NamedTuple):
    """Events at hooks, one after the other."""

    hooks: Int64s
    kinds: Int64s
    """`RECLAIM` and so on."""
    which: Int64s
    """Rows of the moves."""


def in_order(moves: Moves) -> Events:
    """The events of `moves`: by hook, then by kind, then in the plan's order."""
    every = np.arange(len(moves))
    outs = (moves.out_at < moves.reclaim_at).nonzero()[0]  # the others begin with the reclaim that waits for them
    backs = (moves.in_at < moves.use_at).nonzero()[0]  # the others begin with the use that waits for them
    keys = np.concatenate(
        (
            moves.reclaim_at * 5 + RECLAIM + (moves.head > 0),
            moves.out_at[outs] * 5 + OUT,
            moves.use_at * 5 + USE,
            moves.in_at[backs] * 5 + BACK,
        )
    )
    order = np.argsort(keys, kind="stable")
    hooks, kinds = np.divmod(keys[order], 5)
    return Events(hooks, kinds, np.concatenate((every, outs, every, backs))[order])


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
