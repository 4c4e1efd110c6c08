"""Which claim stands for a storage: one copy per storage and version, whatever number of views. Note [Identity].

    claim = claims.on(t, part)                    # a live claim on all of its storage, or on that part of it
    claims.add(claim); claims.forget(saved)

Keyed by the storage object's id, compared by a weak reference: ids are recycled.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable

import torch
from torch import Tensor

from chameleon_mm.executor.gather import Part
from chameleon_mm.executor.stored import Claim, SavedStorage, claim_key
from chameleon_mm.policy import DefaultRule, SaveFacts


class Claims:
    """Not thread-safe: the executor holds its lock."""

    def __init__(self) -> None:
        self._claims: dict[Hashable, weakref.ref[Claim]] = {}
        self._parts: dict[int, list[Part]] = {}
        """By the storage's id: the parts of it that are claimed alone. An id that recurs costs a gather, nothing else."""

    def on(self, storage: torch.UntypedStorage, part: Part | None, version: int) -> Claim | None:
        """The live claim on all of `storage` as it is at `version`, or on `part` of it."""
        ref = self._claims.get(claim_key(storage, part))
        claim = None if ref is None else ref()
        return claim if claim is not None and claim.saved.holds(storage, version) else None

    def find(self, t: Tensor, facts: SaveFacts, rule: DefaultRule) -> tuple[Claim | None, Part | None]:
        """The claim that `t` shares, else None and which part of its storage a new one is to be on; None: on all of it.

        A part where `t` covers little of a storage that was not saved whole: views of that part share it.
        """
        storage, version = t.untyped_storage(), t._version
        claim = self.on(storage, None, version)
        if claim is not None or not rule.gathers(facts, views=0, view_bytes=0):
            return claim, None
        part = Part.of(t)
        claim = None if part is None else self.on(storage, part, version)
        others = self._parts.get(id(storage), ())
        if not rule.gathers(facts, views=len(others), view_bytes=sum(other.nbytes for other in others)):
            part = None
        return claim, part

    def add(self, claim: Claim) -> None:
        saved = claim.saved
        self._claims[saved.key] = weakref.ref(claim)
        if saved.part is not None:
            self._parts.setdefault(saved.storage_id, []).append(saved.part)

    def forget(self, saved: SavedStorage) -> None:
        """Its last handle is gone."""
        claim = self._claims.get(saved.key)
        if claim is not None and claim() is None:
            del self._claims[saved.key]
        if saved.part is None:
            return
        parts = self._parts[saved.storage_id]
        parts.remove(saved.part)
        if not parts:
            del self._parts[saved.storage_id]
