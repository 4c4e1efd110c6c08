"""Step under a plan, carried out one action after the other, without arrays: the reference for the planner's arithmetic.

timed_one_by_one(trace, plan, cost)         when compute reaches every tick, waits, and both copy engines
most_on_host(trace, plan)                   pinned memory at most, one block at a time
assert_as_carried_out(trace, plan, cost)    what is simulated is these, and device memory that of `_hybrid_traces`
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any, NamedTuple

import numpy as np
import pytest

from chameleon_mm.errors import InfeasibleBudget
from chameleon_mm.plan.planner import generate_plan
from chameleon_mm.plan.simulate import Timeline, simulate
from chameleon_mm.plan.swap_plan import Action, SwapPlan
from chameleon_mm.plan.timing import CopyEngine, LinkCost
from chameleon_mm.plan.trace import Trace
from chameleon_mm.plan.unswapped_memory import smallest_budget
from chameleon_mm.units import round_up
from tests._hybrid_traces import carried_out_recomputing
from tests._trace_records import hooks_of


class Timed(NamedTuple):
    """Timing of a step."""

    step_us: float
    tick_us: list[float]
    head_copy_us: float
    out_stalls_us: dict[int, float]
    """Keyed by tensor; 0 where compute does not wait."""
    in_stalls_us: dict[int, float]
    out: CopyEngine
    back: CopyEngine


def timed_one_by_one(trace: Trace, plan: SwapPlan, cost: LinkCost) -> Timed:
    """The order of a hook is written out here as plan.py states it, and time is compute's own, not compute's delay."""
    at = {name: _by_hook(plan, name) for name in ("out_at", "reclaim_at", "in_at", "use_at")}
    stays_us = {a.tensor: (int(trace.tensor_bytes[a.tensor]) - a.nbytes) / (cost.hbm_gbps * 1e3) for a in plan.actions}
    out, back = CopyEngine.pair(cost)
    out_done, back_done = dict[int, float](), dict[int, float]()
    out_stalls_us, in_stalls_us = dict[int, float](), dict[int, float]()
    took_us = dict(zip(trace.op_tick.tolist(), trace.op_us.tolist(), strict=True))
    hook_of = {tick: k for k, tick in enumerate(trace.hook_tick.tolist())}
    own = zip(trace.op_out_bytes.tolist(), trace.op_back_bytes.tolist(), strict=True)
    program = {tick: both for tick, both in zip(trace.op_tick.tolist(), own, strict=True) if any(both)}
    idle, clock = CopyEngine.pair(cost), trace.clock_us().tolist()
    alone_us = {tick: _crossed(idle, both, clock[tick]) for tick, both in program.items()}
    now = head_copy_us = 0.0
    tick_us = []

    def bring(action: Action) -> None:
        nonlocal now, head_copy_us
        back_done[action.tensor] = back.queue(action.tensor, action.nbytes, max(now, out_done[action.tensor]))
        now += stays_us[action.tensor]
        head_copy_us += stays_us[action.tensor]

    for tick in range(trace.num_ticks):
        tick_us.append(now)
        if tick in program:
            now += max(0.0, _crossed((out, back), program[tick], now) - alone_us[tick])
        now += took_us.get(tick, 0.0)
        hook = hook_of.get(tick, -1)
        for action in sorted(at["reclaim_at"][hook], key=lambda action: stays_us[action.tensor] > 0):
            if action.again:
                continue
            if action.out_at == hook:
                out_done[action.tensor] = out.queue(action.tensor, action.nbytes, now)
            now += stays_us[action.tensor]
            head_copy_us += stays_us[action.tensor]
            out_stalls_us[action.tensor] = max(0.0, out_done[action.tensor] - now)
            now += out_stalls_us[action.tensor]
        for action in at["out_at"][hook]:
            if action.reclaim_at > hook and not action.again:
                out_done[action.tensor] = out.queue(action.tensor, action.nbytes, now)
        for action in at["use_at"][hook]:
            if action.in_at == hook:
                bring(action)
            waits_us = max(0.0, back_done[action.tensor] - now)
            in_stalls_us[action.tensor] = in_stalls_us.get(action.tensor, 0.0) + waits_us
            now += waits_us
        for action in at["in_at"][hook]:
            if action.use_at > hook:
                bring(action)
    return Timed(now, tick_us, head_copy_us, out_stalls_us, in_stalls_us, out, back)


def _crossed(engines: tuple[CopyEngine, CopyEngine], nbytes: tuple[int, int], now_us: float) -> float:
    """Time until copies of the program's own, to and from the host, have crossed."""
    return max(engine.queue(-1, n, now_us) - now_us for engine, n in zip(engines, nbytes, strict=True) if n)


def _by_hook(plan: SwapPlan, name: str) -> dict[int, list[Action]]:
    """Actions by one of their hooks, in the plan's order."""
    actions: dict[int, list[Action]] = defaultdict(list)
    for action in plan.actions:
        actions[getattr(action, name)].append(action)
    return actions


def most_on_host(trace: Trace, plan: SwapPlan) -> int:
    """Maximum bytes on the host, with one entry for every block, taken and given back after the last use."""
    last_use = {hook.tensor: k for k, hook in enumerate(hooks_of(trace)) if hook.use}
    host: dict[int, int] = {}
    most = 0
    for k in range(len(hooks_of(trace))):
        host.update((a.tensor, round_up(a.nbytes, 4096)) for a in plan.actions if a.out_at == k)
        most = max(most, sum(host.values()))
        host = {tensor: nbytes for tensor, nbytes in host.items() if last_use[tensor] > k}
    return most


def assert_as_carried_out(trace: Trace, plan: SwapPlan, cost: LinkCost) -> Timeline:
    """Simulate `plan`: memory and time are those of a step carried out one action after the other. Return the timeline."""
    timeline, timed = simulate(trace, plan, cost), timed_one_by_one(trace, plan, cost)
    allocated = carried_out_recomputing(trace, plan)
    assert timeline.allocated_bytes.tolist() == allocated
    assert timeline.peak_bytes == max(allocated, default=trace.start_bytes)
    assert timeline.host_bytes == most_on_host(trace, plan)
    assert timeline.peak_bytes >= smallest_budget(trace)
    assert timeline.step_us == near(timed.step_us)
    assert timeline.tick_us.tolist() == near(timed.tick_us)
    assert timeline.head_copy_us == near(timed.head_copy_us)
    for at_use, expected in ((False, timed.out_stalls_us), (True, timed.in_stalls_us)):
        stalls = Counter[int]()
        for stall in timeline.stalls:
            stalls.update({stall.tensor: stall.us} if stall.at_use is at_use else {})
        assert [stalls[tensor] for tensor in expected] == near(list(expected.values()))
        assert set(stalls) <= set(expected)
    for spans, engine in ((timeline.out_spans, timed.out), (timeline.in_spans, timed.back)):
        assert [(span.tensor, span.nbytes) for span in spans] == [(span.tensor, span.nbytes) for span in engine.spans]
        ends = [[(span.start_us, span.end_us) for span in of] for of in (spans, engine.spans)]
        assert np.array(ends[0]) == near(np.array(ends[1]))
    return timeline


def near(expected: Any) -> Any:
    return pytest.approx(expected, rel=1e-9, abs=1e-9)


def plan_within_host(trace: Trace, budget: int, of_host: float, cost: LinkCost) -> SwapPlan | None:
    """The plan within that share of the host memory that a plan without a host budget takes. None: there is none, and the error
    names two ways out, both of which will do."""
    host = int(generate_plan(trace, budget, None, cost, drafts=60).host_bytes * of_host)
    try:
        plan = generate_plan(trace, budget, host, cost, drafts=60)
    except InfeasibleBudget as refusal:
        needed, larger = refusal.smallest_host_bytes, refusal.smallest_bytes
        assert needed is not None
        assert larger is not None
        assert host < needed
        assert generate_plan(trace, budget, needed, cost, drafts=60).host_bytes <= needed
        assert generate_plan(trace, larger, host, cost, drafts=60).host_bytes <= host
        return None
    assert plan.host_bytes <= host
    return plan
