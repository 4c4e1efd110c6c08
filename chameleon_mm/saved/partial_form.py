"""The form of a storage that moves in part: its first bytes stay on the device, in a buffer of their own.

Moving in part fills a budget exactly: the rest of the last storage that has to move stays where it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from chameleon_mm.device import Stream
from chameleon_mm.saved.calling_thread import ComputeStreams
from chameleon_mm.saved.form import Form
from chameleon_mm.saved.handles import flat_bytes


class PartialForm(Form):
    """All bytes but the first `device_bytes` on the host."""

    __slots__ = ("_alloc_stream", "_buffer", "_streams", "device_bytes")

    def __init__(self, device_bytes: int, streams: ComputeStreams) -> None:
        self.device_bytes = device_bytes
        self._streams = streams
        self._buffer: Tensor | None = None
        self._alloc_stream: Stream | None = None

    def keep(self, storage: torch.UntypedStorage, alloc_stream: Stream) -> None:
        """Copy the first bytes out of `storage`, on `alloc_stream`, whose work on it is queued."""
        if self._buffer is None:
            self._buffer, self._alloc_stream = alloc_stream.alloc(self.device_bytes), alloc_stream
            alloc_stream.copy(self._buffer, flat_bytes(storage)[: self.device_bytes])

    def put_back(self, whole: Tensor, compute: Stream) -> None:
        """Copy the first bytes back to where they were, on `compute`, and free their buffer."""
        if self._buffer is None or self._alloc_stream is None:
            return
        if self._alloc_stream is not compute:
            self._streams.join_all(self._alloc_stream)  # orders `compute` after the copy that filled the buffer
        compute.copy(whole[: self.device_bytes], self._buffer)
        if self._alloc_stream is not compute:
            # Note [Reclaim]: the buffer's next owner on its own stream comes after that read
            self._streams.join_all(self._alloc_stream)
        self.drop()

    def drop(self) -> None:
        if self._buffer is not None and self._alloc_stream is not None:
            self._alloc_stream.free(self._buffer)
        self._buffer = self._alloc_stream = None
