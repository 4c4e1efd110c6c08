"""The director of a step decides what becomes of the storages that the step's hooks save and use; the executor carries it out.

    recorder = director.begin_step(epoch, budget, compute)
    at each hook:  director.on_save(t, saved, finished) | director.on_use(saved_at, saved, finished)
                   actions = director.due(finished)         # carried out by the executor
                   director.note_growth(nbytes)             # where memory was checked
                   director.note_restored(saved, storage)   # a use: where its bytes are
    kind = director.end_step(recorder, compute, growth_bytes, completed=...)

`Director` itself leaves every storage to the default rule and records no step. `adaptive.PlanFollower` follows plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from chameleon_mm.device import Stream
from chameleon_mm.executor.budget import Budget
from chameleon_mm.executor.recompute_plan import RecomputePlan
from chameleon_mm.executor.way import Way
from chameleon_mm.profiler.light import LightProfiler
from chameleon_mm.profiler.recorder import Recorder
from chameleon_mm.saved.handles import NO_HOOK
from chameleon_mm.saved.saved_storage import SavedStorage
from chameleon_mm.saved.timed_spans import StepKind


class HookActions(NamedTuple):
    """Actions that are due at one hook, in the order in which they are carried out."""

    reclaims: Sequence[tuple[SavedStorage, int, bool]] = ()
    """Storages whose device memory is to be reclaimed, the bytes at their end that go to the host, and whether they were away
    before: what was restored is dropped then, as the host still has it."""
    swap_outs: Sequence[tuple[SavedStorage, int | None]] = ()
    """Storages whose copy out is to be queued, and the bytes at their end that go; None: as the default rule has it."""
    check_memory: bool = False
    """Whether memory is to be checked at this hook, whatever it saves or uses."""
    prefetches: Sequence[SavedStorage] = ()
    """Storages to swap in, after the one that the hook is of."""
    drops: Sequence[SavedStorage] = ()
    """Storages to drop first of all, as they are recomputed for their use."""


NOTHING_DUE = HookActions()

ON_SAVE = NO_HOOK - 1
"""In place of a hook's number: `on_save` tells it."""


class Director:
    """Leaves every storage to the default rule. Not thread-safe: the executor holds its lock."""

    __slots__ = ()

    plans = False
    """Whether it is told of every hook, also where nothing moves that is saved or used there."""
    light: LightProfiler | None = None
    """The profiler that notes what autograd saves and uses, of a director that plans."""
    at_rest_until = 0
    """Hook until which nothing is due and the step is the cached one, as long as its hooks have that one's features."""

    @property
    def recompute(self) -> RecomputePlan | None:
        """What is recomputed in the step that has begun; None: nothing."""
        return None

    @property
    def may_recompute(self) -> bool:
        """Whether the step that has begun may follow a plan that recomputes something, as far as is known by now."""
        return self.recompute is not None

    def replan(self) -> None:
        """Have new plans made where a recipe turned out to make other bits than the original. Called between steps."""

    def begin_step(self, epoch: int, budget: Budget, compute: Stream) -> Recorder | None:
        """Begin a step, whose storages are of that epoch. Returns what is to record it; None: nothing."""
        return None

    def on_save(self, t: Tensor, saved: SavedStorage | None, finished: Sequence[SavedStorage]) -> int:
        """Autograd saves `t`, of the storage `saved`, or of one that stays (None). Returns the hook's number in this step.

        `finished`: storages that were saved by operators which are over now.
        """
        return NO_HOOK

    def on_use(self, saved_at: tuple[int, int], saved: SavedStorage | None, finished: Sequence[SavedStorage]) -> None:
        """Autograd uses what was saved in that step at that hook, of the storage `saved`, or of one that stayed (None)."""

    def saves_at_rest(self, t: Tensor) -> int:
        """Autograd saves `t`, which stays, at a hook at which nothing but that may be due. Returns the hook's number in this
        step, as `on_save` does; `ON_SAVE`, with nothing noted, where `on_save` has to be called."""
        return NO_HOOK

    def uses_at_rest(self, saved_at: tuple[int, int]) -> bool:
        """Autograd uses what was saved then and stayed, as above. Returns whether that is all; False: `on_use` has to be
        called, and nothing was noted."""
        return True

    def due(self, finished: Sequence[SavedStorage]) -> HookActions:
        """Return what is due at this hook, `finished` included: each once."""
        return HookActions(swap_outs=[(saved, None) for saved in finished]) if finished else NOTHING_DUE

    def note_growth(self, nbytes: int, *, at_hook: bool, hook: int | None = None) -> None:
        """Note that the model allocated so much since memory was last checked, freed bytes included. `at_hook`: every step that
        has these hooks checks memory here and at the last such check, whatever its plan. `hook`: None is the
        latest."""

    def note_held(self, saved: SavedStorage, number: int) -> None:
        """Note that `saved`, which autograd did not save, is held for what is recomputed from it. `number`: as in
        `RecomputePlan.held`."""

    def note_restored(self, saved: SavedStorage, storage: torch.UntypedStorage) -> None:
        """Note that `storage` holds the bytes of `saved`, which is used now."""

    def way(self) -> Way | None:
        """What the step has to follow behind its latest hook, for the loop; None: the loop cannot run it."""
        return None

    def rejoin(self, hook: int, thread: int, numbers: dict[int, int]) -> None:
        """Go on behind `hook`, the latest that the loop did. `thread`: that of the latest save. `numbers`: autograd's number of
        operators at each thread's latest save."""

    def end_step(self, recorder: Recorder | None, compute: Stream, growth_bytes: int, *, completed: bool) -> StepKind:
        """End the step, of which something is learned if it `completed`. `growth_bytes` as in `note_growth`."""
        return StepKind.BY_RULE if completed else StepKind.FAILED

    def change_budget(self, hbm_budget_bytes: int, host_budget_bytes: int | None, *, must_fit: bool) -> None:
        """Set other budgets from the next step on; None: as it is. Called between steps, before the pool has its new limit.
        `must_fit`: steps that are known keep to them, and it raises `InfeasibleBudget`, with nothing changed, where one that
        has a plan would have none; else they are forgotten."""
