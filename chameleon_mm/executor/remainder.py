"""What stays on the device of a storage that moves in part: its first bytes, in a buffer of their own.

    remainder = Remainder(head_bytes)
    remainder.keep(storage, home)              # a copy in device memory, on home; then the storage may be dropped
    remainder.put_back(whole, compute)         # into the storage's next copy, on compute; the buffer goes

Moving in part fills a budget exactly: the rest of the last storage that has to move stays where it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from chameleon_mm.device import Stream
from chameleon_mm.executor.handles import flat_bytes
from chameleon_mm.executor.streams import ComputeStreams


class Remainder:
    """The first `nbytes` of a storage. Empty for one that moves whole."""

    __slots__ = ("_home", "_kept", "_streams", "nbytes")

    def __init__(self, nbytes: int, streams: ComputeStreams) -> None:
        self.nbytes = nbytes
        self._streams = streams
        self._kept: Tensor | None = None
        self._home: Stream | None = None

    def keep(self, storage: torch.UntypedStorage, home: Stream) -> None:
        """Copy them out of `storage`, on `home`, whose work on it is queued. Raises `torch.OutOfMemoryError`."""
        if self.nbytes and self._kept is None:
            self._kept, self._home = home.alloc(self.nbytes), home
            home.copy(self._kept, flat_bytes(storage)[: self.nbytes])

    def put_back(self, whole: Tensor, compute: Stream) -> None:
        """Copy them to where they were, on `compute`, and give their buffer back."""
        if self._kept is None or self._home is None:
            return
        if self._home is not compute:
            self._streams.meet(self._home)  # orders `compute` after the copy that filled the buffer
        compute.copy(whole[: self.nbytes], self._kept)
        if self._home is not compute:
            self._streams.meet(self._home)  # Note [Reclaim]: the buffer's next owner on its own stream comes after that read
        self._home.free(self._kept)
        self._kept = self._home = None

    def drop(self) -> None:
        """Nobody wants them any more."""
        if self._kept is not None and self._home is not None:
            self._home.free(self._kept)
        self._kept = self._home = None
