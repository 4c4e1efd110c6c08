"""The moves of a plan as arrays, one row for each storage that moves, and the order in which what they ask for happens.

moves = Moves.of(plan.actions, trace)     a hundred thousand actions are arithmetic, not a loop
moves.actions(tensors)                    the other way around
in_order(moves)                           events in the order that plan.py sets down: the one place that computes it
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
