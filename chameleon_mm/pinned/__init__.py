"""Pinned host memory: a pool of blocks over an integer free list.

    pool = PinnedPool(max_bytes="8GiB")
    block = pool.allocate(nbytes, stream=d2h)      # d2h waits for the earlier user of the bytes, the host does not
    d2h.copy(block.buffer, hbm)
    block.release(after=d2h.record())

Read free_list (which bytes), pending (until when), block (one block's life), chunks (how large), pool (all of it, and its
limits), in that order; then reservation and pageable.
"""

from __future__ import annotations

from chameleon_mm.pinned.block import PinnedBlock
from chameleon_mm.pinned.free_list import FreeList
from chameleon_mm.pinned.host_memory import available_host_bytes
from chameleon_mm.pinned.pageable import PageableBlock
from chameleon_mm.pinned.pool import PinnedPool
from chameleon_mm.pinned.reservation import Reservation
from chameleon_mm.pinned.stats import PoolStats

__all__ = ["FreeList", "PageableBlock", "PinnedBlock", "PinnedPool", "PoolStats", "Reservation", "available_host_bytes"]
