"""What is known of one step that has a trace: its plans, how long steps under each took, which one is followed.

course = Course(record, trace)
course.offer(plans)                  # close in simulated time: each is tried, the one that measures best is kept
course.current                       # the plan that a step follows now; None: there is none within the budget
course.measured(variant, time)       # after a step that went by it, hook for hook
course.slowdown                      # how much longer operators take than the trace has it: 1 where that is right, or not known
course.wants_better()                # the kept one stalls more than it was to: a plan with more lead may do better
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from chameleon_mm.executor.script import Script
from chameleon_mm.executor.step_timing import StepTime
from chameleon_mm.policy import SwapPlan, memory_curve
from chameleon_mm.profiler.matching import Matcher
from chameleon_mm.profiler.step_record import StepRecord
from chameleon_mm.trace import Trace

SAMPLES = 2
"""Steps under a plan before it is judged."""

MOST_PLANS = 6
"""For one step, in all: after that the best of them stays."""

WORTH_A_PLAN = 0.01
"""Share of the step that it must have stalled beyond what was foreseen."""


class Variant:
    """One plan, and the steps that went by it."""

    __slots__ = ("busy_us", "script", "stalls_us", "times_us")

    def __init__(self, script: Script) -> None:
        self.script = script
        self.times_us: list[float] = []
        self.busy_us: list[float] = []
        """Of these: what compute was not waiting for copies."""
        self.stalls_us: Mapping[int, float] = {}
        """Of the last one, by the trace's number of the storage: compute's wait for its copy back."""

    @property
    def step_us(self) -> float:
        """Measured; before that, foreseen."""
        return median(self.times_us) if self.times_us else self.script.plan.step_us

    @property
    def unforeseen_us(self) -> float:
        """Stall beyond what the plan has, in the last step."""
        return sum(self.stalls_us.values()) - self.script.plan.stall_us


class Course:
    """Not thread-safe."""

    def __init__(self, record: StepRecord, trace: Trace) -> None:
        self.record = record
        self.trace = trace
        self.matcher = Matcher(record)
        self.first_hook_bytes = _first_hook_bytes(trace)
        """Allocated at the step's first hook, as far as is known."""
        self.variants: list[Variant] = []
        self.times_corrected = 0
        """How often the trace's times were."""

    @property
    def current(self) -> Variant | None:
        """The plan to follow: the first that was not tried enough, else the fastest. None: there is none within the budget, and
        the default rule does what it can."""
        on_trial = [variant for variant in self.variants if len(variant.times_us) < SAMPLES]
        if on_trial and len(self.variants) > 1:
            return on_trial[0]
        return min(self.variants, key=lambda variant: variant.step_us, default=None)

    @property
    def settled(self) -> bool:
        """Whether no plan is on trial any more."""
        return len(self.variants) < 2 or all(len(variant.times_us) >= SAMPLES for variant in self.variants)

    def offer(self, plans: Sequence[SwapPlan]) -> None:
        """Other plans, best first. Those that there were are kept, unless the trace is another now (`replace`)."""
        self.variants += [Variant(Script.of(self.trace, plan)) for plan in plans]

    def replace(self, trace: Trace, plans: Sequence[SwapPlan]) -> None:
        """The step needs more memory than was known, or other times: what was planned and measured before is of no use."""
        self.trace = trace
        self.first_hook_bytes = _first_hook_bytes(trace)
        self.variants = []
        self.offer(plans)

    def measured(self, variant: Variant, time: StepTime) -> None:
        """A step went by `variant`, one of these, hook for hook, and took that long on the device."""
        for times, us in ((variant.times_us, time.step_us), (variant.busy_us, time.busy_us)):
            times.append(us)
            del times[:-SAMPLES]
        variant.stalls_us = time.stalls_us

    @property
    def slowdown(self) -> float:
        """Time that operators took, by the time that they were to take. 1 until a plan is kept and was measured enough."""
        current = self.current
        if current is None or not self.settled or len(current.times_us) < SAMPLES:
            return 1.0
        plan, foreseen_us = current.script.plan, self.trace.duration_us
        copies_us = plan.step_us - plan.stall_us - foreseen_us  # of what stays of storages that move in part: no operator's
        took_us = median(current.busy_us) - copies_us
        return took_us / foreseen_us if min(took_us, foreseen_us) > 0 else 1.0

    def wants_better(self) -> bool:
        """Whether the plan that was kept stalls more than it was to, and another one may be tried."""
        current = self.current
        if current is None or not self.settled or len(current.times_us) < SAMPLES or len(self.variants) >= MOST_PLANS:
            return False
        return current.unforeseen_us > WORTH_A_PLAN * current.step_us


def _first_hook_bytes(trace: Trace) -> int:
    return int(memory_curve(trace)[trace.hook_tick[0]]) if len(trace.hook_tick) else trace.start_bytes
