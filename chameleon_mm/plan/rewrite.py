"""Rewrite a trace for dropped and held storages, so that the swap planner and `simulate` need not know recomputation.

rewritten = RewrittenTrace.of(recipes, dropped, held)
rewritten.trace              a dropped storage dies at the hook of its drop, and is made again after a hook of backward
rewritten.hook_of[k]         number in the rewritten trace of hook k of the step
rewritten.origin[q]          hook of the step to which hook q of the rewritten trace belongs; it rises with q
rewritten.to_step(moves)     moves for the rewritten trace -> moves for the step; `from_step` is the inverse

hook k of the step           rewritten
use of j (dropped)           hook k     reclaims, copies out, copies back without a use at k
                             uses       one hook per storage that the recomputation reads and that was not used before
                             operators  of the recomputation, as operators of backward
next tick                    next tick

So all actions of hook k happen before the recomputation's operators run, which also belong to tick k.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from chameleon_mm.plan.recipes import COPIED_BYTES, Recipes
from chameleon_mm.plan.swap_plan import Action, ActionColumns, ActionKind, SwapPlan
from chameleon_mm.plan.trace import NEVER, Int32s, Int64s, StepPhase, TensorKind, Trace
from chameleon_mm.plan.unswapped_memory import Candidates
from chameleon_mm.units import CHECKSUM_BYTES, allocated_size

# --- Recomputations of a step for a choice of dropped and held storages: their hooks, operators and inputs
#
# A recomputation at a dropped storage's first use reads storages that exist: from before the step, saved by autograd, or held.
# Saved storages that it needs and that were dropped are recomputed too, and stay until their own use. All other storages that
# it needs are made in the recomputation, and freed within it.

CHECKSUMS_IN_PAGE = 512
"""Number of checksums whose memory is allocated together. A dropped storage has two: of the original and of the result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation:
    """Recomputation within one hook."""

    hook: int
    ops: tuple[int, ...]
    """Operators of forward that run again, in forward's order."""
    made: tuple[int, ...]
    """Dropped storages that exist from then on."""
    passing: tuple[int, ...]
    """Storages that are made in between, and freed after their last reader in this recomputation."""
    sources: tuple[int, ...]
    """Existing storages, made in the step, that the recomputation reads: saved, held, or recomputed earlier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputations:
    """All recomputations of a step."""

    by_hook: tuple[Recomputation, ...]
    dropped: tuple[int, ...]
    """Dropped storages by number, except those that a recomputation needs before they could be dropped."""
    held: tuple[int, ...]
    """Held storages by number: those that a recomputation reads."""
    first: Mapping[int, int]
    """Hook from which each dropped storage is away: only its handle holds it, and only the session holds its held inputs."""

    def bytes_beside(self, trace: Trace) -> int:
        """Return the bytes of recomputations besides storages of the step: pages of checksums, and copies of small inputs such
        as biases. Copied inputs are from before the step and not read in backward, because autograd saves and keeps inputs that
        it reads."""
        again = np.unique([op for recomputation in self.by_hook for op in recomputation.ops])
        reader = trace.op_of_read()
        read = np.unique(trace.read_tensors[np.isin(reader, again)])
        saved = np.unique(trace.read_tensors[trace.op_phase[reader] == StepPhase.BACKWARD])
        read = np.setdiff1d(read[trace.tensor_born[read] < 0], saved)
        nbytes = trace.tensor_bytes[read]
        pages = -(-2 * len(self.dropped) // CHECKSUMS_IN_PAGE)
        return int(allocated_size(nbytes[nbytes <= COPIED_BYTES]).sum()) + pages * CHECKSUMS_IN_PAGE * CHECKSUM_BYTES


def find_recomputations(recipes: Recipes, dropped: Collection[int], held: Collection[int]) -> Recomputations:
    """Return the recomputations for a choice of `dropped` and `held`. Storages that cannot be dropped are ignored.

    Raises `ValueError` if a recomputation needs a storage that does not exist and cannot be recomputed.
    """
    candidates, alone = recipes.candidates, recipes.alone_hook.tolist()
    idle = dict(zip(candidates.tensor.tolist(), candidates.first.tolist(), strict=True))
    use = dict(zip(candidates.tensor.tolist(), candidates.use.tolist(), strict=True))
    holds = frozenset(held)
    gone = {j for j in dropped if recipes.makers[j] and j in use}
    while True:
        walk = _Walk(recipes, gone, holds)
        recomputations = [walk.to(j, use[j]) for j in sorted(gone, key=lambda j: (use[j], j)) if j not in walk.recomputed]
        first: dict[int, int] = {}
        for recomputation in recomputations:
            since = max((alone[x] for x in recomputation.sources if x in holds), default=0)
            first.update({j: max(idle[j], since) for j in recomputation.made})
        too_early = {j for recomputation in recomputations for j in recomputation.made if recomputation.hook <= first[j]}
        if not too_early:
            break
        gone -= too_early
    read = sorted(holds.intersection(x for recomputation in recomputations for x in recomputation.sources))
    return Recomputations(by_hook=tuple(recomputations), dropped=tuple(sorted(gone)), held=tuple(read), first=first)


class _Walk:
    def __init__(self, recipes: Recipes, dropped: set[int], held: frozenset[int]) -> None:
        self._recipes, self._dropped, self._held = recipes, dropped, held
        self._saved: list[bool] = recipes.saved.tolist()
        self.recomputed: set[int] = set()
        """Dropped storages made by the recomputations so far."""

    def to(self, target: int, hook: int) -> Recomputation:
        """Return the recomputation of `target`, with the other storages that it makes."""
        recipes, recomputed, dropped = self._recipes, self.recomputed, self._dropped
        seen, ops = {target}, set[int]()
        sources: dict[int, None] = {}
        stack = [target]
        while stack:
            j = stack.pop()
            makers = recipes.makers[j]
            if not makers:
                raise ValueError(
                    f"expected what storage {target} is recomputed from to be saved, held, or made by operators that may run "
                    f"again, got storage {j}, which is none of it; hold it"
                )
            ops.update(makers)
            for x in recipes.inputs[j]:
                if x in self._held or x in recomputed or (self._saved[x] and x not in dropped):
                    sources[x] = None
                elif x not in seen:
                    seen.add(x)
                    stack.append(x)
        beside = {x for o in ops for x in recipes.fresh[o] if x in dropped and x not in recomputed and x not in seen}
        made = {j for j in seen if j in dropped} | {x for x in beside if ops.issuperset(recipes.makers[x])}
        recomputed |= made
        return Recomputation(
            hook=hook,
            ops=tuple(sorted(ops)),
            made=tuple(sorted(made)),
            passing=tuple(sorted(seen - made)),
            sources=tuple(sorted(sources)),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RewrittenTrace:
    """Trace of a step with its recomputations. Storages keep the step's numbers; recomputed storages follow."""

    trace: Trace
    recomputations: Recomputations
    tick_of: Int64s
    """(ticks of the step,) number of each in the rewritten trace. Inserted ticks follow it."""
    hook_of: Int64s
    """(hooks of the step,) number of each in the rewritten trace."""
    origin: Int64s
    """(hooks,) number in the step of the hook that each belongs to."""
    made_at: dict[int, int]
    """For each dropped storage, the hook of the step at which it is recomputed."""
    recompute_us: float
    """Time of the operators that run again and of the comparisons."""

    @classmethod
    def of(cls, recipes: Recipes, dropped: Collection[int], held: Collection[int]) -> RewrittenTrace:
        """Rewrite `recipes.trace`. Raises as `find_recomputations` does. O(ticks + storages + operators that run again)."""
        return _Writer(recipes, find_recomputations(recipes, dropped, held)).rewritten()

    def to_step(self, moves: ActionColumns) -> ActionColumns:
        """Return the moves in the step's hooks."""
        hooks = ("out_at", "reclaim_at", "in_at", "use_at")
        return replace(moves, **{name: self.origin[getattr(moves, name)] for name in hooks})

    def from_step(self, moves: ActionColumns, use_at: Int64s) -> ActionColumns:
        """Return moves of the step in this trace's hooks. `use_at`: hooks here at which each is used. At a hook of the step,
        copies back for a later use are queued after those for the recomputation there."""
        last = np.append(self.hook_of[1:], len(self.origin)) - 1
        on_demand = moves.in_at == moves.use_at
        return replace(
            moves,
            out_at=self.hook_of[moves.out_at],
            reclaim_at=self.hook_of[moves.reclaim_at],
            in_at=np.where(on_demand, use_at, last[moves.in_at]),
            use_at=use_at,
        )

    def moves_of(self, swaps: Sequence[Action]) -> ActionColumns:
        """Return actions of the step as moves of this trace."""
        candidates = Candidates.of(self.trace)
        use = np.full(len(self.trace.tensor_bytes), -1, np.int64)
        use[candidates.tensor] = candidates.use
        tensors = np.array([action.tensor for action in swaps], np.int64)
        return self.from_step(ActionColumns.of(swaps, self.trace), use[tensors])

    def by_tick(self, values: Int64s) -> Int64s:
        """Return (ticks of the step,): maximum of `values`, one per tick here, over the ticks of each tick of the step."""
        return np.maximum.reduceat(values, self.tick_of) if len(self.tick_of) else values


class _Writer:
    """Writer of one rewritten trace: first the rows inserted after each tick, then the columns."""

    def __init__(self, recipes: Recipes, recomputations: Recomputations) -> None:
        self._recipes, self._recomputations, self._old = recipes, recomputations, recipes.trace
        self._held = frozenset(recomputations.held)
        self._dropped = frozenset(recomputations.dropped)
        by_row = (recipes.candidates.use, recipes.candidates.last_use)
        self._use, self._last_use = (np.append(hooks, -1)[recipes.row].tolist() for hooks in by_row)  # -1: not a candidate
        self._hooks = self._inserted_hooks()
        counts = np.zeros(self._old.num_ticks + 1, np.int64)
        for hooks, recomputation in zip(self._hooks, recomputations.by_hook, strict=True):
            counts[self._old.hook_tick[recomputation.hook]] = len(hooks) + len(recomputation.ops)
        self._end = np.arange(self._old.num_ticks + 1) + np.cumsum(counts)
        """(ticks + 1,) last tick here that belongs to each tick of the step."""
        self._tick_of: Int64s = np.append(0, self._end[:-1] + 1)[: self._old.num_ticks]

    def _inserted_hooks(self) -> list[list[int]]:
        """Return the storages for which each recomputation needs hooks of its own: storages read before their first use or
        after their last use, and held storages."""
        first_read: dict[int, int] = {}
        last_read: dict[int, int] = {}
        for i, recomputation in enumerate(self._recomputations.by_hook):
            for x in recomputation.sources:
                first_read.setdefault(x, i)
                last_read[x] = i
        hooks = []
        for i, recomputation in enumerate(self._recomputations.by_hook):
            here = []
            for x in recomputation.sources:
                swappable = x in self._held or (self._use[x] >= 0 and x not in self._dropped)
                early = first_read[x] == i and (x in self._held or recomputation.hook < self._use[x])
                late = last_read[x] == i and recomputation.hook > self._last_use[x]
                if swappable and (early or late):
                    here.append(x)
            hooks.append(here)
        return hooks

    def rewritten(self) -> RewrittenTrace:
        old = self._old
        tensors = self._old_tensors()
        again, op_rows, hook_rows, made_at = self._insert(tensors)
        ops = np.array([row[:2] for row in op_rows], np.int64).reshape(-1, 2)
        op_us = np.concatenate((old.op_us, old.op_us[ops[:, 0]] + np.array([us for _, _, us in op_rows])))
        hooks = np.array(hook_rows, np.int64).reshape(-1, 3)
        op_tick = np.concatenate((self._tick_of[old.op_tick], ops[:, 1]))
        op_order = np.argsort(op_tick, kind="stable")
        op_from = np.concatenate((np.arange(len(old.op_us)), ops[:, 0]))[op_order]
        phase = np.concatenate((old.op_phase, np.full(len(ops), StepPhase.BACKWARD, np.uint8)))[op_order]
        hook_tick = np.concatenate((self._tick_of[old.hook_tick], hooks[:, 1]))
        hook_order = np.argsort(hook_tick, kind="stable")
        num_hooks = len(old.hook_tick)
        hook_of = np.empty(len(hook_tick), np.int64)
        hook_of[hook_order] = np.arange(len(hook_tick))
        origin = np.concatenate((np.arange(num_hooks), hooks[:, 2]))[hook_order]
        self._finish_tensors(tensors, hook_of[:num_hooks])
        for name, values in again.items():
            tensors[name] = np.concatenate((tensors[name], np.array(values, np.int64)))
        trace = Trace(
            start_bytes=old.start_bytes,
            op_names=old.op_names,
            op_name=old.op_name[op_from],
            op_phase=phase,
            op_us=op_us[op_order],
            op_tick=op_tick[op_order].astype(np.int32),
            **_ragged("read", old.read_offsets, old.read_tensors, op_from),
            **_ragged("write", old.write_offsets, old.write_tensors, op_from),
            op_inner_bytes=old.op_inner_bytes[op_from],
            op_passed_bytes=old.op_passed_bytes[op_from],
            op_out_bytes=old.op_out_bytes[op_from],
            op_back_bytes=old.op_back_bytes[op_from],
            tensor_bytes=tensors["bytes"],
            tensor_kind=tensors["kind"].astype(np.uint8),
            **{f"tensor_{name}": tensors[name].astype(np.int32) for name in ("born", "released", "sendable", "dies")},
            hook_tick=hook_tick[hook_order].astype(np.int32),
            hook_use=np.concatenate((old.hook_use, np.ones(len(hooks), np.bool_)))[hook_order],
            hook_tensor=np.concatenate((old.hook_tensor, hooks[:, 0].astype(np.int32)))[hook_order],
            # In a step that recomputes, no storage is swapped between two uses: recomputations may read it.
            hook_released=np.full(len(hook_order), NEVER, np.int32),
            fingerprint=old.fingerprint,
        )
        return RewrittenTrace(
            trace=trace,
            recomputations=self._recomputations,
            tick_of=self._tick_of,
            hook_of=hook_of[:num_hooks],
            origin=origin,
            made_at=made_at,
            recompute_us=float(op_us[len(old.op_us) :].sum()),
        )

    def _old_tensors(self) -> dict[str, Any]:
        """Return the columns of the step's storages: ticks of the rewritten trace, but hooks still in the step's numbers."""
        old = self._old
        born, released = old.tensor_born.astype(np.int64), old.tensor_released.astype(np.int64)
        tick_of = np.append(self._tick_of, self._end[-1])
        return {
            "bytes": old.tensor_bytes,
            "kind": old.tensor_kind.astype(np.int64),
            "born": np.where(born >= 0, tick_of[born], born),
            "released": np.where(released >= 0, self._end[released], released),
            "sendable": old.tensor_sendable.astype(np.int64),
            "dies": np.where(old.tensor_dies >= 0, self._end[old.tensor_dies], old.tensor_dies),
        }

    def _insert(
        self, tensors: dict[str, Any]
    ) -> tuple[dict[str, list[int]], list[tuple[int, int, float]], list[tuple[int, int, int]], dict[int, int]]:
        """Return recomputed storages as columns; inserted operators (operator, tick, extra time); inserted hooks (storage,
        tick, hook of the step); and for each dropped storage the hook of the step at which it is recomputed."""
        old, recipes = self._old, self._recipes
        nbytes, dies = old.tensor_bytes.tolist(), tensors["dies"]
        again: dict[str, list[int]] = {name: [] for name in tensors}
        op_rows: list[tuple[int, int, float]] = []
        hook_rows: list[tuple[int, int, int]] = []
        made_at: dict[int, int] = {}
        second: dict[int, int] = {}
        tick_of_hook = self._tick_of[old.hook_tick].tolist()
        for hooks, recomputation in zip(self._hooks, self._recomputations.by_hook, strict=True):
            tick = tick_of_hook[recomputation.hook]
            for x in hooks:
                tick += 1
                hook_rows.append((x, tick, recomputation.hook))
            last_read: dict[int, int] = {}
            for at, o in enumerate(recomputation.ops, tick + 1):
                op_rows.append((o, at, 0.0))
                last_read.update(dict.fromkeys(recipes.reads[o], at))
            end = tick + len(recomputation.ops)
            # The time of both checksums, although one is taken in forward.
            compared_us = float(recipes.compare_us[list(recomputation.made)].sum())
            op_rows[-1] = (*op_rows[-1][:2], compared_us)
            made, passing = set(recomputation.made), set(recomputation.passing)
            for at, o in enumerate(recomputation.ops, tick + 1):
                for x in recipes.fresh[o]:
                    if x in made:
                        second[x] = len(again["bytes"])
                        made_at[x] = recomputation.hook
                        until = max(int(dies[x]), end)
                    else:
                        until = max(at, last_read.get(x, at)) if x in passing else at
                    for name, value in (
                        ("bytes", nbytes[x]), ("kind", TensorKind.TEMPORARY), ("born", at), ("released", NEVER),
                        ("sendable", NEVER), ("dies", until),
                    ):  # fmt: skip
                        again[name].append(value)
            for x in recomputation.sources:
                if x in second:
                    again["dies"][second[x]] = max(again["dies"][second[x]], end)
                else:
                    dies[x] = max(int(dies[x]), end)
        return again, op_rows, hook_rows, made_at

    def _finish_tensors(self, tensors: dict[str, Any], hook_of: Int64s) -> None:
        """Renumber hooks as in the rewritten trace, and set the lifetimes of dropped and held storages."""
        old, recipes = self._old, self._recipes
        sendable = tensors["sendable"]
        known = sendable >= 0
        sendable[known] = hook_of[sendable[known]]
        dropped = np.array(self._recomputations.dropped, np.int64)
        first = np.array([self._recomputations.first[j] for j in self._recomputations.dropped], np.int64)
        tensors["dies"][dropped] = self._tick_of[old.hook_tick[first]] - 1
        tensors["released"][dropped] = NEVER
        sendable[dropped] = NEVER
        held = np.array(self._recomputations.held, np.int64)
        natural = old.tensor_dies[held].astype(np.int64)
        tensors["released"][held] = np.where(natural < old.num_ticks, self._end[natural], NEVER)
        # Its copy is certain to have the bytes that recipes read only if made after the model released it: Note [Relied on].
        since = np.where(recipes.is_kept[held], recipes.hold_hook[held], recipes.alone_hook[held])
        sendable[held] = hook_of[np.minimum(since, len(hook_of) - 1)]
        tensors["kind"][held] = TensorKind.ACTIVATION


def _ragged(name: str, offsets: Int64s, values: Int32s, rows: Int64s) -> dict[str, Any]:
    """Return the columns of the ragged rows `rows`, in that order."""
    lengths = np.diff(offsets)[rows]
    new = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)))
    index = np.arange(new[-1]) - np.repeat(new[:-1] - offsets[:-1][rows], lengths)
    return {f"{name}_offsets": new, f"{name}_tensors": values[index]}


# --- Rewritten trace of a plan that recomputes, and the actions that record its choice


def rewritten_for(recipes: Recipes, plan: SwapPlan) -> RewrittenTrace:
    """Rewrite the trace of `recipes` for the storages that `plan` drops and holds. Raises as `find_recomputations` does."""
    return RewrittenTrace.of(recipes, [a.tensor for a in plan.recomputed], [a.tensor for a in plan.held])


def choice_actions(recipes: Recipes, rewritten: RewrittenTrace) -> tuple[Action, ...]:
    """Return actions: first of dropped storages, by hook of recomputation; then of held ones, by hook of their first reader."""
    nbytes = recipes.trace.tensor_bytes
    first_read: dict[int, int] = {}
    for recomputation in rewritten.recomputations.by_hook:
        for x in recomputation.sources:
            first_read.setdefault(x, recomputation.hook)
    spans = [
        (ActionKind.RECOMPUTE, j, rewritten.recomputations.first[j], rewritten.made_at[j])
        for j in sorted(rewritten.recomputations.dropped, key=lambda j: (rewritten.made_at[j], j))
    ]
    spans += [
        (ActionKind.HOLD, h, int(recipes.hold_hook[h]), first_read[h])
        for h in sorted(rewritten.recomputations.held, key=lambda h: (first_read[h], h))
    ]
    return tuple(
        Action(tensor=j, nbytes=int(nbytes[j]), out_at=since, reclaim_at=since, in_at=until, use_at=until, kind=kind)
        for kind, j, since, until in spans
    )
