"""Compile a plan into one row per hook, which a running step reads.

    program = StepProgram.of(trace, plan, Keys(features, save_of, classes))
    program.rows[hook]          # Row(key, kind, number, ops, growth, is_checked, ins)

    hook        key                                          kind      ops, ordered as in `swap_plan.py`
    save 0      (Tensor, (8, 256), float32, 1)               FIRST     -
    save 1      (Parameter, (256, 256), float32, 1)          KEPT      -
    save 2      (Tensor, (8, 256), float32, 2)               AGAIN     -
    save 3      (Tensor, (8, 64), float32, 1)                FIRST     OUT 0
    use 4       3                                            USE       RECLAIM 0; after the use: IN 0

A step with the same hooks as the compiled step finds its row by counting: `hook += 1`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from chameleon_mm.plan import swap_plan
from chameleon_mm.plan.recipes import Recipes
from chameleon_mm.plan.rewrite import rewritten_for
from chameleon_mm.plan.swap_plan import BACK, ActionColumns, PlannedMemory, SwapPlan, in_order
from chameleon_mm.plan.trace import FIXED_STORAGE, NEW_STORAGE, SAVE_PARTS, BirthPlace, Int64s, Trace
from chameleon_mm.plan.unswapped_memory import memory_curve

KEPT, FIRST, AGAIN, USE, END = range(5)
"""Kinds of rows: save of a tensor that no plan moves, first save of a storage, later save of it, use, end of the step."""

RECLAIM, RELEASE, OUT, DROP = range(4)
"""Ops. `RECLAIM`: wait for the copy out, then free the memory. `RELEASE`: free memory whose bytes the host already has. `OUT`:
copy out. `DROP`: free memory whose bytes will be recomputed."""

Op = tuple[int, int, int]
"""Op, number of the storage, number of bytes that move (the last bytes of the storage)."""

_NEVER = 1 << 62


class Row(NamedTuple):
    """Work of one hook."""

    key: Hashable = None
    """For a save: (class, sizes, dtype, operators since the last save). For a use: the hook of its save. None: no key
    identifies the hook, so its whole feature must be compared."""
    kind: int = KEPT
    number: int = -1
    """Number of the storage in the trace; -1 for a tensor that no plan moves."""
    ops: tuple[Op, ...] = ()
    """Ops to run before the hook's own storage is used, in order."""
    growth: int = 0
    """Growth in bytes until the next check, from `PlannedMemory.growth_until_next_check`."""
    is_checked: bool = False
    ins: tuple[int, ...] = ()
    """Numbers of the storages whose copies back begin after the hook's own use; first of all its own, if that waits for a copy
    back that begins with it."""


class Keys(NamedTuple):
    """Data that identify the hooks of a step."""

    features: Sequence[tuple[Hashable, ...]]
    """Features from the light profiler, by hook."""
    save_of: Sequence[int]
    """Hook of the save that each use belongs to. Negative for a save, and for the use of a tensor saved in an earlier step."""
    plain_classes: AbstractSet[Hashable]
    """Tensor classes that are not wrapper subclasses."""


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class StepProgram:
    """Plan in rows, one per hook. Steps only read it."""

    plan: SwapPlan
    rows: tuple[Row, ...]
    """Rows by hook, followed by an `END` row."""
    nbytes: tuple[int, ...]
    """Bytes of each storage of the trace."""
    allocated_bytes: Int64s
    """(ticks,) maximum of the bytes allocated during each tick."""
    backs: AbstractSet[tuple[int, int]]
    """Pairs of a hook at which memory is allocated for a copy back, and the storage's number."""
    held: Mapping[BirthPlace, int]
    """Numbers of the unsaved storages to hold for recomputations, by the place of their last write."""
    first_due: int
    """First hook that has ops or copies back."""

    @classmethod
    def of(cls, trace: Trace, plan: SwapPlan, keys: Keys | None = None) -> StepProgram:
        """Compile `plan`, which was made for `trace`. `keys`: None if the trace has open sizes: then no hook has a key.

        Raises `ValueError` for a plan made for another trace.
        """
        plan.check_made_for(trace)
        moves = ActionColumns.of(plan.swaps, trace)
        ops, ins, frees = _due(plan, moves)
        recipes = Recipes.of(trace, None) if len(plan.swaps) < len(plan.actions) else None
        allocated, growth = _memory(trace, plan, moves) if recipes is None else _memory_of_recomputations(recipes, plan)
        rows = []
        for hook, (row, grows) in enumerate(zip(_rows(trace, keys), growth.tolist(), strict=True)):
            due, back, is_checked = tuple(ops.get(hook, ())), tuple(ins.get(hook, ())), row.number >= 0 or hook in frees
            rows.append(row._replace(ops=due, ins=back, growth=grows, is_checked=is_checked))
        return cls(
            plan=plan,
            rows=(*rows, Row(kind=END)),
            nbytes=tuple(trace.tensor_bytes.tolist()),
            allocated_bytes=allocated,
            backs=frozenset((action.in_at, action.tensor) for action in plan.swaps),
            held={} if recipes is None else _birth_places(recipes, plan),
            first_due=min((*ops, *ins), default=_NEVER),
        )

    def number_at(self, hook: int) -> int | None:
        """Return the number of the storage whose first save is at `hook`; None if no movable storage is first saved there."""
        row = self.rows[min(hook, len(self.rows) - 1)]
        return row.number if row.kind == FIRST else None


def _due(plan: SwapPlan, moves: ActionColumns) -> tuple[dict[int, list[Op]], dict[int, list[int]], set[int]]:
    """Return the ops by hook, the copies back by hook, and the set of hooks that free memory."""
    swaps, ops, ins, frees = plan.swaps, defaultdict[int, list[Op]](list), defaultdict[int, list[int]](list), set[int]()
    for action in plan.recomputed:
        ops[action.reclaim_at].append((DROP, action.tensor, action.nbytes))
        frees.add(action.reclaim_at)
    for hook, kind, j in zip(*(column.tolist() for column in in_order(moves)), strict=True):
        action = swaps[j]
        if kind == BACK or (kind == swap_plan.USE and action.in_at == hook):
            ins[hook].append(action.tensor)  # a use comes before copies back
        elif kind == swap_plan.OUT:
            ops[hook].append((OUT, action.tensor, action.nbytes))
        elif kind != swap_plan.USE:
            ops[hook].append((RELEASE if action.again else RECLAIM, action.tensor, action.nbytes))
            frees.add(hook)
    return ops, ins, frees


def _rows(trace: Trace, keys: Keys | None) -> list[Row]:
    """Return the rows of the step's hooks with only key, kind and number."""
    rows: list[Row] = []
    seen: set[int] = set()
    for hook, (number, use) in enumerate(zip(trace.hook_tensor.tolist(), trace.hook_use.tolist(), strict=True)):
        kind = USE if use else KEPT if number < 0 else AGAIN if number in seen else FIRST
        if not use:
            seen.add(number)
        rows.append(Row(None if keys is None else _key(keys, hook, kind), kind, number))
    return rows


def _key(keys: Keys, hook: int, kind: int) -> Hashable:
    """Return the key of the hook; None if its whole feature must be compared."""
    feature = keys.features[hook]
    if len(feature) < SAVE_PARTS:
        save = keys.save_of[hook]
        return save if kind == USE and save >= 0 else None
    since = feature[SAVE_PARTS - 1]
    if kind == USE or feature[0] not in keys.plain_classes or not isinstance(since, int):
        return None
    expected = KEPT if since == FIXED_STORAGE else FIRST if since == NEW_STORAGE else AGAIN
    return feature[: SAVE_PARTS - 1] if kind == expected else None


def _memory(trace: Trace, plan: SwapPlan, moves: ActionColumns) -> tuple[Int64s, Int64s]:
    """Return the maximum allocated bytes by tick, and the growth in bytes until the next check by hook."""
    moves = moves.take(np.flatnonzero(moves.use_at < plan.num_hooks))  # without moves that never happen, of a wrong plan
    memory = PlannedMemory(trace, memory_curve(trace))
    allocated = memory.allocated(moves)
    return allocated, memory.growth_until_next_check(moves, allocated)


def _memory_of_recomputations(recipes: Recipes, plan: SwapPlan) -> tuple[Int64s, Int64s]:
    """Return the same as `_memory` for a plan that recomputes. Memory of a recomputation counts at the hook where it runs."""
    rewritten = rewritten_for(recipes, plan)
    moves = rewritten.moves_of(plan.swaps)
    memory = PlannedMemory(rewritten.trace, memory_curve(rewritten.trace), rewritten.hook_of)
    allocated = memory.allocated(moves)
    drop_at = [int(rewritten.hook_of[action.reclaim_at]) for action in plan.recomputed]
    growth = memory.growth_until_next_check(moves, allocated, drop_at)
    return rewritten.by_tick(allocated), growth[rewritten.hook_of]


def _birth_places(recipes: Recipes, plan: SwapPlan) -> dict[BirthPlace, int]:
    """Return the places of the last writes to held storages. From there on they have the bytes that recomputations read."""
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
