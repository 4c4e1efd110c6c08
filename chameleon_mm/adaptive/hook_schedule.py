"""A plan arranged by hook, for a running step: the action of the storage that a hook saves, and the actions that are due there.

schedule = HookSchedule.of(trace, plan)
schedule.storage_actions           # action of the storage that a hook saves first, by hook; of others nothing is known
schedule.growth[hook]              # how much more is allocated at most until the next check of memory
schedule.held                      # what nobody saves and is held, by where in the step it is born
cursor = schedule.begin_step()
cursor.advance_to(hook)            # reclaims, outs, ins and drops of all hooks since the last one that was reached
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from chameleon_mm.policy import Action, StorageAction, SwapPlan, memory_curve
from chameleon_mm.policy.action_columns import BACK, OUT, RECLAIM, RECLAIM_IN_PART, USE, ActionColumns, PlannedMemory, in_order
from chameleon_mm.policy.planned_rewrite import rewritten_for
from chameleon_mm.policy.recipes import Recipes
from chameleon_mm.profiler.calls import BirthPlace
from chameleon_mm.trace import Trace
from chameleon_mm.trace.trace import Int64s


class DueActions(NamedTuple):
    """Actions that are due now, each kind in the plan's order."""

    reclaims: list[Action]
    """Storages to reclaim: whole ones first."""
    outs: list[Action]
    ins: list[Action]
    drops: list[Action]
    """Storages to drop, which are recomputed."""

    def with_later(self, later: DueActions) -> DueActions:
        """These and `later`, these first."""
        return DueActions(*(mine + theirs for mine, theirs in zip(self, later, strict=True)))


NO_ACTIONS = DueActions([], [], [], [])

_COLUMN = {RECLAIM: 0, RECLAIM_IN_PART: 0, OUT: 1, BACK: 2}


class HookSchedule:
    """A plan by hook, for any number of steps, which do not change it."""

    __slots__ = ("_due", "_hooks", "allocated_bytes", "backs", "growth", "held", "held_actions", "plan", "storage_actions")

    def __init__(
        self,
        plan: SwapPlan,
        storage_actions: dict[int, StorageAction],
        due: dict[int, DueActions],
        growth: Sequence[int],
        allocated_bytes: Int64s,
        held: Mapping[BirthPlace, int],
    ) -> None:
        """`due`: what is due, by hook, the first hook first. `growth`: by hook, as `PlannedMemory.growth_until_next_check`."""
        self.plan = plan
        numbers = set(held.values())
        self.held_actions = {action.tensor: action for action in plan.swaps if action.tensor in numbers}
        self.held = held
        """Numbers of the storages that nobody saves and that are held, by where they are written."""
        self.allocated_bytes = allocated_bytes
        """(ticks,) most bytes allocated during each tick."""
        self.growth = growth
        """Bytes, by hook, that allocation grows at most from when its reclaims are done until the next check of memory."""
        self.backs = frozenset((action.in_at, action.tensor) for action in plan.swaps)
        """Hooks at which memory is taken for copies back, each with the storage's number."""
        self.storage_actions = storage_actions
        """Action of each storage, by the hook that saves it for the first time; of other storages nothing is known."""
        self._hooks, self._due = list(due), list(due.values())

    @classmethod
    def of(cls, trace: Trace, plan: SwapPlan) -> HookSchedule:
        """Arrange `plan`, which was made for `trace`. Raises `ValueError` where it was not."""
        plan.check_made_for(trace)
        unknown = [action.tensor for action in plan.actions if not 0 <= action.tensor < len(trace.tensor_bytes)]
        if unknown:
            raise ValueError(
                f"plan: expected tensors below {len(trace.tensor_bytes)}, as this trace has them, got {unknown[0]}; make a "
                f"plan for this trace"
            )
        actions = {action.tensor: action for action in plan.swaps + plan.recomputed if not action.again}
        storage_actions: dict[int, StorageAction] = {}
        seen: set[int] = set()
        for hook, (tensor, use) in enumerate(zip(trace.hook_tensor.tolist(), trace.hook_use.tolist(), strict=True)):
            if tensor >= 0 and not use and tensor not in seen:
                seen.add(tensor)
                storage_actions[hook] = StorageAction(tensor, actions.get(tensor))
        swaps = plan.swaps
        moves = ActionColumns.of(swaps, trace)
        due: dict[int, DueActions] = {}
        for hook, kind, j in zip(*(column.tolist() for column in in_order(moves)), strict=True):
            if kind != USE:
                due.setdefault(hook, DueActions([], [], [], []))[_COLUMN[kind]].append(swaps[j])
        for action in plan.recomputed:
            due.setdefault(action.reclaim_at, DueActions([], [], [], [])).drops.append(action)
        in_reach = moves.take(np.flatnonzero(moves.use_at < plan.num_hooks))  # of a wrong plan: the others never come
        held: dict[BirthPlace, int] = {}
        if len(swaps) < len(plan.actions):
            recipes = Recipes.of(trace, None)
            allocated, growth = _memory_of_recomputations(recipes, plan)
            held = _birth_places(recipes, plan)
        else:
            allocated, growth = _memory(trace, in_reach)
        return cls(plan, storage_actions, dict(sorted(due.items())), growth.tolist(), allocated, held)

    def begin_step(self) -> ScheduleCursor:
        return ScheduleCursor(self._hooks, self._due)


def _memory(trace: Trace, moves: ActionColumns) -> tuple[Int64s, Int64s]:
    """What is allocated at most during each tick, and by how much it grows until the next check, by hook."""
    memory = PlannedMemory(trace, memory_curve(trace))
    allocated = memory.allocated(moves)
    return allocated, memory.growth_until_next_check(moves, allocated)


def _memory_of_recomputations(recipes: Recipes, plan: SwapPlan) -> tuple[Int64s, Int64s]:
    """The same for a plan that recomputes: what a recomputation takes belongs to the hook at which it is."""
    rewritten = rewritten_for(recipes, plan)
    moves = rewritten.moves_of(plan.swaps)
    memory = PlannedMemory(rewritten.trace, memory_curve(rewritten.trace), rewritten.hook_of)
    allocated = memory.allocated(moves)
    drop_at = [int(rewritten.hook_of[action.reclaim_at]) for action in plan.recomputed]
    growth = memory.growth_until_next_check(moves, allocated, drop_at)
    return rewritten.by_tick(allocated), growth[rewritten.hook_of]


def _birth_places(recipes: Recipes, plan: SwapPlan) -> dict[BirthPlace, int]:
    """Where what is held is written last: by then it is what recomputations read."""
    trace, places = recipes.trace, {}
    for action in plan.held:
        tick = int(recipes.last_write[action.tensor])
        op = int(np.searchsorted(trace.op_tick, tick))
        hooks = int(np.searchsorted(trace.hook_tick, tick))
        since = 0 if hooks == 0 else int(trace.hook_tick[hooks - 1])
        first = int(np.searchsorted(trace.op_tick, since))
        same_name = int((trace.op_name[first : op + 1] == trace.op_name[op]).sum())
        written = trace.write_tensors[trace.write_offsets[op] : trace.write_offsets[op + 1]].tolist()
        place = BirthPlace(hooks, trace.op_names[trace.op_name[op]], same_name, written.index(action.tensor))
        places[place] = action.tensor
    return places


class ScheduleCursor:
    """Position of a step in its schedule. Only ever goes forward."""

    __slots__ = ("_at", "_due", "_hooks", "next_hook")

    def __init__(self, hooks: Sequence[int], due: Sequence[DueActions]) -> None:
        """`due`: what comes at each of `hooks`, which rise."""
        self._hooks = hooks
        self._due = due
        self._at = 0
        self.next_hook = hooks[0] if hooks else BEHIND_ALL

    def advance_to(self, hook: int) -> DueActions | None:
        """Actions due up to hook number `hook` that were not returned before; None: there are none."""
        if hook < self.next_hook:
            return None
        begin = self._at
        end = self._at = bisect_right(self._hooks, hook, begin)
        self.next_hook = self._hooks[end] if end < len(self._hooks) else BEHIND_ALL
        if end == begin + 1:
            return self._due[begin]
        return DueActions(*(list(chain.from_iterable(kind)) for kind in zip(*self._due[begin:end], strict=True)))


BEHIND_ALL = 1 << 62
