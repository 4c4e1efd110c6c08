"""Follows a running step along the cached step that it agrees with, and says what that one's plan has due at each hook.

    executor.director = PlanFollower(adaptation)    # from the next step on (`plan_steps.py`)

A step follows the cached step that it agrees with so far. Once it agrees with none, it has diverged: from there on it goes by
the default rule, and memory is checked as if there were no plan: a wrong plan costs time, never correctness or the budget. The
methods, and the order in which they are called: `executor/director.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from chameleon_mm.adaptive.adaptation import Adaptation, StepEntry, Steps, recomputes
from chameleon_mm.adaptive.extra_memory import ExtraMemory
from chameleon_mm.adaptive.followed_step import FollowedStep
from chameleon_mm.adaptive.hook_schedule import BEHIND_ALL, NO_ACTIONS, HookSchedule, ScheduleCursor
from chameleon_mm.adaptive.plan_trial import PlanTrial
from chameleon_mm.adaptive.planned_step import PlannedStep
from chameleon_mm.adaptive.step_memory import StepMemory
from chameleon_mm.adaptive.structure import MOST_VARIABLES
from chameleon_mm.device import Stream
from chameleon_mm.executor.budget import Budget
from chameleon_mm.executor.director import NOTHING_DUE, ON_SAVE, Director, HookActions
from chameleon_mm.executor.forecasts import PlanForecast, TraceForecast
from chameleon_mm.executor.recompute_plan import RecomputePlan
from chameleon_mm.executor.way import Way
from chameleon_mm.policy import ActionKind, StorageAction
from chameleon_mm.profiler.light import FIXED_STORAGE, NEW_STORAGE, LightProfiler
from chameleon_mm.profiler.recorder import Recorder
from chameleon_mm.profiler.step_record import EARLIER_STEP, feature_hash
from chameleon_mm.saved.handles import NO_HOOK
from chameleon_mm.saved.saved_storage import SavedStorage
from chameleon_mm.saved.state import State
from chameleon_mm.saved.timed_spans import StepKind

_NONE = -1


class PlanFollower(Director):
    """Follows the plan of the cached step that the running one agrees with. `adaptation` says which step is expected, makes
    plans, and learns from what came."""

    plans = True  # so that the executor tells it of every hook

    __slots__ = (
        "_budget", "_checked_at", "_cursor", "_diverged", "_due", "_entry", "_epoch", "_first_bytes", "_first_saves",
        "_growth_bytes", "_had_plan", "_last_entry", "_may_recompute", "_memory", "_plan_forecast", "_planned", "_predicted",
        "_reached", "_recorded_hooks", "_recorder", "_schedule", "_steps", "_storages", "_trace_forecast", "adaptation",
        "at_rest_until", "followed", "light",
    )  # fmt: skip

    def __init__(self, adaptation: Adaptation) -> None:
        self.adaptation = adaptation
        self.light: LightProfiler = LightProfiler()
        self._plan_forecast = PlanForecast()
        self._trace_forecast = TraceForecast()
        self._epoch = -1
        self._last_entry: StepEntry | None = None
        """The cached step that the last one agreed with to its end."""
        self._budget: Budget | None = None
        self._steps: Steps | None = None
        """The step cache; None outside of steps."""
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

    def end_step(self, recorder: Recorder | None, compute: Stream, growth_bytes: int, *, completed: bool) -> StepKind:
        num_hooks, entry = self.light.num_hooks, self._entry
        self.note_growth(growth_bytes, at_hook=entry is not None and entry.record.num_hooks == num_hooks, hook=num_hooks)
        step = FollowedStep(
            record=self.light.end_step(),
            followed=self.followed,
            whole=self._recorder is not None,
            recorded_hooks=self._recorded_hooks if self._recorder is None else num_hooks,
            extra=ExtraMemory(extra_bytes=self._memory.extra_bytes, spikes=self._memory.spikes),
            unused=self._memory.unused,
            exceeded_plan=self._memory.exceeded_plan,
            had_plan=self._had_plan,
            followed_plan=self._budget is not None and self._budget.forecast.follows_plan,
        )
        self._last_entry = None if self._diverged else self._entry
        for fingerprint in self._predicted:
            if fingerprint != step.record.fingerprint:
                self.adaptation.steps.forget(fingerprint)
        self._forget_step()
        return self.adaptation.end_step(step, recorder, compute, completed=completed)

    def change_budget(self, hbm_budget_bytes: int, host_budget_bytes: int | None, *, must_fit: bool) -> None:
        self.adaptation.change_budget(hbm_budget_bytes, host_budget_bytes, must_fit=must_fit)

    def _forget_step(self) -> None:
        """Forget the step, and all that leads through it to the model. What comes until the next one follows nothing."""
        self.light.begin_step()
        self._steps = self._recorder = None
        self._entry: StepEntry | None = None
        """The cached step that this one agrees with, or did last."""
        self._planned: PlannedStep | None = None
        """The cached step's plans; None: it has none."""
        self._recorded_hooks = 0
        self._predicted: list[int] = []
        """Fingerprints of the steps that this one was taken for because of its sizes."""
        self._diverged = False
        self.at_rest_until = 0
        self._reached = _NONE
        """The furthest of the cached step's hooks so far."""
        self._first_saves: dict[int, SavedStorage] = {}
        """First saves by hook of this step, retired ones included, which hold no device memory any more."""
        self._storages: dict[int, SavedStorage] = {}
        """Saved storages by the plan's number of the storage."""
        self.followed: PlanTrial | None = None
        """The trial whose plan this step follows, or did."""
        self._schedule: HookSchedule | None = None
        self._may_recompute = False
        self._cursor: ScheduleCursor | None = None
        self._due = NO_ACTIONS
        self._first_bytes = 0
        """Bytes allocated at the first hook."""
        self._memory = StepMemory()
        self._checked_at, self._growth_bytes = _NONE, 0
        """Hook of the last check of memory that every step like this one makes, and the growth since then."""
        self._had_plan = False
        self._trace_forecast.forget()
        if self._budget is not None:
            self._budget.forecast = self._budget.learned_forecast
        self._budget = None

    # --- the hooks

    def on_save(self, t: Tensor, saved: SavedStorage | None, finished: Sequence[SavedStorage]) -> int:
        if self._steps is None:  # outside of steps nobody would ever begin to number them again
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
            self._recorder.all_sendable(over.slot.traced for over in finished)
            if first and saved is not None and saved.part is None and saved.device is not None:
                saved.slot.note_traced(self._recorder.add_claim(saved.device))
            self._recorder.on_save([None if saved is None else saved.slot.traced], feature_hash(self.light.feature))
        self._locate(hook, expected=expected)
        if first and saved is not None and saved.part is None:
            self._first_saves[hook] = saved
            schedule = None if self._diverged else self._schedule
            action = None if schedule is None else schedule.storage_actions.get(hook)
            saved.planned = action
            if action is not None:
                self._storages[action.tensor] = saved
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
            self._recorder.all_sendable(over.slot.traced for over in finished)
            self._recorder.on_use([None if saved is None else saved.slot.traced], feature_hash(self.light.feature))
        self._locate(hook, expected=expected)

    def saves_at_rest(self, t: Tensor) -> int:
        hook, cursor = self.light.num_hooks, self._cursor
        is_first = not (hook or self._steps is None or self._recorder or self._diverged or (cursor and not cursor.next_hook))
        if not (is_first or hook < self.at_rest_until) or not self.light.save_agrees(t):
            return ON_SAVE
        if is_first:
            self._locate(hook, expected=True)
        return hook

    def uses_at_rest(self, saved_at: tuple[int, int]) -> bool:
        if self.light.num_hooks >= self.at_rest_until:
            return False
        epoch, at_hook = saved_at
        return self.light.use_agrees(at_hook if epoch == self._epoch and at_hook != NO_HOOK else EARLIER_STEP)

    def note_held(self, saved: SavedStorage, number: int) -> None:
        if self._schedule is not None:
            saved.planned = StorageAction(number, self._schedule.held_actions.get(number))
            self._storages[number] = saved

    # --- the loop

    def way(self) -> Way | None:
        planned, trial, budget = self._planned, self.followed, self._budget
        if planned is None or trial is None or budget is None or self._cursor is None or self._diverged:
            return None
        if self._recorder is not None or self._may_recompute or budget.forecast is not self._plan_forecast:
            return None
        if self._due is not NO_ACTIONS or (program := planned.program_of(trial)) is None:
            return None
        return Way(
            program=program,
            epoch=self._epoch,
            hook=self.light.num_hooks - 1,
            numbers=self.light.numbers(),
            storages=self._storages,
            first_saves=self._first_saves,
            actions=trial.schedule.storage_actions,
            forecast=self._plan_forecast,
            margin_bytes=planned.margin_bytes,
        )

    def rejoin(self, hook: int, thread: int, numbers: dict[int, int]) -> None:
        self.light.rejoin(hook, thread, numbers)
        self._reached = hook
        if self._cursor is not None:
            self._cursor.advance_to(hook)  # the loop has done it
            self.at_rest_until = self._cursor.next_hook

    def note_restored(self, saved: SavedStorage, storage: torch.UntypedStorage) -> None:
        if self._recorder is not None:
            self._recorder.restored(saved.slot.traced, storage)

    # --- which hook of the cached step it is

    def _locate(self, hook: int, *, expected: bool) -> None:
        """Find out whether this hook is the cached step's, and collect what is due up to it. `expected`: it has the feature
        that the followed step has here."""
        assert self._steps is not None and self._budget is not None
        if not self._diverged and (not expected or hook == 0 or self._recorder is not None):
            self._follow_or_diverge(self._steps, self._budget, hook)
        if self._diverged:
            return
        if self._schedule is not None and self._planned is not None and self._budget.forecast.follows_plan:
            self._plan_forecast.hook = hook
            self._plan_forecast.growth_bytes = self._schedule.growth[hook] + self._planned.margin_bytes
        else:
            self._trace_forecast.hook = hook
        if hook > self._reached:
            self._reached = hook
            if self._cursor is not None:
                self._had_plan = True
                due = self._cursor.advance_to(hook) if hook >= self._cursor.next_hook else None
                if due is not None:  # what the step missed before it turned out to be this one comes first
                    self._due = due if self._due is NO_ACTIONS else self._due.with_later(due)
        if self._recorder is None:
            self.at_rest_until = BEHIND_ALL if self._cursor is None else self._cursor.next_hook

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
                self._recorder.stop()  # whatever it turns out to be needs no trace
                self._recorder, self._recorded_hooks = None, hook + 1
        else:
            self._diverge(budget)

    def _diverge(self, budget: Budget) -> None:
        self._diverged, self.at_rest_until = True, 0
        budget.forecast = budget.highest_forecast

    def _predict(self, steps: Steps, hook: int) -> bool:
        """Take the step for one that those recorded tell of: the same but for its sizes."""
        if len(self._predicted) >= MOST_VARIABLES:  # one for each that a step may show
            return False
        predicted = self.adaptation.predict(self.light.beginning)
        if predicted is None:
            return False
        steps.adopt(hook, *predicted)
        self._predicted.append(predicted[0].fingerprint)
        return True

    def _compare_memory(self, budget: Budget) -> None:
        """Have the plan made anew if it counts on less memory than is allocated at the first hook: it would pass its
        budget."""
        if self._planned is None:
            return
        extra_bytes = max(0, self._first_bytes - self._planned.first_hook_bytes)
        if self.adaptation.needs_more(self._planned, extra_bytes):
            self._follow(self._entry, budget)
        self._memory.extra_bytes = extra_bytes

    def note_growth(self, nbytes: int, *, at_hook: bool, hook: int | None = None) -> None:
        """Note growth; `at_hook`, compare all since the last comparison with the cached step's. `hook`: None is the latest."""
        self._growth_bytes += nbytes
        if not at_hook:
            return
        hook = self.light.num_hooks - 1 if hook is None else hook
        since, self._checked_at = self._checked_at, hook
        growth_bytes, self._growth_bytes = self._growth_bytes, 0
        planned, budget = self._planned, self._budget
        if planned is None or self._diverged or budget is None or hook <= since:
            return
        until = planned.allocated_until
        more_bytes = growth_bytes - until[hook] + (until[since] if since >= 0 else 0)
        if more_bytes and self._memory.differs(more_bytes, since, hook, planned, self._schedule, budget):
            budget.forecast = budget.highest_forecast  # for the rest of the step the plan's forecast is not enough

    def _follow(self, entry: StepEntry | None, budget: Budget) -> None:
        """Follow `entry` from now on, with which the hooks of the step agree so far."""
        self._entry = entry
        if entry is not None:
            self.adaptation.plan_entry(entry)
            self.light.follow(entry.record)
        self._planned = planned = None if entry is None else entry.plan
        self.followed = None if planned is None else planned.current
        self._schedule = None if self.followed is None else self.followed.schedule
        if planned is not None and self.recompute is not None:
            self.recompute.is_on_trial = not planned.is_decided
        self._cursor = None if self._schedule is None else self._schedule.begin_step()
        self._storages = {}
        self._memory = StepMemory()
        # What was due up to the hook before this one, which is counted already.
        missed = None if self._cursor is None else self._cursor.advance_to(self.light.num_hooks - 2)
        self._due = missed or NO_ACTIONS
        untouched = all(saved.state is State.ON_DEVICE for saved in self._first_saves.values())
        if self._schedule is not None and missed is None and untouched:
            budget.forecast, self._plan_forecast.backs = self._plan_forecast, self._schedule.backs
        elif planned is not None and self._predicted:  # of a size like no step before
            self._trace_forecast.follow(planned.growth_after, self.light.num_hooks - 1)
            budget.forecast = self._trace_forecast
        elif planned is None or self.light.num_hooks > 0 or entry is not self._last_entry:
            budget.forecast = budget.highest_forecast  # it may be like no step before
        else:  # a cached step that has no plan within the budget, as the one before it
            budget.forecast = budget.learned_forecast
        for hook, saved in self._first_saves.items():
            action = None if self._schedule is None else self._schedule.storage_actions.get(hook)
            saved.planned = action
            if action is not None:
                self._storages[action.tensor] = saved

    def _compare_size(self, saved: SavedStorage, hook: int) -> None:
        """Trust what was predicted no more if it has another size for `saved`: neither now nor in later steps like this one."""
        planned = self._planned
        structure = None if planned is None else planned.predicted_by
        if planned is None or structure is None or structure.has_open_sizes or self._budget is None or self._steps is None:
            return
        tensor = planned.trace.hook_tensor[hook]
        if tensor >= 0 and planned.trace.tensor_bytes[tensor] != saved.nbytes:
            structure.note_misprediction()
            self._diverge(self._budget)
            self._steps.forget(planned.record.fingerprint)

    # --- what is due

    def due(self, finished: Sequence[SavedStorage]) -> HookActions:
        due, self._due = self._due, NO_ACTIONS
        if due is NO_ACTIONS and not finished:
            return NOTHING_DUE
        reclaims, outs, ins, drops = due
        storages = self._storages
        to_drop = [storages[a.tensor] for a in drops if a.tensor in storages] if drops else []
        swap_outs: list[tuple[SavedStorage, int | None]] = []
        for a in outs:
            if a.tensor in storages:
                swap_outs.append((storages[a.tensor], a.nbytes))  # noqa: PERF401 - a comprehension is one more call
        for saved in finished:
            if saved.planned is None:
                swap_outs.append((saved, None))
            elif saved.planned.action is not None and saved.planned.action.out_at <= self._reached:
                if saved.planned.action.kind is not ActionKind.RECOMPUTE:
                    swap_outs.append((saved, saved.planned.action.nbytes))
                elif saved not in to_drop:
                    to_drop.append(saved)
        to_reclaim = [(storages[a.tensor], a.nbytes, a.again) for a in reclaims if a.tensor in storages] if reclaims else ()
        prefetches = [storages[a.tensor] for a in ins if a.tensor in storages] if ins else ()
        return HookActions(to_reclaim, swap_outs, check_memory=bool(reclaims or drops), prefetches=prefetches, drops=to_drop)
