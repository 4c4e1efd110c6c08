"""Memory for copy benchmarks: device, pinned and pageable, filled with random bytes, freed in order.

    with Buffers(device) as buffers:
        hbm, host = buffers.on_device(n), buffers.pinned(n)
        ...                                   # the end waits for the device, then frees everything

Bytes are random: zeros would be faster than real data, because of compression and of pages that were never touched.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from chameleon_mm.device.protocols import Device

_PATTERN_BYTES = 1 << 20


class Buffers:
    """Context that owns flat uint8 buffers of one device and of its host. Allocation errors pass through."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._compute = device.current_stream()
        self._on_device: list[Tensor] = []
        self._pinned: list[Tensor] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._device.synchronize()
        while self._on_device:
            self._compute.free(self._on_device.pop())
        while self._pinned:
            self._device.free_pinned(self._pinned.pop())

    def on_device(self, nbytes: int) -> Tensor:
        """Filled device memory of the compute stream. Every stream may use it at once, because the host waited."""
        buffer = self._compute.alloc(nbytes)
        self._on_device.append(buffer)
        with self._device.compute():
            buffer.random_()
        self._device.synchronize()
        return buffer

    def pinned(self, nbytes: int) -> Tensor:
        """Filled pinned host memory."""
        buffer = self._device.alloc_pinned(nbytes)
        self._pinned.append(buffer)
        return _fill(buffer)

    def pageable(self, nbytes: int) -> Tensor:
        """Filled pageable host memory; it is resident because it is filled."""
        return _fill(torch.empty(nbytes, dtype=torch.uint8))


def _fill(host: Tensor) -> Tensor:
    # A repeated pattern: drawing a GiB of random bytes on one core takes seconds.
    pattern = torch.randint(0, 256, (min(_PATTERN_BYTES, host.numel()),), dtype=torch.uint8)
    for piece in host.split(_PATTERN_BYTES):
        piece.copy_(pattern[: piece.numel()])
    return host
