"""A storage's bytes in a codec's shorter form, and the status word that says whether they stand for the storage.

    | encoded bytes | up to 15 unused | status, 4 bytes | 12 unused |          on the device as on the host

    encoding.encode(raw, buffer, compute)         # the kernel writes both; they cross in one copy
    encoding.is_exact(host)                       # once the copy's event is complete: else the raw bytes must cross
    encoding.decode(buffer, raw, compute)

The source must stay until the status is known: a codec may find that the bytes are not of the kind that it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from chameleon_mm.arguments import check_type
from chameleon_mm.device import Stream
from chameleon_mm.kernels.arguments import UNIT_BYTES
from chameleon_mm.saved.handles import flat_bytes
from chameleon_mm.units import round_up

if TYPE_CHECKING:
    from chameleon_mm.kernels.codec import Codec

_STATUS_BYTES = 4


class Encoding:
    """The encoded form of one storage of `raw_bytes`, by `codec`: its size, its layout and its kernels."""

    __slots__ = ("_encoded_bytes", "_status_at", "codec", "dtype", "nbytes")

    def __init__(self, codec: Codec, raw_bytes: int, dtype: torch.dtype) -> None:
        self.codec = codec
        self.dtype = dtype
        self._encoded_bytes = codec.encoded_bytes(raw_bytes)
        self._status_at = round_up(self._encoded_bytes, UNIT_BYTES)
        self.nbytes = self._status_at + UNIT_BYTES
        """Bytes that cross the link, and lie on the host."""

    def encode(self, raw: torch.UntypedStorage, buffer: Tensor, compute: Stream) -> None:
        """Fill `buffer`, (nbytes,) uint8, on `compute`, the current stream."""
        compute.encode(self.codec, flat_bytes(raw), buffer[: self._encoded_bytes], self._status(buffer))

    def is_exact(self, host: Tensor) -> bool:
        """Whether the encoded bytes on the host stand for the source. Their copy must be complete."""
        return int(self._status(host)) == 0

    def decode(self, buffer: Tensor, raw: torch.UntypedStorage, compute: Stream) -> None:
        """Fill `raw` from `buffer`, on `compute`, the current stream."""
        compute.decode(self.codec, buffer[: self._encoded_bytes], flat_bytes(raw))

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
