"""Chooses the way of a buffer across the link, by its size.

thresholds.path(nbytes) -> Path.STAY | PACK | DIRECT         # by size, smallest first
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from chameleon_mm.units import KIB, MIB


class Path(enum.Enum):
    """Ways of a buffer across the link."""

    STAY = "stay"
    """The buffer stays: below `stay_below_bytes` moving costs more than the memory is worth."""
    PACK = "pack"
    """Packed with others of its kind: one kernel packs them, one copy moves them. Below `pack_below_bytes`."""
    DIRECT = "direct"
    """A copy of its own, in pieces. From `pack_below_bytes` on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Sizes at which one path ends and the next begins, in bytes, and how much memory packing may take.

    Raises `ValueError` for limits that are not in order, and for less staging than two packed tensors need.
    """

    stay_below_bytes: int = 4 * KIB
    """One page: less is not worth a launch's share, and hardly any memory. Not measured: nothing that is measured tells it."""

    pack_below_bytes: int = 128 * KIB
    """Size from which a copy takes the link about as long as it takes the host to ask for it: 2.4 us at the 55 GB/s published
    for an H200, against 2.3-7 us for cudaMemcpyAsync."""

    staging_bytes: int = 64 * MIB
    """Device memory that packed groups may take, on their way out and back together: sixteen groups of 4 MiB. Where it is used
    up, compute is ordered after the oldest group's copy, whose memory goes, before another is made."""

    def __post_init__(self) -> None:
        previous = 0
        for name in ("stay_below_bytes", "pack_below_bytes"):
            nbytes = getattr(self, name)
            if nbytes < previous:
                raise ValueError(f"{name}: expected {previous} bytes or more, as the paths follow each other, got {nbytes}")
            previous = nbytes
        if self.staging_bytes < 2 * self.pack_below_bytes:
            raise ValueError(
                f"staging_bytes: expected room for two tensors of pack_below_bytes ({self.pack_below_bytes} each), got "
                f"{self.staging_bytes}; raise it, or lower pack_below_bytes"
            )

    @classmethod
    def direct(cls) -> Thresholds:
        """Thresholds by which every buffer moves alone, whatever its size."""
        return cls(stay_below_bytes=0, pack_below_bytes=0)

    def path(self, nbytes: int) -> Path:
        """Path of a buffer of `nbytes`."""
        if nbytes < self.stay_below_bytes:
            return Path.STAY
        return Path.PACK if nbytes < self.pack_below_bytes else Path.DIRECT
