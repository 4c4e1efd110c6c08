"""Pin and free chunks for a pool: one thread at a time, never under the pool's lock.

    with resizing:                                  # if another thread pins, wait for its chunk, which may be enough
        with ledger.lock: allocate -> done          # ... or blocks were released meanwhile
                          make_room                 # size of the next chunk; detaches unused chunks for it
        free detached chunks; pin; admit            # slow, may wait for the device
    again                                           # another thread may have taken the new memory

Pinning runs at a few GB/s. A thread that finds a free block meanwhile continues; `ledger.lock` is held only for microseconds.

An interrupt (`KeyboardInterrupt`, a signal handler that raises) may come between any two lines here. The only mark of a pinning
thread is the lock itself, which the thread releases at its exit. A chunk is at any time in one of the lists of `Chunks`, from
which the next call admits it or frees it.
"""

from __future__ import annotations

import threading

from chameleon_mm.errors import HostMemoryExhausted
from chameleon_mm.pool.block import Owner, PinnedBlock
from chameleon_mm.pool.ledger import Ledger


class Growth:
    """Growth and shrinking of the pool of `ledger`, within `limit_bytes`. Thread-safe."""

    def __init__(self, ledger: Ledger, limit_bytes: int) -> None:
        self._ledger, self._chunks, self.limit_bytes = ledger, ledger.chunks, limit_bytes
        self._resizing = threading.Lock()  # taken before `ledger.lock` if both are needed

    def allocate_or_pin(self, owner: Owner, nbytes: int) -> PinnedBlock:
        """Allocate a block, from another chunk if needed. Raises `HostMemoryExhausted`, or `PoolStateError` if the pool is
        closed."""
        ledger, chunks = self._ledger, self._chunks
        while True:
            with self._resizing:
                with ledger.lock:
                    ledger.check_open("allocate")
                    ledger.drain()
                    chunks.admit()
                    block = ledger.allocate(owner, nbytes)
                if block is not None:
                    return block
                if ledger.shrinking:
                    if not self._shrink(self.limit_bytes, wait=True):
                        raise HostMemoryExhausted(
                            f"pinned pool: asked for {nbytes} bytes, but the limit was lowered to {self.limit_bytes} bytes "
                            f"and {chunks.reserved_bytes} are still reserved, in chunks with live blocks; release these, or "
                            f"raise limit_bytes"
                        )
                    continue
                with ledger.lock:
                    wanted = chunks.make_room(nbytes, self.limit_bytes)
                self._pin(wanted)

    def set_limit(self, nbytes: int) -> None:
        """Set the limit, and free unused chunks until it is met or none is left. The host waits if the device still uses
        one."""
        with self._resizing:
            with self._ledger.lock:
                self._ledger.check_open("limit_bytes")
                self._ledger.shrinking = True  # first: after an interrupt the next allocation completes the rest
            self.limit_bytes = nbytes
            self._shrink(nbytes, wait=True)

    def shrink(self) -> None:
        """Free unused chunks that the device no longer uses, until the limit is met."""
        with self._resizing:
            self._shrink(self.limit_bytes, wait=False)

    def close(self) -> None:
        """Free all chunks of a pool without blocks. The host waits if the device still uses one."""
        with self._resizing:
            self._shrink(0, wait=True)

    def _shrink(self, limit: int, *, wait: bool) -> bool:
        """Free unused chunks above `limit`, under `_resizing`. `wait`: also chunks that the device still uses. Returns True if
        the limit is met now."""
        ledger, chunks = self._ledger, self._chunks
        with ledger.lock:
            ledger.drain()
            chunks.admit()
            enough = chunks.shrink(limit, wait=wait)
            ledger.shrinking = not enough
        chunks.free()
        return enough

    def _pin(self, nbytes: int) -> None:
        """Pin another chunk. Called under `_resizing`, so that detached chunks are freed before the limit is used again."""
        chunks = self._chunks
        chunks.free()
        try:
            chunks.pin(nbytes)
        except MemoryError as error:
            raise HostMemoryExhausted(
                f"pinned pool: asked the device for a chunk of {nbytes} bytes, got: {error}. {chunks.reserved_bytes} of at "
                f"most {self.limit_bytes} bytes are reserved"
            ) from error
        with self._ledger.lock:
            chunks.admit()
