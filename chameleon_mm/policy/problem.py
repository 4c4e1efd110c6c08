"""A trace as the planner sees it: ticks become the intervals between hooks, storages become candidates.

memory:   level[k] = most allocated from hook k until hook k + 1, nothing swapped; what is above the budget has to be away
time:     time_us[k] = when compute is at hook k, nothing swapped
who:      candidate i may be away from hook first[i] until hook use[i], and its copy out begin at hook sendable[i]; a storage
          that may be away between its uses as well is several candidates

The executor acts at hooks alone, so nothing that happens between two of them can be told apart: arithmetic over hooks and
candidates is exact, and a step of a million operators is a few arrays of a hundred thousand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from chameleon_mm.policy.action_columns import ActionColumns, partial_move_peaks
from chameleon_mm.policy.unswapped_memory import Candidates, memory_curve, sum_over_time
from chameleon_mm.trace import Trace
from chameleon_mm.trace.trace import Bools, Int64s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """K hooks and n candidates, in the order in which they may be copied out. Lists where Python walks through them."""

    before_bytes: int
    """Most bytes allocated before the first hook: nothing can be done about that."""
    level: Int64s
    """(K,) most bytes allocated from each hook until the next."""
    at_hook: Int64s
    """(K,) bytes allocated at the hook's own tick."""
    time_us: list[float]
    """(K,) times at which compute is at each hook."""
    total_us: float
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
    """(K,) whether more may be missing from hook k on than before it: the level rises, or a candidate is used."""
    may_exceed_more_backwards: Bools = field(init=False)
    """(K,) whether more may be missing, walking back: the level is above hook k + 1's, or one may be away from k + 1 on."""
    peak_bytes: int = field(init=False)
    """Peak of the step, nothing swapped."""
    least_bytes: int = field(init=False)
    """Peak with every candidate away for as long as it may be: no plan's peak is below it."""
    goes_between_uses: bool = False
    """Whether there are candidates that are idle between two uses."""
    goes_twice: bool = field(init=False)
    """Whether there are two candidates or more that are one storage at different times."""

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
        """Problem of `trace`. `between_uses`: what is idle between two uses may be away there, too. O(operators + storages +
        hooks), without a loop."""
        curve, hooks, candidates = memory_curve(trace), trace.hook_tick, Candidates.of(trace, between_uses=between_uses)
        *time_us, total_us = trace.hook_us().tolist()
        return cls(
            before_bytes=int(curve[: hooks[0] if len(hooks) else None].max(initial=0)) if len(curve) else trace.start_bytes,
            level=np.maximum.reduceat(curve, hooks) if len(hooks) else np.empty(0, np.int64),
            at_hook=curve[hooks],
            time_us=time_us,
            total_us=total_us,
            candidates=candidates.take(np.argsort(candidates.sendable, kind="stable")),
            goes_between_uses=between_uses,
        )

    def peak_of(self, level: Int64s) -> int:
        """Peak of a step with `level` from each hook until the next."""
        return max(self.before_bytes, int(level.max(initial=0)))

    def over(self, budget: int, where: Bools) -> tuple[list[int], list[int]]:
        """Hooks of `where` from which more than `budget` is allocated until the next, and how much more."""
        hooks = ((self.level > budget) & where).nonzero()[0]
        return hooks.tolist(), (self.level[hooks] - budget).tolist()

    def moves(
        self, who: Sequence[int], freed: Sequence[int], out_at: Sequence[int], reclaim_at: Sequence[int], in_at: Sequence[int]
    ) -> ActionColumns:
        """The moves of candidates `who`, in the order of their uses. Each frees a multiple of 512 bytes: all that it takes, or
        less."""
        c = self.candidates
        which, freed_bytes, *hooks = (np.asarray(column, np.int64) for column in (who, freed, out_at, reclaim_at, in_at))
        again = c.take(which).away_before() if self.goes_twice else np.zeros(len(which), np.bool_)
        return ActionColumns.reclaiming(freed_bytes, c.size[which], c.nbytes[which], (*hooks, c.use[which]), again)

    def whole_where_twice(self, selected: Mapping[int, int]) -> Mapping[int, int]:
        """`selected`, candidate -> bytes that it gives up: all that it takes for each storage that goes more than once, so that
        it comes back from one host copy every time."""
        if not self.goes_twice:
            return selected
        times = Counter(self.tensor[i] for i in selected)
        return {i: nbytes if times[self.tensor[i]] == 1 else self.size[i] for i, nbytes in selected.items()}

    def peak_with(self, moves: ActionColumns) -> int:
        """Device memory at most under `moves`."""
        away = moves.away(len(self.level))
        return max([self.peak_of(self.level - away), *partial_move_peaks(moves, self.at_hook - away).values()])
