"""The pinned-host allocator alone: blocks of any size out of few large chunks, within a limit."""

from __future__ import annotations

import torch

import chameleon_mm as cm

with cm.PinnedPool(max_bytes="64MiB") as pool:
    block = pool.allocate(3 << 20)
    block.numpy((3, 1024, 1024), "uint8")[:] = 1  # the block as a NumPy array ...
    assert block.tensor((3 << 20,), torch.uint8).sum() == 3 << 20  # ... and as a tensor, of the same bytes
    print(f"{pool.stats().live_bytes} bytes live, {pool.stats().reserved_bytes} reserved")
    block.release()  # after=event: whoever gets the bytes next waits for that event, on the device

    batch = pool.empty((1024, 1024), torch.float32)  # a tensor whose last view gives its block back
    del batch

    try:
        pool.allocate(65 << 20)
    except cm.HostMemoryExhausted as refusal:
        print(refusal)
    print(f"{pool.stats().num_live} blocks are live")
