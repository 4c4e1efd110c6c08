"""Pinned host memory: a pool of blocks over an integer free list.

    pool = PinnedPool(max_bytes="8GiB")            # or "auto": this rank's share of the machine's available memory
    block = pool.allocate(nbytes, stream=d2h)      # d2h waits for the earlier user of the bytes, the host does not
    d2h.copy(block.buffer, hbm)
    block.release(after=d2h.record())

| for | take |
|---|---|
| the pool, its blocks and statistics | `PinnedPool`, `PinnedBlock`, `PageableBlock`, `PoolStats` |
| bugs: blocks that are never released | `CheckingAllocator` |
| CuPy | `pool.as_cupy_allocator()` |
| available memory | `available_host_bytes`, `pinnable_bytes` |

Read free_list (which bytes), chunks (until when, and how large), block (one block's life), ledger (all of it, under one lock),
growth (more of it) and pool (the user's view), in that order; then checking.
"""

from __future__ import annotations
