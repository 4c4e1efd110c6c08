"""A plan arranged by hook, for a running step: the action of the storage that a hook saves, and the actions that are due there.

schedule = HookSchedule.of(trace, plan)
schedule.storage_action(hook)           # action of the storage that is first saved there; None: nothing is known of it
schedule.growth(hook)              # how much more is allocated at most until the next check of memory
cursor = schedule.begin_step()
cursor.advance_to(hook)            # reclaims, outs and ins of all hooks since the last one that was reached
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from chameleon_mm.policy import Action, StorageAction, SwapPlan, memory_curve
from chameleon_mm.policy.moves import BACK, OUT, RECLAIM_IN_PART, Moves, in_order
from chameleon_mm.policy.planned_memory import PlannedMemory
from chameleon_mm.trace import Trace
from chameleon_mm.trace.trace import Int64s


class DueActions(NamedTuple):
    """Actions that are due now, each kind in the plan's order."""

    reclaims: Sequence[Action]
    """Storages to reclaim: whole ones first."""
    outs: Sequence[Action]
    ins: Sequence[Action]


class HookSchedule:
    """One plan by hook, for any number of steps. Not changed by them."""

    def __init__(
        self,
        plan: SwapPlan,
        storage_actions: dict[int, StorageAction],
        due: DueActions,
        growth: Sequence[int],
        allocated_bytes: Int64s,
    ) -> None:
        """`due`: all that the plan has. `growth`: by hook, as `PlannedMemory.growth_until_next_check`."""
        self.plan = plan
        self.allocated_bytes = allocated_bytes
        """(ticks,) most bytes allocated during each tick."""
        self._growth = growth
        self._storage_actions = storage_actions
        self.reclaims, self.outs, self.ins = due

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
        actions = {action.tensor: action for action in plan.actions}
        storage_actions: dict[int, StorageAction] = {}
        seen: set[int] = set()
        for hook, (tensor, use) in enumerate(zip(trace.hook_tensor.tolist(), trace.hook_use.tolist(), strict=True)):
            if tensor >= 0 and not use and tensor not in seen:
                seen.add(tensor)
                storage_actions[hook] = StorageAction(tensor, actions.get(tensor))
        moves = Moves.of(plan.actions, trace)
        events = in_order(moves)
        reclaims, outs, ins = (
            [plan.actions[j] for j in events.which[asked].tolist()]
            for asked in (events.kinds <= RECLAIM_IN_PART, events.kinds == OUT, events.kinds == BACK)
        )
        in_reach = moves.take(np.flatnonzero(moves.use_at < plan.num_hooks))  # of a wrong plan: the others never come
        memory = PlannedMemory(trace, memory_curve(trace))
        allocated = memory.allocated(in_reach)
        growth = memory.growth_until_next_check(in_reach, allocated).tolist()
        return cls(plan, storage_actions, DueActions(reclaims, outs, ins), growth, allocated)

    def storage_action(self, hook: int) -> StorageAction | None:
        """Action of the storage that is saved for the first time at hook number `hook`; None: nothing is known of it."""
        return self._storage_actions.get(hook)

    def growth(self, hook: int) -> int:
        """The most by which allocation grows from when the reclaims of hook number `hook` are done until the next check of
        memory."""
        return self._growth[hook]

    def begin_step(self) -> ScheduleCursor:
        return ScheduleCursor(self)


class ScheduleCursor:
    """Position of a step in its schedule. Only ever goes forward."""

    __slots__ = ("_next_hook", "_queues")

    def __init__(self, schedule: HookSchedule) -> None:
        self._queues = (
            _Queue(schedule.reclaims, attrgetter("reclaim_at")),
            _Queue(schedule.outs, attrgetter("out_at")),
            _Queue(schedule.ins, attrgetter("in_at")),
        )
        self._next_hook = min(queue.next_hook for queue in self._queues)
        """First hook at which anything is due."""

    def advance_to(self, hook: int) -> DueActions | None:
        """Actions due up to hook number `hook` that were not returned before; None: there are none."""
        if hook < self._next_hook:
            return None
        due = DueActions(*(queue.until(hook) for queue in self._queues))
        self._next_hook = min(queue.next_hook for queue in self._queues)
        return due


class _Queue:
    """Actions ordered by one of their hooks."""

    __slots__ = ("_actions", "_at", "_hook_of", "next_hook")

    def __init__(self, actions: Sequence[Action], hook_of: Callable[[Action], int]) -> None:
        self._actions = actions
        self._hook_of = hook_of
        self._at = 0
        self.next_hook = self._hook()

    def until(self, hook: int) -> Sequence[Action]:
        """Take out and return the actions due up to `hook`."""
        begin = self._at
        while self.next_hook <= hook:
            self._at += 1
            self.next_hook = self._hook()
        return self._actions[begin : self._at]

    def _hook(self) -> int:
        return self._hook_of(self._actions[self._at]) if self._at < len(self._actions) else _BEHIND_ALL


_BEHIND_ALL = 1 << 62
"""More hooks than a step has."""
