"""Pack and unpack: every size and alignment, exactly, and not a byte beside it. Under Triton's interpreter or on a GPU.

Tests with the parameter "interpreter" exist only where Triton's interpreter is on: test_kernels_compiled runs them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from chameleon_mm.device.packing import packed_offsets
from chameleon_mm.kernels.pack_kernels import pack, pack_kernel, pack_reference, unpack, unpack_reference

PLACES = [pytest.param("cuda", marks=pytest.mark.gpu)]
if os.environ.get("TRITON_INTERPRET") == "1":
    PLACES.insert(0, pytest.param("cpu", id="interpreter"))

BLOCK_BYTES = 256  # small: buffers of a few hundred bytes have several items
CANARY_BYTES = 64


def filled(nbytes: int, shift: int, place: str) -> tuple[Tensor, Tensor]:
    """Random bytes, canaries included, and a buffer amid them, so far behind a 16-byte boundary."""
    memory = torch.randint(0, 256, (nbytes + 2 * CANARY_BYTES + 32,), dtype=torch.uint8).to(place)
    begin = -memory.data_ptr() % 16 + CANARY_BYTES + shift
    return memory, memory[begin : begin + nbytes]


def check_both_ways(batch: Sequence[tuple[int, int]], offsets: list[int], place: str, num_programs: int = 3) -> None:
    """Check that buffers of (bytes, shift) are packed to `offsets` and back, and that nothing else is written."""
    made = [filled(*one, place) for one in batch]
    before = [memory.clone() for memory, _ in made]
    buffers = [t for _, t in made]
    memory, staging = filled(max(offset + t.numel() for offset, t in zip(offsets, buffers, strict=True)), 0, place)
    expected = memory.clone()
    pack_reference(expected[staging.storage_offset() :][: staging.numel()], buffers, offsets)
    pack(staging, buffers, offsets, num_programs=num_programs, block_bytes=BLOCK_BYTES)
    assert torch.equal(memory, expected)
    assert all(map(torch.equal, (memory for memory, _ in made), before))

    targets = [filled(*one, place) for one in batch]
    wanted = [memory.clone() for memory, _ in targets]
    places = [(t.storage_offset(), t.numel()) for _, t in targets]
    unpack_reference(staging, [w[at : at + n] for w, (at, n) in zip(wanted, places, strict=True)], offsets)
    unpack(staging, [t for _, t in targets], offsets, num_programs=num_programs, block_bytes=BLOCK_BYTES)
    assert all(map(torch.equal, (memory for memory, _ in targets), wanted))
    assert torch.equal(memory, expected)
    assert all(map(torch.equal, (t for _, t in targets), buffers))


@pytest.mark.parametrize("place", PLACES)
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    batch=st.lists(st.tuples(st.integers(0, 3 * BLOCK_BYTES), st.integers(0, 15)), min_size=1, max_size=4),
    gaps=st.lists(st.integers(0, 40), min_size=4, max_size=4),
    num_programs=st.sampled_from((1, 3)),
)
def test_every_size_and_place_is_packed_and_unpacked_exactly(
    place: str, batch: list[tuple[int, int]], gaps: list[int], num_programs: int
) -> None:
    offsets, end = [], 0
    for (nbytes, _), gap in zip(batch, gaps, strict=False):
        offsets.append(end + gap)
        end += gap + nbytes
    check_both_ways(batch, offsets, place, num_programs)


@pytest.mark.parametrize("place", PLACES)
def test_sizes_around_the_unit_and_the_block(place: str) -> None:
    sizes = (0, 1, 15, 16, 17, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 8)
    batch = [(nbytes, shift) for nbytes in sizes for shift in (0, 1, 8)]
    check_both_ways(batch, packed_offsets([nbytes for nbytes, _ in batch]).offsets, place)


@pytest.mark.parametrize("place", PLACES)
def test_sources_may_overlap_and_repeat(place: str) -> None:
    base = filled(400, 0, place)[1]
    buffers, offsets = [base[:240], base[160:], base[:240]], [0, 256, 512]
    staging = filled(800, 0, place)[1]
    expected = staging.clone()
    pack_reference(expected, buffers, offsets)
    pack(staging, buffers, offsets, num_programs=2)
    assert torch.equal(staging, expected)


class Guarded:
    """Memory whose neighbours cannot be touched: pages without access in front of it and behind it."""

    def __init__(self, nbytes: int) -> None:
        page = mmap.PAGESIZE
        self._inner = -(-nbytes // page) * page
        self._map = mmap.mmap(-1, self._inner + 2 * page)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        for offset in (0, page + self._inner):
            assert libc.mprotect(ctypes.c_void_p(self.bytes.data_ptr() + offset), page, 0) == 0
        self._page = page

    def front(self, nbytes: int) -> Tensor:
        return self.bytes[self._page : self._page + nbytes]

    def end(self, nbytes: int) -> Tensor:
        return self.bytes[self._page + self._inner - nbytes : self._page + self._inner]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="reads the host's pages; needs Triton's interpreter")
@pytest.mark.parametrize("nbytes", [1, 15, 16, 17, 1000])
def test_interpreter_touches_nothing_beside_its_tensors(nbytes: int) -> None:
    memories = [Guarded(nbytes), Guarded(nbytes)]
    for view in (Guarded.front, Guarded.end):
        source, target = (view(memory, nbytes) for memory in memories)
        source.copy_(torch.randint(0, 256, (nbytes,), dtype=torch.uint8))
        staging = view(Guarded(nbytes + 15), -(-nbytes // 16) * 16)  # ends at the page where it can begin at a boundary
        pack(staging, [source], [0], num_programs=2)
        unpack(staging, [target], [0], num_programs=2)
        assert torch.equal(source, target)


def test_nothing_needs_no_launch() -> None:
    nothing = torch.empty(0, dtype=torch.uint8)
    pack(nothing, [], [], num_programs=1)
    unpack(nothing, [nothing], [0], num_programs=1)


def test_launch_metadata_carries_the_bytes_read_and_written() -> None:
    told = pack_kernel.launch_metadata((4, 1, 1), SimpleNamespace(name="pack_kernel"), {"nbytes": 97})
    assert told == {"name": "pack_kernel_97B", "bytes": 194}
