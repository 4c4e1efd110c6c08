"""A step that has a trace, with its plans: how long steps under each plan took, and which plan is followed.

planned = PlannedStep(record, trace)
planned.add_plans(plans, link)       # close in simulated time: each is tried, the one that measures best is kept
planned.current                      # the plan that a step follows now; None: there is none within the budget
planned.add_time(trial, time)        # after a step that followed it, hook for hook
planned.slowdown                     # operators' measured time by the trace's: 1 where that is right, or not known
planned.learn_stalls()               # the kept plan stalls more than predicted: how much earlier copies are to begin
planned.reset_for(need)      # a step like it took more memory, or the latest took less
planned.learn_inner_memory(unused, 1 << 20)    # the latest steps held less inside operators than the recorded one
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np

from chameleon_mm.follow.structure import RECENT_STEPS, ExtraMemory, Structure
from chameleon_mm.plan.simulate import simulate
from chameleon_mm.plan.step_program import Keys, StepProgram
from chameleon_mm.plan.swap_plan import SwapPlan
from chameleon_mm.plan.timing import LinkCost
from chameleon_mm.plan.trace import Int64s, StepPhase, Trace, with_extra, with_times
from chameleon_mm.plan.unswapped_memory import Candidates, memory_curve
from chameleon_mm.record.light_profiler import PLAIN_CLASSES, StepRecord
from chameleon_mm.replayable import base_name
from chameleon_mm.swap.metrics import StepTime
from chameleon_mm.swap.recipe import Refusal
from chameleon_mm.swap.recomputing import RecomputePlan
from chameleon_mm.units import allocated_size

# --- A plan on trial: what it foresees, and how long the steps that followed it took


class PlanTrial:
    """A compiled plan, and the times of the steps that followed it.

    `predicted_out_us`, `predicted_in_us`: its simulated stalls, by storage.
    """

    __slots__ = ("busy_us", "predicted_in_us", "predicted_out_us", "program", "recompute", "time", "times_us")

    def __init__(
        self,
        program: StepProgram,
        predicted_out_us: Mapping[int, float],
        predicted_in_us: Mapping[int, float],
        recompute: RecomputePlan | None,
    ) -> None:
        self.program = program
        self.recompute = recompute
        """The plan's part about recomputation, for the executor; None: nothing is recomputed."""
        self.predicted_out_us = predicted_out_us
        self.predicted_in_us = predicted_in_us
        self.times_us: list[float] = []
        self.busy_us: list[float] = []
        """Time of each of these steps in which compute was not waiting for copies."""
        self.time: StepTime | None = None
        """Times of the latest step."""

    @property
    def step_us(self) -> float:
        """Median of the measured step times; before there are any, the plan's prediction."""
        return median(self.times_us) if self.times_us else self.program.plan.step_us

    @property
    def excess_out_us(self) -> dict[int, float]:
        """Stalls at reclaims beyond the plan's prediction in the latest step, by storage."""
        return {} if self.time is None else _beyond(self.time.out_stalls_us, self.predicted_out_us)

    @property
    def excess_in_us(self) -> dict[int, float]:
        """Stalls for copies back beyond the plan's prediction in the latest step, by storage."""
        return {} if self.time is None else _beyond(self.time.in_stalls_us, self.predicted_in_us)


def _beyond(measured: Mapping[int, float], predicted: Mapping[int, float]) -> dict[int, float]:
    more = {tensor: us - predicted.get(tensor, 0.0) for tensor, us in measured.items()}
    return {tensor: us for tensor, us in more.items() if us > 0}


# --- planned step

SAMPLES = 2
"""Steps under a plan before it is judged: of one alone nobody could tell what was an accident."""

MOST_PLANS = 6
"""Plans for one step, in all: after that the best of them stays. Trying them all takes a dozen steps."""

WORTH_A_PLAN = 0.01
"""Share of the step that it must have stalled beyond the prediction before another plan is made: half of that by which plans on
trial may differ as simulated."""


LINK_OFF = 0.1
"""Share by which a measured rate of the link must have moved before plans are made for the new one. At nearly twice the rate
that it was made for a plan takes 15 to 20 % longer than it need (docs/policy.md), so what is left at this is some 2 %."""


_NO_EXTRA = ExtraMemory()


class PlannedStep:
    """A step that has a trace, its plans and their trials. Not thread-safe."""

    def __init__(
        self, record: StepRecord, trace: Trace, *, admitted: frozenset[str] = frozenset(), banned: set[str] | None = None
    ) -> None:
        """`admitted`: base names of operators that may run again; `banned`: as in `RecomputePlan`."""
        self.record = record
        self.admitted = admitted
        self.banned = set() if banned is None else banned
        self.proven: set[int] = set()
        """Numbers of the storages that were recomputed bit for bit, beside their originals."""
        self.refused: dict[int, Refusal] = {}
        """Numbers of the storages that cannot be recomputed, and why."""
        self.link: LinkCost | None = None
        """The link that the latest plans were made for."""
        self.modules: Mapping[int, str] = {}
        """Path of the module that each hook was called in, by the hook's number, where it is known."""
        self._planned_without = 0
        """How many were refused when plans were made."""
        self.margin_bytes = 0
        """Bytes that plans leave free, and that are left free until each next hook, as sizes of the step are open."""
        self.predicted_by: Structure | None = None
        """Structure that its trace was predicted from; None: it was recorded."""
        self._recorded = trace
        self._by_hook = [*trace.hook_tick.tolist(), trace.num_ticks]
        """Tick of each hook, and of the step's end."""
        self._checked: list[int] = np.flatnonzero(trace.hook_tensor >= 0).tolist()
        """Hooks at which memory is checked, whatever the plan."""
        self.allocated_until = self._cumulative()
        """Bytes that the step had allocated by each hook and by its end, freed ones included."""
        self.first_hook_bytes = int(memory_curve(trace)[self._by_hook[0]]) if len(trace.hook_tick) else trace.start_bytes
        self.times_corrected = 0
        self._recent: deque[ExtraMemory] = deque(maxlen=RECENT_STEPS)
        self._unused: deque[Mapping[tuple[int, int], int]] = deque(maxlen=RECENT_STEPS)
        self._same_unused = 0
        """Number of latest steps whose `unused` was that of the step before."""
        self.reset_for(ExtraMemory())

    def reset_for(self, extra: ExtraMemory) -> None:
        """Plan from now on for a step that takes that much more memory than was recorded. Forgets the plans made before."""
        self.extra = extra
        self.trace = with_extra(extra.added_to(self._recorded), self.margin_bytes)
        self._curve: Int64s | None = None
        """Bytes allocated during each tick of `trace`, once somebody asked."""
        self.forget_plans()

    def forget_plans(self) -> None:
        """Forget the plans, and what steps under them have taught: budgets are others from now on."""
        self._same_unused = 0  # other budgets leave other bytes to spare
        self.trials: list[PlanTrial] = []
        self.lead_us: dict[int, float] = {}
        """How much earlier than predicted each storage's copy back is to be done, by storage."""
        self.lag_us: dict[int, float] = {}
        """How much later than predicted each storage's copy out is done, by storage."""
        self._nothing_better = False

    def correct_times(self) -> None:
        """Scale the trace's operator times to what was measured. Forgets the plans made before."""
        self.times_corrected += 1
        self._recorded = with_times(self._recorded, self.slowdown)
        self.reset_for(self.extra)

    # --- what may be recomputed

    def has_new_refusals(self) -> bool:
        """Whether plans rely on something that cannot be recomputed, as was found since they were made. Forgets them then."""
        known, self._planned_without = self._planned_without, len(self.refused)
        if known == self._planned_without:
            return False
        if all(trial.recompute is None for trial in self.trials):
            return False
        self.reset_for(self.extra)
        return True

    # --- plans

    @property
    def current(self) -> PlanTrial | None:
        """The first plan not tried enough, else the fastest. None: none is within the budget; the default rule applies."""
        on_trial = [trial for trial in self.trials if len(trial.times_us) < SAMPLES]
        if on_trial and len(self.trials) > 1:
            return on_trial[0]
        return min(self.trials, key=lambda trial: trial.step_us, default=None)

    @property
    def moves_nothing(self) -> bool:
        """Whether the plan to follow moves and drops nothing, and none is on trial."""
        current = self.current
        return self.is_decided and current is not None and not current.program.plan.actions

    def bytes_by_class(self) -> dict[str, int]:
        """Bytes that the plan to follow keeps, swaps, recomputes and holds; empty where there is none."""
        if self.current is None:
            return {}
        plan = self.current.program.plan
        held = {action.tensor: action.nbytes for action in plan.held}
        swapped = sum(action.nbytes for action in plan.swaps if action.tensor not in held and not action.again)
        recomputed = sum(action.nbytes for action in plan.recomputed)
        candidates = Candidates.of(self.trace, between_uses=any(action.again for action in plan.swaps))
        movable = int(candidates.nbytes[~candidates.away_before()].sum())
        kept = movable - swapped - recomputed
        return {"kept": kept, "swapped": swapped, "recomputed": recomputed, "held": sum(held.values())}

    @property
    def is_decided(self) -> bool:
        """Whether no plan is on trial any more."""
        return len(self.trials) < 2 or all(len(trial.times_us) >= SAMPLES for trial in self.trials)

    def add_plans(self, plans: Sequence[SwapPlan], link: LinkCost) -> None:
        """Add plans for `trace`, best first, made for `link`, to those that there are."""
        self.link = link
        self._planned_without = len(self.refused)
        known = {trial.program.plan.actions for trial in self.trials}
        new = [plan for plan in plans if plan.actions not in known]
        self._nothing_better = not new
        is_open = self.predicted_by is not None and self.predicted_by.has_open_sizes
        keys = None if is_open else Keys(self.record.features, self.record.save_of.tolist(), PLAIN_CLASSES)
        for plan in new:
            program = StepProgram.of(self.trace, plan, keys)
            self.trials.append(PlanTrial(program, *_stalls(self.trace, plan, link), self._recompute_plan(program)))

    def _recompute_plan(self, program: StepProgram) -> RecomputePlan | None:
        if not program.plan.recomputed:
            return None
        return RecomputePlan(
            admitted=self.admitted,
            held=program.held,
            proven=self.proven,
            refused=self.refused,
            inner_bytes=self._inner_bytes(),
            banned=self.banned,
            module_of=self._module_of,
        )

    def _module_of(self, number: int) -> str:
        """Path of the module that saves a storage first; "": not known."""
        hooks = np.flatnonzero((self.trace.hook_tensor == number) & ~self.trace.hook_use)
        return self.modules.get(int(hooks[0]), "") if len(hooks) else ""

    def _inner_bytes(self) -> int:
        """Bytes that an operator which may run again holds inside itself at most, as recorded."""
        trace = self.trace
        may_run = np.array([base_name(name) in self.admitted for name in trace.op_names], np.bool_)[trace.op_name]
        return int(trace.op_inner_bytes[may_run & (trace.op_phase == StepPhase.FORWARD)].max(initial=0))

    def add_time(self, trial: PlanTrial, time: StepTime) -> None:
        """Add the time of a step that followed `trial`, one of these, hook for hook."""
        for times, us in ((trial.times_us, time.step_us), (trial.busy_us, time.busy_us)):
            times.append(us)
            del times[:-SAMPLES]
        trial.time = time

    @property
    def chooses_by_link(self) -> bool:
        """Whether what its plans drop hangs on the link, and none of them is on trial."""
        return bool(self.admitted) and self.is_decided

    def is_for_another_link(self, link: LinkCost) -> bool:
        """Whether `link` is so much faster or slower than the one that plans were made for that another choice of what is
        swapped and what is recomputed may be better."""
        made_for = self.link
        if made_for is None:
            return False
        rates = (
            (link.d2h_gbps, made_for.d2h_gbps),
            (link.h2d_gbps, made_for.h2d_gbps),
            (link.duplex_gbps, made_for.duplex_gbps),
        )
        return any(abs(now / then - 1) > LINK_OFF for now, then in rates)

    @property
    def slowdown(self) -> float:
        """Measured time of the operators by the trace's time of them; 1 until the kept plan was measured enough."""
        current = self._measured
        return 1.0 if current is None else self.slowdown_under(current)

    def slowdown_under(self, trial: PlanTrial) -> float:
        """The same by the steps that followed `trial`, which was measured."""
        plan, predicted_us = trial.program.plan, self.trace.duration_us
        copies_us = plan.head_copy_us(predicted_us)  # no operator's
        took_us = median(trial.busy_us) - copies_us
        predicted_us += plan.recompute_us
        return took_us / predicted_us if min(took_us, predicted_us) > 0 else 1.0

    def learn_stalls(self) -> bool:
        """Whether the kept plan stalls more than predicted, and another one may be tried. Then `lead_us` and `lag_us` say what
        it is to be made with, the latest stalls added to the earlier ones."""
        current = self._measured
        if current is None or self._nothing_better or len(self.trials) >= MOST_PLANS:
            return False
        ins, outs = current.excess_in_us, current.excess_out_us
        if sum(ins.values()) + sum(outs.values()) <= WORTH_A_PLAN * current.step_us:
            return False
        for learned, stalls in ((self.lead_us, ins), (self.lag_us, outs)):
            for tensor, us in stalls.items():
                learned[tensor] = learned.get(tensor, 0.0) + us
        return True

    @property
    def _measured(self) -> PlanTrial | None:
        """The kept plan, once it was measured enough; else None."""
        current = self.current
        return current if current is not None and self.is_decided and len(current.times_us) >= SAMPLES else None

    # --- memory that no hook tells of

    def growth_after(self, hook: int, checks: int) -> int:
        """Bytes that allocation grows at most from a hook until so many checks of memory behind the next one, if nothing moves
        meanwhile. -1: from the step's beginning. Memory is checked where something is saved or used that may move."""
        if self._curve is None:
            self._curve = memory_curve(self.trace)
        begin = self._by_hook[hook] if hook >= 0 else 0
        behind = bisect_right(self._checked, hook) + checks
        end = self._by_hook[self._checked[behind] if behind < len(self._checked) else -1]
        before = self._curve[begin] if hook >= 0 else self.trace.start_bytes
        return int(self._curve[begin : end + 1].max(initial=before) - before) + self.margin_bytes

    def widen_margin(self, more_bytes: int) -> None:
        """Note that a step allocated so much more between two hooks than its trace has. Where sizes are open more is left free
        from now on, as they may go on growing."""
        if self.predicted_by is not None and self.predicted_by.has_open_sizes:
            self.margin_bytes = max(self.margin_bytes, self.predicted_by.note_growth(more_bytes))

    def ticks_between(self, hook: int, later: int) -> slice:
        """Ticks of the operators between two hooks; where there are none, the first hook's own. -1: the step's beginning; one
        past the last hook: its end."""
        begin, end = self._by_hook[hook] + 1 if hook >= 0 else 0, self._by_hook[later]
        return slice(begin, end) if begin < end else slice(max(0, end - 1), max(1, end))

    def note_extra(self, extra: ExtraMemory, spare_bytes: int) -> ExtraMemory | None:
        """Note the extra memory of a step like this one. Returns what to plan for, the most that the latest steps took, where
        that is less than now by more than `spare_bytes`."""
        self._recent.append(extra)
        if len(self._recent) < RECENT_STEPS or not self.extra.exceeds(_NO_EXTRA, spare_bytes):
            return None
        most = ExtraMemory.most_of(self._recent)
        return most if self.extra.exceeds(most, spare_bytes) else None

    def learn_inner_memory(self, unused: Mapping[tuple[int, int], int], spare_bytes: int) -> bool:
        """Note how much less a step like this one allocated between two hooks than was recorded. An operator holds no more
        inside itself than the most that the latest steps allocated there: more was the recorded step's alone, as when kernels
        were tried out. Returns whether the difference exceeds `spare_bytes`; then the trace is corrected and its plans are
        forgotten."""
        self._same_unused = self._same_unused + 1 if self._unused and self._unused[-1] == unused else 0
        self._unused.append(unused)
        # Once more the same as the latest: what was found then holds.
        if len(self._unused) < RECENT_STEPS or self._same_unused > RECENT_STEPS:
            return False
        recorded, until = self._recorded, self.allocated_until
        inner_bytes = recorded.op_inner_bytes.copy()
        for since, later in unused:
            allocated = until[later] - (until[since] if since >= 0 else 0)
            most_bytes = allocated - min(step.get((since, later), 0) for step in self._unused)
            ticks = self.ticks_between(since, later)
            ops = slice(*np.searchsorted(recorded.op_tick, (ticks.start, ticks.stop)).tolist())
            inner_bytes[ops] = np.minimum(inner_bytes[ops], most_bytes)
        if int((recorded.op_inner_bytes - inner_bytes).max(initial=0)) <= spare_bytes:
            return False
        self._recorded = dataclasses.replace(recorded, op_inner_bytes=inner_bytes)
        self.allocated_until = self._cumulative()
        self._unused.clear()
        self.reset_for(self.extra)
        return True

    def _cumulative(self) -> list[int]:
        trace = self._recorded
        born = trace.tensor_born >= 0
        made = np.bincount(trace.tensor_born[born], allocated_size(trace.tensor_bytes[born]), trace.num_ticks + 1)
        made[trace.op_tick] += trace.op_inner_bytes
        allocated_until: list[int] = np.cumsum(made)[self._by_hook].astype(np.int64).tolist()
        return allocated_until


def _stalls(trace: Trace, plan: SwapPlan, link: LinkCost) -> tuple[Mapping[int, float], Mapping[int, float]]:
    """Simulated stalls of the plan by storage, at reclaims and for copies back."""
    try:
        timeline = simulate(trace, plan, link)
    except ValueError:  # a wrong plan costs time, never a step: what nobody can carry out is not foreseen either
        return {}, {}
    return timeline.out_stalls_us, timeline.in_stalls_us
