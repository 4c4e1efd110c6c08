"""Statistics of a pool: what it holds at one moment.

    pool.stats().to_dict() -> {"live_bytes": 8192, "requested_bytes": 5000, "reserved_bytes": 1073741824, ...}

live / requested - 1 is what rounding costs, reserved / live - 1 what chunks and fragmentation cost.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """Statistics of a pool: `requested_bytes <= live_bytes <= reserved_bytes <= limit_bytes`, always. All sizes in bytes."""

    limit_bytes: int
    """Bytes that the pool may reserve at most."""
    reserved_bytes: int
    """Bytes of the chunks got from the device now."""
    live_bytes: int
    """Bytes of live blocks, each rounded up to the alignment."""
    requested_bytes: int
    """Bytes of live blocks, as asked for."""
    peak_live_bytes: int
    """The most `live_bytes` has been. A release counts from the pool's next call on: the pool is not told in between."""
    peak_reserved_bytes: int
    """The most `reserved_bytes` has been."""
    largest_free_bytes: int
    """The largest block that fits without another chunk."""
    num_live: int
    """Live blocks, those of zero bytes and the pageable ones included."""
    num_chunks: int
    pageable_bytes: int = 0
    """Ordinary memory of pageable blocks, beside all of the above: live ones, and released ones that the device still uses."""
    peak_pageable_bytes: int = 0
    """The most `pageable_bytes` has been."""

    def to_dict(self) -> dict[str, int]:
        """The fields by name, for JSON."""
        return asdict(self)
