"""The recomputations of a step for a choice of what is dropped and what is held: when, by which operators, from what.

found = find_recomputations(recipes, dropped, held)
for one in found.by_hook:                    in the order of the step, one for each hook at which anything is recomputed
    one.hook, one.ops, one.sources           there: these operators run, in forward's order, from these storages
found.dropped, found.held                    what of the choice is of use

A recomputation at a dropped storage's first use goes back to what is there: what was there before the step, what autograd
saved, what is held. What autograd saved and was dropped as well is recomputed on the way, and stays until its own use. All else
is made as a part of the recomputation, and goes within it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from chameleon_mm.policy.recipes import COPIED_BYTES, Recipes
from chameleon_mm.trace import StepPhase, Trace
from chameleon_mm.units import CHECKSUM_BYTES, allocated_size

CHECKSUMS_IN_PAGE = 512
"""Checksums whose memory is allocated together: one of each dropped storage, and one of what is made in its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation:
    """What is recomputed within one hook."""

    hook: int
    ops: tuple[int, ...]
    """Operators of forward that run again, in forward's order."""
    made: tuple[int, ...]
    """Dropped storages that are there from then on."""
    passing: tuple[int, ...]
    """Storages that are made on the way, and go once nothing of this recomputation reads them any more."""
    sources: tuple[int, ...]
    """Storages made in the step that it reads and that are there: saved, held, or recomputed before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputations:
    """All recomputations of a step."""

    by_hook: tuple[Recomputation, ...]
    dropped: tuple[int, ...]
    """The dropped storages, by number: those that are not needed again before they could be dropped."""
    held: tuple[int, ...]
    """The held ones, by number: those that a recomputation reads."""
    first: Mapping[int, int]
    """Hook from which each dropped storage is away: nobody but its handle holds it, nor but the session what is held for it."""

    def bytes_beside(self, trace: Trace) -> int:
        """Bytes that they take beside storages of the step: copies of the small things that they read, were there before it and
        are not read in backward (autograd saves those, and keeps the original), such as biases; and pages of checksums."""
        again = np.unique([op for recomputation in self.by_hook for op in recomputation.ops])
        reader = np.repeat(np.arange(len(trace.op_us)), np.diff(trace.read_offsets))
        read = np.unique(trace.read_tensors[np.isin(reader, again)])
        saved = np.unique(trace.read_tensors[trace.op_phase[reader] == StepPhase.BACKWARD])
        read = np.setdiff1d(read[trace.tensor_born[read] < 0], saved)
        nbytes = trace.tensor_bytes[read]
        pages = -(-2 * len(self.dropped) // CHECKSUMS_IN_PAGE)
        return int(allocated_size(nbytes[nbytes <= COPIED_BYTES]).sum()) + pages * CHECKSUMS_IN_PAGE * CHECKSUM_BYTES


def find_recomputations(recipes: Recipes, dropped: Collection[int], held: Collection[int]) -> Recomputations:
    """Recomputations where `dropped` and `held` are the choice. What cannot be dropped is not.

    Raises `ValueError` where a recomputation would need what is neither there nor can be recomputed.
    """
    candidates, alone = recipes.candidates, recipes.alone_hook.tolist()
    idle = dict(zip(candidates.tensor.tolist(), candidates.first.tolist(), strict=True))
    use = dict(zip(candidates.tensor.tolist(), candidates.use.tolist(), strict=True))
    holds = frozenset(held)
    gone = {j for j in dropped if recipes.makers[j] and j in use}
    while True:
        recomputations = _Walk(recipes, gone, holds).recomputations(sorted(gone, key=lambda j: (use[j], j)), use)
        first: dict[int, int] = {}
        for recomputation in recomputations:
            since = max((alone[x] for x in recomputation.sources if x in holds), default=0)
            first.update({j: max(idle[j], since) for j in recomputation.made})
        too_early = {j for recomputation in recomputations for j in recomputation.made if recomputation.hook <= first[j]}
        if not too_early:
            break
        gone -= too_early
    read = {x for recomputation in recomputations for x in recomputation.sources}
    return Recomputations(
        by_hook=tuple(recomputations), dropped=tuple(sorted(gone)), held=tuple(sorted(read.intersection(holds))), first=first
    )


class _Walk:
    def __init__(self, recipes: Recipes, dropped: set[int], held: frozenset[int]) -> None:
        self._recipes = recipes
        self._dropped = dropped
        self._held = held
        self._saved: list[bool] = recipes.saved.tolist()
        self._recomputed: set[int] = set()

    def recomputations(self, order: list[int], use: dict[int, int]) -> list[Recomputation]:
        """One recomputation for each of `order`, dropped storages by their uses, that none before it makes."""
        return [self._recomputation(j, use[j]) for j in order if j not in self._recomputed]

    def _recomputation(self, target: int, hook: int) -> Recomputation:
        recipes, recomputed, dropped = self._recipes, self._recomputed, self._dropped
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
