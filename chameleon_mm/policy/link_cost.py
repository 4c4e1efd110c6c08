"""Cost model of the link: measured rates, a fixed cost per piece, and what is left while both directions are busy.

start = max(when it may start, when its direction is free)
end   = start + copy_us per piece + bytes at this direction's rate, or at the duplex rest beside a copy the other way
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from operator import index
from typing import overload

import numpy as np

from chameleon_mm.trace.trace import Float64s, Int64s
from chameleon_mm.units import MIB

SLOWEST_GBPS, FASTEST_GBPS = 1e-12, 1e15
"""Bounds far beyond any link. Within them no time of a copy is infinite, or nothing, for want of digits."""

_DEAREST_US = 1e9
"""Bound of the fixed cost of a piece: a quarter of an hour."""

_ROUNDING = 1e-9
"""Share by which a duplex rate may exceed the sum that it stands for: both may have been scaled by a factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCost:
    """The link between a device and pinned host memory. One FIFO engine per direction. Rates in 1e9 bytes a second.

    Raises `ValueError` for rates that no link has, for a duplex rate that is below the faster direction's or above the sum of
    both, for a fixed cost that is no time, and for pieces that are no whole number of bytes.
    """

    d2h_gbps: float
    """Rate from device to host, nothing the other way."""
    h2d_gbps: float
    duplex_gbps: float
    """Rate of both directions added up, while both are busy."""
    copy_us: float = 3.1
    """Fixed cost of a piece on its engine: published for an H200, where 4 MiB reach 53.2 of 55.4 GB/s."""
    piece_bytes: int = 32 * MIB
    """Size of the pieces that copies are cut into."""
    hbm_gbps: float = 2_000.0
    """Rate of a copy within device memory: what stays behind of a tensor that moves in part is copied once each way."""

    def __post_init__(self) -> None:
        for knob in ("d2h_gbps", "h2d_gbps", "duplex_gbps", "hbm_gbps"):
            rate = getattr(self, knob)
            if not SLOWEST_GBPS <= rate <= 2 * FASTEST_GBPS:  # NaN is not
                raise ValueError(
                    f"{knob}: expected a finite number above 0, from {SLOWEST_GBPS:g} to {FASTEST_GBPS:g} GB/s, got {rate}; "
                    f"measure the link again"
                )
        if not isfinite(self.copy_us) or not 0 <= self.copy_us <= _DEAREST_US:
            raise ValueError(f"copy_us: expected a finite number from 0 to {_DEAREST_US:g} us, got {self.copy_us}")
        try:
            whole = index(self.piece_bytes)
        except TypeError:
            whole = 0
        if whole < 1:
            raise ValueError(f"piece_bytes: expected a whole number of 1 byte or more, got {self.piece_bytes!r}")
        fastest, total = max(self.d2h_gbps, self.h2d_gbps), self.d2h_gbps + self.h2d_gbps
        if not fastest <= self.duplex_gbps <= total * (1 + _ROUNDING):
            raise ValueError(
                f"duplex_gbps: expected both directions together to carry at least what one does alone ({fastest}) and at most "
                f"what both do ({total}), got {self.duplex_gbps}; measure the link again"
            )

    @overload
    def alone_us(self, nbytes: int, rate_gbps: float) -> float: ...
    @overload
    def alone_us(self, nbytes: Int64s, rate_gbps: float) -> Float64s: ...
    def alone_us(self, nbytes: int | Int64s, rate_gbps: float) -> float | Float64s:
        """Time of a copy of `nbytes` at one rate, its pieces' fixed cost included; of an array of sizes, one by one."""
        return -(-nbytes // self.piece_bytes) * np.float64(self.copy_us) + nbytes / np.float64(rate_gbps * 1e3)
