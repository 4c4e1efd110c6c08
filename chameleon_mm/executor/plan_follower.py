"""Finds where a running step is among the steps that are cached, and what the plan of the one that it is has due.

    follower.begin_step(cache, recorder, ...)             # the step that is expected, if any
    hook = follower.on_save(t, saved, finished)           # every save: which hook of the cached step it is
    follower.on_use(saved_at, saved, finished)            # every use
    follower.reclaim_due(); follower.swap_out_due(finished)     # what is due at this hook, in the order of policy/plan.py
    follower.note_growth(nbytes)                          # at a check of memory: what the model allocated since the last one
    follower.note_restored(saved, storage)
    follower.prefetch_due(compute)
    outcome = follower.end_step(grown_bytes)

A step follows the cached one that it agrees with so far. Once it agrees with none it has diverged: its hooks are matched by
features with those of the last one that it agreed with. A hook that is found there follows that plan, the others fall to the
default rule, and memory is watched as if there were no plan. Note [No plan, no harm].
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from chameleon_mm.device import Stream
from chameleon_mm.errors import TransferFailed
from chameleon_mm.executor.budget import BudgetGuard
from chameleon_mm.executor.extra_memory import ExtraMemory
from chameleon_mm.executor.handles import NO_HOOK
from chameleon_mm.executor.hook_schedule import DueActions, HookSchedule, ScheduleCursor
from chameleon_mm.executor.planned_step import PlannedStep, PlanTrial
from chameleon_mm.executor.registry import StorageRegistry
from chameleon_mm.executor.saved_storage import SavedStorage, State
from chameleon_mm.executor.swap_ins import SwapIns
from chameleon_mm.executor.swap_outs import SwapOuts
from chameleon_mm.policy import Action
from chameleon_mm.profiler.light import FIXED_STORAGE, NEW_STORAGE, LightProfiler
from chameleon_mm.profiler.matching import Matcher
from chameleon_mm.profiler.recorder import Recorder
from chameleon_mm.profiler.step_cache import CachedStep, StepCache
from chameleon_mm.profiler.step_record import EARLIER_STEP, StepRecord, feature_hash

_NONE = -1
"""Of a hook: none of the known step's."""

_NOTHING_DUE = DueActions((), (), ())


StepEntry = CachedStep[PlannedStep | None]
"""One that was seen; None: without a trace, so without a plan."""
Known = StepCache[PlannedStep | None]


class FollowedStep(NamedTuple):
    """A step that ended."""

    record: StepRecord
    whole: bool
    """Whether a recorder saw all of it."""
    recorded_hooks: int
    """Those that a recorder saw, from the first one on."""
    need: ExtraMemory
    """What it took beyond what the trace of the step that it was has, as far as it was that one."""
    unused: dict[tuple[int, int], int]
    """Bytes that the known step allocated between two hooks and this one did not, by the hooks."""
    exceeded_plan: bool
    """Whether it took so much more that its plan was no longer trusted."""
    had_plan: bool
    """Whether some hook of it was one of a plan's; `kept_to_plan`: all were, of one plan, which was trusted to the end."""
    kept_to_plan: bool


class PlanFollower:
    """Not thread-safe: the executor holds its lock."""

    def __init__(self, registry: StorageRegistry, guard: BudgetGuard, outs: SwapOuts, ins: SwapIns) -> None:
        self.light = LightProfiler()
        self._registry = registry
        self._guard = guard
        self._outs = outs
        self._ins = ins
        self._known: Known | None
        self._recorder: Recorder | None
        self._wants: Callable[[StepEntry], bool] | None
        self._needs_more: Callable[[PlannedStep, int], bool] | None
        self._forget_step()

    def begin_step(
        self,
        known: Known,
        recorder: Recorder | None,
        *,
        wants: Callable[[StepEntry], bool],
        needs_more: Callable[[PlannedStep, int], bool],
    ) -> None:
        """A new step: the one that `known` expects. `recorder` writes it down, for as long as it may be one that `wants` says
        yes to, or a new one.

        `needs_more` is told of a planned, and of how many bytes more than its trace has are allocated at the first hook; it
        returns whether it changed the planned's plans.
        """
        self._forget_step()
        self._known = known
        self._recorder = recorder
        self._wants = wants
        self._needs_more = needs_more
        self._follow(known.current)

    def end_step(self, grown_bytes: int) -> FollowedStep:
        """The step that was; `grown_bytes` as `note_growth` has them. What comes until the next one follows nothing."""
        if self._entry is not None and self._entry.record.num_hooks == self.light.num_hooks:
            self._compare_growth(self._grown_bytes + grown_bytes, self._looked_at, self.light.num_hooks)
        whole = self._recorder is not None
        recorded_hooks = self.light.num_hooks if whole else self._recorded_hooks
        need = ExtraMemory(extra_bytes=self._extra_bytes, spikes=self._spikes)
        seen = FollowedStep(
            self.light.end_step(),
            whole,
            recorded_hooks,
            need,
            self._unused,
            self._exceeded_plan,
            self._had_plan,
            self._guard.trusts_plan,
        )
        self._forget_step()
        return seen

    def _forget_step(self) -> None:
        self.light.begin_step()
        self._known = None
        """None: outside of steps."""
        self._wants = self._needs_more = None
        """Forgotten with the step: they lead to whoever holds this, and through it to the model."""
        self._entry: StepEntry | None = None
        """The known step that this one agrees with, or did last."""
        self._recorder = None
        self._recorded_hooks = 0
        """Of a recorder that was stopped: how many it saw."""
        self._diverged = False
        """Whether there is none that it agrees with any more."""
        self._place_of = array("i")
        """By hook of this step: the number of the known one's."""
        self._reached = _NONE
        """The furthest of the known step's hooks so far."""
        self._first_saves: dict[int, SavedStorage] = {}
        """By hook of this step. Their device memory is theirs to drop: a retired one holds none."""
        self._storages: dict[int, SavedStorage] = {}
        """By the plan's number of the storage."""
        self.followed: PlanTrial | None = None
        """The plan that this step goes by, or did."""
        self._schedule: HookSchedule | None = None
        self._matcher: Matcher | None = None
        self._cursor: ScheduleCursor | None = None
        self._due = _NOTHING_DUE
        self._first_bytes = 0
        """Allocated at the first hook."""
        self._extra_bytes = 0
        """Of these: more than the known step has there."""
        self._looked_at = _NONE
        """The hook of the last check at memory that every step like this one takes; `_grown_bytes` since then."""
        self._grown_bytes = 0
        self._spikes: dict[int, int] = {}
        """By tick of the known step's trace: allocated beyond what it has, as far as plans know or should know of it."""
        self._unused: dict[tuple[int, int], int] = {}
        """Bytes not allocated, as in `FollowedStep`."""
        self._exceeded_plan = self._had_plan = False
        self._guard.trusts_plan = self._guard.diverged = False

    @property
    def follows_plan(self) -> bool:
        """Whether the step is, hook for hook, the one that was planned."""
        return self._guard.trusts_plan

    # --- the hooks

    def on_save(self, t: Tensor, saved: SavedStorage | None, finished: Sequence[SavedStorage]) -> int:
        """Autograd saves `t`, of the storage `saved`, or of one that stays (None). Returns the hook's number in this step.

        `finished`: storages that were saved by operators which are over now.
        """
        if self._known is None:  # outside of steps nobody would ever begin to number them again
            return NO_HOOK
        hook = self.light.num_hooks
        first = False
        if saved is None:
            since = FIXED_STORAGE
        else:
            epoch, last = self._registry.epoch, saved.last_save
            first, saved.followed_in = saved.followed_in != epoch, epoch
            since = hook - last.hook if last.epoch == epoch else NEW_STORAGE
            last.epoch, last.hook = epoch, hook
        expected = self.light.saved(t, since)
        if self._recorder is not None:
            self._record_save(self._recorder, saved, finished, first=first)
        place = self._place(hook, expected, None)
        if first and saved is not None and saved.part is None:
            self._first_saves[hook] = saved
            self._assign_action(saved, place)
        return hook

    def on_use(self, saved_at: tuple[int, int], saved: SavedStorage | None, finished: Sequence[SavedStorage]) -> None:
        """Autograd uses what was saved in that step at that hook, of the storage `saved`, or of one that stayed (None)."""
        if self._known is None:
            return
        epoch, at_hook = saved_at
        save = at_hook if epoch == self._registry.epoch and at_hook != NO_HOOK else EARLIER_STEP
        hook = self.light.num_hooks
        expected = self.light.used(save)
        if self._recorder is not None:
            self._tell_finished(self._recorder, finished)
            self._recorder.on_use([None if saved is None else saved.traced], feature_hash(self.light.feature))
        self._place(hook, expected, save)

    def note_restored(self, saved: SavedStorage, storage: torch.UntypedStorage) -> None:
        """`storage` holds the bytes of `saved`, whose use this is."""
        if self._recorder is not None:
            self._recorder.restored(saved.traced, storage)

    # --- which hook of the known step it is

    def _place(self, hook: int, expected: bool, save: int | None) -> int:
        """`expected`: the followed step's hook. `save`: of a use, the hook of this step that saved it."""
        if self._known is None:
            return _NONE
        if not self._diverged and (not expected or hook == 0 or self._recorder is not None):
            self._follow_or_diverge(self._known, hook)
        place = hook if not self._diverged else self._matched(save)
        if self._guard.trusts_plan and self._schedule is not None:
            self._guard.planned_climb_bytes = self._schedule.climb(place)
        self._place_of.append(place)
        if place > self._reached:
            self._reached = place
            if self._cursor is not None:
                self._had_plan = True
                self._due = self._cursor.advance_to(place) or _NOTHING_DUE
        return place

    def _follow_or_diverge(self, known: Known, hook: int) -> None:
        if known.follow(hook, self.light.feature):
            another = known.current is not self._entry
            if another:
                self._follow(known.current)
            if hook == 0:
                self._first_bytes = self._guard.allocated_bytes()
            if hook == 0 or another:
                self._compare_memory()
            if self._recorder is not None and self._wants is not None and not any(map(self._wants, known.agreeing())):
                self._recorder.stop()  # whatever it turns out to be needs no trace
                self._recorder, self._recorded_hooks = None, hook + 1
        else:
            self._diverged = self._guard.diverged = True
            self._guard.trusts_plan = False
            if self._matcher is not None:
                self._matcher.begin_step(hook)

    def _compare_memory(self) -> None:
        """A plan that counts on less than is allocated at the first hook would pass its budget."""
        if self._entry is None or self._entry.plan is None or self._needs_more is None:
            return
        extra_bytes = max(0, self._first_bytes - self._entry.plan.first_hook_bytes)
        if self._needs_more(self._entry.plan, extra_bytes):
            self._follow(self._entry)
        self._extra_bytes = extra_bytes

    def note_growth(self, nbytes: int, *, at_hook: bool) -> None:
        """The model allocated so much since memory was last checked, freed bytes too. `at_hook`: at this check and at the last
        such one every step that has these hooks looks at it, whatever its plan."""
        self._grown_bytes += nbytes
        if at_hook:
            hook = self.light.num_hooks - 1
            self._compare_growth(self._grown_bytes, self._looked_at, hook)
            self._looked_at, self._grown_bytes = hook, 0

    def _compare_growth(self, grown_bytes: int, since: int, hook: int) -> None:
        """Between two hooks the known step allocated less: all that is more may have come at the worst moment."""
        planned = None if self._entry is None or self._diverged else self._entry.plan
        if planned is None or hook <= since:
            return
        more_bytes = grown_bytes - planned.allocated_between(since, hook)
        if more_bytes <= 0:
            if more_bytes < 0:
                self._unused[since, hook] = -more_bytes
            return
        ticks = planned.ticks_between(since, hook)
        planned_for = planned.need.spikes
        tick = next((tick for tick in planned_for if ticks.start <= tick < ticks.stop), None)
        spike_bytes = 0 if tick is None else planned_for[tick]
        if tick is not None:
            self._spikes[tick] = min(more_bytes, spike_bytes)
        if self._schedule is None:
            return
        allocated = self._schedule.allocated_bytes[ticks]
        room_bytes = self._guard.hbm_budget_bytes - int(allocated.max())
        beyond_bytes = more_bytes - spike_bytes
        if beyond_bytes > room_bytes:
            # No more than the device's own peak says, which is since the session began.
            beyond_bytes = min(beyond_bytes, self._guard.peak_allocated_bytes() - int(allocated.max()))
        if beyond_bytes > room_bytes:
            self._spikes[ticks.start + int(allocated.argmax()) if tick is None else tick] = spike_bytes + beyond_bytes
            # Where it took more than its trace has it may again: predictions of climbs are for the rest of this step.
            self._exceeded_plan = self._guard.diverged = True
            self._guard.trusts_plan = False

    def _matched(self, save: int | None) -> int:
        if self._matcher is None:
            return _NONE
        if save is None:
            place = self._matcher.match(self.light.feature)
        else:
            known_save = self._place_of[save] if save >= 0 else _NONE
            place = self._matcher.match_use(None if known_save == _NONE else known_save)
        return _NONE if place is None else place

    def _follow(self, entry: StepEntry | None) -> None:
        """From here on the step is expected to be `entry`, with which its hooks so far agree."""
        self._entry = entry
        if entry is not None:
            self.light.follow(entry.record)
        planned = None if entry is None else entry.plan
        self.followed = None if planned is None else planned.current
        self._schedule = None if self.followed is None else self.followed.schedule
        self._matcher = None if planned is None or self.followed is None else planned.matcher
        self._cursor = None if self._schedule is None else self._schedule.begin_step()
        self._storages = {}
        self._extra_bytes, self._spikes, self._unused, self._exceeded_plan = 0, {}, {}, False
        behind = None if self._cursor is None else self._cursor.advance_to(self.light.num_hooks - 2)
        self._due = behind or _NOTHING_DUE
        untouched = all(saved.state is State.RESIDENT for saved in self._first_saves.values())
        self._guard.trusts_plan = self._schedule is not None and behind is None and untouched
        # A step that is known to have no plan is like the one before it, hook for hook; any other may be like none.
        self._guard.diverged = not self._guard.trusts_plan and (planned is None or self.light.num_hooks > 0)
        for hook, saved in self._first_saves.items():
            self._assign_action(saved, hook)

    def _assign_action(self, saved: SavedStorage, place: int) -> None:
        saved.planned = None if self._schedule is None else self._schedule.storage_action(place)
        if saved.planned is not None:
            self._storages[saved.planned.tensor] = saved

    # --- what is due

    def reclaim_due(self) -> bool:
        """Compute waits for the copies whose memory is to be given back here. Returns whether the plan has any."""
        for action in self._due.reclaims:
            saved = self._storages.get(action.tensor)
            if saved is None:
                continue
            if saved.state is State.RESIDENT:
                self._send(saved, action)
            if saved.state is State.LEAVING:
                saved.reclaim(in_turn=True)
                self._guard.note_allocated(saved.remains_bytes)
        return bool(self._due.reclaims)

    def swap_out_due(self, finished: Iterable[SavedStorage]) -> None:
        """Queue copies out: what is due, and storages whose operator is over now."""
        for action in self._due.outs:
            saved = self._storages.get(action.tensor)
            if saved is not None:
                self._send(saved, action)
        for saved in finished:
            if saved.planned is None:
                self._outs.send(saved)
            elif saved.planned.action is not None and saved.planned.action.out_at <= self._reached:
                self._send(saved, saved.planned.action)

    def prefetch_due(self, compute: Stream) -> None:
        """Queue the copies back that are due."""
        due, self._due = self._due, _NOTHING_DUE
        for action in due.ins:
            saved = self._storages.get(action.tensor)
            if saved is None or saved.state is not State.ON_HOST or saved.group is not None or saved.first() is not None:
                continue
            if not self.follows_plan and not self._guard.room_for(saved.arrival_bytes):
                return
            with suppress(torch.OutOfMemoryError, TransferFailed):  # nobody needs it yet
                self._ins.prefetch(saved, compute)

    def _send(self, saved: SavedStorage, action: Action) -> None:
        if saved.state is State.RESIDENT and saved.op_is_over and saved.worth_a_copy:
            self._outs.send_planned(saved, min(action.nbytes, saved.nbytes))

    # --- the recorder

    def _record_save(
        self,
        recorder: Recorder,
        saved: SavedStorage | None,
        finished: Sequence[SavedStorage],
        *,
        first: bool,
    ) -> None:
        self._tell_finished(recorder, finished)
        if first and saved is not None and saved.part is None and saved.device is not None:
            saved.traced = recorder.claim(saved.device)
        recorder.on_save([None if saved is None else saved.traced], feature_hash(self.light.feature))

    @staticmethod
    def _tell_finished(recorder: Recorder, finished: Iterable[SavedStorage]) -> None:
        for saved in finished:
            recorder.sendable(saved.traced)
