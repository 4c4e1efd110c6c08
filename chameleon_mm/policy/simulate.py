"""What a plan comes to, without carrying it out: device memory at every tick, stalls, both copy engines, the step's time.

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

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from chameleon_mm.policy.cost import LinkCost
from chameleon_mm.policy.engine import CopyEngine, EngineSpan
from chameleon_mm.policy.memory import Candidates, memory_curve
from chameleon_mm.policy.moves import BACK, OUT, USE, Moves, in_order
from chameleon_mm.policy.plan import ActionKind, SwapPlan
from chameleon_mm.policy.planned_memory import PlannedMemory, pinned_peak
from chameleon_mm.trace import Trace
from chameleon_mm.trace.trace import Float64s, Int64s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline:
    """One step under a plan, simulated. `step_us` is the operators' time, `stall_us` and `head_copy_us` together."""

    peak_bytes: int
    """Most of device memory allocated at once."""
    allocated_bytes: Int64s
    """(ticks,): at most during each; where a storage moves in part, with what that takes for a moment."""
    host_bytes: int
    """Most of pinned memory at once."""
    step_us: float
    stall_us: float
    """Compute waits for copies."""
    head_copy_us: float
    """Compute copies what stays of storages that move in part, out of them and back into them."""
    out_stalls_us: Mapping[int, float]
    """By tensor: compute waits at `reclaim_at` for its copy out. Who never makes compute wait is not in it."""
    in_stalls_us: Mapping[int, float]
    """By tensor: compute waits at `use_at` for its copy back."""
    out_spans: tuple[EngineSpan, ...]
    """Device to host, in the order in which the engine runs them."""
    in_spans: tuple[EngineSpan, ...]
    tick_us: Float64s
    """(ticks,): when compute reaches each tick, before what it does there."""


def simulate(trace: Trace, plan: SwapPlan, cost_model: LinkCost) -> Timeline:
    """The step of `trace` under `plan` on a link of `cost_model`. O(ticks + storages + copies).

    Raises `ValueError` for a plan of another trace, and for actions that nobody could carry out in this one.
    """
    return Simulator(trace, cost_model).run(plan)


class Simulator:
    """One trace on one link, for any number of plans. What does not depend on the plan is worked out once."""

    def __init__(self, trace: Trace, cost_model: LinkCost) -> None:
        self.trace = trace
        self._cost = cost_model
        self._memory = PlannedMemory(trace, memory_curve(trace))
        clock = trace.clock_us()
        self._tick_us, self._ops_us = clock[:-1], float(clock[-1])
        self._candidates = Candidates.of(trace)
        self._row = np.full(len(trace.tensor_bytes), -1)
        self._row[self._candidates.tensor] = np.arange(len(self._candidates))

    def run(self, plan: SwapPlan) -> Timeline:
        """The step under `plan`. Raises as `simulate` does."""
        actions = self._check(plan)
        tensors = [action.tensor for action in plan.actions]
        compute = _Compute(self._cost, actions, tensors)
        hooks, kinds, which = in_order(actions)
        ticks = self.trace.hook_tick[hooks]
        delays_us = [
            compute.do(us, kind, i)
            for us, kind, i in zip(self._tick_us[ticks].tolist(), kinds.tolist(), which.tolist(), strict=True)
        ]
        late_us = np.zeros(len(self._tick_us) + 1)
        np.add.at(late_us, ticks + 1, delays_us)
        allocated = self._memory.allocated(actions)
        stall_us = sum(compute.out_stalls_us.values()) + sum(compute.in_stalls_us.values())
        return Timeline(
            peak_bytes=int(allocated.max()) if len(allocated) else self.trace.start_bytes,
            allocated_bytes=allocated,
            host_bytes=pinned_peak(len(self.trace.hook_tick), actions, self._candidates.last_use[self._row[tensors]]),
            step_us=self._ops_us + stall_us + compute.head_copy_us,
            stall_us=stall_us,
            head_copy_us=compute.head_copy_us,
            out_stalls_us=compute.out_stalls_us,
            in_stalls_us=compute.in_stalls_us,
            out_spans=compute.out.spans,
            in_spans=compute.back.spans,
            tick_us=self._tick_us + np.cumsum(late_us)[:-1],
        )

    def _check(self, plan: SwapPlan) -> Moves:
        trace, again = self.trace, "make a plan for this trace"
        if plan.fingerprint != trace.fingerprint or plan.num_hooks != len(trace.hook_tick):
            raise ValueError(
                f"plan: expected one for fingerprint {trace.fingerprint:#x} and {len(trace.hook_tick)} hooks, as this trace, "
                f"got one for {plan.fingerprint:#x} and {plan.num_hooks}; {again}"
            )
        for action in plan.actions:
            who = f"plan, tensor {action.tensor}"
            if action.kind is not ActionKind.SWAP:
                raise ValueError(f"{who}: expected a swap, got {action.kind.value}; only swaps can be simulated")
            if not 0 <= action.tensor < len(self._row) or self._row[action.tensor] < 0:
                raise ValueError(f"{who}: expected one of the {len(self._candidates)} candidates, got another; {again}")
        actions, tensors = Moves.of(plan.actions, trace), [action.tensor for action in plan.actions]
        if len(set(tensors)) < len(tensors):
            raise ValueError("plan: expected one action for a tensor, got two for one; give each candidate one")
        row = self._row[tensors]
        sendable, first, use = (
            column[row] for column in (self._candidates.sendable, self._candidates.first, self._candidates.use)
        )
        wrong = (actions.out_at < sendable) | (actions.reclaim_at < first) | (actions.use_at != use) | (actions.stays < 0)
        if wrong.any():
            i = int(wrong.argmax())
            action, whole = plan.actions[i], int(self._candidates.nbytes[row[i]])
            raise ValueError(
                f"plan, tensor {action.tensor}: expected at most {whole} bytes to move, out_at of {sendable[i]} or later, "
                f"reclaim_at of {first[i]} or later and use_at {use[i]}, got {action.nbytes}, {action.out_at}, "
                f"{action.reclaim_at} and {action.use_at}; {again}"
            )
        return actions


class _Compute:
    """Where compute is: later, by what it waited for and copied, than it would be alone."""

    def __init__(self, cost: LinkCost, actions: Moves, tensors: list[int]) -> None:
        self._tensor, self._nbytes = tensors, actions.nbytes.tolist()
        self._out_with_reclaim = (actions.out_at == actions.reclaim_at).tolist()
        self._back_with_use = (actions.in_at == actions.use_at).tolist()
        self._head_copy_us: list[float] = (actions.stays / (cost.hbm_gbps * 1e3)).tolist()
        self.out, self.back = CopyEngine.pair(cost)
        self._out_done = [0.0] * len(self._tensor)
        self._back_done = [0.0] * len(self._tensor)
        self._late_us = 0.0
        self.head_copy_us = 0.0
        self.out_stalls_us: dict[int, float] = {}
        self.in_stalls_us: dict[int, float] = {}

    def do(self, alone_us: float, kind: int, i: int) -> float:
        """Action `i` asks for `kind` at a hook that compute alone would reach at `alone_us`. Returns for how long it stays."""
        now_us = alone_us + self._late_us
        delay_us = 0.0
        if kind == OUT:
            self._send(i, now_us)
        elif kind == BACK:
            self._bring(i, now_us)
            delay_us = self._copy_head(i)
        elif kind == USE:
            if self._back_with_use[i]:
                self._bring(i, now_us)
                delay_us = self._copy_head(i)
            delay_us += _wait(self.in_stalls_us, self._tensor[i], self._back_done[i] - now_us - delay_us)
        else:
            if self._out_with_reclaim[i]:
                self._send(i, now_us)
            delay_us = self._copy_head(i)
            delay_us += _wait(self.out_stalls_us, self._tensor[i], self._out_done[i] - now_us - delay_us)
        self._late_us += delay_us
        return delay_us

    def _send(self, i: int, now_us: float) -> None:
        self._out_done[i] = self.out.queue(self._tensor[i], self._nbytes[i], now_us)

    def _bring(self, i: int, now_us: float) -> None:
        self._back_done[i] = self.back.queue(self._tensor[i], self._nbytes[i], max(now_us, self._out_done[i]))

    def _copy_head(self, i: int) -> float:
        self.head_copy_us += self._head_copy_us[i]
        return self._head_copy_us[i]


def _wait(stalls_us: dict[int, float], tensor: int, wait_us: float) -> float:
    """Compute waits that long on behalf of `tensor`, if at all. Returns how long."""
    if wait_us <= 0:
        return 0.0
    stalls_us[tensor] = wait_us
    return wait_us
