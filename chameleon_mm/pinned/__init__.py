"""Pinned host memory: a pool of blocks over an integer free list.

    pool = PinnedPool(max_bytes="8GiB")            # or "auto": this rank's share of what the machine leaves
    block = pool.allocate(nbytes, stream=d2h)      # d2h waits for the earlier user of the bytes, the host does not
    d2h.copy(block.buffer, hbm)
    block.release(after=d2h.record())

| for | take |
|---|---|
| the pool, and what it gives | `PinnedPool`, `PinnedBlock`, `PageableBlock`, `Reservation`, `PoolStats` |
| a step whose blocks are known | `plan_offsets` -> `OffsetPlan` -> `pool.replay` -> `ReplayPool`, `ReplayStats` |
| an allocator of one's own, or around one | `Allocator`, `AllocatorWrapper` |
| what goes through | `StatisticsAllocator` -> `AllocationStats` |
| one user's share of a pool | `LimitedAllocator` |
| a log of every call, done again elsewhere | `RecordingAllocator`, `replay_log` -> `LogReplay` |
| bugs: writes beside a block, second releases | `CheckingAllocator` |
| CuPy, or code in the shape of its pool | `pool.as_cupy_allocator()`, `PinnedMalloc` |
| how much there is | `available_host_bytes`, `auto_limit_bytes` |
| addresses alone | `FreeList` |

Read free_list (which bytes), pending (until when), block (one block's life), chunks (how large), ledger (all of it, under one
lock), growth (more of it) and pool (what users see), in that order; then pageable and the wrappers.
"""

from __future__ import annotations

from chameleon_mm.pinned.allocator import Allocator, AllocatorWrapper
from chameleon_mm.pinned.block import PinnedBlock
from chameleon_mm.pinned.checking import CheckingAllocator
from chameleon_mm.pinned.counting import AllocationStats, LimitedAllocator, StatisticsAllocator
from chameleon_mm.pinned.free_list import FreeList
from chameleon_mm.pinned.growth import Reservation
from chameleon_mm.pinned.host_memory import auto_limit_bytes, available_host_bytes
from chameleon_mm.pinned.ledger import PoolStats
from chameleon_mm.pinned.malloc import PinnedMalloc
from chameleon_mm.pinned.pageable import PageableBlock
from chameleon_mm.pinned.plan_offsets import OffsetPlan, plan_offsets
from chameleon_mm.pinned.pool import PinnedPool, pool_for
from chameleon_mm.pinned.recording import LogReplay, RecordingAllocator, replay_log
from chameleon_mm.pinned.replay import ReplayPool, ReplayStats

__all__ = [
    "AllocationStats", "Allocator", "AllocatorWrapper", "CheckingAllocator", "FreeList", "LimitedAllocator", "LogReplay",
    "OffsetPlan", "PageableBlock", "PinnedBlock", "PinnedMalloc", "PinnedPool", "PoolStats", "RecordingAllocator",
    "ReplayPool", "ReplayStats", "Reservation", "StatisticsAllocator", "auto_limit_bytes", "available_host_bytes",
    "plan_offsets", "pool_for", "replay_log",
]  # fmt: skip
