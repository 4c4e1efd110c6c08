"""Simulates a step under a plan: device memory at every tick, stalls, both copy engines, the step's time.

plan.py sets down what happens first at a hook, timing.py how long it takes. Memory is exact; time is a model. A plan that
recomputes is simulated on the trace that `rewrite` makes of the step for it, and told in the step's own ticks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from chameleon_mm.policy.action_columns import (
    BACK,
    RECLAIM_IN_PART,
    USE,
    ActionColumns,
    Events,
    PlannedMemory,
    in_order,
    pinned_peak,
)
from chameleon_mm.policy.cost import LinkCost
from chameleon_mm.policy.memory import Candidates, memory_curve
from chameleon_mm.policy.plan import Action, ActionKind, SwapPlan
from chameleon_mm.policy.planned_rewrite import rewritten_for
from chameleon_mm.policy.recipes import Recipes
from chameleon_mm.policy.rewrite import RewrittenTrace
from chameleon_mm.policy.timing import EngineSpan, Walk, walk
from chameleon_mm.trace import Trace
from chameleon_mm.trace.trace import Float64s, Int64s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline:
    """One step under a plan, simulated. `step_us` is the time of the step's operators, `stall_us`, `head_copy_us` and
    `recompute_us` together."""

    peak_bytes: int
    """Peak of device memory."""
    allocated_bytes: Int64s
    """(ticks,) most bytes allocated during each; where a storage moves in part, with what that takes for a moment."""
    host_bytes: int
    """Peak of pinned memory."""
    step_us: float
    stall_us: float
    """Time that compute waits for copies."""
    head_copy_us: float
    """Time that compute copies what stays of storages that move in part, out of them and back into them."""
    out_stalls_us: Mapping[int, float]
    """Time that compute waits at `reclaim_at` for each copy out, by tensor. A tensor that never makes compute wait is left
    out."""
    in_stalls_us: Mapping[int, float]
    """Time that compute waits at `use_at` for each copy back, by tensor."""
    out_spans: tuple[EngineSpan, ...]
    """Spans from device to host, in the order in which the engine runs them."""
    in_spans: tuple[EngineSpan, ...]
    tick_us: Float64s
    """(ticks,) times at which compute reaches each tick, before what it does there."""
    recompute_us: float = 0.0
    """Time in which operators of forward run again: at the uses of what was dropped."""


def simulate(trace: Trace, plan: SwapPlan, cost_model: LinkCost) -> Timeline:
    """Timeline of the step of `trace` under `plan` on a link of `cost_model`. O(ticks + storages + copies).

    Raises `ValueError` for a plan of another trace, and for actions that nobody could carry out in this one.
    """
    return Simulator(trace, cost_model).run(plan)


class Simulator:
    """Simulates plans for one trace on one link. What does not depend on the plan is worked out once."""

    def __init__(self, trace: Trace, cost_model: LinkCost) -> None:
        self.trace = trace
        self._cost = cost_model
        self._memory = PlannedMemory(trace, memory_curve(trace))
        clock = trace.clock_us()
        self._tick_us, self._ops_us = clock[:-1], float(clock[-1])
        self._hook_us: list[float] = clock[trace.hook_tick].tolist()
        self._candidates = Candidates.of(trace)
        self._row = np.full(len(trace.tensor_bytes), -1)
        self._row[self._candidates.tensor] = np.arange(len(self._candidates))
        self._recipes: Recipes | None = None

    def run(self, plan: SwapPlan) -> Timeline:
        """Timeline of the step under `plan`. Raises as `simulate` does."""
        plan.check_made_for(self.trace)
        if not plan.recomputed and not plan.held:
            return self.run_moves(*self._checked(plan.actions))
        if self._recipes is None:
            self._recipes = Recipes.of(self.trace, None)
        return self.run_rewritten(rewritten_for(self._recipes, plan), plan.swaps)

    def run_rewritten(self, rewritten: RewrittenTrace, swaps: Sequence[Action]) -> Timeline:
        """Timeline of the step as `rewritten`, with `swaps`, in the step's own ticks."""
        inner = Simulator(rewritten.trace, self._cost)
        timeline = inner.run_moves(*inner._checked(swaps, rewritten))
        return replace(
            timeline,
            allocated_bytes=rewritten.by_tick(timeline.allocated_bytes),
            tick_us=timeline.tick_us[rewritten.tick_of],
            recompute_us=rewritten.recompute_us,
        )

    def run_moves(self, moves: ActionColumns, who: Candidates) -> Timeline:
        """The step under moves of the candidates `who`, whoever made sure that they can be carried out."""
        events = in_order(moves)
        ticks, tensors = self.trace.hook_tick[events.hooks], who.tensor.tolist()
        walked = walk(moves, events, self._hook_us, self._cost)
        delays_us, out_stalls_us, in_stalls_us = _delays(moves, events, walked, self._cost, tensors)
        late_us = np.zeros(len(self._tick_us) + 1)
        np.add.at(late_us, ticks + 1, delays_us)
        allocated = self._memory.allocated(moves)
        stall_us = sum(out_stalls_us.values()) + sum(in_stalls_us.values())
        return Timeline(
            peak_bytes=int(allocated.max()) if len(allocated) else self.trace.start_bytes,
            allocated_bytes=allocated,
            host_bytes=pinned_peak(len(self._hook_us), moves, who.last_use),
            step_us=self._ops_us + stall_us + walked.head_copy_us,
            stall_us=stall_us,
            head_copy_us=walked.head_copy_us,
            out_stalls_us=out_stalls_us,
            in_stalls_us=in_stalls_us,
            out_spans=walked.out.spans_of(tensors),
            in_spans=walked.back.spans_of(tensors),
            tick_us=self._tick_us + np.cumsum(late_us)[:-1],
        )

    def _checked(self, actions: Sequence[Action], rewritten: RewrittenTrace | None = None) -> tuple[ActionColumns, Candidates]:
        """The moves of `actions`, and of which candidates they are. That the plan is of this trace is what `HookSchedule` asks
        for, too; here somebody must be able to carry it out as well. `rewritten`: what this trace is of the step that the
        actions are for."""
        again = "make a plan for this trace"
        for action in actions:
            who = f"plan, tensor {action.tensor}"
            if action.kind is not ActionKind.SWAP:
                raise ValueError(f"{who}: expected a swap, got {action.kind.value}; only swaps can be simulated")
            if not 0 <= action.tensor < len(self._row) or self._row[action.tensor] < 0:
                raise ValueError(f"{who}: expected one of the {len(self._candidates)} candidates, got another; {again}")
        moves, tensors = ActionColumns.of(actions, self.trace), [action.tensor for action in actions]
        if len(set(tensors)) < len(tensors):
            raise ValueError("plan: expected one action for a tensor, got two for one; give each candidate one")
        of = self._candidates.take(self._row[tensors])
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


def _delays(
    moves: ActionColumns, events: Events, walked: Walk, cost: LinkCost, tensors: list[int]
) -> tuple[Float64s, dict[int, float], dict[int, float]]:
    """Time by which each event delays compute; of that, waits at reclaims and at uses, by tensor."""
    kinds, which = events.kinds, events.which
    reclaims, uses = kinds <= RECLAIM_IN_PART, kinds == USE
    copies_head = reclaims | (kinds == BACK) | (uses & (moves.in_at == moves.use_at)[which])
    delays_us = np.where(copies_head, (moves.stays / (cost.hbm_gbps * 1e3))[which], 0.0)
    stalls_us = []
    for waits_us, here in ((walked.out_waits_us, reclaims), (walked.in_waits_us, uses)):
        delays_us += np.where(here, np.asarray(waits_us)[which], 0.0)
        stalls_us.append({tensors[j]: waits_us[j] for j in which[here].tolist() if waits_us[j] > 0.0})
    return delays_us, stalls_us[0], stalls_us[1]
