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
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

from chameleon_mm.device import Stream
from chameleon_mm.errors import InfeasibleBudget
from chameleon_mm.executor.extra_memory import ExtraMemory
from chameleon_mm.executor.metrics import Metrics, StepKind
from chameleon_mm.executor.planned_step import PlannedStep, PlanTrial
from chameleon_mm.executor.step_timing import StepTiming
from chameleon_mm.policy import LinkCost, SwapPlan, candidate_plans
from chameleon_mm.profiler.recorder import Recorder
from chameleon_mm.profiler.step_cache import CachedStep, StepCache
from chameleon_mm.profiler.step_record import StepRecord
from chameleon_mm.trace import TensorKind
from chameleon_mm.trace.recurring import there_before

_log = logging.getLogger(__name__)

CACHED_STEPS = 32
"""Steps that are kept, with trace and plans: some MiB each for ten thousand hooks."""

TRIAL_PLANS = 2
"""Plans that are tried for a step, where their simulated times are close."""

RECORDINGS = 3
"""Of one step, where none could be made into a plan: after them the default rule has it, without a recorder's cost."""

DRAFTS = 1000
"""That the planner tries for a step with few candidates: a fifth of a second between two steps, once."""

SPARE_PART = 256
"""Of the budget a plan leaves this part, where it can: a step of the same fingerprint may differ in what the hooks do not see,
such as a scalar that the loop keeps."""

SLACK_BLOCKS = 4
"""At a step's peak so many blocks may be larger than what was asked for, each by the device's `block_slack_bytes`. A plan
leaves room for them as well."""

SLACK_PART = 32
"""A plan leaves no more than this part of the budget for the slack of blocks."""

TIMES_OFF = 0.05
"""Share by which operators may take longer or shorter than the trace has it before they are planned for again. A recorded step
is slower than others: kernels are loaded in it, and the host has more to do for each operator."""

CORRECTIONS = 2
"""Of a step's times, at the most."""

WASTED_SHARE = 1 / 64
"""Of all hooks: so many may be seen by recorders of steps that turn out to have a plan, where others have none."""


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


StepEntry = CachedStep[PlannedStep | None]
"""A step that came before. Its plan is None where it has no trace."""
Steps = StepCache[PlannedStep | None]


class FollowedStep(NamedTuple):
    """What a step was that ended."""

    record: StepRecord
    followed: PlanTrial | None
    """The plan that it followed last."""
    whole: bool
    """Whether a recorder saw all of it."""
    recorded_hooks: int
    """Hooks that a recorder saw, from the first one on."""
    extra: ExtraMemory
    """Memory that it took beyond what the trace of the step that it was has, as far as it was that one."""
    unused: dict[tuple[int, int], int]
    """Bytes that the cached step allocated between two hooks and this one did not, by the hooks."""
    exceeded_plan: bool
    """Whether it took so much more that its plan was no longer followed blindly."""
    had_plan: bool
    """Whether some hook of it was one of a plan's; `followed_plan`: all were, of one plan, to the end."""
    followed_plan: bool


class Adaptation:
    """Not thread-safe: the executor holds its lock.

    `slack_bytes` is the device's `block_slack_bytes`; `make_recorder` makes one for the step that begins; `link_cost` says what
    is known of the link; `host_budget` how much pinned memory there may be.
    """

    def __init__(
        self,
        metrics: Metrics,
        *,
        hbm_budget_bytes: int,
        slack_bytes: int,
        host_budget: Callable[[], int],
        make_recorder: Callable[[], Recorder],
        link_cost: Callable[[], LinkCost],
    ) -> None:
        self.phase = PlanPhase.PROFILE
        self.detailed_steps = 0
        """Steps recorded to their end."""
        self.plans = 0
        self.plan_cache_hits = 0
        """Steps that were, hook for hook, one that had a plan when they began."""
        self.planning_us = 0.0
        """Host time that making plans took, in all."""
        self.latest: PlannedStep | None = None
        """The step that was planned last."""
        self._metrics = metrics
        self._hbm_budget_bytes = hbm_budget_bytes
        self._slack_bytes = slack_bytes
        self._host_budget = host_budget
        self._make_recorder = make_recorder
        self._link_cost = link_cost
        self.steps: Steps = StepCache(CACHED_STEPS)
        self._flawed: deque[int] = deque(maxlen=CACHED_STEPS * RECORDINGS)
        """Fingerprints of the latest steps whose recording was of no use."""
        self._hooks = self._wasted_hooks = 0
        """Of all steps so far; of these, seen by a recorder that nothing came of."""
        self._measuring: deque[tuple[PlannedStep, PlanTrial, StepTiming]] = deque()
        """Steps whose last event was not complete when they ended."""

    @property
    def latest_plan(self) -> SwapPlan | None:
        """That of the step that was planned last; None: there is none within the budget."""
        current = None if self.latest is None else self.latest.current
        return None if current is None else current.schedule.plan

    @property
    def _spare_bytes(self) -> int:
        """Bytes of the budget that a plan leaves, where it can."""
        budget = self._hbm_budget_bytes
        return max(budget // SPARE_PART, min(SLACK_BLOCKS * self._slack_bytes, budget // SLACK_PART))

    def change_budget(self, hbm_budget_bytes: int) -> None:
        """Another budget from the next step on: plans for the old one are forgotten, so that it is recorded. Between steps."""
        self._hbm_budget_bytes = hbm_budget_bytes
        self.steps = StepCache(CACHED_STEPS)
        self._measuring.clear()
        self.latest = None

    def begin_step(self, compute: Stream) -> Recorder | None:
        """What records the step that begins; None: nothing needs to. Asks for the step to be timed where a plan is on trial."""
        self._learn_times()
        expected = self.steps.begin_step()
        planned = None if expected is None else expected.plan
        has_plan = planned is not None and bool(planned.trials)
        self._to(PlanPhase.STEADY if has_plan else PlanPhase.PROFILE)
        recorder = self._make_recorder() if self._is_worth_recording(expected) else None
        self._metrics.timed = self._metrics.timed or (planned is not None and not planned.is_decided)
        self._metrics.timing = StepTiming(compute) if self._metrics.timed and has_plan and recorder is None else None
        return recorder

    def _is_worth_recording(self, expected: StepEntry | None) -> bool:
        """Whether the step that begins may be one that wants a trace: by what is expected, or, rarely enough, by what else it
        may be. A sequence that nobody ever expects, such as an evaluation now and then, is only recorded so."""
        if expected is None or self.wants_trace(expected):
            return True
        wasted = self._wasted_hooks > WASTED_SHARE * self._hooks
        return not wasted and any(map(self.wants_trace, self.steps.entries()))

    def wants_trace(self, entry: StepEntry) -> bool:
        return entry.plan is None and self._flawed.count(entry.fingerprint) < RECORDINGS

    def end_step(self, step: FollowedStep, recorder: Recorder | None, compute: Stream, *, completed: bool) -> StepKind:
        """`step` is over. What it taught is kept if it `completed`. Returns what the step was."""
        timing, self._metrics.timing = self._metrics.timing, None
        record = step.record
        if not completed:
            self.steps.abandon_step()
            return StepKind.FAILED
        entry = self.steps.end_step(record)
        wasted = step.recorded_hooks
        kind = StepKind.PARTLY_PLANNED if step.had_plan else StepKind.BY_RULE
        if entry is not None and entry.plan is not None:
            self.plan_cache_hits += bool(entry.plan.trials)
            if step.followed_plan and entry.plan.trials:
                kind = StepKind.PLANNED
            if (
                timing is not None
                and not step.exceeded_plan
                and step.followed is not None
                and step.followed in entry.plan.trials
            ):
                timing.end(compute)
                self._measuring.append((entry.plan, step.followed, timing))
            self._learn_extra(entry.plan, step)
        elif recorder is not None and step.whole and recorder.flaw is None:
            wasted, kind = 0, StepKind.RECORDED
            self.detailed_steps += 1
            self._to(PlanPhase.PLAN)
            # Optimizer state made in this step is there from the beginning in all that follow.
            planned = PlannedStep(record, there_before(recorder.finish(record.fingerprint), {TensorKind.OPTIMIZER}))
            self._add_plans(planned)
            self.steps.put(record, planned)
            self.latest = planned
        else:
            if recorder is not None and recorder.flaw is not None:
                self._flawed.append(record.fingerprint)
                _log.info("chameleon_mm: no plan from this step of %d hooks: %s", record.num_hooks, recorder.flaw)
            if entry is None:
                self.steps.put(record, None)
        self._hooks += record.num_hooks
        self._wasted_hooks += wasted
        return kind

    # --- plans

    def _add_plans(self, planned: PlannedStep, *, at_most: int = TRIAL_PLANS) -> None:
        """Give it plans for what is known of it now."""
        began = perf_counter()
        link = self._link_cost()
        plans: list[SwapPlan] = []
        for spare_bytes in dict.fromkeys((self._spare_bytes, self._hbm_budget_bytes // SPARE_PART, 0)):
            try:
                plans = candidate_plans(
                    planned.trace,
                    self._hbm_budget_bytes - spare_bytes,
                    self._host_budget(),
                    link,
                    lead_us=planned.lead_us or 0.0,
                    lag_us=planned.lag_us or 0.0,
                    at_most=at_most,
                    drafts=DRAFTS,
                )
                break
            except InfeasibleBudget as refusal:  # the default rule may still do, with stalls that no plan would take
                if spare_bytes == 0:
                    _log_refusal(planned.record.num_hooks, refusal)
        self.plans += len(plans)
        planned.add_plans(plans, link)
        self.planning_us += (perf_counter() - began) * 1e6

    # --- what steps teach

    def needs_more(self, planned: PlannedStep, extra_bytes: int) -> bool:
        """At the first hook of a step there are that many bytes more on the device than its trace has."""
        more_bytes = extra_bytes - planned.extra.extra_bytes
        plan = None if planned.current is None else planned.current.schedule.plan
        if plan is None or more_bytes <= 0 or plan.peak_bytes + more_bytes <= self._hbm_budget_bytes:
            return False  # a scalar that the loop keeps of every step: what the plan leaves free is for it
        planned.reset_for(planned.extra | ExtraMemory(extra_bytes=extra_bytes))
        self._add_plans(planned)
        return True

    def _learn_extra(self, planned: PlannedStep, step: FollowedStep) -> None:
        extra = planned.note_extra(step.extra, self._spare_bytes)
        if step.exceeded_plan:
            extra = planned.extra | step.extra
        if extra is not None:
            planned.reset_for(extra)
        if planned.learn_inner_memory(step.unused, self._spare_bytes) or extra is not None:
            self._add_plans(planned)

    def _learn_times(self) -> None:
        """Of the steps that are complete by now: how long they took, and what they waited for."""
        while self._measuring:
            planned, trial, timing = self._measuring[0]
            time = timing.result()
            if time is None:
                return
            self._measuring.popleft()
            if trial not in planned.trials:
                continue
            planned.add_time(trial, time)
            if abs(planned.slowdown - 1) > TIMES_OFF and planned.times_corrected < CORRECTIONS:
                planned.correct_times()
                self._add_plans(planned)
            elif planned.learn_stalls():
                self._add_plans(planned, at_most=1)

    def _to(self, phase: PlanPhase) -> None:
        if phase not in _NEXT[self.phase]:
            raise RuntimeError(f"a step in phase {self.phase.value} cannot be followed by one in {phase.value}")
        self.phase = phase


def _log_refusal(num_hooks: int, refusal: InfeasibleBudget) -> None:
    """Log that there is no plan for a step of so many hooks."""
    if num_hooks:
        _log.warning("chameleon_mm: no plan for a step of %d hooks, the default rule goes on: %s", num_hooks, str(refusal))
    else:
        _log.warning(
            "chameleon_mm: a step takes more than the budget, and nothing in it can be swapped, as none of the session's hooks "
            "ran: hooks see what autograd saves on the thread that entered the session, with gradients on"
        )
