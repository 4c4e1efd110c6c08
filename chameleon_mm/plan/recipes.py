"""Recipes of a step, from its trace: the storages that can be recomputed, the operators for that, and their inputs.

recipes = Recipes.of(trace, names)      # names: base names of operators that may run again; None: any
recipes.makers[j]                       operators of forward that wrote storage j, in order: all of them run again
recipes.inputs[j]                       other storages made in the step that these operators read
recipes.can_drop[j]                     True if it may be dropped: saved, idle, and its inputs exist or can be recomputed
recipes.can_hold[j]                     True if it may be held: unsaved, and alive at a hook after it was written

A storage from before the step is not an input here, because it exists at a recomputation too unless a later operator may write
to it. An operator cannot run again if one of its inputs is written before the recomputation. A view writes nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from chameleon_mm.plan.timing import FASTEST_GBPS, LinkCost
from chameleon_mm.plan.trace import NEVER, Bools, Float64s, Int64s, StepPhase, TensorKind, Trace
from chameleon_mm.plan.unswapped_memory import Candidates
from chameleon_mm.replayable import BATCH_NORMS, ELEMENTWISE, VIEWS, base_name
from chameleon_mm.units import KIB

ALWAYS = np.iinfo(np.int64).max
"""Tick after all ticks."""

COPIED_BYTES = 64 * KIB
"""Maximum size of a parameter or an input, such as a bias, that a recipe copies if autograd does not save it: others may write
to it after forward. A larger one may be read again only if backward reads it, because autograd then needs it. Note [Relied on],
docs/architecture.md."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recipes:
    """Recipe of each of the m storages of a trace. Storages and operators by number, times by tick."""

    trace: Trace
    candidates: Candidates
    row: Int64s
    """(m,) row of each in `candidates`; -1: not a candidate."""
    saved: Bools
    """(m,) True if autograd saved the storage, so that it exists at a recomputation unless it was dropped."""
    makers: list[tuple[int, ...]]
    """(m,) operators that wrote the storage, in order; empty: it existed before the step, or cannot be recomputed."""
    inputs: list[tuple[int, ...]]
    """(m,) other storages made in the step that the makers read."""
    fresh: list[tuple[int, ...]]
    """(n,) storages that each operator of forward makes."""
    reads: list[tuple[int, ...]]
    """(n,) storages made in the step that each operator of forward reads or writes to."""
    order: list[int]
    """Storages that forward makes, in the order of their last writes: inputs before the storages made from them."""
    can_drop: Bools
    can_recompute: Bools
    """(m,) True if the makers may run again in any recomputation that needs the storage."""
    needed_until: Int64s
    """(m,) latest tick at which a recomputation may read the storage; -1: never."""
    last_write: Int64s
    """(m,) tick of the last operator that wrote the storage; NEVER: none did."""
    can_hold: Bools
    hold_hook: Int64s
    """(m,) first hook after the last write; the number of hooks if there is none."""
    is_kept: Bools
    """(m,) True if backward reads the storage although no hook saved it: autograd keeps it, for example if it is small."""
    alone_hook: Int64s
    """(m,) first hook at which storages made from this one may be dropped: the model has released it, or autograd keeps it."""
    compare_us: Float64s
    """(m,) time in us to compare a recomputed storage with the original: each of two checksums reads every byte."""

    @classmethod
    def of(
        cls, trace: Trace, names: Collection[str] | None, refused: Collection[int] = (), *, cost: LinkCost | None = None
    ) -> Recipes:
        """Return the recipes of `trace`. `refused`: storages that may not be recomputed. `cost`: cost of comparisons; None:
        they take no time. O(ticks + storages)."""
        return _Finder(trace, names).recipes(refused, cost)

    def shares_us(self, size: Int64s | Float64s, can_drop: Bools) -> list[float]:
        """Return (m,): time of the operators that make each storage, plus the comparison with the original if it `can_drop`.
        If an operator makes several storages that can be dropped, its time is divided among them by `size`."""
        op_us, sizes, droppable = self.trace.op_us.tolist(), size.tolist(), can_drop.tolist()
        us = [0.0] * len(sizes)
        for j in self.order:
            for o in self.makers[j]:
                fresh = self.fresh[o]
                whole = sum(sizes[x] for x in fresh if droppable[x]) if droppable[j] and j in fresh else 0
                us[j] += op_us[o] * (sizes[j] / whole if whole else 1.0)
            us[j] += float(self.compare_us[j]) if droppable[j] else 0.0
        return us


class _Finder:
    """Finder of the recipes of a trace."""

    def __init__(self, trace: Trace, names: Collection[str] | None) -> None:
        self._trace = trace
        m = len(trace.tensor_bytes)
        self._in_step = trace.tensor_born >= 0
        bases = [base_name(name) for name in trace.op_names]
        views = np.array([base in VIEWS for base in bases], np.bool_)
        admitted = np.array([names is None or base in names for base in bases], np.bool_)
        self._may_run: Bools = (trace.op_phase == StepPhase.FORWARD) & admitted[trace.op_name]
        self._read_op = trace.op_of_read()
        self._read = trace.read_tensors.astype(np.int64)
        batch_norm = np.array([base in BATCH_NORMS for base in bases], np.bool_)
        op = trace.op_of_write()
        written = trace.write_tensors.astype(np.int64)
        reads_statistics = batch_norm[trace.op_name[self._read_op]] & (trace.tensor_kind[self._read] == TensorKind.BUFFER)
        updates = batch_norm[trace.op_name[op]] & (trace.tensor_kind[written] == TensorKind.BUFFER)
        updated = reads_statistics & np.isin(self._read_op * m + self._read, op[updates] * m + written[updates])
        self._may_run[self._read_op[reads_statistics & ~updated]] = False
        # A batch norm runs again without its running statistics, which it does not need.
        self._read_op, self._read = self._read_op[~updated], self._read[~updated]
        self._in_backward = np.zeros(m, np.bool_)
        self._in_backward[self._read[trace.op_phase[self._read_op] == StepPhase.BACKWARD]] = True
        others_write = ~self._in_step & ~self._in_backward & (trace.tensor_bytes > COPIED_BYTES)
        self._may_run[self._read_op[others_write[self._read]]] = False
        is_view = views[trace.op_name[op]]
        if is_view.any():
            viewed = views[trace.op_name[self._read_op]]
            keys = np.unique(self._read_op[viewed] * m + self._read[viewed])
            is_view = is_view & np.isin(op * m + written, keys)
        self._write_op, self._written, self._updates = op[~is_view], written[~is_view], updates[~is_view]
        self._write_tick = trace.op_tick[self._write_op].astype(np.int64)
        self._last_write = np.full(m, NEVER, np.int64)
        self._last_write[self._written] = self._write_tick  # ticks rise, so the last assignment stays
        first_write = np.full(m, NEVER, np.int64)
        first_write[self._written[::-1]] = self._write_tick[::-1]
        is_born = trace.tensor_born[self._written] == self._write_tick
        self._is_fresh = (first_write[self._written] == self._write_tick) & is_born
        self._valid_until = self._inputs_stay_until()

    def _inputs_stay_until(self) -> Int64s:
        """Return (n,): tick of the next write to an input of each operator; -1 if an input made in the step is written again.
        Inputs that the operator itself writes do not count, unless they existed before the step."""
        trace, m = self._trace, len(self._trace.tensor_bytes)
        keys = np.sort(self._written * (trace.num_ticks + 1) + self._write_tick)
        tick = trace.op_tick[self._read_op].astype(np.int64)
        # For inputs from before the step include the operator's own tick: its own write counts.
        wanted = self._read * (trace.num_ticks + 1) + tick + self._in_step[self._read]
        at = np.searchsorted(keys, wanted)
        found = np.append(keys, ALWAYS)[at]
        next_tick = np.where(found // (trace.num_ticks + 1) == self._read, found % (trace.num_ticks + 1), ALWAYS)
        next_tick[(next_tick < ALWAYS) & self._in_step[self._read]] = -1
        own = np.isin(self._read_op * m + self._read, self._write_op * m + self._written) & self._in_step[self._read]
        until = np.full(len(trace.op_us), ALWAYS, np.int64)
        np.minimum.at(until, self._read_op[~own], next_tick[~own])
        return until

    def recipes(self, refused: Collection[int], cost: LinkCost | None) -> Recipes:
        trace, m = self._trace, len(self._trace.tensor_bytes)
        candidates = Candidates.of(trace)
        row = np.full(m, -1, np.int64)
        row[candidates.tensor] = np.arange(len(candidates))
        saves = np.flatnonzero(~trace.hook_use & (trace.hook_tensor >= 0))[::-1]
        first_save = np.full(m, NEVER, np.int64)
        first_save[trace.hook_tensor[saves]] = trace.hook_tick[saves]
        saved = (first_save != NEVER) & self._in_step
        makers, inputs, reads, fresh, stays = self._by_storage()
        hold_hook = np.searchsorted(trace.hook_tick, self._last_write, side="right")
        there = np.append(trace.hook_tick, trace.num_ticks + 1)[hold_hook] <= trace.tensor_dies
        kept = self._in_step & ~saved & self._in_backward
        can_hold = self._in_step & ~saved & there & (self._last_write != NEVER) & (trace.tensor_bytes > 0)
        order = [j for j in np.argsort(self._last_write, kind="stable").tolist() if makers[j]]
        use_tick = np.full(m, -1, np.int64)
        droppable = (row >= 0) & (self._last_write < first_save) & (stays >= 0)
        spared = {j for j in refused if 0 <= j < m}
        droppable[list(spared)] = False
        use_tick[candidates.tensor] = trace.hook_tick[candidates.use]
        droppable &= stays > use_tick
        needed_until = np.where(droppable, use_tick, -1).tolist()
        stays_list, saved_list = stays.tolist(), saved.tolist()
        droppable_list, hold_list = droppable.tolist(), can_hold.tolist()
        for j in reversed(order):
            if needed_until[j] >= 0:
                for x in inputs[j]:
                    if not saved_list[x] and needed_until[x] < needed_until[j]:
                        needed_until[x] = needed_until[j]
        recompute = [False] * m
        for j in order:
            had = all(saved_list[x] or hold_list[x] or recompute[x] for x in inputs[j])
            recompute[j] = had and not saved_list[j] and stays_list[j] > needed_until[j] and j not in spared
            droppable_list[j] = droppable_list[j] and had
        droppable &= np.array(droppable_list, np.bool_)
        droppable[[j for j in range(m) if not makers[j]]] = False
        return Recipes(
            trace=trace,
            candidates=candidates,
            row=row,
            saved=saved,
            makers=makers,
            inputs=inputs,
            fresh=fresh,
            reads=reads,
            order=order,
            can_drop=droppable,
            can_recompute=np.array(recompute, np.bool_),
            needed_until=np.array(needed_until, np.int64),
            last_write=self._last_write,
            can_hold=can_hold,
            hold_hook=hold_hook,
            is_kept=kept,
            alone_hook=np.where(kept, 0, np.searchsorted(trace.hook_tick, trace.tensor_dies, side="right")),
            compare_us=np.zeros(m) if cost is None else 2 * _pass_us(trace, cost),
        )

    def _by_storage(
        self,
    ) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], list[tuple[int, ...]], list[tuple[int, ...]], Int64s]:
        """Return makers, inputs, reads, fresh and stays. stays: (m,) tick of the next write to an input of the storage's
        makers; -1: the storage cannot be recomputed."""
        m, n = len(self._trace.tensor_bytes), len(self._trace.op_us)
        over = np.bincount(self._write_op[~self._is_fresh & ~self._updates], minlength=n)
        # An operator that writes to an existing storage can recompute only that storage.
        good = self._may_run[self._write_op] & np.where(self._is_fresh, over[self._write_op] == 0, over[self._write_op] == 1)
        stays = np.full(m, ALWAYS, np.int64)
        np.minimum.at(stays, self._written, np.where(good, self._valid_until[self._write_op], -1))
        whole = np.zeros(m, np.bool_)
        whole[self._written[self._is_fresh]] = True
        stays[~whole | ~self._in_step] = -1
        makers: list[list[int]] = [[] for _ in range(m)]
        made_of: list[list[int]] = [[] for _ in range(n)]
        fresh: list[list[int]] = [[] for _ in range(n)]
        may_run, in_step = self._may_run.tolist(), self._in_step.tolist()
        for o, x in zip(self._read_op.tolist(), self._read.tolist(), strict=True):
            if may_run[o] and in_step[x]:
                made_of[o].append(x)
        can = (stays >= 0).tolist()
        for o, j, new in zip(self._write_op.tolist(), self._written.tolist(), self._is_fresh.tolist(), strict=True):
            if new:
                fresh[o].append(j)
            elif may_run[o] and in_step[j]:
                made_of[o].append(j)
            if can[j]:
                makers[j].append(o)
        inputs = [
            tuple(dict.fromkeys(x for o in made_by for x in made_of[o] if x != j)) if made_by else ()
            for j, made_by in enumerate(makers)
        ]
        reads = [tuple(dict.fromkeys(read)) for read in made_of]
        return [tuple(made_by) for made_by in makers], inputs, reads, [tuple(new) for new in fresh], stays


def _pass_us(trace: Trace, cost: LinkCost) -> Float64s:
    """Return (m,): time in which a kernel with little arithmetic reads each storage: at the rate of forward's elementwise
    operators, by the bytes that they read and write, and at least as long as the shortest of them. Without such operators: at
    the rate of copies within device memory. The program's own copies over the link do not count."""
    elementwise = np.array([base_name(name) in ELEMENTWISE for name in trace.op_names], np.bool_)
    on_device = (trace.op_out_bytes == 0) & (trace.op_back_bytes == 0)
    which = elementwise[trace.op_name] & (trace.op_phase == StepPhase.FORWARD) & on_device
    touched = 0
    for offsets, tensors in ((trace.read_offsets, trace.read_tensors), (trace.write_offsets, trace.write_tensors)):
        nbytes = np.concatenate(([0], np.cumsum(trace.tensor_bytes[tensors])))
        touched += int((nbytes[offsets[1:]] - nbytes[offsets[:-1]])[which].sum())
    us: Float64s = trace.op_us[which]
    if not touched or us.sum() * FASTEST_GBPS < touched:
        per_byte_us, least_us = 1 / (2 * cost.hbm_gbps * 1e3), 0.0  # a copy reads and writes every byte
    else:
        per_byte_us, least_us = us.sum() / touched, us[us > 0].min()
    passes: Float64s = np.maximum(trace.tensor_bytes * per_byte_us, least_us)
    return passes
