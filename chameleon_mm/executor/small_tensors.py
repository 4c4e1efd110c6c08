"""Small saved tensors that are kept on the device as long as there is room, and swapped out when there is not.

    small.add(handle, nbytes)                    # at save: nothing is made for it but an entry here
    small.swap_out_oldest(at_most, swap_out)     # memory is short: the oldest go to the host, until `at_most` bytes stay

Moving one is dear for what it frees, so none is prepared for it: only one that is swapped out gets a record and a host copy.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from chameleon_mm.device import Stream
from chameleon_mm.saved.calling_thread import OperatorNumber, current_operator
from chameleon_mm.saved.claims import Claim, Claims, StorageRegistry
from chameleon_mm.saved.handles import KeptTensor, SwappedView
from chameleon_mm.saved.saved_storage import SavedStorage
from chameleon_mm.saved.state import State, SwapContext
from chameleon_mm.saved.version import SavedBytes

_PRUNE_FROM = 1024
"""Number of entries below which dead ones are not looked for."""


class _Entry(NamedTuple):
    handle: weakref.ref[KeptTensor]
    nbytes: int
    operator: OperatorNumber
    """The operator that saved it: Note [Swap-out]."""
    stream: Stream


class SmallTensors:
    """Small tensors that are kept on the device, oldest first. Not thread-safe: the executor holds its lock."""

    def __init__(
        self, context: SwapContext, registry: StorageRegistry, claims: Claims, new_claim: Callable[[SavedStorage], Claim]
    ) -> None:
        self.nbytes = 0
        """Bytes of the storages of all entries that are not known to be dead: at least what they hold."""
        self._context = context
        self._streams = context.streams
        self._registry = registry
        self._claims = claims
        self._new_claim = new_claim
        self._entries: deque[_Entry] = deque()
        self._prune_at = _PRUNE_FROM
        """Number of entries at which dead ones are forgotten: a loop of small steps alone never runs out of memory."""

    def add(self, handle: KeptTensor, nbytes: int) -> None:
        """Add a tensor that the calling thread saves now, in an operator that has not ended; its storage has `nbytes`."""
        if len(self._entries) >= self._prune_at:
            self.forget_dead()
            self._prune_at = 2 * len(self._entries) + _PRUNE_FROM
        self._entries.append(_Entry(weakref.ref(handle), nbytes, current_operator(), self._streams.current()))
        self.nbytes += nbytes

    def swap_out_oldest(self, at_most: int, swap_out: Callable[[SavedStorage], None]) -> None:
        """Swap out the oldest, until no more than `at_most` bytes stay. Raises what `swap_out` does."""
        self.forget_dead()
        thread, now = current_operator()
        stay: list[_Entry] = []
        try:
            while self._entries and self.nbytes > at_most:
                entry = self._entries[0]
                handle = entry.handle()
                if handle is not None and (entry.operator[0] != thread or entry.operator[1] >= now):
                    stay.append(self._entries.popleft())  # its operator may still write it
                    continue
                if handle is not None and handle.is_as_saved:
                    self._move(handle, entry.stream, swap_out)
                self._entries.popleft()
                self.nbytes -= entry.nbytes
        finally:
            self._entries.extendleft(reversed(stay))

    def forget_dead(self) -> None:
        """Forget the entries whose handles are gone, and count the bytes of the others anew."""
        self._entries = deque(entry for entry in self._entries if entry.handle() is not None)
        self.nbytes = sum(entry.nbytes for entry in self._entries)

    def _move(self, handle: KeptTensor, alloc_stream: Stream, swap_out: Callable[[SavedStorage], None]) -> None:
        t = handle.tensor
        assert t is not None
        saved_bytes = SavedBytes(t)
        found = self._claims.find_whole(t, saved_bytes, alloc_stream)
        claim = found.claim
        if claim is None:
            saved = self._registry.add_outside_steps(
                lambda epoch, index: SavedStorage(t, saved_bytes, alloc_stream, self._context, epoch=epoch, index=index)
            )
            if found.before is not None:
                saved.supersedes(found.before.saved)
            saved.op_ended()
            claim = self._new_claim(saved)
            self._claims.add(claim)
        else:
            claim.saved.add_view()
        saved = claim.saved
        view = SwappedView(claim, t, saved_bytes.probe)
        if saved.state is State.ON_DEVICE:
            swap_out(saved)
        handle.move(view)
