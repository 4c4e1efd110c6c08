"""Search for the fastest plan within both budgets: by several ranks, and by a local search if there are few candidates.

search = Search(problem, limits)
search.try_ranks()          try selections by a few ranks; enough if nothing stalls
search.try_swap_all()       try to swap all candidates, at several depths, so that the result is never worse than that
search.improve(drafts)      make random small changes to the best plans, kept if hardly worse (selection.py)
search.found                tentative plans, in the order in which they were found; `search.best` is the best

Larger problems get fewer tries: one or two for a million operators, thousands for a dozen candidates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from random import Random

from chameleon_mm.plan import swap_all
from chameleon_mm.plan.problem import Problem, Scheduled, latest_back, schedule
from chameleon_mm.plan.selection import RANKS, Rank, SearchPoint, neighbour, select, start_of, used_latest
from chameleon_mm.plan.swap_plan import in_order, pinned_peak
from chameleon_mm.plan.timing import LinkCost, walk

_CANDIDATES_BY_RANK = 2_000
"""Maximum of candidates times tried ranks, without the first rank. *Evenly* is always tried."""
_CLIMBS = 3
"""Number of selections from which the local search starts."""
_STRICTNESS = 30.0
"""Inverse of the mean share by which the local search lets an accepted change be worse."""
_MOST_VARIED = 16
"""Maximum number of candidates for a local search. With more, a single candidate hardly matters, and ranks do as well."""
_NO_WORSE_US = 1e-6
"""Difference in us below which times count as equal, because of rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLimits:
    """Budgets and link: the arguments of `generate_plan`."""

    budget: int
    host_budget: int | None
    cost: LinkCost


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Tentative plan within both budgets, with its cost."""

    scheduled: Scheduled
    peak_bytes: int
    host_bytes: int = 0
    moved_bytes: int = 0
    delay_us: float = 0.0
    stall_us: float = 0.0
    head_copy_us: float = 0.0
    """Time of copies within device memory, of the staying parts of storages that move in part."""

    @property
    def order(self) -> tuple[int, int]:
        """Sort key of plans, lower is better: less time, then fewer bytes."""
        return round(self.delay_us / _NO_WORSE_US), self.moved_bytes


class Search:
    """Search for the best of the tentative plans for one problem."""

    def __init__(self, problem: Problem, limits: PlanLimits) -> None:
        self.found: list[Found] = []
        self.best: Found | None = None
        self.least_host_bytes: int | None = None
        """Minimum pinned memory of the tentative plans so far, including plans above `host_budget`."""
        self._problem, self._limits = problem, limits
        self._budget, self._cost = limits.budget, limits.cost
        self._drafts = 0

    @property
    def hides_all(self) -> bool:
        """True if a found plan costs no time, so that no plan can be better."""
        return self.best is not None and self.best.delay_us < _NO_WORSE_US

    def try_ranks(self) -> None:
        """Try selections by each rank: first with copies back as late as they are in time, then as early as there is room."""
        self._try_rank(used_latest, eager=False)
        if self.best is not None and self.best.delay_us - self.best.head_copy_us < _NO_WORSE_US:
            # The only cost is copies of staying parts: try to move those storages whole.
            self._schedule({i: self._problem.size[i] for i in self.best.scheduled.who}, eager=False)
        left = max(1, _CANDIDATES_BY_RANK // max(len(self._problem.size), 1))
        for eager in (False, True):
            for rank in RANKS:
                if left <= 0 or self.hides_all:
                    return
                if eager or rank is not used_latest:
                    self._try_rank(rank, eager=eager)
                    left -= 1

    def try_others(self, at_least: int) -> None:
        """Try more plans by each rank, even if one costs no time, until `at_least` different plans are found."""
        for eager in (True, False):
            for rank in RANKS:
                if len({found.order for found in self.found}) >= at_least:
                    return
                self._try_rank(rank, eager=eager)

    def try_swap_all(self) -> None:
        """Try to move all candidates whole: at every depth for which the budget has room, and as the budget requires."""
        if self.hides_all:
            return
        for scheduled, peak_bytes in swap_all.drafts(self._problem, self._budget):
            self._evaluate(scheduled, peak_bytes, at_most=self.best.delay_us if self.best else inf)
        if len(self._problem.size) <= _CANDIDATES_BY_RANK:
            self._schedule(dict(enumerate(self._problem.size)), eager=True)

    def improve(self, drafts: int) -> None:
        """Run a local search of `drafts` tries, starting from the best selections. Deterministic."""
        if len(self._problem.size) > _MOST_VARIED or not self.found or self.hides_all:
            return
        random = Random(0)
        starts = [start_of(self._problem, rank, eager=eager) for rank in RANKS for eager in (False, True)]
        for start in sorted(starts, key=self._delay_of)[:_CLIMBS]:
            self._climb(start, random, self._drafts + drafts // _CLIMBS)

    def _climb(self, point: SearchPoint, random: Random, until_draft: int) -> None:
        delay_us = self._delay_of(point)
        while self._drafts < until_draft and not self.hides_all:
            changed = neighbour(self._problem, self._budget, point, random)
            at_most = delay_us * (1 + random.expovariate(_STRICTNESS))  # slightly worse may lead to better
            changed_us = self._delay_of(changed, at_most=at_most)
            if changed_us <= at_most:
                point, delay_us = changed, changed_us

    def _delay_of(self, point: SearchPoint, *, at_most: float = inf) -> float:
        """Return the time by which a variation delays the step; infinite if it exceeds the budgets or `at_most`."""
        selected = point.select(self._problem, self._budget)
        if selected is None:
            self._drafts += 1
            return inf
        send_from = point.send_from(self._problem, selected)
        orders: list[list[int] | None] = [None] if send_from == self._problem.sendable else [None, send_from]
        return min(self._schedule(selected, eager=point.eager, send_from=order, at_most=at_most) for order in orders)

    def _try_rank(self, rank: Rank, *, eager: bool) -> None:
        selected = select(self._problem, self._budget, rank(self._problem))
        if selected is not None:
            self._schedule(selected, eager=eager)

    def _schedule(
        self, selected: Mapping[int, int], *, eager: bool, send_from: Sequence[int] | None = None, at_most: float = inf
    ) -> float:
        selected = self._problem.whole_where_twice(selected)
        in_time = None if eager else partial(latest_back, self._problem, cost=self._cost)
        scheduled = schedule(self._problem, self._budget, selected, send_from=send_from, latest_return=in_time)
        self._drafts += 1
        peak_bytes = self._problem.peak_with(scheduled.moves)
        return inf if peak_bytes > self._budget else self._evaluate(scheduled, peak_bytes, at_most=at_most)

    def _evaluate(self, scheduled: Scheduled, peak_bytes: int, *, at_most: float) -> float:
        """Keep a plan within the device's budget if it is within the host's. Returns its delay of the step; infinite if it
        exceeds that budget or `at_most`."""
        problem, (who, moves) = self._problem, scheduled
        host_bytes = pinned_peak(len(problem.level), moves, problem.candidates.last_use[who])
        self.least_host_bytes = min(host_bytes, self.least_host_bytes or host_bytes)
        if self._limits.host_budget is not None and host_bytes > self._limits.host_budget:
            return inf
        walked = walk(moves, in_order(moves), problem.time_us, self._cost, program=problem.program, at_most_us=at_most)
        delay_us = walked.stall_us + walked.head_copy_us
        if delay_us > at_most:
            return inf
        found = Found(
            scheduled=scheduled,
            delay_us=delay_us,
            stall_us=walked.stall_us,
            head_copy_us=walked.head_copy_us,
            moved_bytes=int(moves.reclaimed.sum()),
            peak_bytes=peak_bytes,
            host_bytes=host_bytes,
        )
        self.found.append(found)
        if self.best is None or found.order < self.best.order:
            self.best = found
        return delay_us
