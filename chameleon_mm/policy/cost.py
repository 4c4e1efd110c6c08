"""What a copy takes on the link: measured rates, a fixed cost per piece, and what is left while both directions are busy.

start = max(when it may start, when its direction is free)
end   = start + copy_us per piece + bytes at this direction's rate, or at the duplex rest beside a copy the other way
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import isfinite

from chameleon_mm.units import MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCost:
    """The link between a device and pinned host memory. One FIFO engine per direction. Rates in 1e9 bytes a second.

    Raises `ValueError` for rates that are not positive and finite, and a duplex rate that is below the faster direction's.
    """

    d2h_gbps: float
    """Device to host, nothing the other way."""
    h2d_gbps: float
    duplex_gbps: float
    """Both directions added up, while both are busy."""
    copy_us: float = 3.1
    """Fixed cost of a piece on its engine: published for an H200, where 4 MiB reach 53.2 of 55.4 GB/s."""
    piece_bytes: int = 32 * MIB
    """Copies are cut into pieces of this."""
    hbm_gbps: float = 2_000.0
    """A copy within device memory: what stays behind of a tensor that moves in part is copied once each way."""

    def __post_init__(self) -> None:
        for knob in fields(self):
            value = getattr(self, knob.name)
            if not isfinite(value) or value < 0 or (value == 0 and knob.name != "copy_us"):
                raise ValueError(f"{knob.name}: expected a finite number above 0, got {value}; measure the link again")
        if self.duplex_gbps < max(self.d2h_gbps, self.h2d_gbps):
            raise ValueError(
                f"duplex_gbps: expected both directions together to carry at least what one does alone "
                f"({max(self.d2h_gbps, self.h2d_gbps)}), got {self.duplex_gbps}; measure the link again"
            )
