"""Records of one pool, under one lock: its memory, its live blocks and its released blocks.

with ledger.lock:                       # held for microseconds: no slow device call is made under it
    ledger.drain()                      # return released blocks to the free list, with their events
    block = ledger.allocate(pool, nbytes)  # best fit over all chunks; None: growth has to get another chunk
    ledger.stats(limit)                 # live / requested - 1: cost of rounding; reserved / live - 1: cost of chunks

pool.note_released -> ledger.returned.append(...)       # a release: no lock, because it may run at any time
"""

from __future__ import annotations

import os
import threading
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from chameleon_mm.device.protocols import Device, Event
from chameleon_mm.errors import PoolStateError
from chameleon_mm.pool.block import Owner, PinnedBlock, Ticket
from chameleon_mm.pool.chunks import Chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """Statistics of a pool, all sizes in bytes. Always `requested_bytes <= live_bytes <= reserved_bytes`. Also `reserved_bytes
    <= limit_bytes`, except for blocks that were live when the limit was lowered."""

    limit_bytes: int
    """Maximum bytes that the pool may reserve."""
    reserved_bytes: int
    """Bytes of the chunks that the pool has now."""
    live_bytes: int
    """Bytes of live blocks, each rounded up to the alignment."""
    requested_bytes: int
    """Bytes of live blocks, as requested."""
    peak_live_bytes: int
    """Maximum of `live_bytes`. A release counts from the pool's next call on."""
    peak_reserved_bytes: int
    largest_free_bytes: int
    """Bytes of the largest block that fits without another chunk."""
    num_live: int
    """Number of live blocks, including blocks of zero bytes and pageable blocks."""


class Ledger:
    """Blocks of one pool over its chunks. Everything except appending to `returned` happens under `lock`.

    It has no reference to its pool, so that the finalizer of a dropped pool can hold it.
    """

    def __init__(self, chunks: Chunks) -> None:
        self.lock = threading.Lock()
        self.chunks = chunks
        self.pageable: dict[int, Tensor] = {}
        """Memory of live pageable blocks, by their serial numbers."""
        self.ending: list[tuple[Tensor, tuple[Event, ...]]] = []
        """Memory of released pageable blocks, each with the events until which it is held."""
        self.returned: deque[tuple[Ticket, tuple[Event, ...]]] = deque()
        self.closed = False
        self.shrinking = False
        """True if reserved memory may exceed a lowered limit. Then no block is allocated."""
        self._free_list = chunks.free_list
        self.live: dict[int, int] = {}
        """Requested bytes of live pinned blocks, by their serial numbers."""
        self._serial = 0

    def add_pageable(self, memory: Tensor) -> int:
        """Hold `memory` for a block. Return the block's serial number."""
        self.drop_ended()
        self._serial = serial = self._serial + 1
        self.pageable[serial] = memory
        return serial

    def drop_ended(self) -> None:
        """Free the memory of released pageable blocks that the device no longer uses. The host does not wait."""
        self.ending = [(memory, events) for memory, events in self.ending if not all(event.query() for event in events)]

    def check_open(self, what: str) -> None:
        if self.closed:
            raise PoolStateError(
                f"{what}: expected an open pool, got one that was closed by close(); make another "
                f"PinnedPool, and close sessions that were given this one before it"
            )

    def drain(self) -> None:
        """Return released blocks to the free list, with their events."""
        returned = self.returned
        while returned:
            (serial, offset), events = returned.popleft()
            if offset is None:
                if (memory := self.pageable.pop(serial, None)) is not None:
                    self.ending.append((memory, events))
                else:
                    del self.live[serial]
                continue
            del self.live[serial]
            size = self._free_list.free(offset)
            if events:
                self.chunks.of(offset).pending.add(offset, offset + size, events)

    def allocate(self, owner: Owner, nbytes: int) -> PinnedBlock | None:
        """Allocate a block from free reserved memory, for `owner`. Returns None if no free block is large enough, or while
        chunks must be freed."""
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
        self.live[serial] = nbytes
        return PinnedBlock(owner, (serial, offset), memory, start, nbytes, events)

    def stats(self, limit_bytes: int) -> PoolStats:
        self.drain()
        self.drop_ended()
        return PoolStats(
            limit_bytes=limit_bytes,
            reserved_bytes=self.chunks.reserved_bytes,
            live_bytes=self._free_list.live_bytes,
            requested_bytes=sum(self.live.values()),
            peak_live_bytes=self._free_list.peak_live_bytes,
            peak_reserved_bytes=self.chunks.peak_reserved_bytes,
            largest_free_bytes=self._free_list.largest_free,
            num_live=len(self.live) + len(self.pageable),
        )

    def free_all(self, device: Device, pid: int) -> None:
        """Free everything, even live blocks, for a pool without references. The host waits for the device. In a forked child,
        which is not process `pid`, it does nothing, because the parent owns the memory."""
        if os.getpid() == pid and (self.chunks.hold_memory or self.pageable or self.ending):
            # Not only the events: after an error, a block may have been dropped without an event.
            device.synchronize()
            self.pageable.clear()
            self.ending.clear()
            self.chunks.free_all()
