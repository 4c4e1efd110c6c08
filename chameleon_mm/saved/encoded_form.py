"""A storage's bytes in a codec's shorter form, and the status word that says whether they stand for the storage.

    | encoded bytes | up to 15 unused | status, 4 bytes | 12 unused |          on the device as on the host

A kernel writes both, and they cross in one copy. The source must stay until the host has read the status: a codec may find that
the bytes are not of the kind that it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from chameleon_mm.arguments import check_type
from chameleon_mm.device import Stream
from chameleon_mm.kernels.arguments import UNIT_BYTES
from chameleon_mm.saved.form import Form
from chameleon_mm.saved.handles import flat_bytes
from chameleon_mm.saved.state import SwapContext
from chameleon_mm.units import round_up

if TYPE_CHECKING:
    from chameleon_mm.kernels.codec import Codec

_STATUS_BYTES = 4


class EncodedForm(Form):
    """The bytes of one storage of `raw_bytes`, all of that dtype, encoded by `codec`."""

    __slots__ = ("_alloc_stream", "_buffer", "_codec", "_context", "_dtype", "_encoded_bytes", "_status_at", "nbytes")

    host_decides = True

    def __init__(self, codec: Codec, raw_bytes: int, dtype: torch.dtype, context: SwapContext) -> None:
        self._codec = codec
        self._dtype = dtype
        self._context = context
        self._encoded_bytes = codec.encoded_bytes(raw_bytes)
        self._status_at = round_up(self._encoded_bytes, UNIT_BYTES)
        self.nbytes = self._status_at + UNIT_BYTES
        """Bytes that cross the link, and lie on the host."""
        self._buffer: Tensor | None = None
        """The encoded bytes on the device, on their way out or back."""
        self._alloc_stream: Stream | None = None

    def host_bytes(self, nbytes: int) -> int:
        return self.nbytes

    def restore_bytes(self, nbytes: int) -> int:
        return nbytes + self.nbytes

    def source(self, storage: torch.UntypedStorage, alloc_stream: Stream) -> Tensor:
        """The result of a kernel on the current stream, which `alloc_stream` has joined."""
        streams, current = self._context.streams, self._context.streams.current()
        buffer = current.alloc(self.nbytes)
        streams.join_all(alloc_stream)  # Note [Swap-out]: the source was written by others, and `current` reads it
        current.encode(self._codec, flat_bytes(storage), buffer[: self._encoded_bytes], self._status(buffer))
        streams.join_all(alloc_stream)  # ... and the copy comes after the allocating stream, which follows `current` here
        self._buffer, self._alloc_stream = buffer, current
        return buffer

    def stands_for_it(self, host: Tensor) -> bool:
        exact = int(self._status(host)) == 0
        self._context.metrics.encoded(self._codec.name, str(self._dtype), exact=exact)
        return exact

    def destination(self, whole: Tensor, compute: Stream) -> Tensor:
        self._buffer, self._alloc_stream = compute.alloc(self.nbytes), compute
        return self._buffer

    def arrive(self, storage: torch.UntypedStorage, compute: Stream) -> None:
        if self._buffer is not None:
            compute.decode(self._codec, self._buffer[: self._encoded_bytes], flat_bytes(storage))
            self.drop_buffer()

    def drop_buffer(self) -> None:
        if self._buffer is not None and self._alloc_stream is not None:
            self._alloc_stream.free(self._buffer)
        self._buffer = self._alloc_stream = None

    def _status(self, buffer: Tensor) -> Tensor:
        return buffer[self._status_at : self._status_at + _STATUS_BYTES].view(torch.int32)


def codecs_by_name(names: Sequence[str]) -> tuple[Codec, ...]:
    """The codecs that `names` name, in that order; ("all",) names all. Imports Triton where there is a name at all.

    Raises `ValueError` for a name that there is not, `TypeError` for what is no sequence.
    """
    if not isinstance(names, str):
        check_type("codecs", names, Sequence, 'a sequence of names, or ("all",)', 'pass codecs=("all",), or leave it out')
    if not names:
        return ()
    from chameleon_mm.kernels.codecs import CODECS

    known = {codec.name: codec for codec in CODECS}
    unknown = [name for name in names if name != "all" and name not in known]
    if unknown or isinstance(names, str):
        raise ValueError(f'codecs: expected a sequence of names among {", ".join(known)}, or ("all",), got {names!r}')
    return tuple(known.values()) if "all" in names else tuple(known[name] for name in names)
