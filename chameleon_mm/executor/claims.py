"""Which claim stands for a storage: one copy per storage and version, whatever number of views. Note [Identity].

    claim = claims.on(t, part)                    # a live claim on all of its storage, or on that part of it
    claims.add(claim); claims.forget(saved)

Keyed by the storage object's id, compared by a weak reference: ids are recycled.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from chameleon_mm.executor.gather import Part
from chameleon_mm.executor.stored import SavedStorage
from chameleon_mm.policy import DefaultRule, SaveFacts


class Claim:
    """What the handles of one saved storage share: its end is the end of the storage's life. Note [Life].

    It has no `__del__` itself: while one runs, a weak reference still leads to the object and brings it back, and a thread that
    saves the same storage at that moment would share a claim that is being retired. So a part of it has one, which ends when
    no reference leads here any more.
    """

    __slots__ = ("__weakref__", "_end", "saved")

    def __init__(self, saved: SavedStorage, retire: Callable[[SavedStorage], None]) -> None:
        self.saved = saved
        self._end = _End(saved, retire)


class _End:
    """Retires a storage when its claim is gone.

    `__del__` rather than `weakref.finalize`: a claim is made per saved storage in the hot path, and `finalize` keeps a
    registry for interpreter exit, where nothing is to be done. Idempotent, because `SavedStorage.retire` is.
    """

    __slots__ = ("_retire", "_saved")

    def __init__(self, saved: SavedStorage, retire: Callable[[SavedStorage], None]) -> None:
        self._saved = saved
        self._retire = retire

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._retire(self._saved)


class Claims:
    """Not thread-safe: the executor holds its lock."""

    def __init__(self) -> None:
        self._claims: dict[Hashable, weakref.ref[Claim]] = {}
        self._parts: dict[int, list[Part]] = {}
        """By the storage's id: the parts of it that are claimed alone. An id that recurs costs a gather, nothing else."""

    def on(self, storage: torch.UntypedStorage, part: Part | None, version: int) -> Claim | None:
        """The live claim on all of `storage` as it is at `version`, or on `part` of it."""
        ref = self._claims.get(_key(id(storage), part))
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
        self._claims[_key(saved.storage_id, saved.part)] = weakref.ref(claim)
        if saved.part is not None:
            self._parts.setdefault(saved.storage_id, []).append(saved.part)

    def forget(self, saved: SavedStorage) -> None:
        """Its last handle is gone."""
        key = _key(saved.storage_id, saved.part)
        claim = self._claims.get(key)
        if claim is not None and claim() is None:
            del self._claims[key]
        if saved.part is None:
            return
        parts = self._parts[saved.storage_id]
        parts.remove(saved.part)
        if not parts:
            del self._parts[saved.storage_id]


def _key(storage_id: int, part: Part | None) -> Hashable:
    """Of the claim on all of a storage, or on a part of it."""
    return storage_id if part is None else (storage_id, part)
