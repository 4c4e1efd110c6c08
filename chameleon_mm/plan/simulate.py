"""Simulate a step under a plan: device memory at every tick, stalls, both copy engines, the step's time.

swap_plan.py defines the order of events at a hook, timing.py their times. Memory is exact; time is modelled. A plan that
recomputes is simulated on the trace that `rewrite` makes for it; the results are in the step's own ticks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from chameleon_mm.plan.recipes import Recipes
from chameleon_mm.plan.rewrite import RewrittenTrace, rewritten_for
from chameleon_mm.plan.swap_plan import (
    BACK,
    RECLAIM_IN_PART,
    USE,
    Action,
    ActionColumns,
    Events,
    PlannedMemory,
    SwapPlan,
    in_order,
    pinned_peak,
)
from chameleon_mm.plan.timing import EngineSpan, LinkCost, Walk, program_copies, walk
from chameleon_mm.plan.trace import Float64s, Int64s, Trace
from chameleon_mm.plan.unswapped_memory import Candidates, memory_curve


class Stall(NamedTuple):
    hook: int
    tensor: int
    us: float
    at_use: bool
    """True: a wait for a copy back, at a use. False: a wait for a copy out, at a reclaim."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline:
    """Simulation of one step under a plan. `step_us` is the sum of the operators' time, `stall_us`, `head_copy_us` and
    `recompute_us`."""

    peak_bytes: int
    allocated_bytes: Int64s
    """(ticks,) maximum bytes allocated during each tick, including the buffers of storages that move in part."""
    host_bytes: int
    """Peak of pinned memory."""
    step_us: float
    stall_us: float
    program_waits_us: float
    """Part of `stall_us` in which the program's own copies wait for our copies on the link."""
    head_copy_us: float
    """Time in which compute copies the staying parts of storages that move in part, to their buffers and back."""
    out_spans: tuple[EngineSpan, ...]
    """Spans of copies from device to host, in the order in which the engine runs them."""
    in_spans: tuple[EngineSpan, ...]
    tick_us: Float64s
    """(ticks,) times at which compute reaches each tick, before its actions."""
    stalls: tuple[Stall, ...]
    """All waits for copies out and back, in order."""
    recompute_us: float = 0.0
    """Time in which operators of forward run again for dropped storages."""


def simulate(trace: Trace, plan: SwapPlan, cost_model: LinkCost) -> Timeline:
    """Return the timeline of the step of `trace` under `plan`, on a link with `cost_model`. O(ticks + storages + copies).

    Raises `ValueError` for a plan of another trace, and for actions that are impossible in this trace.
    """
    return Simulator(trace, cost_model).run(plan)


class Simulator:
    """Simulator of plans for one trace on one link. Computes plan-independent data once."""

    def __init__(self, trace: Trace, cost_model: LinkCost) -> None:
        self.trace, self._cost = trace, cost_model
        self._memory = PlannedMemory(trace, memory_curve(trace))
        clock, self._program = trace.clock_us(), program_copies(trace)
        self._tick_us, self._ops_us = clock[:-1], float(clock[-1])
        self._hook_us: list[float] = clock[trace.hook_tick].tolist()
        first, later = Candidates.of(trace), Candidates.between_uses(trace)
        self._candidates = first.followed_by(later)
        self._row = np.full(len(trace.tensor_bytes), -1)
        # The first of several rows of a storage stays: its use is the earliest.
        self._row[self._candidates.tensor[::-1]] = np.arange(len(self._candidates))[::-1]
        rows = enumerate(zip(later.tensor.tolist(), later.use.tolist(), strict=True), len(first))
        self._later_row = {tensor_and_use: row for row, tensor_and_use in rows}
        """Rows of candidates that may be off the device between two uses, by tensor and the later use."""
        self._recipes: Recipes | None = None

    def run(self, plan: SwapPlan) -> Timeline:
        """Return the timeline of the step under `plan`. Raises as `simulate` does."""
        plan.check_made_for(self.trace)
        if not plan.recomputed and not plan.held:
            return self.run_moves(*self._checked(plan.actions))
        if self._recipes is None:
            self._recipes = Recipes.of(self.trace, None, cost=self._cost)
        return self.run_rewritten(rewritten_for(self._recipes, plan), plan.swaps)

    def run_rewritten(self, rewritten: RewrittenTrace, swaps: Sequence[Action]) -> Timeline:
        """Return the timeline of the step as `rewritten`, with `swaps`, in the step's own ticks."""
        inner = Simulator(rewritten.trace, self._cost)
        timeline = inner.run_moves(*inner._checked(swaps, rewritten))
        return replace(
            timeline,
            allocated_bytes=rewritten.by_tick(timeline.allocated_bytes),
            tick_us=timeline.tick_us[rewritten.tick_of],
            recompute_us=rewritten.recompute_us,
            stalls=tuple(stall._replace(hook=int(rewritten.origin[stall.hook])) for stall in timeline.stalls),
        )

    def run_moves(self, moves: ActionColumns, who: Candidates) -> Timeline:
        """Return the timeline under `moves` of the candidates `who`. The caller has checked that the moves are possible."""
        events = in_order(moves)
        ticks, tensors = self.trace.hook_tick[events.hooks], who.tensor.tolist()
        walked = walk(moves, events, self._hook_us, self._cost, program=self._program)
        delays_us, waits = _delays(moves, events, walked, self._cost)
        stalls = tuple(
            Stall(hook, tensors[j], (walked.in_waits_us if at_use else walked.out_waits_us)[j], at_use)
            for hook, j, at_use in waits
        )
        late_us = np.zeros(len(self._tick_us) + 1)
        np.add.at(late_us, ticks + 1, delays_us)
        np.add.at(late_us, np.array([copy.tick + 1 for copy in self._program], np.int64), walked.program_waits_us)
        allocated = self._memory.allocated(moves)
        program_waits_us = sum(walked.program_waits_us)
        stall_us = sum(stall.us for stall in stalls) + program_waits_us
        return Timeline(
            peak_bytes=int(allocated.max()) if len(allocated) else self.trace.start_bytes,
            allocated_bytes=allocated,
            host_bytes=pinned_peak(len(self._hook_us), moves, who.last_use),
            step_us=self._ops_us + stall_us + walked.head_copy_us,
            stall_us=stall_us,
            program_waits_us=program_waits_us,
            head_copy_us=walked.head_copy_us,
            out_spans=walked.out.spans_of(tensors),
            in_spans=walked.back.spans_of(tensors),
            tick_us=self._tick_us + np.cumsum(late_us)[:-1],
            stalls=stalls,
        )

    def _checked(self, actions: Sequence[Action], rewritten: RewrittenTrace | None = None) -> tuple[ActionColumns, Candidates]:
        """Return the moves of `actions` and their candidates. Raises `ValueError` if they are impossible in this trace;
        `StepProgram` checks only that the plan was made for the trace. `rewritten`: this trace, if it is a rewrite of the step
        for which the actions are."""
        again = "make a plan for this trace"
        for action in actions:
            if not 0 <= action.tensor < len(self._row) or self._row[action.tensor] < 0:
                count = len(self._candidates)
                raise ValueError(f"plan, tensor {action.tensor}: expected one of the {count} candidates, got another; {again}")
        moves = ActionColumns.of(actions, self.trace)
        rows = [self._later_row.get((action.tensor, action.use_at), self._row[action.tensor]) for action in actions]
        of = self._candidates.take(np.array(rows, np.int64))
        _check_repeats(actions, of)
        use = of.use
        if rewritten is not None:
            use = rewritten.origin[of.use]
            if not (moves.use_at != use).any():
                moves, use = rewritten.from_step(moves, of.use), of.use
        wrong = (moves.out_at < of.sendable) | (moves.reclaim_at < of.first) | (moves.use_at != use) | (moves.stays < 0)
        if wrong.any():
            i = int(wrong.argmax())
            action = actions[i]
            raise ValueError(
                f"plan, tensor {action.tensor}: expected at most {of.nbytes[i]} bytes to move, out_at of {of.sendable[i]} or "
                f"later, reclaim_at of {of.first[i]} or later and use_at {use[i]}, got {action.nbytes}, {action.out_at}, "
                f"{action.reclaim_at} and {action.use_at}; {again}"
            )
        return moves, of


def _delays(moves: ActionColumns, events: Events, walked: Walk, cost: LinkCost) -> tuple[Float64s, list[tuple[int, int, bool]]]:
    """Return the time by which each event delays compute, and a list of the waits: hook, row, True if at a use."""
    kinds, which = events.kinds, events.which
    reclaims, uses = kinds <= RECLAIM_IN_PART, kinds == USE
    copies_head = reclaims | (kinds == BACK) | (uses & (moves.in_at == moves.use_at)[which])
    delays_us = np.where(copies_head, (moves.stays / (cost.hbm_gbps * 1e3))[which], 0.0)
    waits_us = np.where(reclaims, np.asarray(walked.out_waits_us)[which], 0.0)
    waits_us += np.where(uses, np.asarray(walked.in_waits_us)[which], 0.0)
    waits = (waits_us > 0.0).nonzero()[0]
    rows = zip(events.hooks[waits].tolist(), which[waits].tolist(), uses[waits].tolist(), strict=True)
    return delays_us + waits_us, list(rows)


def _check_repeats(actions: Sequence[Action], of: Candidates) -> None:
    """Raise `ValueError` if two of `actions` (of the rows `of`) move one storage, unless both move all of it, at two times."""
    if len({(action.tensor, use) for action, use in zip(actions, of.use.tolist(), strict=True)}) < len(actions):
        raise ValueError("plan: expected one action for a tensor, got two for one use; give each candidate one")
    last: dict[int, Action] = {}
    for i in np.argsort(of.use, kind="stable").tolist():
        action, before = actions[i], last.get(actions[i].tensor)
        last[action.tensor] = action
        if action.again != (before is not None):
            raise ValueError(
                f"plan, tensor {action.tensor}: expected `again` of every action for a tensor but its first, got "
                f"{action.again} of the one for its use at hook {action.use_at}; make a plan for this trace"
            )
        if before is not None and min(before.nbytes, action.nbytes) < of.nbytes[i]:
            raise ValueError(
                f"plan, tensor {action.tensor}: expected {of.nbytes[i]} bytes, all of it, in each of its actions, got "
                f"{before.nbytes} and {action.nbytes}; make a plan for this trace"
            )
