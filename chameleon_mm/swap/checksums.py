"""Checksums of device memory. Each stays in a slot on the device, so that the host can read many at once.

    slot = checksums.start(buffer)          # enqueued on the current stream; the host does not wait
    checksums.read([slot, other])           # copies their pages to the host, and waits for the latest checksum
    del slot                                # frees the slot; on any thread, at any time

A kernel adds to a slot, so each page of 512 slots is set to zero first. Slots are not reused: at the end of a step, pages
without a held slot are freed.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from chameleon_mm.device import Device, Event, Stream
from chameleon_mm.plan.rewrite import CHECKSUMS_IN_PAGE
from chameleon_mm.pool.pool import PinnedPool, host_block
from chameleon_mm.units import CHECKSUM_BYTES

PAGE_SLOTS = CHECKSUMS_IN_PAGE

PAGE_BYTES = PAGE_SLOTS * CHECKSUM_BYTES


class _Page:
    """Slots that share a buffer."""

    __slots__ = ("buffer", "freed", "stream", "sums", "taken", "zeroed")

    def __init__(self, buffer: Tensor, stream: Stream) -> None:
        """`buffer` is set to zero on `stream`, which allocated it."""
        self.buffer, self.stream = buffer, stream
        self.sums = buffer.split(CHECKSUM_BYTES)
        self.zeroed = stream.record()
        self.taken = 0
        """Number of slots that were handed out."""
        self.freed: deque[None] = deque()
        """An entry for each of them that was freed since."""


class Checksums:
    """Checksums of buffers of one device. Not thread-safe: the executor holds its lock. Only slots may be freed without it."""

    def __init__(self, device: Device, pool: PinnedPool) -> None:
        """`pool`: pool of the host memory into which pages are copied."""
        self._device = device
        self._pool = pool
        self._pages: list[_Page] = []
        self._order: Stream | None = None
        """Stream that waits for every checksum and copies pages. So a read does not wait for later work of compute."""

    def start(self, buffer: Tensor) -> ChecksumSlot:
        """Enqueue the checksum of a flat uint8 tensor on the current stream. Raises `torch.OutOfMemoryError` if there is no
        memory for another page."""
        current = self._device.current_stream()
        if not self._pages or self._pages[-1].taken == PAGE_SLOTS:
            self._add_page()
        page = self._pages[-1]
        assert self._order is not None
        if page.stream is not current:
            current.wait(page.zeroed)  # setting the page to zero -> this checksum
        slot, page.taken = page.taken, page.taken + 1
        try:
            current.add_checksum(page.sums[slot], buffer)
        finally:
            self._order.wait(current.record())  # the checksum -> a copy of its page
        return ChecksumSlot(page, slot)

    def read(self, slots: Sequence[ChecksumSlot]) -> list[int]:
        """Return the checksums in these slots. The host waits for them."""
        pages = list(dict.fromkeys(slot.page for slot in slots))
        if not pages:
            return []
        assert self._order is not None
        block = host_block(self._pool, PAGE_BYTES * len(pages))
        done: Event | None = None
        try:
            block.wait_on(self._order)  # Note [Host block]: the block's last copy may still be running
            with _disable_current_modes():
                for host, page in zip(block.buffer.split(PAGE_BYTES), pages, strict=True):
                    self._order.copy(host, page.buffer)
                done = self._order.record()
                done.synchronize()  # the copies -> the host's reads, and all later launches
                numbers = block.buffer.numpy().view(np.int64).copy()
        finally:
            block.release(after=done)
        return [int(numbers[pages.index(slot.page) * PAGE_SLOTS + slot.number]) for slot in slots]

    def release_unused(self) -> None:
        """Free the pages without a held slot."""
        for page in [page for page in self._pages if page.taken == len(page.freed)]:
            assert self._order is not None
            page.stream.wait(self._order.record())  # its checksums and copies -> the next owner of its memory
            page.stream.free(page.buffer)
            self._pages.remove(page)

    def _add_page(self) -> None:
        if self._order is None:
            self._order = self._device.new_stream("checksums")
        with _disable_current_modes(), self._device.compute(), torch.no_grad():
            stream = self._device.current_stream()
            buffer = stream.alloc(PAGE_BYTES)
            self._pages.append(_Page(buffer.zero_(), stream))
        self._order.wait(self._pages[-1].zeroed)  # zero -> a copy of the page


class ChecksumSlot:
    """Slot with one checksum on the device. Deleting this object frees the slot."""

    __slots__ = ("number", "page")

    def __init__(self, page: _Page, number: int) -> None:
        self.page = page
        self.number = number

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ends():
            self.page.freed.append(None)
