"""Pack many buffers into one staging buffer: the offsets of the buffers, and the kernels that copy them there and back.

offsets, nbytes = packed_offsets([t.numel() for t in sources])
staging = compute.alloc(nbytes); compute.pack(staging, sources, offsets)

packer.pack(staging, sources, offsets)        # False: no kernel can run here, so copy each buffer by itself
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from chameleon_mm.units import CHECKSUM_BYTES


def is_flat(t: Tensor) -> bool:
    """True if `t` is a flat buffer: (n,) uint8, contiguous."""
    return t.dtype is torch.uint8 and t.dim() == 1 and t.is_contiguous()


def check_flat(what: str, name: str, t: Tensor, on: torch.device | None = None) -> None:
    """Raise `ValueError` unless `t` is a flat buffer, on the device `on` if given."""
    if not is_flat(t) or (on is not None and t.device != on):
        where = "" if on is None else f" on {on}"
        how = f"strides {t.stride()}" if t.layout is torch.strided else f"layout {t.layout}"
        raise ValueError(
            f"{what}: expected {name} as a flat, contiguous uint8 tensor{where}, got {t.dtype} of shape {tuple(t.shape)} and "
            f"{how} on {t.device}: view its bytes first"
        )


def check_ends(what: str, dst: Tensor, src: Tensor, on: torch.device | None = None) -> None:
    """Raise `ValueError` unless both are flat buffers of equal size, on the device `on` if given."""
    check_flat(what, "dst", dst, on)
    check_flat(what, "src", src, on)
    if dst.numel() != src.numel():
        raise ValueError(f"{what}: expected equal sizes, got {src.numel()} bytes into {dst.numel()}: slice one")


def check_storage(storage: torch.UntypedStorage, nbytes: int) -> None:
    """Raise `ValueError` if `storage` has fewer than `nbytes`."""
    if storage.nbytes() < nbytes:
        raise ValueError(
            f"copy_storage: expected a storage of {nbytes} bytes or more, got {storage.nbytes()}: slice the host buffer"
        )


def check_host(host: Tensor, nbytes: int) -> None:
    """Raise `ValueError` if `host` has fewer than `nbytes`."""
    if host.numel() < nbytes:
        raise ValueError(
            f"copy_behind: expected {nbytes} bytes or more of host memory, got {host.numel()}: give a larger buffer"
        )


def check_packed(what: str, buffers: Sequence[Tensor], staging: Tensor, offsets: Sequence[int], on: torch.device) -> None:
    """Raise `ValueError` unless all are flat buffers on the device `on`, and each fits in `staging` at its offset. The message
    names the buffer by its index."""
    if len(offsets) != len(buffers):
        raise ValueError(f"{what}: expected an offset for each of {len(buffers)} buffers, got {len(offsets)}")
    check_flat(what, "the staging buffer", staging, on)
    room = staging.numel()
    for i, (buffer, offset) in enumerate(zip(buffers, offsets, strict=True)):
        if not is_flat(buffer) or buffer.device != on:  # the name's text is built only for a failing one
            check_flat(what, f"buffer {i}", buffer, on)
        if offset < 0 or offset + buffer.numel() > room:
            raise ValueError(
                f"{what}: expected buffer {i} within the staging buffer's {room} bytes, got [{offset}, "
                f"{offset + buffer.numel()}): pack fewer buffers at once, or give packed_offsets(sizes).total_bytes"
            )


_log = logging.getLogger(__name__)

PACK_ALIGN_BYTES = 128
"""Alignment of packed buffers: one cache line, so that no two buffers share one and 16-byte accesses are aligned."""

PACK_PROGRAMS = 16
"""Number of programs of a pack kernel, and so its maximum number of SMs. Derived: an SM of an H200 has 36 GB/s of its 4.8 TB/s,
half of it for reads. So 16 of the 132 SMs pack at 290 GB/s, five times the link's rate."""


class PackedOffsets(NamedTuple):
    offsets: list[int]
    """Bytes from the start of the staging buffer to each buffer."""
    total_bytes: int
    """Size of a staging buffer that holds all of them, up to the end of the last one."""


def packed_offsets(sizes: Sequence[int]) -> PackedOffsets:
    """Return offsets for buffers of `sizes` bytes in their order, each at the next multiple of 128."""
    below, mask = PACK_ALIGN_BYTES - 1, -PACK_ALIGN_BYTES  # `round_up` inlined: a call would cost as much
    offsets = list(accumulate([(nbytes + below) & mask for nbytes in sizes], initial=0))
    offsets.pop()
    return PackedOffsets(offsets, offsets[-1] + sizes[-1] if offsets else 0)


class PackKernels(NamedTuple):
    pack: Callable[..., None]
    unpack: Callable[..., None]


class Packer:
    """Packs and unpacks with kernels, if they work, for all streams of a device. Thread-safe."""

    def __init__(self, load: Callable[[], PackKernels] | None = None) -> None:
        self._load = load or _triton_kernels
        self._kernels: PackKernels | None = None
        self._refused = False

    def pack(self, staging: Tensor, sources: Sequence[Tensor], offsets: Sequence[int]) -> bool:
        """Pack on torch's current stream as `Stream.pack` does, after `check_packed`. Returns False, with nothing done, if
        there is no kernel, no memory for its table, or if torch did not allocate `staging`."""
        return self._launch("pack", staging, sources, offsets)

    def unpack(self, staging: Tensor, destinations: Sequence[Tensor], offsets: Sequence[int]) -> bool:
        """Unpack as `Stream.unpack` does, under the same conditions as `pack`."""
        return self._launch("unpack", staging, destinations, offsets)

    def _launch(self, what: str, staging: Tensor, buffers: Sequence[Tensor], offsets: Sequence[int]) -> bool:
        if not buffers:
            return True
        if staging.data_ptr() % 16:
            return False
        try:
            kernels = self._working_kernels(staging.device)
            if kernels is None:
                return False
            launch = kernels.pack if what == "pack" else kernels.unpack
            launch(staging, buffers, offsets, num_programs=PACK_PROGRAMS)
        except torch.OutOfMemoryError:
            return False  # no memory for the table, which is allocated before the launch; copies need none
        return True

    def _working_kernels(self, device: torch.device) -> PackKernels | None:
        """Return the kernels, after a test run of each, or None: Triton or its compiler may be missing."""
        if self._kernels is None and not self._refused:
            try:
                kernels = self._load()
                one, staging = torch.zeros(2, PACK_ALIGN_BYTES, dtype=torch.uint8, device=device).unbind()
                kernels.pack(staging, [one], [0], num_programs=1)
                kernels.unpack(staging, [one], [0], num_programs=1)
                self._kernels = kernels
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # noqa: BLE001  # compilers raise errors of many types; copies replace the kernels
                self._refused = True
                # Only the text: a log record with the error would keep its frames alive.
                _log.warning("chameleon_mm: buffers are packed by a copy each, as the kernels cannot be used: %s", str(error))
        return self._kernels


def _triton_kernels() -> PackKernels:
    from chameleon_mm.kernels.pack_kernels import pack, unpack

    return PackKernels(pack, unpack)


# --- Add checksums of device memory to slots on the device: with one Triton kernel if Triton works, else with torch operators

CHECKSUM_PROGRAMS = 132 * 4
"""Number of programs of a checksum kernel: four per SM of an H200, as compute waits for it. Derived: their 32 warps, with 4 KiB
to read each, have 128 KiB on their way to an SM, three times what its 36 GB/s and 1 us of latency need."""

_Add = Callable[[Tensor, Tensor], None]


def check_sum(out: Tensor, src: Tensor, on: torch.device) -> None:
    """Raise `ValueError` unless both are flat buffers on the device `on`, and `out` has the size of a checksum."""
    check_flat("add_checksum", "out", out, on)
    check_flat("add_checksum", "src", src, on)
    if out.numel() != CHECKSUM_BYTES:
        raise ValueError(f"add_checksum: expected {CHECKSUM_BYTES} bytes as out, got {out.numel()}: slice the buffer")


def add_by_operators(out: Tensor, src: Tensor) -> None:
    """Add the checksum of `src` to `out`, (1,) int64, with torch operators on the current stream."""
    from chameleon_mm.kernels.checksum import checksum_reference  # imports Triton

    with torch.no_grad():
        out.add_(checksum_reference(src))


class Checksummer:
    """Adds checksums for all streams of a device. Thread-safe."""

    def __init__(self) -> None:
        self._add: _Add | None = None

    def add(self, out: Tensor, src: Tensor) -> None:
        """Add the checksum of `src` to `out` on torch's current stream, as `Stream.add_checksum` does."""
        number = out.view(torch.int64)
        if self._add is None:
            self._add = self._working(out.device)
        if src.data_ptr() % 16:
            add_by_operators(number, src)  # torch did not allocate this memory
        else:
            self._add(number, src)

    @staticmethod
    def _working(device: torch.device) -> _Add:
        """Return the kernel if it runs and agrees with the operators, else the operators. Triton or its compiler may be
        missing."""
        try:
            from chameleon_mm.kernels.checksum import add_checksum, checksum_reference

            tried, out = torch.arange(64, dtype=torch.uint8, device=device), torch.zeros(1, dtype=torch.int64, device=device)
            add_checksum(out, tried, num_programs=1)
            if int(out) != int(checksum_reference(tried)):
                raise RuntimeError("it gave another checksum than torch's operators")
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001  # compilers raise errors of many types; operators replace the kernel
            _log.warning("chameleon_mm: checksums are taken by torch operators, as the kernel cannot be used: %s", str(error))
            return add_by_operators
        return lambda number, src: add_checksum(number, src, num_programs=CHECKSUM_PROGRAMS)
