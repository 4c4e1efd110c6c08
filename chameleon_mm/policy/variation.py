"""A way to cover a problem that small changes can be made to, for a local search.

order      of the candidates: who is asked first, and who is copied out first
bounds     of each: the least and the most that it gives up. Free (0, size), left out (0, 0), all (size, size) or just so much
eager      copies back as early as there is room, not as late as they are in time
hold       of each: a hook before which it is not back even so, which leaves room to others
soon       of each: whether its memory goes as soon as it may, not as late, which leaves room to what stays of others
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random

import numpy as np

from chameleon_mm.policy.cover import Rank, cover
from chameleon_mm.policy.problem import Problem
from chameleon_mm.units import ALLOCATION_UNIT_BYTES, allocated_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Variation:
    """One way; what it leads to follows from it alone."""

    order: tuple[int, ...]
    bounds: tuple[tuple[int, int], ...]
    eager: bool
    hold: tuple[int, ...]
    soon: tuple[bool, ...]

    def cover(self, problem: Problem, budget: int) -> dict[int, int] | None:
        """Candidate -> bytes that it gives up; None where the bounds leave too little."""
        rank = [0] * len(self.order)
        for place, i in enumerate(self.order):
            rank[i] = place
        least, most = zip(*self.bounds, strict=True)
        return cover(problem, budget, rank, least=least, most=most)

    def ready(self, problem: Problem, taken: Mapping[int, int]) -> list[int]:
        """(n,) hooks from which copies out begin, so that they cross the link in this order."""
        ready = list(problem.sendable)
        last: tuple[int, int] = (-1, -1)  # the hook, and the place within it: actions of one hook go in the order of their uses
        for i in self.order:
            if i in taken:
                hook = max(ready[i], last[0])
                if (hook, problem.use[i]) < last:
                    hook = min(hook + 1, problem.use[i])
                ready[i] = hook
                last = hook, problem.use[i]
        return ready


def start_of(problem: Problem, rank: Rank, *, eager: bool) -> Variation:
    """All candidates free, in the order of a rank."""
    ranked = rank(problem)
    order = tuple(sorted(range(len(ranked)), key=ranked.__getitem__))
    free = tuple((0, size) for size in problem.size)
    return Variation(order=order, bounds=free, eager=eager, hold=(0,) * len(order), soon=(False,) * len(order))


def vary(problem: Problem, budget: int, variation: Variation, random: Random) -> Variation:
    """One to three small changes."""
    for _ in range(random.choice((1, 1, 1, 2, 2, 3))):
        kind = random.random()
        if kind < 0.25:
            variation = _reorder(variation, random)
        elif kind < 0.65:
            variation = _rebound(problem, budget, variation, random)
        elif kind < 0.8:
            variation = _trade(problem, budget, variation, random)
        elif kind < 0.9:
            variation = _rehold(problem, variation, random)
        elif kind < 0.95:
            variation = _make_way(problem, budget, variation, random)
        else:
            variation = replace(variation, eager=not variation.eager)
    return variation


def _reorder(variation: Variation, random: Random) -> Variation:
    order = list(variation.order)
    order.insert(random.randrange(len(order)), order.pop(random.randrange(len(order))))
    return replace(variation, order=tuple(order))


def _rebound(problem: Problem, budget: int, variation: Variation, random: Random) -> Variation:
    """Another pair of bounds for one candidate."""
    i = random.randrange(len(problem.size))
    size = problem.size[i]
    exact = _missing(problem, budget, i, random)
    bounds = list(variation.bounds)
    bounds[i] = random.choice(((0, size), (size, size), (0, 0), (exact, exact)))
    return replace(variation, bounds=tuple(bounds))


def _trade(problem: Problem, budget: int, variation: Variation, random: Random) -> Variation:
    """As it covers now, but one candidate gives up less by what another gives up more: half of what it can, or less, or all.

    Where the link's directions differ much, the least time is often at two parts that no other change would hit upon.
    """
    taken = variation.cover(problem, budget)
    if not taken or len(problem.size) < 2:
        return variation
    giver = random.choice(sorted(taken))
    taker = random.choice([i for i in range(len(problem.size)) if i != giver])
    there = taken.get(taker, 0)
    most = min(taken[giver], problem.size[taker] - there)
    amount = min(most, allocated_size(most >> random.randrange(12)))
    bounds = list(variation.bounds)
    bounds[giver] = (taken[giver] - amount, taken[giver] - amount)
    bounds[taker] = (there + amount, there + amount)
    return replace(variation, bounds=tuple(bounds))


def _rehold(problem: Problem, variation: Variation, random: Random) -> Variation:
    i = random.randrange(len(problem.size))
    hold = list(variation.hold)
    hold[i] = 0 if hold[i] else random.randint(problem.first[i] + 1, problem.use[i])
    return replace(variation, hold=tuple(hold))


def _make_way(problem: Problem, budget: int, variation: Variation, random: Random) -> Variation:
    """One candidate is away until a hook at which another one leaves in part: its memory is for what stays of that one."""
    way, part = random.randrange(len(problem.size)), random.randrange(len(problem.size))
    since = max(problem.first[way] + 1, problem.first[part])
    until = min(problem.use[way], problem.use[part])
    if way == part or since > until:
        return _resoon(variation, way)
    hook = random.randint(since, until)
    size = problem.size[way]
    moves = min(size, allocated_size(random.choice((size >> random.randrange(12), random.randint(1, size)))))
    room = max(0, budget - int(problem.at_hook[hook]) + moves)
    gives = problem.size[part] - room // ALLOCATION_UNIT_BYTES * ALLOCATION_UNIT_BYTES
    bounds, hold = list(variation.bounds), list(variation.hold)
    bounds[way], hold[way], hold[part] = (moves, moves), hook, random.randint(hook, problem.use[part])
    if 0 < gives < problem.size[part]:
        bounds[part] = (gives, gives)
    return _resoon(replace(variation, bounds=tuple(bounds), hold=tuple(hold)), way, soon=True)


def _resoon(variation: Variation, i: int, *, soon: bool | None = None) -> Variation:
    changed = list(variation.soon)
    changed[i] = not changed[i] if soon is None else soon
    return replace(variation, soon=tuple(changed))


def _missing(problem: Problem, budget: int, i: int, random: Random) -> int:
    """What is missing at some hook at which candidate `i` may be away, with another's help or without; at most its size."""
    size = problem.size[i]
    excess = problem.level[problem.first[i] : problem.use[i]] - budget
    excess = excess[excess > 0]
    if not len(excess):
        return size
    missing = int(random.choice(np.unique(excess).tolist()))
    if random.random() < 0.5:
        missing -= problem.size[random.randrange(len(problem.size))]
    missing = allocated_size(missing)
    return missing if 0 < missing < size else size
