"""Problem for the planner, made from a trace: ticks become intervals between hooks, and copies begin at hooks.

memory:   level[k] = peak from hook k until hook k + 1, without swaps; the excess over the budget must be away
time:     time_us[k] = time at which compute reaches hook k, without swaps
who:      candidate i may be away from hook first[i] until hook use[i], and its copy out may begin at hook sendable[i]; a
          storage that may be away between its uses as well is several candidates

"Away" means off the device. The executor acts only at hooks, so the order of events between two hooks does not matter. So
arithmetic over hooks and candidates is exact, and a step of a million operators is a few arrays of 100 000.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from chameleon_mm.plan.swap_plan import ActionColumns, partial_move_peaks
from chameleon_mm.plan.timing import LinkCost, ProgramCopy, program_copies
from chameleon_mm.plan.trace import Bools, Int64s, Trace
from chameleon_mm.plan.unswapped_memory import Candidates, memory_curve, sum_over_time
from chameleon_mm.units import ALLOCATION_UNIT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """Problem with K hooks and n candidates, in the order in which copies out may begin. Columns for Python loops are lists."""

    before_bytes: int
    """Maximum bytes allocated before the first hook, which no plan can change."""
    level: Int64s
    """(K,) maximum bytes allocated from each hook until the next."""
    at_hook: Int64s
    """(K,) bytes allocated at the hook's own tick."""
    time_us: list[float]
    """(K,) times in us at which compute reaches each hook."""
    total_us: float
    program: tuple[ProgramCopy, ...]
    """The program's own copies over the link, in order."""
    candidates: Candidates
    """Candidates in the order in which their copies out may begin; the lists below are its columns."""
    tensor: list[int] = field(init=False)
    size: list[int] = field(init=False)
    nbytes: list[int] = field(init=False)
    sendable: list[int] = field(init=False)
    first: list[int] = field(init=False)
    use: list[int] = field(init=False)
    padding: list[int] = field(init=False)
    """Bytes by which `size` is more than `nbytes`."""
    may_exceed_more: Bools = field(init=False)
    """(K,) True if the excess may increase at hook k: the level rises, or a candidate is used."""
    may_exceed_more_backwards: Bools = field(init=False)
    """(K,) the same, walking backwards: the level is above that of hook k + 1, or a candidate may be away from k + 1 on."""
    peak_bytes: int = field(init=False)
    """Peak of the step without swaps."""
    least_bytes: int = field(init=False)
    """Peak with every candidate away for as long as possible. No plan has a lower peak."""
    goes_between_uses: bool = False
    """True if candidates may also be away between two uses."""
    goes_twice: bool = field(init=False)
    """True if several candidates are the same storage at different times."""

    def __post_init__(self) -> None:
        c = self.candidates
        for name in ("tensor", "size", "nbytes", "sendable", "first", "use"):
            object.__setattr__(self, name, getattr(c, name).tolist())
        object.__setattr__(self, "padding", (c.size - c.nbytes).tolist())
        object.__setattr__(self, "goes_twice", bool(c.away_before().any()))
        rises = np.diff(self.level)
        climbs, falls = np.ones(len(self.level), np.bool_), np.ones(len(self.level), np.bool_)
        climbs[1:], falls[:-1] = rises > 0, rises < 0
        climbs[c.use] = True
        falls[np.maximum(c.first - 1, 0)] = True
        object.__setattr__(self, "may_exceed_more", climbs)
        object.__setattr__(self, "may_exceed_more_backwards", falls)
        object.__setattr__(self, "peak_bytes", self.peak_of(self.level))
        away = sum_over_time(len(self.level), c.size, c.first, c.use)
        object.__setattr__(self, "least_bytes", self.peak_of(self.level - away))

    @classmethod
    def of(cls, trace: Trace, *, between_uses: bool = False) -> Problem:
        """Return the problem of `trace`. `between_uses`: storages may also be away between two uses. O(operators + storages +
        hooks), without a Python loop."""
        curve, hooks, candidates = memory_curve(trace), trace.hook_tick, Candidates.of(trace, between_uses=between_uses)
        clock = trace.clock_us()
        return cls(
            before_bytes=int(curve[: hooks[0] if len(hooks) else None].max(initial=0)) if len(curve) else trace.start_bytes,
            level=np.maximum.reduceat(curve, hooks) if len(hooks) else np.empty(0, np.int64),
            at_hook=curve[hooks],
            time_us=clock[hooks].tolist(),
            total_us=float(clock[-1]),
            program=program_copies(trace),
            candidates=candidates.take(np.argsort(candidates.sendable, kind="stable")),
            goes_between_uses=between_uses,
        )

    def peak_of(self, level: Int64s) -> int:
        """Return the peak of a step with `level` from each hook until the next."""
        return max(self.before_bytes, int(level.max(initial=0)))

    def over(self, budget: int, where: Bools) -> tuple[list[int], list[int]]:
        """Return the hooks among `where` whose level exceeds `budget`, and the excess at each."""
        hooks = ((self.level > budget) & where).nonzero()[0]
        return hooks.tolist(), (self.level[hooks] - budget).tolist()

    def moves(
        self, who: Sequence[int], freed: Sequence[int], out_at: Sequence[int], reclaim_at: Sequence[int], in_at: Sequence[int]
    ) -> ActionColumns:
        """Return the moves of candidates `who`, in the order of their uses. Each frees a multiple of 512 bytes within its
        size."""
        c = self.candidates
        which, freed_bytes, *hooks = (np.asarray(column, np.int64) for column in (who, freed, out_at, reclaim_at, in_at))
        again = c.take(which).away_before() if self.goes_twice else np.zeros(len(which), np.bool_)
        return ActionColumns.reclaiming(freed_bytes, c.size[which], c.nbytes[which], (*hooks, c.use[which]), again)

    def whole_where_twice(self, selected: Mapping[int, int]) -> Mapping[int, int]:
        """Return `selected` (candidate -> bytes that it frees), with all bytes of each storage that is away more than once.
        Such a storage is copied back from the same host copy each time."""
        if not self.goes_twice:
            return selected
        times = Counter(self.tensor[i] for i in selected)
        return {i: nbytes if times[self.tensor[i]] == 1 else self.size[i] for i, nbytes in selected.items()}

    def peak_with(self, moves: ActionColumns) -> int:
        """Return the peak of device memory under `moves`."""
        away = moves.away(len(self.level))
        return max([self.peak_of(self.level - away), *partial_move_peaks(moves, self.at_hook - away).values()])


# --- Assign hooks to the moves, so that memory is within the budget at every hook and copies have as much time as possible:
#
# copies out    as soon as each may begin; the engine runs them one after the other
# copies back   last hook to first: memory needed at hook k is taken from the candidates used latest; their copies back follow k
# reclaims      first hook to last: memory needed at hook k is reclaimed at k, from the candidates copied out first
# in part       copying the staying part needs more memory for a moment: at a hook with room, or the whole storage moves
#
# Each sweep keeps at least as many bytes away as the selection, so neither runs out of room. Candidates that the sweeps never
# move are not in the plan.


class Scheduled(NamedTuple):
    """Candidates that move, in the order of their uses, which is the plan's order."""

    who: list[int]
    """Numbers of the candidates in the problem."""
    moves: ActionColumns


def schedule(
    problem: Problem,
    budget: int,
    selected: Mapping[int, int],
    *,
    send_from: Sequence[int] | None = None,
    latest_return: Callable[[Mapping[int, int]], Mapping[int, int]] | None = None,
) -> Scheduled:
    """Assign hooks to `selected` (candidate -> bytes), a selection for `problem`. Time: O(K + n log n).

    send_from: (n,) hooks from which copies out begin; default: as soon as sendable. latest_return: function from a selection to
    the latest hooks at which copies back may begin, by candidate (`latest_back`); default: as soon as there is room.
    """
    selected = dict(selected)
    send_from = problem.sendable if send_from is None else send_from
    while True:
        in_at = _copies_back(problem, budget, selected, latest_return(selected) if latest_return is not None else {})
        reclaim_at = _reclaims(problem, budget, selected, in_at, send_from)
        who = sorted(reclaim_at, key=lambda i: (problem.use[i], i))
        moves = problem.moves(
            who,
            [selected[i] for i in who],
            [min(send_from[i], reclaim_at[i]) for i in who],
            [reclaim_at[i] for i in who],
            [in_at[i] for i in who],
        )
        more = _make_room_for_parts(problem, budget, who, moves)
        if not more:
            return Scheduled(who, moves)
        selected.update(more)


def latest_back(problem: Problem, selected: Mapping[int, int], cost: LinkCost) -> dict[int, int]:
    """Return, by candidate, the last hook at which its copy back can begin in time, if copies cross in the order of uses.

    In time means: it ends before the use, even if the other direction is always busy and compute is never late. The program's
    own copies cross when compute reaches them.
    """
    who = sorted(selected, key=lambda i: (problem.use[i], i))
    if not who:
        return {}
    slower = max(cost.duplex_gbps - cost.d2h_gbps, cost.h2d_gbps / 2)
    nbytes = np.array([selected[i] - problem.padding[i] for i in who])
    copy_us = cost.alone_us(nbytes, slower)
    clock, use = np.asarray(problem.time_us), problem.candidates.use[who]
    theirs = [copy for copy in problem.program if copy.back_bytes]
    at_us = np.array([copy.at_us for copy in theirs], np.float64)
    their_us = cost.alone_us(np.array([copy.back_bytes for copy in theirs], np.int64), slower)
    between = np.searchsorted(clock[use], at_us)
    copy_us, due = np.insert(copy_us, between, their_us), np.insert(clock[use], between, at_us + their_us)
    rest_us = np.cumsum(copy_us[::-1])[::-1]  # time of this copy and all later ones
    start = np.minimum.accumulate((due + rest_us - copy_us)[::-1])[::-1] - rest_us
    start = np.delete(start, between + np.arange(len(theirs)))
    hooks = np.searchsorted(clock, start, side="right") - 1
    # Later hooks may have the same time as a use, if operators in between take no time: clip to the hook of the use.
    return dict(zip(who, np.clip(hooks, 0, use).tolist(), strict=True))


def _copies_back(problem: Problem, budget: int, selected: Mapping[int, int], held: Mapping[int, int]) -> dict[int, int]:
    """Return, by candidate, the first hook from which there is room for it until its use. Those used last are copied back last.

    held: by candidate, a hook before which its copy back does not begin even if there is room.
    """
    first, use = problem.first, problem.use
    waiting = sorted(selected, key=lambda i: (use[i], -first[i], i))  # the last entry is the next to be away
    holding = sorted(held, key=held.__getitem__)
    here = [0] * (len(problem.level) + 1)  # by hook: bytes that were not away before it
    in_at: dict[int, int] = {}
    away, seen = 0, len(problem.level)
    for k, excess in zip(*map(reversed, problem.over(budget, problem.may_exceed_more_backwards)), strict=True):
        away -= sum(here[k + 1 : seen + 1])
        seen = k
        while holding and held[holding[-1]] > k:
            i = holding.pop()
            if i not in in_at:
                in_at[i] = held[i]
                if first[i] <= k:
                    away += selected[i]
                    here[first[i]] += selected[i]
        while away < excess:
            i = waiting.pop()
            if first[i] <= k and i not in in_at:
                in_at[i] = k + 1
                away += selected[i]
                here[first[i]] += selected[i]
    for i in holding:  # no hook over the budget needs them away, but a reclaim may choose them
        in_at.setdefault(i, held[i])
    return in_at


def _reclaims(
    problem: Problem, budget: int, selected: Mapping[int, int], in_at: Mapping[int, int], send_from: Sequence[int]
) -> dict[int, int]:
    """Return, by candidate, the last hook at which its memory must be reclaimed. Those copied out first are reclaimed first."""
    first, use = problem.first, problem.use
    who = sorted(in_at, key=lambda i: (send_from[i], use[i], i))
    arrivals = sorted(range(len(who)), key=[first[i] for i in who].__getitem__, reverse=True)  # places in `who`
    climbs = problem.may_exceed_more.copy()
    climbs[list(in_at.values())] = True
    waiting: list[int] = []
    back = [0] * (len(problem.level) + 1)  # by hook: bytes that are away, less those reclaimed early
    reclaim_at: dict[int, int] = {}
    away, seen = 0, -1
    for k, excess in zip(*problem.over(budget, climbs), strict=True):
        while arrivals and first[who[arrivals[-1]]] <= k:
            heapq.heappush(waiting, arrivals.pop())
        away -= sum(back[seen + 1 : k + 1])
        seen = k
        while away < excess:
            i = who[heapq.heappop(waiting)]
            if in_at[i] > k:
                reclaim_at[i] = k
                away += selected[i]
                back[in_at[i]] += selected[i]
    return reclaim_at


def _make_room_for_parts(problem: Problem, budget: int, who: Sequence[int], moves: ActionColumns) -> dict[int, int]:
    """Move reclaims of partial moves earlier, and their copies back later, to hooks with room to copy the staying part.

    Return candidate -> minimum bytes that it must free, for each candidate without such a hook. Earlier reclaims and later
    copies back can only lower memory, so other moves keep their room.
    """
    parts = moves.head.nonzero()[0].tolist()
    if not parts:
        return {}
    reclaim_at, in_at, heads = moves.reclaim_at.tolist(), moves.in_at.tolist(), moves.head.tolist()
    leaving, staying = _levels_within_hooks(problem, moves)
    more: dict[int, int] = {}
    for j in parts:
        i, stays = who[j], heads[j]
        room_out = budget - leaving[problem.first[i] : reclaim_at[j] + 1]
        room_back = budget - staying[in_at[j] : problem.use[i] + 1]
        room = min(int(room_out.max()), int(room_back.max()))
        if room < stays:
            more[i] = problem.size[i] - max(0, room // ALLOCATION_UNIT_BYTES * ALLOCATION_UNIT_BYTES)
            continue
        moves.reclaim_at[j] = problem.first[i] + (room_out >= stays).nonzero()[0][-1]
        moves.out_at[j] = min(moves.out_at[j], moves.reclaim_at[j])
        moves.in_at[j] += (room_back >= stays).argmax()
    return more


def _levels_within_hooks(problem: Problem, moves: ActionColumns) -> tuple[Int64s, Int64s]:
    """Return two arrays (K,) of bytes allocated: after reclaims of whole storages, before copies back; after all actions."""
    after = moves.away(len(problem.level))
    before = np.concatenate((np.zeros(1, np.int64), after[:-1]))
    whole = moves.head == 0
    np.add.at(before, moves.reclaim_at[whole], moves.reclaimed[whole])
    return problem.at_hook - before, problem.at_hook - after
