"""Match a running step, hook for hook, with a cached step, and return the rows of its plan that are due at each hook.

    adaptation = plan_steps(executor, ...)          # a `PlanFollower` is the executor's director from the next step on

A step follows the cached step with which it agrees so far. If it agrees with no cached step, it has diverged. It then uses the
default rule, and memory is checked as without a plan. A wrong plan costs time, never correctness or the budget.
`swap/director.py` lists the methods and their order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from chameleon_mm.device import Stream
from chameleon_mm.device.uncompiled import import_dynamo
from chameleon_mm.follow.adaptation import Adaptation, FollowedStep, StepEntry, Steps, recomputes
from chameleon_mm.follow.link_rates import UNMEASURED_LINK, rates_of
from chameleon_mm.follow.planned_step import PlannedStep, PlanTrial
from chameleon_mm.follow.structure import MOST_VARIABLES, ExtraMemory
from chameleon_mm.plan.step_program import Row, StepProgram
from chameleon_mm.plan.timing import LinkCost
from chameleon_mm.plan.trace import FIXED_STORAGE, NEW_STORAGE
from chameleon_mm.plan.unswapped_memory import place_at
from chameleon_mm.pool.pool import PinnedPool
from chameleon_mm.record.light_profiler import EARLIER_STEP, LatestHook, LightProfiler
from chameleon_mm.record.recorder import Recorder
from chameleon_mm.swap.budget import Budget
from chameleon_mm.swap.director import Director
from chameleon_mm.swap.executor import Executor
from chameleon_mm.swap.handles import NO_HOOK
from chameleon_mm.swap.host_copy import State
from chameleon_mm.swap.metrics import StepKind
from chameleon_mm.swap.recomputing import RecomputePlan
from chameleon_mm.swap.saved_storage import SavedStorage
from chameleon_mm.swap.way import Way

# --- Difference in bytes between a step's allocation and the allocation of the cached step that it follows


class StepMemory:
    """Bytes that a step allocates in addition to its trace, and bytes of the trace that it does not allocate."""

    def __init__(self) -> None:
        self.at_first_hook = ExtraMemory()
        """Memory allocated at the first hook in addition to the planned step's."""
        self.spikes: dict[int, int] = {}
        """Bytes allocated in addition to the trace, by tick of the trace: both planned and unplanned bytes."""
        self.unused: dict[tuple[int, int], int] = {}
        """Bytes not allocated, as in `FollowedStep`."""
        self.exceeded_plan = False
        self.lacking_bytes, self.lacking_at = 0, -1
        """Maximum bytes above the plan's at a check, if the plan had no room for them, and the tick of that hook."""

    def compare(self, wanted_bytes: int, hook: int, planned: PlannedStep, program: StepProgram, budget: Budget) -> None:
        """Compare `wanted_bytes`, allocated at a check or at most until the next check, with the bytes of `program` there."""
        if wanted_bytes > max(budget.hbm_budget_bytes, program.plan.hbm_budget_bytes):
            beyond_bytes = wanted_bytes - planned.most_until_check(program, hook)
            if beyond_bytes > self.lacking_bytes:
                self.lacking_bytes, self.lacking_at = beyond_bytes, int(planned.trace.hook_tick[hook])

    def differs(
        self, more_bytes: int, since: int, hook: int, planned: PlannedStep, program: StepProgram | None, budget: Budget
    ) -> bool:
        """Note that `more_bytes` more (fewer if negative) were allocated between two hooks than in `planned`. Additional bytes
        are assumed at the interval's peak. Returns True if they exceed the room in the plan, `program`."""
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
        room_bytes = max(budget.hbm_budget_bytes, program.plan.hbm_budget_bytes) - int(allocated.max())
        beyond_bytes = more_bytes - spike_bytes
        if beyond_bytes > room_bytes:
            # Limit it by the device's measured peak, which also covers time before this step.
            beyond_bytes = min(beyond_bytes, budget.peak_allocated_bytes() - int(allocated.max()))
        if beyond_bytes <= room_bytes:
            return False
        # A step that took more than its trace may take more again.
        self.spikes[ticks.start + int(allocated.argmax()) if tick is None else tick] = spike_bytes + beyond_bytes
        self.exceeded_plan = True
        return True


# --- plan follower

_NONE = -1


class PlanFollower(Director):
    """Director that follows the plan of the cached step with which the running step agrees. `adaptation` names the expected
    step, makes plans, and learns from finished steps."""

    plans = True  # the executor then calls it at every hook

    def __init__(self, adaptation: Adaptation) -> None:
        self.adaptation = adaptation
        self.light: LightProfiler = LightProfiler()
        self._epoch = -1
        self._last_entry: StepEntry | None = None
        """Cached step with which the last step agreed to its end."""
        self._budget: Budget | None = None
        self._steps: Steps | None = None
        """Step cache; None between steps."""
        self._recorder: Recorder | None = None
        self._forget_step()

    @property
    def recompute(self) -> RecomputePlan | None:
        return None if self.followed is None else self.followed.recompute

    @property
    def may_recompute(self) -> bool:
        return self._may_recompute

    def replan(self) -> None:
        self.adaptation.replan()

    def begin_step(self, epoch: int, budget: Budget, compute: Stream) -> Recorder | None:
        recorder = self.adaptation.begin_step(compute)
        self._forget_step()
        self._epoch, self._budget = epoch, budget
        self._steps, self._recorder = self.adaptation.steps, recorder
        self._follow(self.adaptation.steps.current, budget)
        self._may_recompute = any(map(recomputes, self.adaptation.steps.entries()))
        return recorder

    def end_step(self, recorder: Recorder | None, growth_bytes: int, *, completed: bool) -> StepKind:
        num_hooks, entry = self.light.num_hooks, self._entry
        self.note_growth(growth_bytes, at_hook=entry is not None and entry.record.num_hooks == num_hooks, hook=num_hooks)
        extra = self._extra_memory(completed=completed)
        step = FollowedStep(
            record=self.light.end_step(),
            followed=self.followed,
            whole=self._recorder is not None,
            recorded_hooks=self._recorded_hooks if self._recorder is None else num_hooks,
            extra=extra,
            unused=self._memory.unused,
            exceeded_plan=self._memory.exceeded_plan,
            had_plan=self._had_plan,
            followed_plan=self._budget is not None and self._budget.way is not None,
        )
        self._last_entry = None if self._diverged else self._entry
        for fingerprint in self._predicted:
            if fingerprint != step.record.fingerprint:
                self.adaptation.steps.forget(fingerprint)
        self._forget_step()
        return self.adaptation.end_step(step, recorder, completed=completed)

    def change_budget(self, hbm_budget_bytes: int, host_budget_bytes: int | None, *, must_fit: bool) -> None:
        self.adaptation.change_budget(hbm_budget_bytes, host_budget_bytes, must_fit=must_fit)

    def _forget_step(self) -> None:
        """Forget the step, and all references through it to the model. No plan is followed until the next step."""
        self.light.begin_step()
        self._steps = self._recorder = None
        self._entry: StepEntry | None = None
        """Cached step with which this step agrees, or agreed last."""
        self._planned: PlannedStep | None = None
        """Plans of the cached step; None: it has no plans."""
        self._recorded_hooks = 0
        self._predicted: list[int] = []
        """Fingerprints of the steps that were predicted from this step's sizes."""
        self._diverged = False
        self._first_saves: dict[int, SavedStorage] = {}
        """Storages of this step by the hook of their first save. Retired storages, without device memory, are included."""
        self.followed: PlanTrial | None = None
        """Trial whose plan this step follows or followed."""
        self.way: Way | None = None
        self._may_recompute = False
        self._first_bytes = 0
        """Bytes allocated at the first hook."""
        self._memory = StepMemory()
        self._checked_at, self._growth_bytes = _NONE, 0
        """Hook of the latest check of memory that every step like this one makes, under any plan, and the growth since then."""
        self._had_plan = False
        if self._budget is not None:
            self._budget.expect(self._budget.headroom.need)
        self._budget = None

    # --- the hooks

    def on_save(self, t: Tensor, saved: SavedStorage | None, finished: Sequence[SavedStorage]) -> int:
        if self._steps is None:  # outside of steps, where hook numbers would never be reset
            return NO_HOOK
        hook = self.light.num_hooks
        first = False
        if saved is None:
            since = FIXED_STORAGE
        else:
            first, hooks_ago = saved.slot.note_save(self._epoch, hook)
            since = NEW_STORAGE if hooks_ago is None else hooks_ago
        expected = self.light.saved(t, since)
        if self._recorder is not None:
            self._recorder.sendable(*(over.slot.traced for over in finished))
            if first and saved is not None and saved.device is not None:
                saved.slot.note_traced(self._recorder.add_claim(saved.device))
            self._recorder.on_save([None if saved is None else saved.slot.traced])
        self._locate(hook, expected=expected)
        if first and saved is not None:
            self._first_saves[hook] = saved
            self._number(saved, hook, None if self._diverged else self.way)
            if self._planned is not None and self._planned.predicted_by is not None and not self._diverged:
                self._compare_size(saved, hook)
        return hook

    def on_use(self, saved_at: tuple[int, int], saved: SavedStorage | None, finished: Sequence[SavedStorage]) -> None:
        if self._steps is None:
            return
        epoch, at_hook = saved_at
        save = at_hook if epoch == self._epoch and at_hook != NO_HOOK else EARLIER_STEP
        hook = self.light.num_hooks
        expected = self.light.used(save)
        if self._recorder is not None:
            self._recorder.sendable(*(over.slot.traced for over in finished))
            self._recorder.on_use([None if saved is None else saved.slot.traced])
        self._locate(hook, expected=expected)

    def due(self) -> Sequence[Row]:
        return () if self.way is None or self._diverged else self.way.due(self.light.num_hooks - 1)

    def note_held(self, saved: SavedStorage, number: int) -> None:
        if self.way is not None:
            saved.number = number
            self.way.storages[number] = saved

    # --- the loop

    def may_loop(self) -> bool:
        way, budget = self.way, self._budget
        if way is None or budget is None or budget.way is not way or self._diverged or self._recorder is not None:
            return False
        hook = self.light.num_hooks - 1
        return way.is_up_to(hook) and way.program.rows[hook + 1].key is not None

    def rejoin(self, hook: int, latest: LatestHook) -> None:
        self.light.rejoin(hook, latest)
        if self.way is not None:
            self.way.rejoin(hook)

    def note_restored(self, saved: SavedStorage, storage: torch.UntypedStorage) -> None:
        if self._recorder is not None:
            self._recorder.restored(saved.slot.traced, storage)

    # --- position in the cached step

    def _locate(self, hook: int, *, expected: bool) -> None:
        """Check whether this hook agrees with the cached step, and advance the plan to it. `expected`: the hook's feature
        equals that of the followed step."""
        assert self._steps is not None and self._budget is not None
        if not self._diverged and (not expected or hook == 0 or self._recorder is not None):
            self._follow_or_diverge(self._steps, self._budget, hook)
        if self._diverged:
            return
        if self.way is not None:
            self.way.at(hook)
            self._had_plan = True

    def _follow_or_diverge(self, steps: Steps, budget: Budget, hook: int) -> None:
        if steps.follow(hook, self.light.feature) or self._predict(steps, hook):
            another = steps.current is not self._entry
            if another:
                self._follow(steps.current, budget)
            if hook == 0:
                self._first_bytes = budget.allocated_bytes()
            if hook == 0 or another:
                self._compare_memory(budget)
            self._may_recompute = self._may_recompute and any(map(recomputes, steps.agreeing()))
            if self._recorder is not None and not any(map(self.adaptation.wants_trace, steps.agreeing())):
                self._recorder.stop()  # no step that this may still be needs a trace
                self._recorder, self._recorded_hooks = None, hook + 1
        else:
            self._diverge(budget)

    def _diverge(self, budget: Budget) -> None:
        self._diverged = True
        budget.expect(budget.headroom.most)

    def _predict(self, steps: Steps, hook: int) -> bool:
        """Follow a step predicted from recorded steps that differ only in sizes. Returns False if there is no prediction."""
        if len(self._predicted) >= MOST_VARIABLES:  # at most one prediction per variable size
            return False
        predicted = self.adaptation.predict(self.light.beginning)
        if predicted is None:
            return False
        steps.adopt(hook, *predicted)
        self._predicted.append(predicted[0].fingerprint)
        return True

    def _compare_memory(self, budget: Budget) -> None:
        """Make the plan again if it assumes less memory than is allocated at the first hook: it would exceed its budget."""
        if self._planned is None:
            return
        plans, extra = self._planned.trials, self._planned.extra_at(self._first_bytes, asks=self.light.latest().last_used < 0)
        if not self.adaptation.has_room(self._planned, extra):
            self._diverge(budget)  # the default rule applies to this step
        elif self._planned.trials is not plans:
            self._follow(self._entry, budget)
        self._memory.at_first_hook = extra

    def note_growth(self, nbytes: int, *, at_hook: bool, hook: int | None = None) -> None:
        self._growth_bytes += nbytes
        hook = self.light.num_hooks - 1 if hook is None else hook
        planned, budget, way = self._planned, self._budget, self.way
        if budget is not None and budget.wanted_bytes:
            wanted_bytes, budget.wanted_bytes = budget.wanted_bytes, 0
            if planned is not None and way is not None and budget.way is way:
                self._memory.compare(wanted_bytes, hook, planned, way.program, budget)
        if not at_hook:
            return
        since, self._checked_at = self._checked_at, hook
        growth_bytes, self._growth_bytes = self._growth_bytes, 0
        if planned is None or self._diverged or budget is None or hook <= since:
            return
        until = planned.allocated_until
        more_bytes = growth_bytes - until[hook] + (until[since] if since >= 0 else 0)
        program = None if way is None else way.program
        if more_bytes and self._memory.differs(more_bytes, since, hook, planned, program, budget):
            budget.expect(budget.headroom.most)  # the plan's forecast is too low for the rest of the step
        if self.way is not None:
            self.way.margin_bytes = planned.margin_bytes  # a step with open sizes may have widened it

    def _extra_memory(self, *, completed: bool) -> ExtraMemory:
        """Return the step's memory in addition to its trace. If it `completed`, warn about bytes above its plan."""
        memory, planned, budget, way = self._memory, self._planned, self._budget, self.way
        extra = replace(memory.at_first_hook, spikes=memory.spikes)
        proves = self.recompute is not None and not self.recompute.is_typical  # such a step keeps storages that the plan drops
        if not completed or planned is None or budget is None or way is None or self._diverged or proves:
            return extra
        lacking_bytes, peak_bytes, plan = memory.lacking_bytes, budget.peak_watch.peak().at_least_bytes, way.program.plan
        passed = peak_bytes > max(budget.hbm_budget_bytes, plan.hbm_budget_bytes)
        if passed and budget.way is way:
            lacking_bytes = max(lacking_bytes, peak_bytes - plan.peak_bytes)
        if passed or memory.exceeded_plan:  # else there was room
            place = str(place_at(planned.trace, memory.lacking_at))
            self.adaptation.tell_lack(max(lacking_bytes, *memory.spikes.values(), 0), f" in {place}" if place else "")
        if lacking_bytes:
            memory.exceeded_plan = True
            extra |= ExtraMemory(extra_bytes=planned.extra.extra_bytes + lacking_bytes)
        return extra

    def growth(self) -> tuple[int, int, list[int]] | None:
        planned = self._planned
        return None if planned is None else (self._checked_at, self._growth_bytes, planned.allocated_until)

    def note_checked(self, checked_at: int, nbytes: int) -> None:
        self._checked_at, self._growth_bytes = checked_at, nbytes

    def _follow(self, entry: StepEntry | None, budget: Budget) -> None:
        """Follow `entry` from now on, with which the step's hooks agree so far."""
        self._entry = entry
        if entry is not None:
            self.adaptation.plan_entry(entry)
            self.light.follow(entry.record)
        self._planned = planned = None if entry is None else entry.plan
        self.followed = None if planned is None else planned.current
        self.way = None
        if planned is not None and self.followed is not None:
            self.way = Way(self.followed.program, self._epoch, margin_bytes=planned.margin_bytes, first_saves=self._first_saves)
            self.way.staying = planned.staying
        self._memory = StepMemory()
        # The latest hook is already counted. Rows due before it run late.
        missed = self.way is not None and self.way.program.first_due < self.light.num_hooks - 1
        untouched = all(saved.state is State.ON_DEVICE for saved in self._first_saves.values())
        if self.way is not None and not missed and untouched:
            budget.way = self.way
        elif planned is not None and self._predicted:  # with sizes that no earlier step had
            budget.expect(lambda checks: planned.growth_after(self.light.num_hooks - 1, checks))
        elif planned is None or self.light.num_hooks > 0 or entry is not self._last_entry:
            budget.expect(budget.headroom.most)  # the step may be unlike any earlier step
        else:  # no plan fits the budget, and the previous step was the same cached step
            budget.expect(budget.headroom.need)
        for hook, saved in self._first_saves.items():
            self._number(saved, hook, self.way)

    @staticmethod
    def _number(saved: SavedStorage, hook: int, way: Way | None) -> None:
        """Set the number of `saved`, first saved at `hook`, in the plan of `way`."""
        saved.number = None
        if way is not None and (number := way.program.number_at(hook)) is not None:
            way.number(saved, number)

    def _compare_size(self, saved: SavedStorage, hook: int) -> None:
        """If the prediction has another size for `saved`, discard it, for this step and later steps like it."""
        planned = self._planned
        structure = None if planned is None else planned.predicted_by
        if planned is None or structure is None or structure.has_open_sizes or self._budget is None or self._steps is None:
            return
        tensor = planned.trace.hook_tensor[hook]
        if tensor >= 0 and planned.trace.tensor_bytes[tensor] != saved.nbytes:
            structure.was_wrong = True
            self._diverge(self._budget)
            self._steps.forget(planned.record.fingerprint)


# --- Record, plan and follow the steps of an executor


def plan_steps(
    executor: Executor,
    pool: PinnedPool,
    *,
    model: nn.Module | None = None,
    link_cost: LinkCost | None = None,
    replayable: frozenset[str] = frozenset(),
    is_hidden: Callable[[torch.UntypedStorage], bool] = lambda storage: False,
) -> Adaptation:
    """Record, plan and follow the steps of `executor`, which has a budget, from the next step on.

    `model`: its parameters and buffers determine the kinds of recorded storages. `link_cost`: cost of the link until copies are
    timed. `replayable`: base names of operators that may run again. `is_hidden(storage)`: True if the storage's memory is not
    part of plans.
    """
    import_dynamo()  # now: the first step's recorder would import it anyway
    me, metrics, names = weakref.ref(executor), executor.metrics, executor.names  # weak: the executor holds its director
    device, model_of = executor.device, (lambda: None) if model is None else weakref.ref(model)  # weak: the user's
    adaptation = Adaptation(
        metrics,
        hbm_budget_bytes=executor.budget.hbm_budget_bytes,
        slack_bytes=device.block_slack_bytes,
        host_budget=lambda: pool.limit_bytes,
        make_recorder=lambda: Recorder(
            device,
            model=model_of(),
            is_hidden=is_hidden,
            warn=metrics.warn,
            names=names,
            reclaim_some=lambda nbytes, busy: (it := me()) is not None and it.reclaim_some(nbytes, busy),
        ),
        replayable=replayable,
        min_bytes=executor.min_bytes,
        link_cost=lambda: rates_of(metrics.resolve(), link_cost or UNMEASURED_LINK),
    )
    adaptation.cache_flushes = device.cache_flushes
    executor.director = PlanFollower(adaptation)
    return adaptation
