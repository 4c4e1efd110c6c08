"""Actions of one step and their hooks: `SwapPlan`, which the executor runs and `simulate` predicts.

At one hook, in this order:
    1. reclaims, by `reclaim_at`, in the plan's order: compute waits for the copy out, and the memory is freed. No copy
       is needed for storages to recompute, nor for those that the host has since an earlier action
    2. copies out, by `out_at`: queued in the plan's order
    3. a use whose tensor is on the host: memory is allocated, the copy back queued first; compute waits for it. A use
       whose tensor was dropped: the same for all inputs of the recomputation that are on the host
    4. other copies back, by `in_at`: memory is allocated and they are queued, in the plan's order
    5. a use whose tensor was dropped: the operators that recompute it run
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np

from chameleon_mm.plan.trace import Bools, Int64s, Trace
from chameleon_mm.plan.unswapped_memory import sum_over_time
from chameleon_mm.units import allocated_size


class ActionKind(enum.Enum):
    """Ways to keep a candidate off the device until its first use in backward, or between two uses."""

    SWAP = "swap"
    """The candidate is copied to the host and back."""
    RECOMPUTE = "recompute"
    """The candidate is dropped at `reclaim_at` and recomputed at `in_at` = `use_at`. That is its own first use, or an earlier
    use of a dropped storage that is made from it."""
    HOLD = "hold"
    """The unsaved storage is kept from `out_at`, the first hook after its last write, for recomputations that read it from
    `use_at` on. Another action may swap it meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """Round trip of one candidate. Hooks are numbered as in the trace. Raises `ValueError` if they are not in order.

    A swapped storage may have several actions, one after the other. Then all its bytes move.
    """

    tensor: int
    """Number of the candidate in the trace."""
    nbytes: int
    """Number of bytes that move: the last bytes of the storage. The other bytes, if any, stay in a buffer on the device."""
    out_at: int
    """Hook at which the copy out is queued."""
    reclaim_at: int
    """Hook at which compute waits for the copy out and the memory is freed."""
    in_at: int
    """Hook at which memory is allocated again and the copy back queued; at most `use_at`."""
    use_at: int
    """Hook of the use for which the storage is copied back: its first or a later use."""
    kind: ActionKind = ActionKind.SWAP
    again: bool = False
    """True if an earlier action of the plan moves the same storage. Then the host has the bytes: nothing is copied out, and the
    memory is freed at `reclaim_at` without a wait."""

    def __post_init__(self) -> None:
        if not 0 <= self.out_at <= self.reclaim_at <= self.in_at <= self.use_at:
            raise ValueError(
                f"action for tensor {self.tensor}: expected 0 <= out_at <= reclaim_at <= in_at <= use_at, got {self.out_at}, "
                f"{self.reclaim_at}, {self.in_at}, {self.use_at}"
            )
        if self.nbytes < 1:
            raise ValueError(f"action for tensor {self.tensor}: expected 1 byte or more to move, got {self.nbytes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapPlan:
    """Actions for one step, and their predicted results. Without actions nothing moves."""

    fingerprint: int
    """Fingerprint of the trace for which the plan was made."""
    num_hooks: int
    """Number of hooks of that trace."""
    actions: tuple[Action, ...]
    """Actions in queue order: by `out_at` for copies out, by `in_at` for copies back. Swaps come first, then recomputations,
    then holds."""
    hbm_budget_bytes: int
    peak_bytes: int
    """Peak of device memory, as `simulate` computes it."""
    host_bytes: int
    step_us: float
    stall_us: float
    """Part of `step_us` in which compute waits for copies."""
    recompute_us: float = 0.0
    """Part of `step_us` in which operators of forward run again."""

    @property
    def swaps(self) -> tuple[Action, ...]:
        """Actions of storages that cross the link."""
        return self._of_kind(ActionKind.SWAP)

    @property
    def recomputed(self) -> tuple[Action, ...]:
        """Actions of storages that are dropped and recomputed."""
        return self._of_kind(ActionKind.RECOMPUTE)

    @property
    def held(self) -> tuple[Action, ...]:
        """Actions of storages that are held as inputs of recomputations."""
        return self._of_kind(ActionKind.HOLD)

    @property
    def moved_bytes(self) -> int:
        """Bytes copied to the host. At least as many are copied back; more if a storage is swapped more than once."""
        return sum(action.nbytes for action in self.swaps if not action.again)

    def check_made_for(self, trace: Trace) -> None:
        """Raise `ValueError` unless the plan's fingerprint and number of hooks are those of `trace`."""
        if self.fingerprint != trace.fingerprint or self.num_hooks != len(trace.hook_tick):
            raise ValueError(
                f"plan: expected one for fingerprint {trace.fingerprint:#x} and {len(trace.hook_tick)} hooks, as this trace, "
                f"got one for {self.fingerprint:#x} and {self.num_hooks}; make a plan for this trace"
            )

    def head_copy_us(self, unswapped_us: float) -> float:
        """Return the time in which compute copies staying parts of partial moves. `unswapped_us`: step without a plan."""
        return self.step_us - self.stall_us - self.recompute_us - unswapped_us

    def _of_kind(self, kind: ActionKind) -> tuple[Action, ...]:
        return tuple(action for action in self.actions if action.kind is kind)


# --- Actions of a plan as arrays, one row per action; the order of their events; the memory that stays allocated
#
# The order at one hook: reclaim whole storages, reclaim storages that move in part, queue copies out, the use, other copies
# back. Memory for copies back is allocated in that order too: first for the use's own storage, then for the others.
#
# If a storage moves in part, its head, the bytes that stay, is in a buffer of its own. So during its reclaim and its copy back,
# the whole storage and that buffer are allocated at the same time for a moment.

RECLAIM, RECLAIM_IN_PART, OUT, USE, BACK = range(5)
"""Kinds of events, in the order in which they happen at one hook."""

HOST_BLOCK_BYTES = 4096
"""Blocks of pinned memory are multiples of this many bytes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ActionColumns:
    """Columns of (n,), one row per action, in the plan's order. The storages of the rows are not included."""

    nbytes: Int64s
    """Bytes that cross the link."""
    stays: Int64s
    """Bytes of each storage that stay."""
    head: Int64s
    """Device memory of the buffer for the bytes that stay; 0: the whole storage moves."""
    reclaimed: Int64s
    """Device memory that the reclaim frees."""
    out_at: Int64s
    reclaim_at: Int64s
    in_at: Int64s
    use_at: Int64s
    again: Bools
    """True if the host has the bytes since an earlier row, so that nothing is copied out."""

    @classmethod
    def reclaiming(
        cls, reclaimed: Int64s, allocated: Int64s, storage_bytes: Int64s, hooks: Sequence[Int64s], again: Bools
    ) -> ActionColumns:
        """Return rows that reclaim `reclaimed` of the `allocated` bytes of storages with `storage_bytes`.

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
        """Return columns of `actions`. Raises `IndexError` for a tensor that `trace` does not have."""
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
        return replace(self, **{column.name: getattr(self, column.name)[which] for column in fields(self)})

    def actions(self, tensors: Sequence[int]) -> tuple[Action, ...]:
        """Return the rows as actions. `tensors`: (n,) numbers in the trace."""
        columns = (self.nbytes, self.out_at, self.reclaim_at, self.in_at, self.use_at, self.again)
        rows = zip(tensors, *(column.tolist() for column in columns), strict=True)
        return tuple(
            Action(tensor=tensor, nbytes=nbytes, out_at=out_at, reclaim_at=reclaim_at, in_at=in_at, use_at=use_at, again=again)
            for tensor, nbytes, out_at, reclaim_at, in_at, use_at, again in rows
        )

    def away(self, num_hooks: int) -> Int64s:
        """Return (num_hooks,): bytes of device memory that are reclaimed and not allocated again, after each hook."""
        return sum_over_time(num_hooks, self.reclaimed, self.reclaim_at, self.in_at)


class Events(NamedTuple):
    hooks: Int64s
    kinds: Int64s
    """`RECLAIM` and so on."""
    which: Int64s
    """Row of each event's action."""


def in_order(moves: ActionColumns) -> Events:
    """Return the events of `moves`: by hook, then by kind, then in the plan's order."""
    every = np.arange(len(moves))
    # Other copies out begin at the reclaim that waits for them, or the host already has the bytes.
    outs = ((moves.out_at < moves.reclaim_at) & ~moves.again).nonzero()[0]
    backs = (moves.in_at < moves.use_at).nonzero()[0]  # the others begin at the use that waits for them
    reclaims = moves.reclaim_at * 5 + RECLAIM + (moves.head > 0)
    keys = np.concatenate((reclaims, moves.out_at[outs] * 5 + OUT, moves.use_at * 5 + USE, moves.in_at[backs] * 5 + BACK))
    order = np.argsort(keys, kind="stable")
    hooks, kinds = np.divmod(keys[order], 5)
    return Events(hooks, kinds, np.concatenate((every, outs, every, backs))[order])


def partial_move_peaks(moves: ActionColumns, left: Int64s) -> dict[int, int]:
    """Return, by hook, the peak of allocated bytes within each hook that reclaims or copies back a storage that moves in part.
    Its head and the whole storage are both allocated then. `left`: (hooks,) bytes allocated after each hook."""
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
        # Walk backwards from the hook's end: copies back raised the level, and earlier reclaims lowered it.
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
    """Return the peak of pinned memory. A block is held from the hook of its copy out to the last use, both included."""
    blocks = np.where(moves.again, 0, -(-moves.nbytes // HOST_BLOCK_BYTES) * HOST_BLOCK_BYTES)
    return int(sum_over_time(num_hooks, blocks, moves.out_at, last_use + 1).max(initial=0))


class PlannedMemory:
    """Memory that stays allocated under plans for one trace. `curve`: the trace's unswapped memory. `hooks`: numbers of the
    trace's hooks that are separate calls; None: all."""

    def __init__(self, trace: Trace, curve: Int64s, hooks: Int64s | None = None) -> None:
        self._tick, self._curve = trace.hook_tick, curve
        hooks = np.arange(len(trace.hook_tick)) if hooks is None else hooks
        self._movable = hooks[trace.hook_tensor[hooks] >= 0]
        """Hooks of storages that may move."""

    def allocated(self, moves: ActionColumns) -> Int64s:
        """Return (ticks,): maximum bytes of device memory allocated during each tick."""
        level = self._left(moves)
        for hook, nbytes in partial_move_peaks(moves, level[self._tick]).items():
            tick = self._tick[hook]
            level[tick] = max(int(level[tick]), nbytes)
        return level

    def growth_until_next_check(self, moves: ActionColumns, allocated: Int64s, drop_at: Sequence[int] = ()) -> Int64s:
        """Return (hooks,): maximum growth of device memory from the end of each hook's reclaims until the next check of memory.

        Memory is checked at each hook that reclaims or drops, and at each hook of a storage that may move. It is also checked
        at the first hook, which stands for all times before the first check. Growth plus allocated memory then never exceeds
        the plan's peak. Each drop has its own check, because a step that proves a recipe keeps the storage to drop.

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
        """Return (ticks,): bytes allocated at the end of each tick. A tick that is a hook ends after its actions."""
        since, until = self._tick[moves.reclaim_at], self._tick[moves.in_at]
        return self._curve - sum_over_time(len(self._curve), moves.reclaimed, since, until)
