"""Bytes by which what a step allocates differs from what the cached step did that it follows, and what plans make of them.

if memory.differs(more_bytes, since, hook, planned, program, budget): ...   # the plan's forecast is not enough from here on
"""

from __future__ import annotations

from chameleon_mm.adaptive.planned_step import PlannedStep
from chameleon_mm.executor.budget import Budget
from chameleon_mm.policy.step_program import StepProgram


class StepMemory:
    """Bytes that a step allocates beyond its trace's, and those of them that it does not."""

    def __init__(self) -> None:
        self.extra_bytes = 0
        """Bytes allocated at the first hook beyond the planned step's."""
        self.spikes: dict[int, int] = {}
        """Bytes allocated beyond the trace's, by tick of the trace, as far as plans know or should know of them."""
        self.unused: dict[tuple[int, int], int] = {}
        """Bytes not allocated, as in `FollowedStep`."""
        self.exceeded_plan = False

    def differs(
        self, more_bytes: int, since: int, hook: int, planned: PlannedStep, program: StepProgram | None, budget: Budget
    ) -> bool:
        """Note that so much more (less, if negative) was allocated between two hooks than `planned` has there. All that is more
        is taken to come at the interval's peak. Returns whether it exceeds what the plan, `program`, has room for."""
        if more_bytes < 0:
            self.unused[since, hook] = -more_bytes
            return False
        planned.widen_margin(more_bytes)
        ticks = planned.ticks_between(since, hook)
        planned_for = planned.extra.spikes
        tick = next((tick for tick in planned_for if ticks.start <= tick < ticks.stop), None)
        spike_bytes = 0 if tick is None else planned_for[tick]
        if tick is not None:
            self.spikes[tick] = min(more_bytes, spike_bytes)
        if program is None:
            return False
        allocated = program.allocated_bytes[ticks]
        room_bytes = budget.hbm_budget_bytes - int(allocated.max())
        beyond_bytes = more_bytes - spike_bytes
        if beyond_bytes > room_bytes:
            # No more than the device's own peak allows, which goes back to before this step.
            beyond_bytes = min(beyond_bytes, budget.peak_allocated_bytes() - int(allocated.max()))
        if beyond_bytes <= room_bytes:
            return False
        # A step that took more than its trace has may do so again.
        self.spikes[ticks.start + int(allocated.argmax()) if tick is None else tick] = spike_bytes + beyond_bytes
        self.exceeded_plan = True
        return True
