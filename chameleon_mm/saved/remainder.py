"""The first bytes of a storage that moves in part: they stay on the device, in a buffer of their own.

    remainder = Remainder(head_bytes)
    remainder.copy_out(storage, alloc_stream)  # a copy in device memory, on that stream; then the storage may be dropped
    remainder.copy_back(whole, compute)        # into the storage's next copy, on compute; the buffer goes

Moving in part fills a budget exactly: the rest of the last storage that has to move stays where it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from chameleon_mm.device import Stream
from chameleon_mm.saved.handles import flat_bytes
from chameleon_mm.saved.streams import ComputeStreams


class Remainder:
    """The first `nbytes` of a storage. Empty for one that moves whole."""

    __slots__ = ("_alloc_stream", "_buffer", "_streams", "nbytes")

    def __init__(self, nbytes: int, streams: ComputeStreams) -> None:
        self.nbytes = nbytes
        self._streams = streams
        self._buffer: Tensor | None = None
        self._alloc_stream: Stream | None = None

    def copy_out(self, storage: torch.UntypedStorage, alloc_stream: Stream) -> None:
        """Copy them out of `storage`, on `alloc_stream`, whose work on it is queued. Raises `torch.OutOfMemoryError`."""
        if self.nbytes and self._buffer is None:
            self._buffer, self._alloc_stream = alloc_stream.alloc(self.nbytes), alloc_stream
            alloc_stream.copy(self._buffer, flat_bytes(storage)[: self.nbytes])

    def copy_back(self, whole: Tensor, compute: Stream) -> None:
        """Copy them back to where they were, on `compute`, and free their buffer."""
        if self._buffer is None or self._alloc_stream is None:
            return
        if self._alloc_stream is not compute:
            self._streams.join_all(self._alloc_stream)  # orders `compute` after the copy that filled the buffer
        compute.copy(whole[: self.nbytes], self._buffer)
        if self._alloc_stream is not compute:
            self._streams.join_all(
                self._alloc_stream
            )  # Note [Reclaim]: the buffer's next owner on its own stream comes after that read
        self._alloc_stream.free(self._buffer)
        self._buffer = self._alloc_stream = None

    def drop(self) -> None:
        """Free the buffer: nobody needs the bytes any more."""
        if self._buffer is not None and self._alloc_stream is not None:
            self._alloc_stream.free(self._buffer)
        self._buffer = self._alloc_stream = None
