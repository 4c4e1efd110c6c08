"""Step with a trace and plans: times of the steps under each plan, and the choice of the plan to follow.

planned = PlannedStep(record, trace)
planned.add_plans(plans, link)       # plans with close simulated times: each is tried, the fastest is kept
planned.current                      # plan that a step follows now; None: no plan fits the budget
planned.add_time(trial, time)        # after a step that followed the trial's plan at each hook
planned.slowdown                     # measured operator time / the trace's; 1: the trace is right, or not measured yet
planned.reset_for(extra)     # after a step like it took more memory, or the latest steps took less
planned.learn_inner_memory(unused, 1 << 20)    # after the latest steps held less memory inside operators
"""

from __future__ import annotations

import dataclasses
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from copy import copy
from statistics import median

import numpy as np
from torch import Tensor

from chameleon_mm.follow.structure import RECENT_STEPS, ExtraMemory, Structure
from chameleon_mm.plan.simulate import simulate
from chameleon_mm.plan.step_program import Keys, StepProgram
from chameleon_mm.plan.swap_plan import SwapPlan
from chameleon_mm.plan.timing import LinkCost
from chameleon_mm.plan.trace import (
    Int64s,
    StepPhase,
    TensorKind,
    Trace,
    outliving_bytes,
    saved_where,
    with_extra,
    with_staying,
    with_times,
)
from chameleon_mm.plan.unswapped_memory import Candidates, memory_curve, place_of
from chameleon_mm.record.light_profiler import PLAIN_CLASSES, StepRecord
from chameleon_mm.replayable import base_name
from chameleon_mm.swap.metrics import StepTime
from chameleon_mm.swap.recipe import Refusal
from chameleon_mm.swap.recomputing import RecomputePlan
from chameleon_mm.units import allocated_size

# --- Plan on trial: its predictions, and the measured times of steps that followed it


class PlanTrial:
    """Compiled plan, and the times of the steps that followed it. `program_waits_us`: simulated waits of the program's own
    copies. Measurements count these waits as operator time."""

    __slots__ = ("busy_us", "program", "program_waits_us", "recompute", "times_us")

    def __init__(self, program: StepProgram, recompute: RecomputePlan | None, program_waits_us: float = 0.0) -> None:
        self.program = program
        self.recompute = recompute
        """Recomputation part of the plan, for the executor; None: nothing is recomputed."""
        self.program_waits_us = program_waits_us
        self.times_us: list[float] = []
        self.busy_us: list[float] = []
        """Time of each of these steps without compute's waits for copies."""

    @property
    def step_us(self) -> float:
        """Return the median of the measured step times, or the plan's prediction without measurements."""
        return median(self.times_us) if self.times_us else self.program.plan.step_us


# --- planned step

SAMPLES = 2
"""Number of steps under a plan before the plan is judged: a single time may be an outlier."""

LATE = 0.01
"""Share of the predicted time by which a step must exceed it to count as late. It is half of the difference in simulated time
that plans on trial may have."""

LINK_OFF = 0.1
"""Relative change of a measured link rate above which new plans are made, if the rate rose or steps are late. A plan for half
of the rate takes some percent longer than necessary (docs/policy.md)."""


class PlannedStep:
    """Step with its trace, its plans and their trials. Not thread-safe."""

    def __init__(
        self, record: StepRecord, trace: Trace, *, admitted: frozenset[str] = frozenset(), banned: set[str] | None = None
    ) -> None:
        """`admitted`: base names of operators that may run again; `banned`: as in `RecomputePlan`."""
        self.record = record
        self.admitted = admitted
        self.banned = set() if banned is None else banned
        self.proven: set[int] = set()
        """Numbers of the storages whose recomputed bits were equal to the original's in a comparison."""
        self.refused: dict[int, Refusal] = {}
        """Reasons why storages cannot be recomputed, by the storage's number."""
        self.staying = saved_where(trace, lambda place: place.keep)
        """Numbers of the storages that a module named in `keep` saves. They stay on the device."""
        self.link: LinkCost | None = None
        """Link for which the latest plans were made."""
        self._planned_without = 0
        """Number of refused storages when the latest plans were made."""
        self.margin_bytes = 0
        """Bytes that plans and forecasts keep free, because sizes of the step are open."""
        self.predicted_by: Structure | None = None
        """Structure from which the trace was predicted; None: the trace was recorded."""
        self.trained: Sequence[weakref.ref[Tensor]] = ()
        """Parameters whose gradients the recorded step made and kept: `gradient_bytes` of device memory."""
        self.gradient_bytes = outliving_bytes(trace, {TensorKind.GRADIENT})
        self._recorded = trace
        self._by_hook = [*trace.hook_tick.tolist(), trace.num_ticks]
        """Tick of each hook, and of the step's end."""
        self._checked: list[int] = np.flatnonzero(trace.hook_tensor >= 0).tolist()
        """Hooks at which memory is checked under any plan."""
        self.allocated_until = self._cumulative()
        """Cumulative bytes allocated by each hook and by the step's end. Freed bytes are not subtracted."""
        self.first_hook_bytes = int(memory_curve(trace)[self._by_hook[0]]) if len(trace.hook_tick) else trace.start_bytes
        self.times_corrected = 0
        self.link_plans, self._since_plans = 0, 0
        """Number of times that plans were made because the link changed, and number of timed steps since the latest plans."""
        self.recent_extra: deque[ExtraMemory] = deque(maxlen=RECENT_STEPS)
        """Memory that each of the latest steps took in addition to the trace."""
        self._unused: deque[Mapping[tuple[int, int], int]] = deque(maxlen=RECENT_STEPS)
        self._same_unused = 0
        """Number of latest consecutive steps whose `unused` equals that of the previous step."""
        self.usual = self
        """Planned step for ordinary steps: this object, or the object from which `odd` was copied. Note [Odd steps]."""
        self.odd: PlannedStep | None = None
        """Copy of this step with plans for odd steps; None: no odd step was repeated."""
        self.odd_is_due = False
        self._since_odd, self._odd_every = 0, -1
        """Number of steps since the latest odd step, and between the latest two. -1: no step was odd; 0: one was."""
        self.reset_for(ExtraMemory())

    def reset_for(self, extra: ExtraMemory) -> None:
        """Plan from now on for a step that takes `extra` memory in addition to the recorded memory. Forgets earlier plans."""
        self.extra = extra
        self.trace = with_staying(with_extra(self.extra.added_to(self._recorded), self.margin_bytes), self.staying)
        self._curve: Int64s | None = None
        """Bytes allocated during each tick of `trace`; None until first needed."""
        self.forget_plans()

    def forget_plans(self) -> None:
        """Forget the plans, because the budgets or the trace changed."""
        self._same_unused = 0  # the number of spare bytes depends on the budgets
        self.trials: list[PlanTrial] = []
        self._since_plans = 0

    def correct_times(self) -> None:
        """Scale the trace's operator times to the measured times. Forgets earlier plans."""
        self.times_corrected += 1
        self._recorded = with_times(self._recorded, self.slowdown)
        self.reset_for(self.extra)

    # --- recomputation

    def has_new_refusals(self) -> bool:
        """True if a plan recomputes a storage, and storages were refused since the plans were made. Then forgets the plans."""
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
        """First plan with too few measured steps, else the fastest plan. None: no plan fits the budget, so the rule applies."""
        on_trial = [trial for trial in self.trials if len(trial.times_us) < SAMPLES]
        if on_trial and len(self.trials) > 1:
            return on_trial[0]
        return min(self.trials, key=lambda trial: trial.step_us, default=None)

    def bytes_by_class(self) -> dict[str, int]:
        """Return the bytes that the current plan keeps, swaps, recomputes and holds; empty without a plan."""
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
        """True if no plan is on trial."""
        return len(self.trials) < 2 or all(len(trial.times_us) >= SAMPLES for trial in self.trials)

    def add_plans(self, plans: Sequence[SwapPlan], link: LinkCost) -> None:
        """Add `plans`, which were made for `trace` and `link`, best first."""
        self.link = link
        self._planned_without = len(self.refused)
        is_open = self.predicted_by is not None and self.predicted_by.has_open_sizes
        keys = None if is_open else Keys(self.record.features, self.record.save_of.tolist(), PLAIN_CLASSES)
        for plan in plans:
            program = StepProgram.of(self.trace, plan, keys)
            self.trials.append(PlanTrial(program, self._recompute_plan(program), _program_waits_us(self.trace, plan, link)))

    def _recompute_plan(self, program: StepProgram) -> RecomputePlan | None:
        if not program.plan.recomputed:
            return None
        trace = self.trace
        may_run = np.array([base_name(name) in self.admitted for name in trace.op_names], np.bool_)[trace.op_name]
        inner_bytes = trace.op_inner_bytes[may_run & (trace.op_phase == StepPhase.FORWARD)]
        return RecomputePlan(
            admitted=self.admitted,
            held=program.held,
            proven=self.proven,
            refused=self.refused,
            inner_bytes=int(inner_bytes.max(initial=0)),
            banned=self.banned,
            module_of=lambda number: place_of(trace, number).module,
        )

    def add_time(self, trial: PlanTrial, time: StepTime) -> None:
        """Add the time of a step that followed `trial`, one of `trials`, at each hook."""
        for times, us in ((trial.times_us, time.step_us), (trial.busy_us, time.busy_us)):
            times.append(us)
            del times[:-SAMPLES]
        self._since_plans += 1

    @property
    def chooses_by_link(self) -> bool:
        """True if plans may recompute (the link's rates then matter), no plan is on trial, and the kept plan has copies."""
        has_copies = self.current is not None and bool(self.current.program.plan.actions)
        return bool(self.admitted) and self.is_decided and has_copies

    def is_for_another_link(self, link: LinkCost) -> bool:
        """True if a rate of `link` differs by more than `LINK_OFF` from the link for which plans were made. Another choice of
        storages to swap and to recompute may then be better.

        A slower link counts only if steps take longer than predicted, because plans assume less than the link's rates. Each
        time, twice as many steps must pass, so that planning for a varying link costs less and less.
        """
        made_for, current = self.link, self._measured
        if made_for is None or current is None or self._since_plans < 1 << self.link_plans:
            return False
        rates = list(zip(link.rates, made_for.rates, strict=True))
        is_late = current.step_us > current.program.plan.step_us * self.slowdown * (1 + LATE)
        return any(now / then > 1 + LINK_OFF or (is_late and now / then < 1 - LINK_OFF) for now, then in rates)

    @property
    def slowdown(self) -> float:
        """Return measured operator time / the trace's operator time; 1 until the kept plan has enough measurements."""
        current = self._measured
        return 1.0 if current is None else self.slowdown_under(current)

    def slowdown_under(self, trial: PlanTrial) -> float:
        """Return the slowdown in the steps that followed `trial`, which has measurements."""
        plan, predicted_us = trial.program.plan, self.trace.duration_us
        copies_us = plan.head_copy_us(predicted_us)  # not operator time
        took_us = median(trial.busy_us) - copies_us - trial.program_waits_us
        predicted_us += plan.recompute_us
        return took_us / predicted_us if min(took_us, predicted_us) > 0 else 1.0

    @property
    def _measured(self) -> PlanTrial | None:
        """Return the kept plan if it has enough measurements, else None."""
        current = self.current
        return current if current is not None and self.is_decided and len(current.times_us) >= SAMPLES else None

    # --- memory that hooks do not see

    def extra_at(self, first_bytes: int, *, asks: bool) -> ExtraMemory:
        """Return the extra memory of a step with `first_bytes` allocated at its first hook. `asks`: no backward has run yet."""
        more_bytes, made = first_bytes - self.first_hook_bytes, [ref() for ref in self.trained]
        keeps = asks and bool(made) and all(parameter is not None and parameter.grad is not None for parameter in made)
        return ExtraMemory(extra_bytes=max(0, more_bytes - keeps * self.gradient_bytes), keeps_gradients=keeps)

    def growth_after(self, hook: int, checks: int) -> int:
        """Return the maximum growth of allocation in bytes, without swaps, from `hook` until `checks` checks of memory after
        the next check. `hook` -1: the step's beginning. Memory is checked at saves and uses of storages that may move."""
        if self._curve is None:
            self._curve = memory_curve(self.trace)
        begin = self._by_hook[hook] if hook >= 0 else 0
        behind = bisect_right(self._checked, hook) + checks
        end = self._by_hook[self._checked[behind] if behind < len(self._checked) else -1]
        before = self._curve[begin] if hook >= 0 else self.trace.start_bytes
        return int(self._curve[begin : end + 1].max(initial=before) - before) + self.margin_bytes

    def widen_margin(self, more_bytes: int) -> None:
        """Note that a step allocated `more_bytes` more between two hooks than its trace. If sizes are open, they may grow
        further, so more bytes are kept free from now on."""
        if self.predicted_by is not None and self.predicted_by.has_open_sizes:
            self.margin_bytes = max(self.margin_bytes, self.predicted_by.note_growth(more_bytes))

    def most_until_check(self, program: StepProgram, hook: int) -> int:
        """Return the maximum bytes that `program`, a plan of this step, has allocated from `hook` until the next check."""
        later = next((later for later in range(hook + 1, len(program.rows) - 1) if program.rows[later].is_checked), -1)
        return int(program.allocated_bytes[self._by_hook[hook] : self._by_hook[later] + 1].max(initial=0))

    def ticks_between(self, hook: int, later: int) -> slice:
        """Return the ticks of the operators between two hooks, or the first hook's own tick if there are none. `hook` -1: the
        step's beginning. `later`: the number of hooks is the step's end."""
        begin, end = self._by_hook[hook] + 1 if hook >= 0 else 0, self._by_hook[later]
        return slice(begin, end) if begin < end else slice(max(0, end - 1), max(1, end))

    def note_extra(self, extra: ExtraMemory, spare_bytes: int) -> ExtraMemory | None:
        """Note the extra memory of a step like this one. If the latest steps need less than the planned extra memory by more
        than `spare_bytes`, return the extra memory to plan for; else None."""
        self.recent_extra.append(extra)
        if len(self.recent_extra) < RECENT_STEPS or not self.extra.exceeds(ExtraMemory(), spare_bytes):
            return None
        room = ExtraMemory.room_for(self.recent_extra, spare_bytes)
        return room if self.extra.exceeds(room, spare_bytes) else None

    # Note [Odd steps]: a step that takes more memory than its plan provides is odd. docs/adaptation.md says what follows then.

    @property
    def is_first_use(self) -> bool:
        """True if the latest step is the first like this one after the recording. Then the recorded step may be the outlier."""
        return len(self.recent_extra) == 1

    def note_odd(self, *, is_odd: bool) -> bool:
        """Note whether the latest step was odd. Returns True if an earlier one was."""
        any_before, self._since_odd = self._odd_every >= 0, self._since_odd + 1
        if is_odd:
            self._odd_every, self._since_odd = self._since_odd if any_before else 0, 0
        self.odd_is_due = self._since_odd + 1 == self._odd_every
        return any_before

    def make_odd(self, extra: ExtraMemory) -> PlannedStep:
        """Make `odd`, which needs plans for `extra` memory."""
        self.odd = odd = copy(self)
        odd.recent_extra, odd._unused = self.recent_extra.copy(), deque(maxlen=RECENT_STEPS)
        odd.reset_for(extra)
        return odd

    def learn_inner_memory(self, unused: Mapping[tuple[int, int], int], spare_bytes: int) -> bool:
        """Note bytes that a step like this one did not allocate between two hooks, although the recorded step did. The maximum
        over the latest steps limits an operator's internal memory. Only the recorded step needed more, for example to try out
        kernels. Returns True if the difference exceeds `spare_bytes`. Then corrects the trace and forgets its plans."""
        self._same_unused = self._same_unused + 1 if self._unused and self._unused[-1] == unused else 0
        self._unused.append(unused)
        # Equal to all the latest steps: the earlier result still applies.
        if len(self._unused) < RECENT_STEPS or self._same_unused > RECENT_STEPS:
            return False
        recorded, until = self._recorded, self.allocated_until
        inner_bytes, passed_bytes = recorded.op_inner_bytes.copy(), recorded.op_passed_bytes.copy()
        for since, later in unused:
            allocated = until[later] - (until[since] if since >= 0 else 0)
            most_bytes = allocated - min(step.get((since, later), 0) for step in self._unused)
            ticks = self.ticks_between(since, later)
            ops = slice(*np.searchsorted(recorded.op_tick, (ticks.start, ticks.stop)).tolist())
            inner_bytes[ops] = np.minimum(inner_bytes[ops], most_bytes)
            passed_bytes[ops] = np.minimum(passed_bytes[ops], most_bytes)
        if int((recorded.op_inner_bytes - inner_bytes).max(initial=0)) <= spare_bytes:
            return False
        self._recorded = dataclasses.replace(recorded, op_inner_bytes=inner_bytes, op_passed_bytes=passed_bytes)
        self.allocated_until = self._cumulative()
        self._unused.clear()
        self.reset_for(self.extra)
        return True

    def recorded_more(self, spare_bytes: int) -> bool:
        """True if the recorded step was odd: it allocated more between two hooks than each of the latest two steps."""
        if self.predicted_by is not None or len(self._unused) < 2:
            return False
        before, latest = self._unused[-2], self._unused[-1]
        return any(min(nbytes, before.get(hooks, 0)) > spare_bytes for hooks, nbytes in latest.items())

    def _cumulative(self) -> list[int]:
        trace = self._recorded
        born = trace.tensor_born >= 0
        made = np.bincount(trace.tensor_born[born], allocated_size(trace.tensor_bytes[born]), trace.num_ticks + 1)
        made[trace.op_tick] += trace.op_inner_bytes + trace.op_passed_bytes
        allocated_until: list[int] = np.cumsum(made)[self._by_hook].astype(np.int64).tolist()
        return allocated_until


def _program_waits_us(trace: Trace, plan: SwapPlan, link: LinkCost) -> float:
    """Return the simulated waits of the program's own copies."""
    try:
        return simulate(trace, plan, link).program_waits_us
    except ValueError:  # an impossible plan has no prediction; it costs only time
        return 0.0
