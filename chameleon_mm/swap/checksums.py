"""Checksums of device memory. Each stays in a slot on the device, so that the host can read many at once.

    slot = checksums.start(buffer)          # enqueued on the current stream; the host does not wait
    checksums.read([slot, other])           # copies their pages to the host, and waits for the latest checksum
    del slot                                # frees the slot; on any thread, at any time

A page has 512 slots. A kernel adds to a slot, so a page is zeroed before its slots are reused, once none of them is held.
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

    __slots__ = ("buffer", "clean", "freed", "stream", "sums", "zeroed")

    def __init__(self, buffer: Tensor, stream: Stream) -> None:
        self.buffer = buffer
        self.stream = stream
        """Stream that allocated the buffer."""
        self.sums = buffer.split(CHECKSUM_BYTES)
        self.clean: deque[int] = deque()
        """Numbers of the slots that are zero."""
        self.freed: deque[None] = deque()
        """An entry for each slot that was freed since the page was last zeroed."""
        self.zeroed: tuple[Stream, Event] | None = None
        """Stream that last zeroed the page, and the event after that; None: never zeroed."""

    @property
    def is_held(self) -> bool:
        return self.zeroed is not None and len(self.clean) + len(self.freed) < PAGE_SLOTS

    @property
    def has_room(self) -> bool:
        """True if a slot is zero, or the whole page may be zeroed."""
        return bool(self.clean) or self.zeroed is None or len(self.freed) == PAGE_SLOTS


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
        page = next((page for page in self._pages if page.has_room), None) or self._add_page()
        if not page.clean:
            self._set_to_zero(page, current)
        assert page.zeroed is not None and self._order is not None
        if page.zeroed[0] is not current:
            current.wait(page.zeroed[1])  # setting the page to zero -> this checksum
        slot = page.clean.popleft()
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
        for page in [page for page in self._pages if not page.is_held]:
            assert self._order is not None
            page.stream.wait(self._order.record())  # its checksums and copies -> the next owner of its memory
            page.stream.free(page.buffer)
            self._pages.remove(page)

    def _add_page(self) -> _Page:
        if self._order is None:
            self._order = self._device.new_stream("checksums")
        with _disable_current_modes(), self._device.compute():
            stream = self._device.current_stream()
            page = _Page(stream.alloc(PAGE_BYTES), stream)
        self._pages.append(page)
        return page

    def _set_to_zero(self, page: _Page, current: Stream) -> None:
        assert self._order is not None
        if page.zeroed is not None:
            current.wait(self._order.record())  # earlier uses of its slots, on any stream -> zero
        with _disable_current_modes(), self._device.compute(), torch.no_grad():
            page.buffer.zero_()
        page.zeroed = current, current.record()
        self._order.wait(page.zeroed[1])  # zero -> a copy of the page
        page.freed.clear()
        page.clean.extend(range(PAGE_SLOTS))


class ChecksumSlot:
    """Slot with one checksum on the device. Deleting this object frees the slot."""

    __slots__ = ("number", "page")

    def __init__(self, page: _Page, number: int) -> None:
        self.page = page
        self.number = number

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ends():
            self.page.freed.append(None)
