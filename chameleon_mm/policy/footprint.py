"""How much memory a plan's actions leave allocated: of the device at each tick, of the host at most. Exact, without time.

at a hook    whole reclaims    reclaims in part                     copies back, the use's own first
             - size            + head, - size                       + size; then, of one in part, - head

A storage that moves in part leaves its head in a buffer of its own, so for a moment both are allocated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from chameleon_mm.policy.memory import sum_over_time
from chameleon_mm.policy.plan import Action
from chameleon_mm.trace import Trace
from chameleon_mm.trace.trace import Int64s
from chameleon_mm.units import allocated_size

HOST_BLOCK_BYTES = 4096
"""Blocks of pinned memory are multiples of it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ActionColumns:
    """A plan's actions by column, (n,) each and in the plan's order: a hundred thousand of them are arithmetic, not a loop."""

    tensor: Int64s
    nbytes: Int64s
    out_at: Int64s
    reclaim_at: Int64s
    in_at: Int64s
    use_at: Int64s
    stays: Int64s
    """Bytes that do not move."""
    head: Int64s
    """Device memory of what does not move. 0: all of it moves."""
    gain: Int64s
    """Device memory that is given back."""

    @classmethod
    def of(cls, actions: Sequence[Action], trace: Trace) -> ActionColumns:
        """Raises `IndexError` for a tensor that `trace` does not have."""
        rows = [(a.tensor, a.nbytes, a.out_at, a.reclaim_at, a.in_at, a.use_at) for a in actions]
        tensor, nbytes, out_at, reclaim_at, in_at, use_at = np.array(rows, np.int64).reshape(-1, 6).T
        whole = trace.tensor_bytes[tensor]
        head = allocated_size(whole - nbytes)
        return cls(
            tensor=tensor,
            nbytes=nbytes,
            out_at=out_at,
            reclaim_at=reclaim_at,
            in_at=in_at,
            use_at=use_at,
            stays=whole - nbytes,
            head=head,
            gain=allocated_size(whole) - head,
        )


class Footprint:
    """Of the actions of any number of plans for one trace. `curve`: its memory, nothing swapped."""

    def __init__(self, trace: Trace, curve: Int64s) -> None:
        self._tick = trace.hook_tick
        self._curve = curve
        self._movable = np.flatnonzero(trace.hook_tensor >= 0)
        """Hooks about a storage that may move."""

    def allocated(self, actions: ActionColumns) -> Int64s:
        """(ticks,) of device memory allocated at most during each."""
        level = self._left_allocated(actions)
        in_part = np.flatnonzero(actions.head)
        if len(in_part):
            hooks = np.union1d(actions.reclaim_at[in_part], actions.in_at[in_part])
            for hook, nbytes in self._moments_in_part(actions, in_part, hooks, level).items():
                tick = self._tick[hook]
                level[tick] = max(int(level[tick]), nbytes)
        return level

    def climbs(self, actions: ActionColumns, allocated: Int64s) -> Int64s:
        """(hooks,) of device memory: from when a hook's reclaims are done until those of the next hook that reclaims, or is
        about a storage that may move, how much more is allocated at most. With what is allocated then it never passes the
        plan's peak. `allocated`: of these actions, as `allocated` has it."""
        if not len(self._tick):
            return np.zeros(0, np.int64)
        looks = np.union1d(np.append(self._movable, 0), actions.reclaim_at)
        back = np.zeros(len(self._tick), np.int64)
        np.add.at(back, actions.in_at, actions.gain)
        reclaimed = self._left_allocated(actions)[self._tick] - back
        ticks = self._tick[looks]
        highest = np.maximum.reduceat(allocated, ticks)
        highest[:-1] = np.maximum(highest[:-1], allocated[ticks[1:]])
        since = np.searchsorted(looks, np.arange(len(self._tick)), side="right") - 1
        return np.asarray(highest[since] - reclaimed)

    def _left_allocated(self, actions: ActionColumns) -> Int64s:
        """(ticks,): as `allocated`, but for what is there in the middle of a hook alone."""
        since, until = self._tick[actions.reclaim_at], self._tick[actions.in_at]
        return self._curve - sum_over_time(len(self._curve), actions.gain, since, until)

    def host_bytes(self, actions: ActionColumns, last_use: Int64s) -> int:
        """Of pinned memory at most. A block is held from its copy out's hook to the last use of its storage, both included."""
        block = -(-actions.nbytes // HOST_BLOCK_BYTES) * HOST_BLOCK_BYTES
        held = sum_over_time(len(self._tick), block, actions.out_at, last_use + 1)
        return int(held.max(initial=0))

    def _moments_in_part(self, actions: ActionColumns, in_part: Int64s, hooks: Int64s, level: Int64s) -> dict[int, int]:
        """By hook of `hooks`: the most while a head and its whole storage are both allocated."""
        leave: dict[int, list[int]] = {hook: [] for hook in hooks.tolist()}
        back: dict[int, list[int]] = {hook: [] for hook in leave}
        for i in in_part.tolist():
            leave[int(actions.reclaim_at[i])].append(i)
        for i in np.flatnonzero(np.isin(actions.in_at, hooks)).tolist():
            used_here = actions.in_at[i] == actions.use_at[i]
            there = back[int(actions.in_at[i])]
            there.insert(0 if used_here else len(there), i)
        most = {}
        for hook, leaving in leave.items():
            # From the hook's end backwards: copies back raised the level, and before them reclaims lowered it.
            now = highest = int(level[self._tick[hook]])
            for i in reversed(back[hook]):
                highest = max(highest, now + int(actions.head[i]))
                now -= int(actions.gain[i])
            for i in reversed(leaving):
                now += int(actions.gain[i])
                highest = max(highest, now + int(actions.head[i]))
            most[hook] = highest
        return most
