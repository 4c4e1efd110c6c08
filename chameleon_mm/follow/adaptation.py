"""Decide for each step whether to record it, plan it or follow a plan, and which of several plans to keep.

    expected step has no plan    record the step; swap by the default rule
    recorded step ends           make plans from its trace; the step cache keeps them under the step's fingerprint
    expected step has a plan     follow the plan

Every step is fingerprinted. A wrong expectation costs time but changes no result.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from copy import copy
from time import perf_counter
from typing import NamedTuple

from chameleon_mm.device import Stream
from chameleon_mm.device.region_partitions import FirstChoice
from chameleon_mm.errors import InfeasibleBudget
from chameleon_mm.follow.planned_step import PlannedStep, PlanTrial
from chameleon_mm.follow.step_cache import CachedStep, StepCache
from chameleon_mm.follow.structure import TIMES_OFF, ExtraMemory, Structure, Structures
from chameleon_mm.plan.planner import candidate_plans
from chameleon_mm.plan.regions import SHARES, PartitionChoice
from chameleon_mm.plan.swap_plan import SwapPlan
from chameleon_mm.plan.timing import COUNTED_ON, LinkCost, without_waits
from chameleon_mm.plan.trace import TensorKind, Trace, renumbered, saved_where, without_making
from chameleon_mm.plan.unswapped_memory import smallest_budget
from chameleon_mm.record.light_profiler import Feature, StepRecord
from chameleon_mm.record.recorder import Recorder
from chameleon_mm.swap.calling_thread import annotation
from chameleon_mm.swap.metrics import Metrics, StepKind, StepSums
from chameleon_mm.swap.recipe import Refusal
from chameleon_mm.units import format_size

# --- Make plans within budgets, and keep some device memory free if possible

_log = logging.getLogger(__name__)

TRIAL_PLANS = 2
"""Number of plans to try for one step if their simulated times are close. For a mixture of experts, the second plan was up to 8
% faster than the plan predicted to be fastest."""

DRAFTS = 1000
"""Number of tentative plans that the planner evaluates for a step with few candidates. It takes 0.2 s, once."""

SPARE_PART = 256
"""Part of the budget, 1 / SPARE_PART, that a plan keeps free if possible. Steps with equal fingerprints may differ in memory
that hooks do not see, such as a scalar that the loop keeps."""

SLACK_BLOCKS = 4
"""Number of blocks at a step's peak that may be larger than requested. Plans keep `block_slack_bytes` free for each."""

SLACK_PART = 32
"""Maximum part of the budget, 1 / SLACK_PART, to keep free for block slack. It matters only for budgets below 128 MiB."""

GAP_PART = 32
"""Part of the budget, 1 / GAP_PART, that plans keep free in addition each time that gaps between blocks made the allocator
empty its cache. At most eight parts, because reserved bytes of replayed plans exceed allocated bytes by at most a quarter."""

FLUSHES = 2
"""Number of consecutive planned steps in which the allocator emptied its cache, after which plans keep more free. The first
step of a plan may only free blocks cached before."""


class Budgets(NamedTuple):
    """Bytes that a plan may use."""

    hbm_bytes: int
    host_bytes: int


class Planning:
    """Makes plans. `slack_bytes`: the device's `block_slack_bytes`. `metrics`: counts refusals."""

    def __init__(self, slack_bytes: int, metrics: Metrics) -> None:
        self.slack_bytes, self._metrics = slack_bytes, metrics
        self.outside_bytes: Callable[[], int] = int
        """Function that returns the bytes of a step that no hook sees. If no plan fits, one may exceed the budget by these."""
        self.gap_parts = 0
        """Number of parts of the budget, each 1 / GAP_PART, kept free for gaps between the allocator's blocks."""

    def spare_bytes(self, hbm_budget_bytes: int) -> int:
        """Return the bytes of the budget that a plan keeps free if possible."""
        slack_bytes = min(SLACK_BLOCKS * self.slack_bytes, hbm_budget_bytes // SLACK_PART)
        return max(hbm_budget_bytes // SPARE_PART, slack_bytes) + self.gap_parts * (hbm_budget_bytes // GAP_PART)

    def plans_for(self, planned: PlannedStep, budgets: Budgets, link: LinkCost, *, at_most: int) -> list[SwapPlan]:
        """Return plans for the step, best first. Raises `InfeasibleBudget`, which names the smallest budget with a plan."""

        def within(hbm_bytes: int) -> list[SwapPlan]:
            return candidate_plans(
                planned.trace, hbm_bytes, budgets.host_bytes, link, at_most=at_most, drafts=DRAFTS,
                recompute=planned.admitted, refused=planned.refused, counted_on=COUNTED_ON,
            )  # fmt: skip

        budget, spare_bytes = budgets.hbm_bytes, self.spare_bytes(budgets.hbm_bytes)
        for spared in dict.fromkeys((spare_bytes, budget // SPARE_PART)):
            with suppress(InfeasibleBudget):
                return within(budget - spared)
        try:
            return within(budget)
        except InfeasibleBudget as refusal:
            smallest_bytes = refusal.smallest_bytes or 0
            if not budget < smallest_bytes <= budget + self.outside_bytes():
                if held := int(planned.trace.tensor_bytes[list(planned.staying)].sum()):
                    refusal.args = (f"{refusal}. Modules of `keep` hold {format_size(held)} of saved tensors",)
                raise
        return within(smallest_bytes + spare_bytes)

    def plans_within(
        self, budgets: Budgets, planned_steps: Iterable[PlannedStep], link: LinkCost, *, before: Budgets
    ) -> dict[int, list[SwapPlan]]:
        """Return plans of these steps within `budgets`, by the `id` of each step. `before`: the present budgets.

        Raises `InfeasibleBudget` if a step that has a plan now would have none. If several steps fail, the error with the
        largest requirement is raised, whose budget is enough for all.
        """
        made = dict[int, list[SwapPlan]]()
        refusals = list[InfeasibleBudget]()
        for planned in planned_steps:
            try:
                made[id(planned)] = self.plans_for(planned, budgets, link, at_most=most_plans(planned))
            except InfeasibleBudget as refusal:
                if planned.trials:
                    refusals.append(refusal)
                else:
                    log_refusal(self._metrics, planned.record.num_hooks, refusal)
                    made[id(planned)] = []
        if refusals:
            asked = "smallest_bytes" if budgets.host_bytes == before.host_bytes else "smallest_host_bytes"
            try:
                raise max(refusals, key=lambda refusal: getattr(refusal, asked) or 0)
            finally:
                refusals.clear()  # their tracebacks hold this frame, which would be a cycle
        return made


def most_plans(planned: PlannedStep) -> int:
    """Return the number of plans to try for a step. For a predicted step, which may not be repeated, it is one."""
    return TRIAL_PLANS if planned.predicted_by is None else 1


def log_refusal(metrics: Metrics, num_hooks: int, refusal: InfeasibleBudget) -> None:
    """Log that there is no plan for a step of `num_hooks` hooks."""
    if num_hooks:
        metrics.warn(
            _log, "chameleon_mm: no plan for a step of %d hooks, the default rule goes on: %s", num_hooks, str(refusal)
        )
    else:
        metrics.warn(
            _log,
            "chameleon_mm: a step takes more than the budget, and nothing in it can be swapped, as none of the session's hooks "
            "ran: hooks see what autograd saves on the thread that entered the session, with gradients on",
        )


# --- Facts about a finished step, reported by the plan follower


class FollowedStep(NamedTuple):
    """Facts about a finished step."""

    record: StepRecord
    followed: PlanTrial | None
    whole: bool
    """True if a recorder saw the whole step."""
    recorded_hooks: int
    """Number of hooks that a recorder saw, counted from the first hook."""
    extra: ExtraMemory
    """Memory allocated beyond the trace while the step agreed with a cached step."""
    unused: dict[tuple[int, int], int]
    """Bytes that the recorded step allocated between two hooks and this step did not, by the two hooks."""
    exceeded_plan: bool
    """True if the step took more memory than its plan provides, at a hook or between two. `extra` includes these bytes."""
    had_plan: bool
    """True if any hook followed a plan. `followed_plan`: all hooks followed one plan, whose forecast was right to the end."""
    followed_plan: bool


# --- Digests of a rank's plan and of the plan's inputs. Ranks that do the same have equal digests
#
# Digests contain no times, which differ between ranks and between runs. Plans depend on times, so on a GPU the ranks of one
# step may have different plans.

_DIGITS = 16


def plan_digests(planned: PlannedStep | None) -> dict[str, str]:
    """Return digests: "operators" (operators and hooks in order), "sizes" (of storages), "plan" (actions and their hooks).
    "plan" is missing if the step has no plan. Empty if no step was planned. Comparable between processes."""
    if planned is None:
        return {}
    trace, trial = planned.trace, planned.current
    names = [trace.op_names[number] for number in trace.op_name.tolist()]
    found = {
        "operators": _digest([names, trace.op_phase.tolist(), trace.hook_use.tolist(), trace.hook_tensor.tolist()]),
        "sizes": _digest(trace.tensor_bytes.tolist()),
    }
    if trial is not None:
        found["plan"] = _digest(
            [[a.tensor, a.nbytes, a.out_at, a.reclaim_at, a.in_at, a.use_at, a.kind.value] for a in trial.program.plan.actions]
        )
    return found


def _digest(data: object) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()[:_DIGITS]


# --- adaptation

NEVER_RECOMPUTE = Refusal("saved by a module of never_recompute")

CACHED_STEPS = 32
"""Number of steps in the cache, with trace and plans. A step of ten thousand hooks takes some MiB."""

RECORDINGS = 3
"""Number of recordings of a step without a plan. After that, the step runs by the default rule, without a recorder."""

CORRECTIONS = 2
"""Maximum number of corrections of a step's operator times: one for a wrong factor, one for changes by the new plan."""

UNUSED_RECORDINGS = 4
"""Number of unused recordings from which `RECORDED_SHARE` applies. Unused: no such or predicted step followed."""
RECORDED_SHARE = 0.02
"""Share of all steps that may be recorded from `UNUSED_RECORDINGS` on. A recorded step takes up to 1.7 times
as long as a planned step (a mixture of experts, simulated), so this costs at most 1.4 %."""

WASTED_SHARE = 1 / 64
"""Share of all hooks that recorders may see in steps that already have a plan, while other steps need a trace. With the same
factor of 1.7, this costs 1.1 % of the time."""


StepEntry = CachedStep[PlannedStep | None]
"""Earlier step. Its plan is None if there is no trace."""
Steps = StepCache[PlannedStep | None]


class Adaptation:
    """Recording of steps, and choice among their plans. Not thread-safe: the executor holds its lock.

    `slack_bytes`: the device's `block_slack_bytes`. `make_recorder`: makes the recorder of a step. `link_cost`: returns the
    known cost of the link. `host_budget`: returns the limit of pinned memory in bytes. `replayable`: base names of operators
    that may run again; if empty, nothing is recomputed. `min_bytes`: size below which no storage moves.
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
        replayable: frozenset[str] = frozenset(),
        min_bytes: int = 0,
    ) -> None:
        self.detailed_steps = 0
        self.plans = 0
        self.plan_cache_hits = 0
        self.planning_us = 0.0
        self.latest: PlannedStep | None = None
        self._metrics = metrics
        self._hbm_budget_bytes = hbm_budget_bytes
        self.planning = Planning(slack_bytes, metrics)
        self._host_budget, self._make_recorder, self._link_cost = host_budget, make_recorder, link_cost
        self.cache_flushes: Callable[[], int] = int
        """Function that returns the device's number of cache flushes."""
        self._flushes = self._flushed_steps = 0
        """Number of flushes at the end of the last step, and number of consecutive planned steps with flushes."""
        self._replayable = replayable
        self._banned: set[str] = set()
        self.steps: Steps = StepCache(CACHED_STEPS)
        self.partition, self.first_partitions = PartitionChoice(), FirstChoice(SHARES, metrics.warn)
        self._min_bytes = min_bytes
        self._structures = Structures(min_bytes)
        self._flawed: deque[int] = deque(maxlen=CACHED_STEPS * RECORDINGS)
        """Fingerprints of the latest steps whose recordings gave no plan."""
        self._hooks = self._wasted_hooks = 0
        """Number of hooks of all steps so far, and number of hooks that a recorder saw without need."""
        self._num_steps = self._num_recorded = 0
        self._unused: set[int] = set()
        """Fingerprints of the unused recordings, as `UNUSED_RECORDINGS` defines them."""
        self._measuring: deque[tuple[PlannedStep, PlanTrial, StepSums]] = deque()
        """Steps that ended on the host and whose last event may still be pending on the device."""

    @property
    def latest_plan(self) -> SwapPlan | None:
        """Plan of the latest planned step. None: no step was planned, or no plan fits the budget."""
        current = None if self.latest is None else self.latest.current
        return None if current is None else current.program.plan

    @property
    def host_bytes_wanted(self) -> int | None:
        """Maximum pinned memory in bytes that a cached step needs under its current plan. None: no cached step has a plan."""
        followed = (entry.plan.current for entry in self.steps.entries() if entry.plan is not None)
        return max((trial.program.plan.host_bytes for trial in followed if trial is not None), default=None)

    @property
    def banned(self) -> tuple[str, ...]:
        """Sorted names of the operators of recipes that made other bits than the original."""
        return tuple(sorted(self._banned))

    @property
    def _spare_bytes(self) -> int:
        return self.planning.spare_bytes(self._hbm_budget_bytes)

    @property
    def _budgets(self) -> Budgets:
        return Budgets(self._hbm_budget_bytes, self._host_budget())

    def change_budget(self, hbm_budget_bytes: int, host_budget_bytes: int | None, *, must_fit: bool) -> None:
        """Plan every cached step again, from its trace, for new budgets. Called between steps. Raises `InfeasibleBudget` and
        changes nothing if a step that has a plan now would have none.

        `host_budget_bytes`: the next result of `host_budget`; None: its present result. `must_fit` False: forget all steps
        instead, because their traces may come from steps that ran out of memory.
        """
        before = self._budgets
        budgets = Budgets(hbm_budget_bytes, before.host_bytes if host_budget_bytes is None else host_budget_bytes)
        if not must_fit:
            self._hbm_budget_bytes, self.latest = hbm_budget_bytes, None
            self.steps, self._structures = StepCache(CACHED_STEPS), Structures(self._min_bytes)
            self._measuring.clear()
            self._unused.clear()
            return
        if budgets == before:
            return
        planned_steps = self._usual_steps()
        link, began = self._link_cost(), perf_counter()
        made = self.planning.plans_within(budgets, planned_steps, link, before=before)
        self._hbm_budget_bytes = hbm_budget_bytes
        self._measuring.clear()
        for planned in planned_steps:
            planned.odd = None
            planned.forget_plans()
            planned.add_plans(made[id(planned)], link)
            self.plans += len(made[id(planned)])
        self.planning_us += (perf_counter() - began) * 1e6

    def _usual_steps(self) -> list[PlannedStep]:
        """Return the cached steps that have a trace. From now on they follow the plans for usual steps."""
        for entry in self.steps.entries():
            entry.plan = entry.plan and entry.plan.usual
        return [entry.plan for entry in self.steps.entries() if entry.plan is not None]

    def choose_partition(self) -> bool:
        """Choose how much compiled regions save, once, from the first recorded step with such regions. Called between steps.
        Returns True if they should be compiled once more."""
        planned, first, choice = self.latest, self.first_partitions, self.partition
        if choice.is_made or planned is None:
            return False
        own_us = None if planned.current is None else planned.current.program.plan.step_us
        hopeless = own_us is None and not first.fits
        step_us = (lambda _: None) if hopeless else (lambda trace: self._step_us(planned, trace))
        choice.make(planned.trace, own_us, step_us, present=min(first.shares, default=1.0))
        first.fixed = choice.share
        if choice.share is not None and own_us is None and first.most_bytes:  # each region's need is known from its own graph
            beside_bytes = max(0, smallest_budget(planned.trace) - first.most_bytes - first.resident_bytes)
            first.fixed, first.beside_bytes = None, beside_bytes
            choice.text = (
                f"as first compiled no plan fits; compiled once more, beside {format_size(beside_bytes)} of other storages"
            )
        if choice.text:
            _log.info("chameleon_mm: partition of compiled regions: %s", choice.text)
        return choice.share is not None

    def note_resident(self, nbytes: int) -> None:
        """Note the bytes that stay on the device in the next step: a region that compiles in it has the rest of the budget."""
        first = self.first_partitions
        first.resident_bytes, first.spare_bytes = nbytes, self._spare_bytes
        first.budget_bytes = self._hbm_budget_bytes - first.spare_bytes

    def _step_us(self, planned: PlannedStep, trace: Trace) -> float | None:
        """Return the predicted time of a step like `planned` with that trace. None: no plan fits."""
        other = PlannedStep(planned.record, trace, admitted=planned.admitted, banned=planned.banned)
        try:
            return self.planning.plans_for(other, self._budgets, self._link_cost(), at_most=1)[0].step_us
        except InfeasibleBudget:
            return None

    def pins(self) -> dict[str, int]:
        """Return the bytes that pins hold in the latest planned step; empty without one."""
        if (planned := self.latest) is None:
            return {}
        never = [number for number, why in planned.refused.items() if why is NEVER_RECOMPUTE]
        kept, never_recomputed = (int(planned.trace.tensor_bytes[list(which)].sum()) for which in (planned.staying, never))
        return {"kept_bytes": kept, "never_recomputed_bytes": never_recomputed}

    def begin_step(self, compute: Stream) -> Recorder | None:
        """Begin a step. Returns its recorder, or None if no trace is needed. Times the step if a plan is on trial."""
        self._learn_times()
        expected = self.steps.begin_step()
        planned = None if expected is None else expected.plan
        recorder = self._make_recorder() if self._is_worth_recording(expected) else None
        if planned is not None and not planned.is_decided:
            self._metrics.time_step(compute)
        return recorder

    def _is_worth_recording(self, expected: StepEntry | None) -> bool:
        """True if the step that begins may need a trace: the expected step has no trace, or, rarely enough, another cached step
        has none. The second case is for steps that are never expected, such as an occasional evaluation."""
        if expected is None:
            return True
        if len(self._unused) >= UNUSED_RECORDINGS and self._num_recorded >= RECORDED_SHARE * self._num_steps:
            return False
        if self.wants_trace(expected):
            return True
        wasted = self._wasted_hooks > WASTED_SHARE * self._hooks
        return not wasted and any(map(self.wants_trace, self.steps.entries()))

    def wants_trace(self, entry: StepEntry) -> bool:
        """True if this cached step needs a trace, or another trace because the recorded step was odd."""
        if self._flawed.count(entry.fingerprint) >= RECORDINGS:
            return False
        if entry.plan is not None:
            return not entry.plan.usual.trials and entry.plan.usual.recorded_more(self._spare_bytes)
        structure = self._structures.of(entry.record)
        return structure is None or structure.wants_trace

    def end_step(self, step: FollowedStep, recorder: Recorder | None, *, completed: bool) -> StepKind:
        """End `step` and return its kind. Learn from it if it `completed`."""
        sums = self._metrics.step if self._metrics.timed and recorder is None else None
        record = step.record
        if not completed:
            self.steps.abandon_step()
            return StepKind.FAILED
        entry = self.steps.end_step(record)
        wasted = step.recorded_hooks
        kind = StepKind.PARTLY_PLANNED if step.had_plan else StepKind.BY_RULE
        has_trace = recorder is not None and step.whole and recorder.flaw is None
        if entry is not None and entry.plan is not None and not (has_trace and self.wants_trace(entry)):
            if entry.plan.predicted_by is not None:
                self._unused.clear()
            else:
                self._unused.discard(record.fingerprint)  # the step was repeated
            self.plan_cache_hits += bool(entry.plan.trials)
            if step.followed_plan and entry.plan.trials:
                kind = StepKind.PLANNED
            if (
                sums is not None
                and step.followed_plan
                and step.followed is not None
                and step.followed in entry.plan.trials
                and (step.followed.recompute is None or step.followed.recompute.is_typical)
            ):
                self._measuring.append((entry.plan, step.followed, sums))
            self._learn_extra(entry, entry.plan, step)
        elif recorder is not None and has_trace:
            wasted, kind = 0, StepKind.RECORDED
            if entry is not None and entry.plan is not None:
                self._flawed.append(record.fingerprint)  # counts its first recording
            self.detailed_steps += 1
            self._unused.add(record.fingerprint)
            # Optimizer state that this step made exists from the beginning of all later steps.
            recorded = without_waits(recorder.finish(record.fingerprint), self._link_cost())
            trace = renumbered(without_making(recorded, {TensorKind.OPTIMIZER}))
            structure = self._structures.note(record, trace)
            structure.trained = recorder.trained
            planned = self._planned_step(record, trace, structure)
            self._add_plans(planned)
            self.steps.put(record, planned)
            self.latest = planned
        else:
            if recorder is not None and recorder.flaw is not None:
                self._flawed.append(record.fingerprint)
                _log.info("chameleon_mm: no plan from this step of %d hooks: %s", record.num_hooks, recorder.flaw)
            if entry is None:
                self.steps.put(record, None)
        self._note_flushes(was_planned=kind is StepKind.PLANNED)
        self._hooks += record.num_hooks
        self._wasted_hooks += wasted
        self._num_steps += 1
        self._num_recorded += step.whole
        return kind

    # --- steps with other sizes than recorded steps

    def predict(self, features: Sequence[Feature]) -> tuple[StepRecord, PlannedStep] | None:
        """Predict, from recorded steps, the step that begins with these hooks, and plan it. None: no prediction."""
        for structure in self._structures.beginning_with(features):
            record = structure.predict(features)
            if record is not None:
                return record, self._predicted(record, structure)
        return None

    def plan_entry(self, entry: StepEntry) -> None:
        """Plan a cached step that was not recorded, if it can be predicted."""
        structure = self._structures.of(entry.record) if entry.plan is None else None
        if structure is not None and structure.predicts and structure.predict(entry.record.features) is not None:
            entry.plan = self._predicted(entry.record, structure)

    def _predicted(self, record: StepRecord, structure: Structure) -> PlannedStep:
        planned = self._planned_step(record, structure.trace_of(record), structure)
        planned.predicted_by, planned.margin_bytes = structure, structure.margin_bytes(record)
        planned.reset_for(ExtraMemory())  # with the step's margin
        if not self._plan_for(planned, ExtraMemory.most_of(structure.recent_extra), at_most=1):
            self._add_plans(planned, at_most=1)
        return planned

    def _planned_step(self, record: StepRecord, trace: Trace, structure: Structure) -> PlannedStep:
        planned = PlannedStep(record, trace, admitted=self._replayable, banned=self._banned)
        planned.proven, planned.refused, planned.trained = structure.proven(trace), structure.refused, structure.trained
        for number in saved_where(trace, lambda place: place.never_recompute):
            planned.refused[number] = NEVER_RECOMPUTE
        return planned

    # --- plans

    def _add_plans(self, planned: PlannedStep, *, at_most: int = TRIAL_PLANS) -> None:
        try:
            self._make_plans(planned, at_most)
        except InfeasibleBudget as refusal:  # the default rule may still work, with more stalls than a plan may have
            log_refusal(self._metrics, planned.record.num_hooks, refusal)
            planned.add_plans([], self._link_cost())

    def _plan_for(self, planned: PlannedStep, extra: ExtraMemory, *, at_most: int = TRIAL_PLANS) -> bool:
        """Make the step's plans again for `extra` memory. Returns False if there are none; the present plans then stay."""
        before = copy(planned)
        planned.reset_for(extra)
        try:
            self._make_plans(planned, at_most)
        except InfeasibleBudget:
            vars(planned).update(vars(before))
            return False
        return True

    def _make_plans(self, planned: PlannedStep, at_most: int) -> None:
        began = perf_counter()
        link = self._link_cost()
        try:
            with annotation("chameleon::plan"):
                plans = self.planning.plans_for(planned, self._budgets, link, at_most=at_most)
            self.plans += len(plans)
            planned.add_plans(plans, link)
        finally:
            self.planning_us += (perf_counter() - began) * 1e6

    # --- learning from finished steps

    def replan(self) -> None:
        """Make new plans for steps whose plans recompute, if storages were refused since."""
        for entry in self.steps.entries():
            if entry.plan is not None and entry.plan.has_new_refusals():
                self._add_plans(entry.plan)

    def has_room(self, planned: PlannedStep, extra: ExtraMemory) -> bool:
        """True if the step's plans have room for `extra`, allocated at its first hook in addition to the trace. If not, make
        such plans. False: there are none; the present plans stay, for steps without these bytes."""
        new_gradients = extra.keeps_gradients and not planned.extra.keeps_gradients
        more_bytes = extra.extra_bytes - planned.extra.extra_bytes + new_gradients * planned.gradient_bytes
        plan = None if planned.current is None else planned.current.program.plan
        room_bytes = 0 if plan is None else max(self._hbm_budget_bytes, plan.hbm_budget_bytes) - plan.peak_bytes
        if plan is None or more_bytes <= max(0, room_bytes):
            return True  # such as a scalar of every step that the loop keeps: plans keep room for it
        has_room = self._plan_for(planned, planned.extra | extra)
        if not has_room:
            self.tell_lack(more_bytes, " as it began")
        return has_room

    def _learn_extra(self, entry: StepEntry, planned: PlannedStep, step: FollowedStep) -> None:
        """Learn the memory that a step took in addition to its trace. Note [Odd steps]."""
        spare_bytes, structure, usual = self._spare_bytes, planned.predicted_by, planned.usual
        before = ExtraMemory.most_of((structure or usual).recent_extra)
        if structure is not None:
            structure.note_extra(step.extra)
            if (
                structure.has_open_sizes
                and (margin := structure.margin_bytes(planned.record)) < planned.margin_bytes - spare_bytes
            ):
                planned.margin_bytes = margin  # an odd step had increased it
                self._plan_for(planned, planned.extra, at_most=1)
        extra = planned.note_extra(step.extra, spare_bytes)
        if planned is not usual:
            extra = None  # plans for odd steps keep their room
        if extra is not None:
            planned.reset_for(extra)
        if planned.learn_inner_memory(step.unused, spare_bytes) or planned.has_new_refusals() or extra is not None:
            self._add_plans(planned)
        is_odd = step.exceeded_plan or any(nbytes > spare_bytes for nbytes in step.extra.spikes.values())
        repeats = usual.note_odd(is_odd=is_odd) or bool(before.spikes)
        if step.exceeded_plan and (repeats or usual.is_first_use):
            extra = planned.extra | before | step.extra
            varying = extra | ExtraMemory.room_for((structure or planned).recent_extra, spare_bytes)
            if self._plan_for(planned, varying):
                extra = varying
            elif varying != extra:
                self._plan_for(planned, extra)
            if repeats and step.extra.spikes and planned is usual and structure is None:
                self._add_plans(usual.make_odd(extra))
        entry.plan = usual.odd if usual.odd is not None and usual.odd_is_due else usual

    def tell_lack(self, more_bytes: int, where: str) -> None:
        """Warn that a step took `more_bytes` more than its plan provides."""
        told = (
            "chameleon_mm: a step had %s more device memory allocated than its plan has%s, in tensors that no hook sees; free "
            "them earlier, or raise hbm_budget by as much if it goes on: later plans leave so much free if they can"
        )
        self._metrics.warn(_log, told, format_size(more_bytes), where)

    def _note_flushes(self, *, was_planned: bool) -> None:
        """Let plans keep more of the budget free, if torch's allocator emptied its cache in consecutive planned steps."""
        before, self._flushes = self._flushes, self.cache_flushes()
        self._flushed_steps = self._flushed_steps + 1 if was_planned and self._flushes > before else 0
        if self._flushed_steps < FLUSHES or self.planning.gap_parts >= GAP_PART // 4:
            return
        self._flushed_steps = 0
        self.planning.gap_parts += 1
        self._metrics.warn(
            _log,
            "chameleon_mm: torch's allocator emptied its cache in planned steps, as gaps between blocks filled the device, so "
            "plans leave %s more of hbm_budget free each time; before the program starts, "
            "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
            format_size(self._hbm_budget_bytes // GAP_PART),
        )
        for planned in self._usual_steps():
            planned.odd = None
            planned.reset_for(planned.extra)
            self._add_plans(planned, at_most=most_plans(planned))

    def _learn_times(self) -> None:
        """Read the times of the steps that the device has completed. Correct operator times and copy times by them."""
        while self._measuring:
            planned, trial, sums = self._measuring[0]
            time = self._metrics.time_of(sums)
            if time is None:
                return
            self._measuring.popleft()
            if trial not in planned.trials:
                continue
            planned.add_time(trial, time)
            if planned.predicted_by is not None:
                planned.predicted_by.note_slowdown(planned.trace, planned.slowdown_under(trial))
            if planned.times_corrected < CORRECTIONS and abs(planned.slowdown - 1) > TIMES_OFF:
                planned.correct_times()
                self._add_plans(planned)
            elif planned.chooses_by_link and planned.is_for_another_link(self._link_cost()):
                planned.link_plans += 1
                planned.reset_for(planned.extra)
                self._add_plans(planned)


def recomputes(entry: StepEntry) -> bool:
    """True if the current plan of a cached step recomputes a storage."""
    current = None if entry.plan is None else entry.plan.current
    return current is not None and current.recompute is not None
