"""The books of one pool, behind one lock: what it holds, hands out and gets back.

with ledger.lock:                       # held for microseconds: nothing slow of the device is called under it
    ledger.drain()                      # released blocks back to the free list, their events beside them
    block = ledger.allocate(pool, nbytes)  # best fit over all chunks; None: growth has to get another chunk
    ledger.stats(limit)                 # live / requested - 1 is what rounding costs, reserved / live - 1 what chunks cost

pool.note_released -> ledger.returned.append(...)       # a release: no lock, for it runs in the middle of any line
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

import torch

from chameleon_mm.device.protocols import Device, Event
from chameleon_mm.errors import PoolStateError
from chameleon_mm.pool.block import Owner, PageableLedger, PinnedBlock, Ticket
from chameleon_mm.pool.chunks import Chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """Statistics of a pool, all sizes in bytes: `requested_bytes <= live_bytes <= reserved_bytes` always, `reserved_bytes <=
    limit_bytes` but for blocks that were live when the limit was lowered."""

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


class Ledger:
    """The blocks of one pool over its chunks. All but appending to `returned` happens under `lock`.

    It does not know its pool, so that what gives the memory back of a pool that was dropped can hold it.
    """

    def __init__(self, chunks: Chunks) -> None:
        self.lock = threading.Lock()
        self.chunks = chunks
        self.pageable = PageableLedger()
        self.returned: deque[tuple[Ticket, tuple[Event, ...]]] = deque()
        self.closed = False
        self.shrinking = False
        """Whether more may be reserved than the limit, as it was lowered. Then no block is allocated."""
        self._free_list = chunks.free_list
        self._live: dict[int, int] = {}  # serial -> bytes as asked for; of pageable blocks their own ledger knows
        self._serial = 0

    @property
    def num_live(self) -> int:
        """Live blocks, those included that were released since the last `drain`."""
        return len(self._live) + self.pageable.num_live

    def live_sizes(self) -> list[int]:
        """Bytes of each live block, as asked for."""
        return [*self._live.values(), *self.pageable.live_sizes()]

    def next_serial(self) -> int:
        """A number that no block of the pool has had."""
        self._serial += 1
        return self._serial

    def check_open(self, what: str) -> None:
        if self.closed:
            raise PoolStateError(f"{what}: expected an open pool, got one that was closed; make another PinnedPool")

    def drain(self) -> None:
        """Return released blocks to the free list, their events beside them."""
        returned = self.returned
        while returned:
            (serial, offset), events = returned.popleft()
            if offset is None:
                if serial in self.pageable:
                    self.pageable.note_released(serial, events)
                else:
                    del self._live[serial]
                continue
            del self._live[serial]
            size = self._free_list.free(offset)
            if events:
                self.chunks.of(offset).pending.add(offset, offset + size, events)

    def allocate(self, owner: Owner, nbytes: int) -> PinnedBlock | None:
        """Allocate a block of what is reserved and free, for `owner`; None where none is large enough, or while chunks have to
        go."""
        if nbytes:
            if self.shrinking:
                return None
            units = self._free_list
            offset = units.allocate(nbytes)
            if offset is None:
                return None
            chunk = self.chunks.of(offset)
            start, memory, pending = offset - chunk.base, chunk.memory, chunk.pending
            events: tuple[Event, ...] = ()
            if pending.starts:
                size = -(-nbytes // units.alignment) * units.alignment  # as `round_up`
                events = pending.take(offset, offset + size)
        else:
            offset, start, memory, events = None, 0, torch.empty(0, dtype=torch.uint8), ()
        self._serial = serial = self._serial + 1
        self._live[serial] = nbytes
        return PinnedBlock(owner, (serial, offset), memory, start, nbytes, events)

    def stats(self, limit_bytes: int) -> PoolStats:
        """Statistics of the pool, every release up to here counted."""
        self.drain()
        self.pageable.drop_complete()
        return PoolStats(
            limit_bytes=limit_bytes,
            reserved_bytes=self.chunks.reserved_bytes,
            live_bytes=self._free_list.live_bytes,
            requested_bytes=sum(self._live.values()),
            peak_live_bytes=self._free_list.peak_live_bytes,
            peak_reserved_bytes=self.chunks.peak_reserved_bytes,
            largest_free_bytes=self._free_list.largest_free,
            num_live=self.num_live,
            num_chunks=len(self.chunks),
            pageable_bytes=self.pageable.nbytes,
            peak_pageable_bytes=self.pageable.peak_bytes,
        )

    def free_all(self, device: Device) -> None:
        """Give everything back, whatever lives: for a pool that nobody can reach any more. The host waits for the device."""
        if self.chunks.hold_memory or self.pageable.holds_memory:
            # Not just the events: a pool is abandoned where something went wrong, and a block may have been dropped without
            # one.
            device.synchronize()
            self.pageable.free_all()
            self.chunks.free_all()
