"""A way to select candidates that small changes can be made to, for a local search.

order          of the candidates: who is asked first, and who is copied out first
bounds         of each: the least and the most that it gives up: (0, size), (0, 0), (size, size) or just so much
early          copies back as early as there is room, not as late as they are in time
not_before     of each: a hook before which it is not back even so, which leaves room to others
reclaim_early  of each: whether its memory goes as soon as it may, not as late, which leaves room to what stays of others
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random

import numpy as np

from chameleon_mm.policy.problem import Problem
from chameleon_mm.policy.selection import Rank, select
from chameleon_mm.units import ALLOCATION_UNIT_BYTES, allocated_size


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPoint:
    """Choices that a plan follows from, and nothing else."""

    order: tuple[int, ...]
    bounds: tuple[tuple[int, int], ...]
    eager: bool
    not_back_before: tuple[int, ...]
    reclaim_early: tuple[bool, ...]

    def select(self, problem: Problem, budget: int) -> dict[int, int] | None:
        """Select candidates and the bytes that each gives up; None where the bounds leave too little."""
        rank = [0] * len(self.order)
        for place, i in enumerate(self.order):
            rank[i] = place
        least, most = zip(*self.bounds, strict=True)
        return select(problem, budget, rank, least=least, most=most)

    def send_from(self, problem: Problem, selected: Mapping[int, int]) -> list[int]:
        """(n,) hooks from which copies out begin, so that they cross the link in this order."""
        send_from = list(problem.sendable)
        last: tuple[int, int] = (-1, -1)  # the hook, and the place within it: actions of one hook go in the order of their uses
        for i in self.order:
            if i in selected:
                hook = max(send_from[i], last[0])
                if (hook, problem.use[i]) < last:
                    hook = min(hook + 1, problem.use[i])
                send_from[i] = hook
                last = hook, problem.use[i]
        return send_from


def start_of(problem: Problem, rank: Rank, *, eager: bool) -> SearchPoint:
    """Variation with all candidates free, in the order of a rank."""
    ranked = rank(problem)
    order = tuple(sorted(range(len(ranked)), key=ranked.__getitem__))
    free = tuple((0, size) for size in problem.size)
    return SearchPoint(
        order=order, bounds=free, eager=eager, not_back_before=(0,) * len(order), reclaim_early=(False,) * len(order)
    )


def neighbour(problem: Problem, budget: int, point: SearchPoint, random: Random) -> SearchPoint:
    """Make one to three small changes."""
    for _ in range(random.choice((1, 1, 1, 2, 2, 3))):
        kind = random.random()
        if kind < 0.25:
            point = _reorder(point, random)
        elif kind < 0.65:
            point = _change_bounds(problem, budget, point, random)
        elif kind < 0.8:
            point = _shift_bytes(problem, budget, point, random)
        elif kind < 0.9:
            point = _change_hold(problem, point, random)
        elif kind < 0.95:
            point = _make_room_for_another(problem, budget, point, random)
        else:
            point = replace(point, eager=not point.eager)
    return point


def _reorder(point: SearchPoint, random: Random) -> SearchPoint:
    order = list(point.order)
    order.insert(random.randrange(len(order)), order.pop(random.randrange(len(order))))
    return replace(point, order=tuple(order))


def _change_bounds(problem: Problem, budget: int, point: SearchPoint, random: Random) -> SearchPoint:
    i = random.randrange(len(problem.size))
    size = problem.size[i]
    exact = _missing(problem, budget, i, random)
    bounds = list(point.bounds)
    bounds[i] = random.choice(((0, size), (size, size), (0, 0), (exact, exact)))
    return replace(point, bounds=tuple(bounds))


def _shift_bytes(problem: Problem, budget: int, point: SearchPoint, random: Random) -> SearchPoint:
    """Let one candidate give up less by what another gives up more: half of what it can, or less, or all.

    Where the link's directions differ much, the least time is often at two parts that no other change would hit upon.
    """
    selected = point.select(problem, budget)
    if not selected or len(problem.size) < 2:
        return point
    giver = random.choice(sorted(selected))
    taker = random.choice([i for i in range(len(problem.size)) if i != giver])
    there = selected.get(taker, 0)
    most = min(selected[giver], problem.size[taker] - there)
    amount = min(most, allocated_size(most >> random.randrange(12)))
    bounds = list(point.bounds)
    bounds[giver] = (selected[giver] - amount, selected[giver] - amount)
    bounds[taker] = (there + amount, there + amount)
    return replace(point, bounds=tuple(bounds))


def _change_hold(problem: Problem, point: SearchPoint, random: Random) -> SearchPoint:
    i = random.randrange(len(problem.size))
    not_back_before = list(point.not_back_before)
    not_back_before[i] = 0 if not_back_before[i] else random.randint(problem.first[i] + 1, problem.use[i])
    return replace(point, not_back_before=tuple(not_back_before))


def _make_room_for_another(problem: Problem, budget: int, point: SearchPoint, random: Random) -> SearchPoint:
    """Keep one candidate away until a hook at which another one leaves in part: its memory is for what stays of that one."""
    way, part = random.randrange(len(problem.size)), random.randrange(len(problem.size))
    since = max(problem.first[way] + 1, problem.first[part])
    until = min(problem.use[way], problem.use[part])
    if way == part or since > until:
        return _toggle_early(point, way)
    hook = random.randint(since, until)
    size = problem.size[way]
    moves = min(size, allocated_size(random.choice((size >> random.randrange(12), random.randint(1, size)))))
    room = max(0, budget - int(problem.at_hook[hook]) + moves)
    gives = problem.size[part] - room // ALLOCATION_UNIT_BYTES * ALLOCATION_UNIT_BYTES
    bounds, not_back_before = list(point.bounds), list(point.not_back_before)
    bounds[way], not_back_before[way], not_back_before[part] = (moves, moves), hook, random.randint(hook, problem.use[part])
    if 0 < gives < problem.size[part]:
        bounds[part] = (gives, gives)
    return _toggle_early(replace(point, bounds=tuple(bounds), not_back_before=tuple(not_back_before)), way, reclaim_early=True)


def _toggle_early(point: SearchPoint, i: int, *, reclaim_early: bool | None = None) -> SearchPoint:
    changed = list(point.reclaim_early)
    changed[i] = not changed[i] if reclaim_early is None else reclaim_early
    return replace(point, reclaim_early=tuple(changed))


def _missing(problem: Problem, budget: int, i: int, random: Random) -> int:
    """Bytes missing at some hook at which candidate `i` may be away, with another's help or without; at most its size."""
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
