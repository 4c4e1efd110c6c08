"""Compares what a step allocates with what the cached step did that it follows: between two hooks, and at the first one.

memory.growth_bytes += nbytes                          # as memory was checked: so much was allocated since then
if memory.compare(hook, planned, schedule, budget): ... # the plan's forecast is not enough for the rest of the step
"""

from __future__ import annotations

from chameleon_mm.adaptive.hook_schedule import HookSchedule
from chameleon_mm.adaptive.planned_step import PlannedStep
from chameleon_mm.executor.budget import Budget


class StepMemory:
    """What a step takes more or less than its trace has."""

    def __init__(self) -> None:
        self.growth_bytes = 0
        """Bytes allocated since the last hook that was compared, freed ones included: whoever checks memory adds to it."""
        self._since = -1
        """Hook of the last check of memory that every step like this one makes."""
        self.follow_another()

    def follow_another(self) -> None:
        """Compare with another cached step from now on."""
        self.extra_bytes = 0
        """Bytes allocated at the first hook beyond the planned step's."""
        self.spikes: dict[int, int] = {}
        """Bytes allocated beyond the trace's, by tick of the trace, as far as plans know or should know of them."""
        self.unused: dict[tuple[int, int], int] = {}
        """Bytes not allocated, as in `FollowedStep`."""
        self.most_more_bytes = 0
        """The most bytes allocated between two hooks beyond the trace's."""
        self.exceeded_plan = False
        """Whether it took so much more that its plan is no longer trusted."""

    def compare(self, hook: int, planned: PlannedStep | None, schedule: HookSchedule | None, budget: Budget) -> bool:
        """Compare growth since the last hook that was compared with the trace of `planned`; None: it follows none. All that is
        more is taken to come at the interval's peak. Returns whether it exceeds what the plan, `schedule`, has room for."""
        growth_bytes, self.growth_bytes = self.growth_bytes, 0
        since, self._since = self._since, hook
        if planned is None or hook <= since:
            return False
        more_bytes = growth_bytes - planned.allocated_between(since, hook)
        if more_bytes <= 0:
            if more_bytes < 0:
                self.unused[since, hook] = -more_bytes
            return False
        self.most_more_bytes = max(self.most_more_bytes, more_bytes)
        ticks = planned.ticks_between(since, hook)
        planned_for = planned.extra.spikes
        tick = next((tick for tick in planned_for if ticks.start <= tick < ticks.stop), None)
        spike_bytes = 0 if tick is None else planned_for[tick]
        if tick is not None:
            self.spikes[tick] = min(more_bytes, spike_bytes)
        if schedule is None:
            return False
        allocated = schedule.allocated_bytes[ticks]
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
