"""The director of a step decides what becomes of the storages that the step's hooks save and use; the executor carries it out.

    recorder = director.begin_step(epoch, budget, compute)
    at each hook:  director.on_save(t, saved, finished) | director.on_use(saved_at, saved, finished)
                   rows = director.due()                    # rows of `director.way`, carried out by the executor
                   director.note_growth(nbytes)             # where memory was checked
                   director.note_restored(saved, storage)   # a use: where its bytes are
    kind = director.end_step(recorder, compute, growth_bytes, completed=...)

`Director` itself leaves every storage to the default rule and records no step. `PlanFollower` of `follow` follows plans.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from chameleon_mm.device import Stream
from chameleon_mm.plan.step_program import Row
from chameleon_mm.record.light_profiler import LatestHook, LightProfiler
from chameleon_mm.record.recorder import Recorder
from chameleon_mm.swap.budget import Budget
from chameleon_mm.swap.handles import NO_HOOK
from chameleon_mm.swap.metrics import StepKind
from chameleon_mm.swap.recomputing import RecomputePlan
from chameleon_mm.swap.saved_storage import SavedStorage
from chameleon_mm.swap.way import Way


class Director:
    """Leaves every storage to the default rule. Not thread-safe: the executor holds its lock."""

    plans = False
    """Whether it is told of every hook, also where nothing moves that is saved or used there."""
    light: LightProfiler | None = None
    """The profiler that notes what autograd saves and uses, of a director that plans."""
    way: Way | None = None
    """What the step follows; None: the default rule."""

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

    def due(self) -> Sequence[Row]:
        """Return the rows of `way` that are due by this hook, each once."""
        return ()

    def note_growth(self, nbytes: int, *, at_hook: bool, hook: int | None = None) -> None:
        """Note that the model allocated so much since memory was last checked, freed bytes included. `at_hook`: every step that
        has these hooks checks memory here and at the last such check, whatever its plan. `hook`: None is the
        latest."""

    def note_held(self, saved: SavedStorage, number: int) -> None:
        """Note that `saved`, which autograd did not save, is held for what is recomputed from it. `number`: as in
        `RecomputePlan.held`."""

    def note_restored(self, saved: SavedStorage, storage: torch.UntypedStorage) -> None:
        """Note that `storage` holds the bytes of `saved`, which is used now."""

    def may_loop(self) -> bool:
        """Whether the loop may run the hooks of `way` behind the latest."""
        return False

    def rejoin(self, hook: int, latest: LatestHook) -> None:
        """Go on behind `hook`, the latest that the loop did."""

    def end_step(self, recorder: Recorder | None, compute: Stream, growth_bytes: int, *, completed: bool) -> StepKind:
        """End the step, of which something is learned if it `completed`. `growth_bytes` as in `note_growth`."""
        return StepKind.BY_RULE if completed else StepKind.FAILED

    def change_budget(self, hbm_budget_bytes: int, host_budget_bytes: int | None, *, must_fit: bool) -> None:
        """Set other budgets from the next step on; None: as it is. Called between steps, before the pool has its new limit.
        `must_fit`: steps that are known keep to them, and it raises `InfeasibleBudget`, with nothing changed, where one that
        has a plan would have none; else they are forgotten."""
