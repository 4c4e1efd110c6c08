"""Adds checksums of device memory to slots on the device: by one Triton kernel where Triton works, else by torch operators."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from chameleon_mm.device.packing import check_flat
from chameleon_mm.units import CHECKSUM_BYTES

_log = logging.getLogger(__name__)

CHECKSUM_PROGRAMS = 132 * 4
"""Number of programs of a checksum kernel: four for each SM of an H200, as the kernel is in compute's own way. Not measured."""

_Add = Callable[[Tensor, Tensor], None]


def check_sum(out: Tensor, src: Tensor, on: torch.device) -> None:
    """Raise `ValueError` unless both are flat buffers on the device `on`, and `out` has the size of a checksum."""
    check_flat("add_checksum", "out", out, on)
    check_flat("add_checksum", "src", src, on)
    if out.numel() != CHECKSUM_BYTES:
        raise ValueError(f"add_checksum: expected {CHECKSUM_BYTES} bytes as out, got {out.numel()}: slice the buffer")


def add_by_operators(out: Tensor, src: Tensor) -> None:
    """Add the checksum of `src` to `out`, (1,) int64, by torch operators on the current stream."""
    from chameleon_mm.kernels.checksum import checksum_reference  # imports Triton

    with torch.no_grad():
        out.add_(checksum_reference(src))


class Checksummer:
    """Adds checksums for all streams of a device. Thread-safe."""

    def __init__(self) -> None:
        self._add: _Add | None = None

    def add(self, out: Tensor, src: Tensor) -> None:
        """Enqueue on torch's current stream the addition of the checksum of `src` to `out`, as `Stream.add_checksum` does."""
        number = out.view(torch.int64)
        if self._add is None:
            self._add = self._working(out.device)
        if src.data_ptr() % 16:
            add_by_operators(number, src)  # memory that torch did not allocate
        else:
            self._add(number, src)

    @staticmethod
    def _working(device: torch.device) -> _Add:
        """The kernel, if it runs here and gives what the operators give: Triton may be missing, or lack what it compiles
        with."""
        try:
            from chameleon_mm.kernels.checksum import add_checksum, checksum_reference

            tried, out = torch.arange(64, dtype=torch.uint8, device=device), torch.zeros(1, dtype=torch.int64, device=device)
            add_checksum(out, tried, num_programs=1)
            if int(out) != int(checksum_reference(tried)):
                raise RuntimeError("it gave another checksum than torch's operators")
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001  # a compiler fails in ways of its own, and operators do the same work
            _log.warning("chameleon_mm: checksums are taken by torch operators, as the kernel cannot be used: %s", str(error))
            return add_by_operators
        return lambda number, src: add_checksum(number, src, num_programs=CHECKSUM_PROGRAMS)
