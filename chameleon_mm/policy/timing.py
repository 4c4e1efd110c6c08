"""Simulates a plan without carrying it out: device memory at every tick, stalls, both copy engines, the step's time.

at every hook that an action names, in the order that plan.py sets down:
    reclaims      whole ones, then those in part, whose head is copied first; compute waits for the copy out
    copies out    ready now
    the use       its copy back, if not under way yet, is ready now; compute waits for it
    copies back   ready now; of those in part the head is copied back meanwhile
between hooks compute takes what the trace says

Memory is exact. Time is a model: the host is always far enough ahead, a copy is queued on its engine, whole, when compute is at
its hook, and one back runs after its own copy out.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from chameleon_mm.policy.cost import LinkCost
from chameleon_mm.policy.engine import CopyEngine
from chameleon_mm.policy.moves import OUT, RECLAIM_IN_PART, USE, Events, Moves


class Walk(NamedTuple):
    """Delays of a step, and the copies behind them."""

    stall_us: float
    """Compute waits for copies."""
    head_copy_us: float
    """Compute copies what stays of storages that move in part, out of them and back into them."""
    out_waits_us: list[float]
    """(n,) of the moves: waits at reclaims."""
    in_waits_us: list[float]
    """(n,) of the moves: waits at uses."""
    out: CopyEngine
    """Device to host; its copies are numbered as the moves."""
    back: CopyEngine


def walk(
    moves: Moves,
    events: Events,
    hook_us: Sequence[float],
    cost: LinkCost,
    *,
    at_most_us: float = inf,
    lag_us: Sequence[float] = (),
) -> Walk:
    """Goes through `events`, those of `moves`. `hook_us`: (hooks,) when compute is at each, nothing swapped.

    at_most_us: it stops where the step is later by more than that. lag_us: (n,) by how much copies out are done later than
    their engine has them; empty: not at all.
    """
    nbytes, out_at, in_at = moves.nbytes.tolist(), moves.out_at.tolist(), moves.in_at.tolist()
    head_us = (moves.stays / (cost.hbm_gbps * 1e3)).tolist()
    lag = lag_us or [0.0] * len(nbytes)
    out, back = CopyEngine.pair(cost)
    out_done, back_done, out_waits, in_waits = ([0.0] * len(nbytes) for _ in range(4))
    stall = heads = late = 0.0
    for hook, kind, j in zip(*(column.tolist() for column in events), strict=True):
        now = hook_us[hook] + late
        if kind <= RECLAIM_IN_PART:
            if out_at[j] == hook:
                out_done[j] = out.queue(j, nbytes[j], now) + lag[j]
            now += head_us[j]
            late += head_us[j]
            heads += head_us[j]
            wait, waits = out_done[j] - now, out_waits
        elif kind == OUT:
            out_done[j] = out.queue(j, nbytes[j], now) + lag[j]
            continue
        else:
            wait, waits = 0.0, in_waits
            if in_at[j] == hook:
                back_done[j] = back.queue(j, nbytes[j], max(now, out_done[j]))
                now += head_us[j]
                late += head_us[j]
                heads += head_us[j]
            if kind == USE:
                wait = back_done[j] - now
        if wait > 0.0:
            late += wait
            stall += wait
            waits[j] = wait
            if late > at_most_us:
                break
    return Walk(stall, heads, out_waits, in_waits, out, back)
