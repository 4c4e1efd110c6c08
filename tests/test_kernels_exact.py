"""Exact results of each kernel, under Triton's interpreter or on a GPU. Pack and unpack write no other byte, at every size and
alignment. The checksum equals that of torch's operators and of Python's integers, and shows every change of bytes.

Tests with the parameter "interpreter" exist only where Triton's interpreter is on: test_kernels_compiled runs them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from chameleon_mm.device import Device
from chameleon_mm.device.packing import packed_offsets
from chameleon_mm.kernels.checksum import BLOCK_WORDS, add_checksum, checksum_reference
from chameleon_mm.kernels.pack_kernels import pack, pack_kernel, pack_reference, unpack, unpack_reference

PLACES = [pytest.param("cuda", marks=pytest.mark.gpu)]
if os.environ.get("TRITON_INTERPRET") == "1":
    PLACES.insert(0, pytest.param("cpu", id="interpreter"))

BLOCK_BYTES = 256  # small: buffers of a few hundred bytes have several items
CANARY_BYTES = 64


def filled(nbytes: int, shift: int, place: str) -> tuple[Tensor, Tensor]:
    """Return random bytes, canaries included, and a buffer among them that begins `shift` bytes after a 16-byte boundary."""
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
    """Memory with pages without access before and after it."""

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


def test_launch_metadata_carries_the_bytes_read_and_written_and_nothing_needs_no_launch() -> None:
    told = pack_kernel.launch_metadata((4, 1, 1), SimpleNamespace(name="pack_kernel"), {"nbytes": 97})
    assert told == {"name": "pack_kernel_97B", "bytes": 194}
    nothing = torch.empty(0, dtype=torch.uint8)
    pack(nothing, [], [], num_programs=1)
    unpack(nothing, [nothing], [0], num_programs=1)


# --- the checksum

SIZES = (0, 1, 7, 8, 9, 4096, 8 * BLOCK_WORDS - 1, 8 * BLOCK_WORDS, 8 * BLOCK_WORDS + 5, 24 * BLOCK_WORDS + 13)

_ALL = (1 << 64) - 1


def by_integers(data: bytes) -> int:
    """The checksum by Python's integers, from splitmix64's definition."""
    data += bytes(-len(data) % 8)
    total = 0
    for number in range(len(data) // 8):
        x = int.from_bytes(data[8 * number : 8 * number + 8], "little") ^ ((number + 1) * 0x9E3779B97F4A7C15 & _ALL)
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _ALL
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _ALL
        total += x ^ (x >> 31)
    total &= _ALL
    return total - (1 << 64) if total >> 63 else total


def reference(data: Tensor) -> int:
    return int(checksum_reference(data))


@pytest.mark.parametrize("nbytes", SIZES)
def test_operators_give_what_integers_give(nbytes: int) -> None:
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    assert reference(data) == by_integers(bytes(data.tolist()))
    beside = torch.cat((torch.zeros(3, dtype=torch.uint8), data))[3:]  # off the alignment
    assert reference(beside) == reference(data)


@pytest.mark.parametrize("num_programs", [1, 2, 5])
@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("place", PLACES)
def test_the_kernel_gives_what_operators_give(place: str, nbytes: int, num_programs: int) -> None:
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    out = torch.tensor([17], device=place)
    add_checksum(out, data.to(place), num_programs=num_programs)
    assert int(out) == (reference(data) + 17 + (1 << 63)) % (1 << 64) - (1 << 63)


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "negated": Tensor.neg,
    "two signs at odd positions": lambda t: (
        t * torch.where((torch.arange(t.numel()) == 3) | (torch.arange(t.numel()) == 9), -1, 1)
    ),
    "halves exchanged": lambda t: t.roll(t.numel() // 2),
    "neighbours exchanged": lambda t: t.view(-1, 2).flip(1).flatten(),
    "reversed": lambda t: t.flip(0),
    "shifted by a word": lambda t: t.roll(2),
    "one last bit": lambda t: torch.cat((t[:-1].view(torch.int32), t[-1:].view(torch.int32) ^ 1)).view(torch.float32),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_a_weighted_sum_would_not_see(change: Callable[[Tensor], Tensor]) -> None:
    before = torch.randn(1024)
    after = change(before).contiguous()
    assert reference(before.view(torch.uint8)) != reference(after.view(torch.uint8))


@pytest.mark.parametrize("offset", [0, 1])
def test_a_stream_adds_checksums_in_its_order(device: Device, offset: int) -> None:
    compute = device.current_stream()
    with device.compute():
        out = compute.alloc(8)
        out.zero_()
        data = torch.randint(0, 256, (1000 + offset,), dtype=torch.uint8, device=device.torch_device)[offset:]
        compute.add_checksum(out, data)
        expected = reference(data.cpu())
        assert int(out.view(torch.int64)) == expected
        with pytest.raises(ValueError, match="expected 8 bytes as out"):
            compute.add_checksum(out[:4], data)
        with pytest.raises(ValueError, match="flat"):
            compute.add_checksum(out, data.view(2, -1))
