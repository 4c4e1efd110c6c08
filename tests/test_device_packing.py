"""Packing by kernels: the kernel of each launch and its arguments, and copies where no kernel can run.

The kernels are played by their references. Under Triton's interpreter, in a process of its own, they run.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from chameleon_mm.device.packing import PACK_PROGRAMS, Packer, PackKernels, packed_offsets
from tests._fakes import refusing

SIZES = (1, 16, 17, 4096)


class PlayedKernels:
    """The kernels as far as a packer uses them, by copies; notes each launch. `fails` is raised by all of them."""

    def __init__(self, fails: Exception | None = None) -> None:
        self.fails = fails
        self.launched: list[tuple[str, int, int]] = []

    def load(self) -> PackKernels:
        return PackKernels(self._pack, self._unpack)

    def _pack(self, staging: Tensor, buffers: Sequence[Tensor], offsets: Sequence[int], *, num_programs: int) -> None:
        self._launch("pack", len(buffers), num_programs)
        for buffer, offset in zip(buffers, offsets, strict=True):
            staging[offset : offset + buffer.numel()] = buffer

    def _unpack(self, staging: Tensor, buffers: Sequence[Tensor], offsets: Sequence[int], *, num_programs: int) -> None:
        self._launch("unpack", len(buffers), num_programs)
        for buffer, offset in zip(buffers, offsets, strict=True):
            buffer.copy_(staging[offset : offset + buffer.numel()])

    def _launch(self, what: str, buffers: int, num_programs: int) -> None:
        if self.fails is not None:
            raise self.fails
        self.launched.append((what, buffers, num_programs))


def aligned(nbytes: int) -> Tensor:
    """Memory on a 128-byte boundary, as an allocator on a GPU gives it."""
    memory = torch.zeros(nbytes + 128, dtype=torch.uint8)
    start = -memory.data_ptr() % 128
    return memory[start : start + nbytes]


def buffers_of(sizes: Sequence[int]) -> list[Tensor]:
    return [aligned(nbytes).random_(1, 256) for nbytes in sizes]


def pack_and_unpack(packer: Packer, first: int = 0) -> bool:
    """True if `packer` packed and unpacked after `first` bytes, exactly, and wrote nothing else."""
    sources, back = buffers_of(SIZES), [torch.zeros_like(t) for t in buffers_of(SIZES)]
    offsets, total = packed_offsets(SIZES)
    offsets = [first + offset for offset in offsets]
    staging = aligned(first + total + 64)
    if not packer.pack(staging, sources, offsets):
        return False
    want = torch.zeros_like(staging)
    for source, offset in zip(sources, offsets, strict=True):
        want[offset : offset + source.numel()] = source
    done = packer.unpack(staging, back, offsets)
    return done and torch.equal(staging, want) and all(torch.equal(*pair) for pair in zip(sources, back, strict=True))


@pytest.mark.parametrize("first", [0, 128, 4096])
def test_what_is_packed_is_what_comes_back(first: int) -> None:
    kernels = PlayedKernels()
    assert pack_and_unpack(Packer(kernels.load), first)
    # Once on a single buffer, to know that they work; then with as many programs as a copy leaves room for.
    assert kernels.launched == [("pack", 1, 1), ("unpack", 1, 1), ("pack", 4, PACK_PROGRAMS), ("unpack", 4, PACK_PROGRAMS)]


def test_what_kernels_have_nothing_to_do_with_launches_none() -> None:
    kernels = PlayedKernels()
    assert Packer(load=kernels.load).pack(aligned(16), [], [])
    # Memory that torch did not allocate is left to copies.
    assert not Packer(load=kernels.load).pack(aligned(512)[8:], buffers_of([16, 32]), [0, 128])
    assert kernels.launched == []
    assert not Packer(load=refusing(ModuleNotFoundError, "No module named 'triton'")).unpack(
        aligned(512), buffers_of([16]), [0]
    )


@pytest.mark.parametrize("error", [ImportError("No module named 'triton'"), RuntimeError("gcc: not found"), KeyError("sm_999")])
def test_kernels_that_do_not_work_are_left_alone_and_named_once(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    packer = Packer(load=PlayedKernels(fails=error).load)
    with caplog.at_level(logging.WARNING, logger="chameleon_mm"):
        for _ in range(3):
            assert not packer.pack(aligned(512), buffers_of([16]), [0])
    assert [str(error) in record.message for record in caplog.records] == [True]
    assert caplog.records[0].exc_info is None


def test_an_error_of_a_kernel_that_works_is_raised_and_no_memory_for_a_table_is_none() -> None:
    kernels = PlayedKernels(fails=torch.OutOfMemoryError("out of memory"))
    packer = Packer(load=kernels.load)
    assert not packer.pack(aligned(512), buffers_of([16]), [0])
    kernels.fails = None
    assert pack_and_unpack(packer)
    kernels.fails = torch.OutOfMemoryError("out of memory")
    assert not packer.pack(aligned(512), buffers_of([16]), [0])
    kernels.fails = RuntimeError("an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        packer.pack(aligned(512), buffers_of([16]), [0])


def test_a_packer_keeps_no_buffer(no_gc: None) -> None:
    kernels = PlayedKernels()
    packer, staging, sources = Packer(load=kernels.load), aligned(512), buffers_of([16, 32])
    assert packer.pack(staging, sources, [0, 128])
    kept = [weakref.ref(t) for t in (staging, *sources)]
    del staging, sources
    assert [ref() for ref in kept] == [None] * 3
