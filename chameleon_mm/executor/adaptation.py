"""From steps that were seen to steps that are planned: when to record, when to plan, which plan to follow, which is the better.

    PROFILE   nothing is known of the step that is expected: it is recorded, and swapped by the default rule
       | the recorded step ends
    PLAN      its trace is turned into a plan, which is kept by the step's fingerprint
       | at once
    STEADY    the step that is expected has a plan, and follows it
       ^------ a step that nobody knows: PROFILE; a known one comes back: STEADY at once

Every step is fingerprinted, in every phase. What was expected and is not what comes costs time, never a number.
"""

from __future__ import annotations

import enum
import logging
from collections import Counter, deque
from collections.abc import Callable
from time import perf_counter

from chameleon_mm.device import Stream
from chameleon_mm.errors import InfeasibleBudget
from chameleon_mm.executor.course import Course, Variant
from chameleon_mm.executor.guide import Guide, Known
from chameleon_mm.executor.meter import EVENT_GAP_US, Meter
from chameleon_mm.executor.step_timing import StepTiming
from chameleon_mm.policy import LinkCost, SwapPlan, candidate_plans
from chameleon_mm.profiler.known import KnownSequences
from chameleon_mm.profiler.recorder import Recorder
from chameleon_mm.trace import TensorKind, Trace
from chameleon_mm.trace.recurring import kept_bytes, there_before, with_extra, with_times

_log = logging.getLogger(__name__)

KNOWN_STEPS = 32
"""Steps that are kept, with trace and plans: some MiB each for ten thousand hooks."""

CANDIDATES = 2
"""Plans that are tried for a step, where their simulated times are close."""

RECORDINGS = 3
"""Of one step, where none could be made into a plan: after them the default rule has it, without a recorder's cost."""

DRAFTS = 1000
"""That the planner tries for a step with few candidates: a fifth of a second between two steps, once."""

SPARE_PART = 256
"""Of the budget a plan leaves this part, where it can: a step of the same fingerprint may differ in what the hooks do not see,
such as a scalar that the loop keeps."""

TIMES_OFF = 0.05
"""Share by which operators may take longer or shorter than the trace has it before they are planned for again. A recorded step
is slower than others: kernels are loaded in it, and the host has more to do for each operator."""

CORRECTIONS = 2
"""Of a step's times, at the most."""

LEAD_SHARE = 1.0
"""Of a stall that was not foreseen: how much earlier the copy back is to begin next time."""


class PlanPhase(enum.Enum):
    """What is known of the steps that come."""

    PROFILE = "profile"
    """Begins with the first step, and with each that is expected to be one without a plan; ends when it has one."""
    PLAN = "plan"
    """Begins when a recorded step ends; ends when its plan is made, before the next step begins."""
    STEADY = "steady"
    """Begins with a step that is expected to be one with a plan; ends before one without."""


_NEXT = {
    PlanPhase.PROFILE: (PlanPhase.PROFILE, PlanPhase.PLAN, PlanPhase.STEADY),
    PlanPhase.PLAN: (PlanPhase.PROFILE, PlanPhase.STEADY),
    PlanPhase.STEADY: (PlanPhase.STEADY, PlanPhase.PROFILE, PlanPhase.PLAN),
}


class Adaptation:
    """Not thread-safe: the executor holds its lock.

    `make_recorder` makes one for the step that begins; `link_cost` says what is known of the link; `host_budget` how much
    pinned memory there may be.
    """

    def __init__(
        self,
        guide: Guide,
        meter: Meter,
        *,
        hbm_budget_bytes: int,
        host_budget: Callable[[], int],
        make_recorder: Callable[[], Recorder],
        link_cost: Callable[[], LinkCost],
    ) -> None:
        self.phase = PlanPhase.PROFILE
        self.steps_by_phase: Counter[str] = Counter()
        self.detailed_steps = 0
        """Steps recorded to their end."""
        self.plans = 0
        self.plan_cache_hits = 0
        """Steps that were, hook for hook, one that had a plan when they began."""
        self.planning_us = 0.0
        """Host time that making plans took, in all."""
        self.latest: Course | None = None
        """The step that was planned last."""
        self._guide = guide
        self._meter = meter
        self._hbm_budget_bytes = hbm_budget_bytes
        self._host_budget = host_budget
        self._make_recorder = make_recorder
        self._link_cost = link_cost
        self._known: Known = KnownSequences(KNOWN_STEPS)
        self._flawed: deque[int] = deque(maxlen=KNOWN_STEPS * RECORDINGS)
        """Fingerprints of the latest steps whose recording was of no use."""
        self._measuring: deque[tuple[Course, Variant, StepTiming]] = deque()
        """Steps whose last event was not complete when they ended."""

    @property
    def latest_plan(self) -> SwapPlan | None:
        """That of the step that was planned last; None: there is none within the budget."""
        current = None if self.latest is None else self.latest.current
        return None if current is None else current.script.plan

    def limit_to(self, hbm_budget_bytes: int) -> None:
        """Another budget from the next step on: plans for the old one are forgotten, so that it is recorded. Between steps."""
        self._hbm_budget_bytes = hbm_budget_bytes
        self._known = KnownSequences(KNOWN_STEPS)
        self._measuring.clear()
        self.latest = None

    def begin_step(self, compute: Stream) -> Recorder | None:
        """What records the step that begins; None: nothing needs to. Asks for the step to be timed where a plan is on trial."""
        self._learn_times()
        expected = self._known.begin_step()
        course = None if expected is None else expected.plan
        self._to(PlanPhase.PROFILE if course is None else PlanPhase.STEADY)
        self.steps_by_phase[self.phase.value] += 1
        hopeless = expected is not None and self._flawed.count(expected.fingerprint) >= RECORDINGS
        recorder = self._make_recorder() if course is None and not hopeless else None
        self._meter.timed = self._meter.timed or (course is not None and not course.settled)
        self._meter.timing = StepTiming(compute) if self._meter.timed and course is not None else None
        self._guide.begin_step(self._known, recorder, self._needs_more)
        return recorder

    def end_step(self, recorder: Recorder | None, compute: Stream, *, completed: bool) -> None:
        """The step is over. What it taught is kept if it `completed`."""
        timing, self._meter.timing = self._meter.timing, None
        followed = self._guide.followed
        record, whole = self._guide.end_step()
        if not completed:
            self._known.abandon_step()
            return
        entry = self._known.end_step(record)
        if entry is not None and entry.plan is not None:
            self.plan_cache_hits += bool(entry.plan.variants)
            if timing is not None and followed is not None and followed in entry.plan.variants:
                timing.end(compute)
                self._measuring.append((entry.plan, followed, timing))
        elif recorder is not None and whole and recorder.flaw is None:
            self.detailed_steps += 1
            self._to(PlanPhase.PLAN)
            # Optimizer state made in this step is there from the beginning in all that follow.
            course = Course(record, there_before(recorder.finish(record.fingerprint), {TensorKind.OPTIMIZER}))
            course.offer(self._plans(course.trace, at_most=CANDIDATES))
            self._known.put(record, course)
            self.latest = course
        else:
            if recorder is not None and recorder.flaw is not None:
                self._flawed.append(record.fingerprint)
                _log.info("no plan from this step of %d hooks: %s", record.num_hooks, recorder.flaw)
            if entry is None:
                self._known.put(record, None)

    def _plans(self, trace: Trace, *, at_most: int, lead_us: dict[int, float] | None = None) -> list[SwapPlan]:
        began = perf_counter()
        plans: list[SwapPlan] = []
        for spare_bytes in (self._hbm_budget_bytes // SPARE_PART, 0):
            try:
                plans = candidate_plans(
                    trace,
                    self._hbm_budget_bytes - spare_bytes,
                    self._host_budget(),
                    self._link_cost(),
                    lead_us=lead_us or 0.0,
                    at_most=at_most,
                    drafts=DRAFTS,
                )
                break
            except InfeasibleBudget as refusal:  # the default rule may still do, with stalls that no plan would take
                if spare_bytes == 0:
                    _log.warning("no plan for a step of %d hooks, the default rule goes on: %s", len(trace.hooks), str(refusal))
        self.planning_us += (perf_counter() - began) * 1e6
        self.plans += len(plans)
        return plans

    def _needs_more(self, course: Course, extra_bytes: int) -> None:
        """At the first hook of a step there was more on the device than its trace has."""
        plan = None if course.current is None else course.current.script.plan
        if plan is not None and plan.peak_bytes + extra_bytes <= self._hbm_budget_bytes:
            return  # a scalar that the loop keeps of every step: what the plan leaves free is for it
        trace = course.trace
        gradients = kept_bytes(trace, {TensorKind.GRADIENT})
        if 0 < gradients <= extra_bytes:  # they are kept and filled with zeros
            trace, extra_bytes = there_before(trace, {TensorKind.GRADIENT}), extra_bytes - gradients
        if extra_bytes:
            trace = with_extra(trace, extra_bytes)
        course.replace(trace, self._plans(trace, at_most=CANDIDATES))

    def _learn_times(self) -> None:
        """Of the steps that are complete by now: how long they took, and what they waited for."""
        while self._measuring:
            course, variant, timing = self._measuring[0]
            time = timing.result()
            if time is None:
                return
            self._measuring.popleft()
            if variant not in course.variants:
                continue
            late_us = {tensor: us if us > EVENT_GAP_US else 0.0 for tensor, us in time.stalls_us.items()}
            course.measured(variant, time._replace(stalls_us=late_us))
            if abs(course.slowdown - 1) > TIMES_OFF and course.times_corrected < CORRECTIONS:
                course.times_corrected += 1
                trace = with_times(course.trace, course.slowdown)
                course.replace(trace, self._plans(trace, at_most=CANDIDATES))
            elif course.wants_better():
                lead_us = {tensor: LEAD_SHARE * us for tensor, us in late_us.items() if us > 0}
                course.offer(self._plans(course.trace, at_most=1, lead_us=lead_us))

    def _to(self, phase: PlanPhase) -> None:
        if phase not in _NEXT[self.phase]:
            raise RuntimeError(f"a step in phase {self.phase.value} cannot be followed by one in {phase.value}")
        self.phase = phase
