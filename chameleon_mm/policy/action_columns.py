"""The actions of a plan as arrays, one row per action; the order of their events; and the memory that they leave allocated.

columns = ActionColumns.of(plan.actions, trace)     # arrays, because a plan may have a hundred thousand actions
columns.actions(tensors)                            # back to actions
in_order(columns)                                   # events by hook, then by kind, then in the plan's order
PlannedMemory(trace, curve)                         # device memory at each tick, exact, and without any times
pinned_peak(num_hooks, columns, last_use)           # the most pinned host memory

At one hook, whole storages are reclaimed first, then storages that move in part, then copies out are queued; a use comes next,
and copies back that are due last. Copies back are allocated in that order too: the use's own storage, then the others.

A storage that moves in part leaves its head, the bytes that stay, in a buffer of its own. So while it is reclaimed, and while
it is copied back, both the whole storage and that buffer are allocated for a moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np

from chameleon_mm.policy.plan import Action
from chameleon_mm.policy.unswapped_memory import sum_over_time
from chameleon_mm.trace import Trace
from chameleon_mm.trace.trace import Bools, Int64s
from chameleon_mm.units import allocated_size

RECLAIM, RECLAIM_IN_PART, OUT, USE, BACK = range(5)
"""Kinds of events, in the order in which they happen at one hook."""

HOST_BLOCK_BYTES = 4096
"""Bytes of which blocks of pinned memory are multiples."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ActionColumns:
    """Columns of (n,), one row per action, in the plan's order. The caller knows which storage each row is."""

    nbytes: Int64s
    """Bytes that cross the link."""
    stays: Int64s
    """Bytes of each storage that do not move."""
    head: Int64s
    """Device memory of what does not move. 0: all of the storage moves."""
    reclaimed: Int64s
    """Allocated device memory that the reclaim gives back."""
    out_at: Int64s
    reclaim_at: Int64s
    in_at: Int64s
    use_at: Int64s
    again: Bools
    """Whether the host has the storage since an earlier row, so that nothing is copied out."""

    @classmethod
    def reclaiming(
        cls, reclaimed: Int64s, allocated: Int64s, storage_bytes: Int64s, hooks: Sequence[Int64s], again: Bools
    ) -> ActionColumns:
        """Rows that reclaim `reclaimed` of the `allocated` bytes that each storage of `storage_bytes` takes.

        The first two are multiples of 512, as the allocator rounds. `hooks`: (out_at, reclaim_at, in_at, use_at).
        """
        head, (out_at, reclaim_at, in_at, use_at) = allocated - reclaimed, hooks
        out_at = np.where(again, reclaim_at, out_at)
        return cls(
            nbytes=storage_bytes - head,
            stays=head,
            head=head,
            reclaimed=reclaimed,
            out_at=out_at,
            reclaim_at=reclaim_at,
            in_at=in_at,
            use_at=use_at,
            again=again,
        )

    @classmethod
    def of(cls, actions: Sequence[Action], trace: Trace) -> ActionColumns:
        """Columns of `actions`. Raises `IndexError` for a tensor that `trace` does not have."""
        rows = [(a.tensor, a.nbytes, a.out_at, a.reclaim_at, a.in_at, a.use_at) for a in actions]
        tensor, nbytes, out_at, reclaim_at, in_at, use_at = np.array(rows, np.int64).reshape(-1, 6).T
        whole = trace.tensor_bytes[tensor]
        head = allocated_size(whole - nbytes)
        return cls(
            nbytes=nbytes,
            stays=whole - nbytes,
            head=head,
            reclaimed=allocated_size(whole) - head,
            out_at=out_at,
            reclaim_at=reclaim_at,
            in_at=in_at,
            use_at=use_at,
            again=np.fromiter((action.again for action in actions), np.bool_, len(actions)),
        )

    def __len__(self) -> int:
        return len(self.nbytes)

    def take(self, which: Int64s) -> ActionColumns:
        """The rows `which`, in that order."""
        return replace(self, **{column.name: getattr(self, column.name)[which] for column in fields(self)})

    def actions(self, tensors: Sequence[int]) -> tuple[Action, ...]:
        """The rows as actions. `tensors`: (n,) numbers in the trace."""
        columns = (self.nbytes, self.out_at, self.reclaim_at, self.in_at, self.use_at, self.again)
        return tuple(
            Action(tensor=tensor, nbytes=nbytes, out_at=out_at, reclaim_at=reclaim_at, in_at=in_at, use_at=use_at, again=again)
            for tensor, nbytes, out_at, reclaim_at, in_at, use_at, again in zip(
                tensors, *(column.tolist() for column in columns), strict=True
            )
        )

    def away(self, num_hooks: int) -> Int64s:
        """(num_hooks,) bytes of device memory that are reclaimed, and not yet back, between each hook and the next."""
        return sum_over_time(num_hooks, self.reclaimed, self.reclaim_at, self.in_at)


class Events(NamedTuple):
    """Events at hooks, one after the other."""

    hooks: Int64s
    kinds: Int64s
    """`RECLAIM` and so on."""
    which: Int64s
    """Row of each event's action."""


def in_order(moves: ActionColumns) -> Events:
    """The events of `moves`: by hook, then by kind, then in the plan's order."""
    every = np.arange(len(moves))
    # The others begin with the reclaim that waits for them, or the host has them already.
    outs = ((moves.out_at < moves.reclaim_at) & ~moves.again).nonzero()[0]
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


def partial_move_peaks(moves: ActionColumns, left: Int64s) -> dict[int, int]:
    """Peak of allocated bytes within each hook at which a storage that moves in part is reclaimed or copied back, by hook: its
    head and the whole storage are both allocated then. `left`: (hooks,) bytes allocated once each hook is done."""
    parts = moves.head.nonzero()[0].tolist()
    if not parts:
        return {}
    columns = (moves.head, moves.reclaimed, moves.reclaim_at, moves.in_at, moves.use_at)
    head, reclaimed, reclaim_at, in_at, use_at = (column.tolist() for column in columns)
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
            now -= reclaimed[j]
        for j in reversed(leaving):
            now += reclaimed[j]
            highest = max(highest, now + head[j])
        most[hook] = highest
    return most


def pinned_peak(num_hooks: int, moves: ActionColumns, last_use: Int64s) -> int:
    """The most pinned memory: a block is held from its copy out's hook to the last use, both included."""
    blocks = np.where(moves.again, 0, -(-moves.nbytes // HOST_BLOCK_BYTES) * HOST_BLOCK_BYTES)
    return int(sum_over_time(num_hooks, blocks, moves.out_at, last_use + 1).max(initial=0))


class PlannedMemory:
    """Computes the memory that plans for one trace leave allocated. `curve`: the trace's memory, nothing swapped. `hooks`:
    those of the trace that are calls of their own; None: all are."""

    def __init__(self, trace: Trace, curve: Int64s, hooks: Int64s | None = None) -> None:
        self._tick = trace.hook_tick
        self._curve = curve
        hooks = np.arange(len(trace.hook_tick)) if hooks is None else hooks
        self._movable = hooks[trace.hook_tensor[hooks] >= 0]
        """Hooks about a storage that may move."""

    def allocated(self, moves: ActionColumns) -> Int64s:
        """(ticks,) most device memory allocated during each."""
        level = self._left(moves)
        for hook, nbytes in partial_move_peaks(moves, level[self._tick]).items():
            tick = self._tick[hook]
            level[tick] = max(int(level[tick]), nbytes)
        return level

    def growth_until_next_check(self, moves: ActionColumns, allocated: Int64s, drop_at: Sequence[int] = ()) -> Int64s:
        """(hooks,) maximum growth of device memory from the end of each hook's reclaims until the next check of memory.

        Memory is checked at each hook that reclaims or drops, at each hook of a storage that may move, and at the first hook,
        which stands for what comes before any check. Growth and what is allocated then never exceed the plan's peak. A step
        that proves a recipe keeps what the plan drops: so each drop has its check.

        `allocated`: the result of `self.allocated(moves)`. `drop_at`: hooks that drop.
        """
        if not len(self._tick):
            return np.zeros(0, np.int64)
        checks = np.unique(np.concatenate((self._movable, [0], moves.reclaim_at, np.array(drop_at, np.int64))))
        back = np.zeros(len(self._tick), np.int64)
        np.add.at(back, moves.in_at, moves.reclaimed)
        level_after_reclaims = self._left(moves)[self._tick] - back
        ticks = self._tick[checks]
        highest = np.maximum.reduceat(allocated, ticks)
        highest[:-1] = np.maximum(highest[:-1], allocated[ticks[1:]])
        since = np.searchsorted(checks, np.arange(len(self._tick)), side="right") - 1
        return np.asarray(highest[since] - level_after_reclaims)

    def _left(self, moves: ActionColumns) -> Int64s:
        """(ticks,) bytes allocated at the end of each tick; a tick that is a hook ends once its actions are done."""
        since, until = self._tick[moves.reclaim_at], self._tick[moves.in_at]
        return self._curve - sum_over_time(len(self._curve), moves.reclaimed, since, until)
