"""A saved storage of which only a view was saved: once its operator is over, the rest of the storage goes.

ON_DEVICE --gather--> ON_DEVICE, its bytes side by side --swap_out--> ... --> back as they are --unpack--> in place, for a use
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from chameleon_mm.device import Stream
from chameleon_mm.saved.annotations import annotation
from chameleon_mm.saved.gather import Part
from chameleon_mm.saved.handles import flat_bytes
from chameleon_mm.saved.saved_bytes import SavedBytes
from chameleon_mm.saved.saved_storage import SavedStorage
from chameleon_mm.saved.state import State, SwapContext


class SavedPart(SavedStorage):
    """A saved storage that holds the bytes of `part` alone. Until they are gathered it holds, and would move, all of the
    storage."""

    part: Part

    def __init__(
        self, t: Tensor, saved: SavedBytes, alloc_stream: Stream, context: SwapContext, *, epoch: int, index: int, part: Part
    ) -> None:
        super().__init__(t, saved, alloc_stream, context, epoch=epoch, index=index)
        self.part = part
        self._saved_on = alloc_stream
        self._unpacked: weakref.ref[torch.UntypedStorage] | None = None
        self._unpacked_on: Stream | None = None

    def gather(self, current: Stream) -> None:
        """Hold the bytes of `part` alone from now on, packed by a kernel on `current`, which is the current stream.

        The storage goes at once, in stream order. Raises `torch.OutOfMemoryError` with nothing changed.
        """
        assert self.state is State.ON_DEVICE and self.device is not None and not self.gathered
        self._join_streams()  # Note [Swap-out]: the source was written by others, and `current` reads it
        with annotation("chameleon::gather"):
            packed = self.part.pack(self.device)
        self._join_streams()  # Note [Reclaim]: its next owner comes after that read
        self.alloc_stream.free(flat_bytes(self.device))
        self.device, self.alloc_stream, self.gathered = packed, current, True
        self.latest = weakref.ref(packed)
        self.nbytes = packed.nbytes()
        self._context.metrics.totals.bytes_reclaimed += self._saved_nbytes - self.nbytes

    def unpacked_elsewhere(self, compute: Stream) -> torch.UntypedStorage | None:
        """Returns, for a gathered part, a storage with its bytes in place that somebody holds and `compute` may use without a
        wait.

        That is the saved storage itself, or what another use of it unpacked: views of one storage share one.
        """
        storage = self.first()
        if storage is not None and storage.nbytes() == self._saved_nbytes and self._saved_on is compute:
            return storage
        return self._unpacked() if self._unpacked is not None and self._unpacked_on is compute else None

    def unpack(self, packed: torch.UntypedStorage, compute: Stream) -> torch.UntypedStorage:
        """Allocate, for a gathered part, a storage with its bytes in place, on `compute`, the current stream.

        Raises `torch.OutOfMemoryError`.
        """
        storage = compute.alloc(self.part.end_byte).untyped_storage()
        self.part.unpack(packed, storage)
        self._unpacked, self._unpacked_on = weakref.ref(storage), compute
        return storage
