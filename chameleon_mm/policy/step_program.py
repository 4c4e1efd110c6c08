"""Compile a plan into one row per hook, for the loop that runs it.

    program = compile_program(trace, plan, features, save_of, growth, classes)     # None: the loop cannot run it
    program.rows[hook]          # Row(key, kind, number, ops, growth, ins)

    hook        key                                          kind      ops, in the order of `plan.py`
    save 0      (Tensor, (8, 256), float32, 1)               FIRST     -
    save 1      (Parameter, (256, 256), float32, 1)          KEPT      -
    save 2      (Tensor, (8, 256), float32, 2)               AGAIN     -
    save 3      (Tensor, (8, 64), float32, 1)                FIRST     OUT 0
    use 4       3                                            USE       RECLAIM 0, and behind the use: IN 0

A step that is the compiled one, hook for hook, finds its row by counting: `hook += 1`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from chameleon_mm.policy import action_columns
from chameleon_mm.policy.action_columns import BACK, ActionColumns, in_order
from chameleon_mm.policy.plan import SwapPlan
from chameleon_mm.trace import Trace

KEPT, FIRST, AGAIN, USE = range(4)
"""Kinds of rows: the save of a tensor that no plan moves, a storage's first save, a later save of it, a use."""

RECLAIM, DROP, OUT = range(3)
"""Ops: wait for a copy out and free the memory; free it without a copy, because the host has the bytes; copy out."""

Op = tuple[int, int, int]
"""Op, number of the storage, number of its last bytes that move."""

NO_CHECK = -1

_FIXED, _NEW = -1, 0
"""Values for "hooks since the storage's last save" in a feature: a storage that never moves, and a first save."""

_SAVE_PARTS = 5
"""Number of parts of a save's feature in forward. A save in backward has one more, a use has two."""


class Row(NamedTuple):
    """Work of one hook."""

    key: Hashable
    """Save: (class, sizes, dtype, operators since the last save). Use: the hook of its save."""
    kind: int
    number: int = -1
    """Number of the storage in the trace, -1 for a tensor that no plan moves."""
    ops: tuple[Op, ...] = ()
    """Ops before the hook's own storage is used, in order."""
    growth: int = NO_CHECK
    """Bytes as `PlannedMemory.growth_until_next_check` if memory is checked at this hook, else `NO_CHECK`."""
    ins: tuple[int, ...] = ()
    """Numbers of the storages whose copies back start after the hook's own use."""


@dataclass(frozen=True, slots=True, eq=False)
class StepProgram:
    """A plan by hook, for any number of steps, which do not change it."""

    rows: tuple[Row, ...]
    nbytes: tuple[int, ...]
    """Bytes of each storage of the trace."""


def compile_program(
    trace: Trace,
    plan: SwapPlan,
    features: Sequence[tuple[Hashable, ...]],
    save_of: Sequence[int],
    growth: Sequence[int],
    plain_classes: frozenset[Hashable],
) -> StepProgram | None:
    """Compile `plan`, which was made for `trace`. Return None if the loop cannot run it.

    `features`: by hook, as the light profiler has them. `save_of`: the save of each use, negative for a save. `growth`: bytes
    by hook, as in `Row`. `plain_classes`: classes of tensors that are no wrappers.

    The loop cannot run a plan that recomputes, nor a step with a hook of a wrapper class, of a part of a storage, of a save in
    backward, or of a tensor saved in an earlier step.
    """
    if len(plan.swaps) < len(plan.actions):
        return None
    ops, ins, reclaims = _due(trace, plan)
    rows: list[Row] = []
    numbers: list[int] = trace.hook_tensor.tolist()
    for hook, (feature, save, number) in enumerate(zip(features, save_of, numbers, strict=True)):
        known = _use_row(rows, save) if len(feature) < _SAVE_PARTS else _save_row(feature, number, plain_classes)
        if known is None:
            return None
        checked = known.number >= 0 or hook in reclaims
        rows.append(
            known._replace(
                ops=tuple(ops.get(hook, ())), ins=tuple(ins.get(hook, ())), growth=growth[hook] if checked else NO_CHECK
            )
        )
    return StepProgram(tuple(rows), tuple(trace.tensor_bytes.tolist()))


def _due(trace: Trace, plan: SwapPlan) -> tuple[dict[int, list[Op]], dict[int, list[int]], set[int]]:
    """Return the ops and the copies back by hook, and the set of hooks that reclaim."""
    swaps, ops, ins, reclaims = plan.swaps, defaultdict[int, list[Op]](list), defaultdict[int, list[int]](list), set[int]()
    for hook, kind, j in zip(*(column.tolist() for column in in_order(ActionColumns.of(swaps, trace))), strict=True):
        action = swaps[j]
        if kind == BACK:
            ins[hook].append(action.tensor)
        elif kind == action_columns.OUT:
            ops[hook].append((OUT, action.tensor, action.nbytes))
        elif kind != action_columns.USE:
            ops[hook].append((DROP if action.again else RECLAIM, action.tensor, action.nbytes))
            reclaims.add(hook)
    return ops, ins, reclaims


def _save_row(feature: tuple[Hashable, ...], number: int, plain_classes: frozenset[Hashable]) -> Row | None:
    if len(feature) > _SAVE_PARTS or feature[0] not in plain_classes:
        return None
    since = feature[-1]
    if not isinstance(since, int) or (since == _FIXED) != (number < 0):
        return None
    kind = KEPT if since == _FIXED else FIRST if since == _NEW else AGAIN
    return Row(feature[:-1], kind, number)


def _use_row(rows: Sequence[Row], save: int) -> Row | None:
    return Row(save, USE, rows[save].number) if save >= 0 else None
