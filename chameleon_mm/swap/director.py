"""Director of a step: decides what happens to the storages that the step's hooks save and use. The executor does it.

    recorder = director.begin_step(epoch, budget, compute)
    at each hook:  director.on_save(t, saved, finished) | director.on_use(saved_at, saved, finished)
                   rows = director.due()                    # rows of `director.way` for the executor to run
                   director.note_growth(nbytes)             # after a check of memory
                   director.note_restored(saved, storage)   # at a use: `storage` holds the bytes
    kind = director.end_step(recorder, growth_bytes, completed=...)

`Director` itself applies the default rule to every storage and records no step. `PlanFollower` of `follow` follows plans.
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
    """Director that applies the default rule to every storage. Not thread-safe: the executor holds its lock."""

    plans = False
    """True if the executor calls the director at every hook, including hooks of tensors that do not move."""
    light: LightProfiler | None = None
    """Profiler of the tensors that autograd saves and uses; None: the director does not plan."""
    way: Way | None = None
    """Compiled plan that the step follows; None: the default rule."""

    @property
    def recompute(self) -> RecomputePlan | None:
        """Recomputation part of the running step's plan; None: nothing is recomputed."""
        return None

    @property
    def may_recompute(self) -> bool:
        """True if the running step may follow a plan that recomputes a storage, as far as is known now."""
        return self.recompute is not None

    def replan(self) -> None:
        """Make new plans after a recipe made other bits than the original. Called between steps."""

    def begin_step(self, epoch: int, budget: Budget, compute: Stream) -> Recorder | None:
        """Begin step number `epoch`. Returns the step's recorder; None: it is not recorded."""
        return None

    def on_save(self, t: Tensor, saved: SavedStorage | None, finished: Sequence[SavedStorage]) -> int:
        """Note that autograd saves `t`, whose storage is `saved`; None: it stays. Returns the hook's number in this step.

        `finished`: storages whose saving operators are over now.
        """
        return NO_HOOK

    def on_use(self, saved_at: tuple[int, int], saved: SavedStorage | None, finished: Sequence[SavedStorage]) -> None:
        """Note that autograd uses a tensor of the storage `saved`; None: it stayed. `saved_at`: step and hook of its save."""

    def due(self) -> Sequence[Row]:
        """Return the rows of `way` that became due up to the latest hook. Each row is returned once."""
        return ()

    def note_growth(self, nbytes: int, *, at_hook: bool, hook: int | None = None) -> None:
        """Note the bytes that the model allocated since the last check of memory, including freed bytes. `at_hook`: every step
        with these hooks checks memory here and at the previous such check, under any plan. `hook`: None: the latest."""

    def growth(self) -> tuple[int, int, list[int]] | None:
        """Return the hook of the last comparison (-1: none yet), the growth in bytes since, and the bytes that the cached step
        had allocated up to each hook and to its end. None: nothing is compared."""
        return None

    def note_checked(self, checked_at: int, nbytes: int) -> None:
        """Continue after a comparison that the loop made at hook `checked_at`. `nbytes` were allocated since."""

    def note_held(self, saved: SavedStorage, number: int) -> None:
        """Note that `saved`, which autograd did not save, is held for recomputation. `number`: its number in
        `RecomputePlan.held`."""

    def note_restored(self, saved: SavedStorage, storage: torch.UntypedStorage) -> None:
        """Note that `storage` holds the bytes of `saved`, which autograd uses now."""

    def may_loop(self) -> bool:
        """True if the loop may run the hooks of `way` after the latest one."""
        return False

    def rejoin(self, hook: int, latest: LatestHook) -> None:
        """Continue after `hook`, the latest hook that the loop ran."""

    def end_step(self, recorder: Recorder | None, growth_bytes: int, *, completed: bool) -> StepKind:
        """End the step, and learn from it if it `completed`. `growth_bytes`: the `nbytes` of `note_growth`."""
        return StepKind.BY_RULE if completed else StepKind.FAILED

    def change_budget(self, hbm_budget_bytes: int, host_budget_bytes: int | None, *, must_fit: bool) -> None:
        """Set other budgets from the next step on; None: unchanged. Called between steps, before the pool has its new limit.
        `must_fit`: if a planned step would have no plan, raise `InfeasibleBudget` and change nothing. Otherwise the known steps
        are forgotten."""
