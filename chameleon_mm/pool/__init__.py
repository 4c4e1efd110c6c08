"""Pinned host memory: a pool of blocks over an integer free list.

    pool = PinnedPool(max_bytes="8GiB")            # or "auto": this rank's share of what the machine leaves
    block = pool.allocate(nbytes, stream=d2h)      # d2h waits for the earlier user of the bytes, the host does not
    d2h.copy(block.buffer, hbm)
    block.release(after=d2h.record())

| for | take |
|---|---|
| the pool, and what it gives | `PinnedPool`, `PinnedBlock`, `PageableBlock`, `PoolStats` |
| bugs: writes beside a block, second releases, blocks never released | `CheckingAllocator` |
| CuPy | `pool.as_cupy_allocator()` |
| how much there is | `available_host_bytes`, `auto_limit_bytes` |

Read free_list (which bytes), chunks (until when, and how large), block (one block's life), ledger (all of it, under one lock),
growth (more of it) and pool (what users see), in that order; then checking.
"""

from __future__ import annotations
