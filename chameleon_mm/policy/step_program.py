"""A plan compiled for the loop that runs it: one row for each of autograd's hooks, with what is due there.

    program = compile_program(trace, plan, features, save_of, growth)     # None: the loop cannot run it
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
"""Kinds of rows: a save of what stays whatever the plan, a storage's first save and a later one, and a use."""

RECLAIM, DROP, OUT = range(3)
"""Ops: wait for a copy out and let the memory go; let it go, as the host has the bytes since an earlier action; copy out."""

Op = tuple[int, int, int]
"""An op, the storage's number, and the bytes that move: its last ones."""

NO_CHECK = -1

_FIXED, _NEW = -1, 0
"""Hooks since a storage's last save, in a save's feature, of what never moves and of what is saved for the first time."""

_SAVE_PARTS = 5
"""Parts of a forward's save; one in a backward has one more, and a use has two."""


class Row(NamedTuple):
    """What one hook has to do."""

    key: Hashable
    """Of a save: class, sizes, dtype, operators since the last save. Of a use: the hook of its save."""
    kind: int
    number: int = -1
    """Number of the storage in the trace; -1: it stays whatever the plan."""
    ops: tuple[Op, ...] = ()
    """What is due before the hook's own storage is used, in this order."""
    growth: int = NO_CHECK
    """Bytes, as `PlannedMemory.growth_until_next_check`, where memory is checked; else `NO_CHECK`."""
    ins: tuple[int, ...] = ()
    """Storages whose copies back begin behind it."""


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
    """The rows of `plan`, made for `trace`, whose hooks have these features, as the light profiler has them; `save_of`: the
    save of each use, negative for a save; `growth`: by hook, bytes as in `Row`. `plain_classes`: those whose tensors need no
    taking apart.

    None where the loop cannot run it: where something is recomputed, and where a hook is of a wrapper class, of a part of a
    storage, of a save in backward or of an earlier step.
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
    """By hook: ops before its own storage is used, copies back behind that; and the hooks that reclaim."""
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
