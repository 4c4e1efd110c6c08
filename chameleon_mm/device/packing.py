"""Many buffers in one staging buffer: where each lies there, and the kernels that bring them there and back.

offsets, nbytes = packed_offsets([t.numel() for t in sources])
staging = compute.alloc(nbytes); compute.pack(staging, sources, offsets)

packer.pack(tables, staging, sources, offsets) or copy each by itself       # False: no kernel can do it here
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from chameleon_mm.units import round_up

_log = logging.getLogger(__name__)

PACK_ALIGN_BYTES = 128
"""Every packed buffer begins at a multiple of it, a cache line, which no two share: 16-byte accesses are aligned."""

PACK_PROGRAMS = 16
"""Programs of a pack kernel, so at most as many SMs: of an H200's 132 a share that compute can spare. Not measured."""

_COPIES_PER_LAUNCH = 3  # what a launch costs the host, published as 9-11 us, in copies of about 3 us

_MAX_TABLES = 32
"""Kept for each stream: a step packs a few kinds of batches over and over. One is some KiB, on the host and on the device."""


class PackedOffsets(NamedTuple):
    """The places of packed buffers."""

    offsets: list[int]
    """Bytes from the start of the staging buffer to each."""
    total_bytes: int
    """What the staging buffer must hold: up to the end of the last."""


def packed_offsets(sizes: Sequence[int]) -> PackedOffsets:
    """Places for buffers of `sizes` bytes in their order, each at the next multiple of 128."""
    offsets, end = [], 0
    for nbytes in sizes:
        offset = (
            (end + PACK_ALIGN_BYTES - 1) // PACK_ALIGN_BYTES * PACK_ALIGN_BYTES
        )  # round_up, where a call would cost as much
        offsets.append(offset)
        end = offset + nbytes
    return PackedOffsets(offsets, end)


class _Run(NamedTuple):
    """Buffers that lie in the staging buffer as `packed_offsets` would have them, from some byte on."""

    begin: int
    end: int
    """Indices of the first buffer and behind the last."""
    first: int
    last: int
    """Bytes of the staging buffer: from where, and up to where."""


def _runs(sizes: Sequence[int], offsets: Sequence[int]) -> list[_Run]:
    """The fewest runs that make up buffers of `sizes` at `offsets`: one where all are there, more where some were left out."""
    whole = packed_offsets(sizes)
    if offsets[0] == 0 and list(offsets) == whole.offsets:  # nearly always
        return [_Run(0, len(sizes), 0, whole.total_bytes)]
    runs, begin = [], 0
    for i in range(1, len(sizes) + 1):
        first, last = offsets[begin], offsets[i - 1] + sizes[i - 1]
        if i == len(sizes) or offsets[i] != first + round_up(last - first, PACK_ALIGN_BYTES):
            runs.append(_Run(begin, i, first, last))
            begin = i
    return runs


class PackKernels(NamedTuple):
    """The kernels that a packer launches, as `chameleon_mm.kernels` has them."""

    table: Callable[[Sequence[Tensor]], Any]
    pack: Callable[..., None]
    unpack: Callable[..., None]


class PackTables:
    """One stream's tables of the batches seen last, by direction and sizes. A table that fits takes new addresses alone."""

    def __init__(self) -> None:
        self._tables: OrderedDict[tuple[Any, ...], Any] = OrderedDict()

    def table(self, kernels: PackKernels, what: str, buffers: Sequence[Tensor], sizes: Sequence[int]) -> Any:
        key = (what, *sizes)
        table = self._tables.pop(key, None)
        if table is None:
            table = kernels.table(buffers)
            if len(self._tables) >= _MAX_TABLES:
                self._tables.popitem(last=False)
        self._tables[key] = table
        return table

    def __len__(self) -> int:
        return len(self._tables)


class Packer:
    """Packs and unpacks by kernels, where they work, for all streams of a device. Thread-safe.

    `num_programs` bounds the SMs that a kernel takes. Raises `ValueError` below 1.
    """

    def __init__(self, num_programs: int = PACK_PROGRAMS, load: Callable[[], PackKernels] | None = None) -> None:
        if num_programs < 1:
            raise ValueError(f"pack_programs: expected 1 or more, got {num_programs}")
        self.num_programs = num_programs
        self._load = load or _triton_kernels
        self._kernels: PackKernels | None = None
        self._refused = False
        self._lock = threading.Lock()  # a table is changed and launched from as one step

    def pack(self, tables: PackTables, staging: Tensor, sources: Sequence[Tensor], offsets: Sequence[int]) -> bool:
        """`Stream.pack` on torch's current stream, whose `tables` these are. Returns whether it was done: not where there is no
        kernel or no memory for its table, nor for offsets that are not mostly those of `packed_offsets`."""
        return self._launch("pack", tables, staging, sources, offsets)

    def unpack(self, tables: PackTables, destinations: Sequence[Tensor], staging: Tensor, offsets: Sequence[int]) -> bool:
        """`Stream.unpack`, as `pack`."""
        return self._launch("unpack", tables, staging, destinations, offsets)

    def _launch(
        self, what: str, tables: PackTables, staging: Tensor, buffers: Sequence[Tensor], offsets: Sequence[int]
    ) -> bool:
        sizes = [t.numel() for t in buffers]
        runs = _runs(sizes, offsets)
        if len(runs) > 1 and len(runs) * _COPIES_PER_LAUNCH > len(buffers):
            return False
        if any((staging.data_ptr() + run.first) % PACK_ALIGN_BYTES for run in runs):
            return False
        with self._lock:
            try:
                kernels = self._working_kernels(staging.device)
                if kernels is None:
                    return False
                for run in runs:
                    some = buffers[run.begin : run.end]
                    part = staging[run.first : run.last]
                    table = tables.table(kernels, what, some, sizes[run.begin : run.end])
                    if what == "pack":
                        kernels.pack(some, part, num_programs=self.num_programs, table=table)
                    else:
                        kernels.unpack(part, some, num_programs=self.num_programs, table=table)
            except torch.OutOfMemoryError:
                return False  # for the table, which is allocated before a launch; copies need no memory
            return True

    def _working_kernels(self, device: torch.device) -> PackKernels | None:
        """The kernels, once one of each has run: Triton may be missing, or lack what it compiles with."""
        if self._kernels is None and not self._refused:
            try:
                kernels = self._load()
                one, staging = torch.zeros(2, PACK_ALIGN_BYTES, dtype=torch.uint8, device=device).unbind()
                kernels.pack([one], staging, num_programs=1, table=kernels.table([one]))
                kernels.unpack(staging, [one], num_programs=1, table=kernels.table([one]))
                self._kernels = kernels
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # noqa: BLE001  # a compiler fails in ways of its own, and copies do the same work
                self._refused = True
                # The text alone: a log record that kept the error would keep its frames.
                _log.warning("buffers are packed by a copy each, as the kernels cannot be used: %s", str(error))
        return self._kernels


def _triton_kernels() -> PackKernels:
    from chameleon_mm.kernels.pack import PackTable, pack
    from chameleon_mm.kernels.unpack import unpack

    return PackKernels(table=PackTable, pack=pack, unpack=unpack)
