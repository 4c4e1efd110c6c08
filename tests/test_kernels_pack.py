"""Pack and unpack: every layout, exactly, and not a byte beside it. The kernels run under Triton's interpreter or on a GPU.

Tests with the parameter "interpreter" exist only where Triton's interpreter is on: test_kernels_interpreted runs them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from itertools import product
from math import prod
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from chameleon_mm.kernels import memory_layout, pack_table
from chameleon_mm.kernels.memory_layout import MemoryLayout
from chameleon_mm.kernels.pack import (
    PackTable,
    launch_pack,
    launch_unpack,
    pack,
    pack_kernel,
    pack_reference,
    packed_layout,
    unpack,
    unpack_reference,
)
from chameleon_mm.kernels.pack_table import LayoutGuard

PLACES = [pytest.param("cuda", marks=pytest.mark.gpu)]
if os.environ.get("TRITON_INTERPRET") == "1":
    PLACES.insert(0, pytest.param("cpu", id="interpreter"))

BLOCK_BYTES = 256  # small: tensors of a few hundred bytes have several items
CANARY_BYTES = 64
DTYPES = (torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.int64, torch.complex128)
Layout = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]  # dtype, sizes, strides, misplaced elements


def filled(layout: Layout, place: str) -> tuple[Tensor, Tensor]:
    """Random bytes, canaries included, and a tensor of that layout amid them."""
    dtype, sizes, strides, shift = layout
    reach = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) if 0 not in sizes else 0
    nbytes = (reach + shift) * dtype.itemsize
    memory = torch.randint(0, 256, (nbytes + 2 * CANARY_BYTES,), dtype=torch.uint8).to(place)
    elements = memory[CANARY_BYTES : CANARY_BYTES + nbytes].view(dtype)
    return memory, torch.as_strided(elements, sizes, strides, elements.storage_offset() + shift if reach else 0)


def contiguous(dtype: torch.dtype, *sizes: int, shift: int = 0) -> Layout:
    return dtype, sizes, tuple(prod(sizes[i + 1 :]) for i in range(len(sizes))), shift


def bytes_of_elements(t: Tensor) -> list[int]:
    """The first byte of every distinct element, stride-0 repetitions once."""
    indices = product(*(range(size if stride else min(size, 1)) for size, stride in zip(t.shape, t.stride(), strict=True)))
    return [t.data_ptr() + t.element_size() * sum(map(int.__mul__, index, t.stride())) for index in indices]


def overlapping(t: Tensor) -> bool:
    touched = [byte + i for byte in bytes_of_elements(t) for i in range(t.element_size())]
    return len(touched) != len(set(touched))


def staging_for(tensors: Sequence[Tensor], place: str) -> tuple[Tensor, Tensor]:
    """Random bytes, canaries included, and the buffer amid them."""
    total = packed_layout(tensors).total_bytes
    memory = torch.randint(0, 256, (total + 2 * CANARY_BYTES + 16,), dtype=torch.uint8).to(place)
    begin = -memory.data_ptr() % 16 + CANARY_BYTES
    return memory, memory[begin : begin + total]


def check_both_ways(layouts: Sequence[Layout], place: str, num_programs: int = 3) -> None:
    made = [filled(layout, place) for layout in layouts]
    tensors, before = [t for _, t in made], [memory.clone() for memory, _ in made]
    memory, out = staging_for(tensors, place)
    expected = memory.clone()
    pack_reference(tensors, expected[out.storage_offset() :][: out.numel()])
    pack(tensors, out, num_programs=num_programs, table=PackTable(tensors, block_bytes=BLOCK_BYTES))
    assert torch.equal(memory, expected)
    assert all(map(torch.equal, (memory for memory, _ in made), before))

    targets = [filled(layout, place) for layout in layouts]
    others = [t for _, t in targets]
    table = PackTable(others, block_bytes=BLOCK_BYTES)
    if any(map(overlapping, others)):
        with pytest.raises(ValueError, match="share no byte"):
            unpack(out, others, num_programs=num_programs, table=table)
        return
    wanted = [memory.clone() for memory, _ in targets]
    unpack_reference(out, [mirrored(t, m, w) for (m, t), w in zip(targets, wanted, strict=True)])
    unpack(out, others, num_programs=num_programs, table=table)
    assert all(map(torch.equal, (memory for memory, _ in targets), wanted))
    assert torch.equal(memory, expected)
    assert all(bits(mine) == bits(theirs) for mine, theirs in zip(others, tensors, strict=True))


def mirrored(t: Tensor, memory: Tensor, copy: Tensor) -> Tensor:
    """The tensor that lies in `copy` where `t` lies in `memory`."""
    offset = t.storage_offset() - memory.storage_offset()
    return torch.empty(0, dtype=t.dtype, device=t.device).set_(copy.untyped_storage(), offset, t.shape, t.stride())


def bits(t: Tensor) -> list[int]:
    """Every byte of every element, in logical order, without a floating-point copy."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
    storage = torch.empty(0, dtype=torch.uint8, device=t.device).set_(
        t.untyped_storage(), t.storage_offset() * t.element_size(), (reach * t.element_size(),), (1,)
    )
    raw, first = storage.tolist(), t.data_ptr()
    return [raw[byte - first + i] for byte in bytes_of_elements(t) for i in range(t.element_size())]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    dtype = draw(st.sampled_from(DTYPES))
    sizes = draw(st.lists(st.sampled_from((0, 1, 2, 2, 3, 4, 5, 8)), max_size=4).map(tuple))
    shift = draw(st.integers(0, 5))
    if draw(st.booleans()):  # dense or spread out, in any order of dimensions
        order = draw(st.permutations(range(len(sizes))))
        stride, strides = 1, [0] * len(sizes)
        for dim in order:
            strides[dim] = stride
            stride = max(1, sizes[dim]) * stride + draw(st.sampled_from((0, 0, 0, 1, 3, 8)))
        return dtype, sizes, tuple(strides), shift
    return dtype, sizes, tuple(draw(st.integers(0, 12)) for _ in sizes), shift


@pytest.mark.parametrize("place", PLACES)
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(batch=st.lists(layouts(), min_size=1, max_size=4), num_programs=st.sampled_from((1, 3)))
def test_every_layout_is_packed_and_unpacked_exactly(place: str, batch: list[Layout], num_programs: int) -> None:
    check_both_ways(batch, place, num_programs)


@pytest.mark.parametrize("place", PLACES)
def test_sizes_around_the_unit_and_the_block(place: str) -> None:
    sizes = (0, 1, 15, 16, 17, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 8)
    check_both_ways([contiguous(torch.uint8, n, shift=shift) for n in sizes for shift in (0, 1, 2, 4, 8)], place)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param((torch.bfloat16, (64, 32), (1, 64), 0), id="transposed"),
        pytest.param((torch.float32, (40, 8), (12, 1), 0), id="wide rows"),
        pytest.param((torch.bfloat16, (40, 5), (8, 1), 1), id="narrow rows"),
        pytest.param((torch.int16, (2,) * 8, tuple(3**i for i in range(7, -1, -1)), 0), id="8 dims"),
        pytest.param((torch.float32, (3, 5, 7), (7, 0, 1), 0), id="stride 0 in the middle"),
        pytest.param((torch.int32, (9, 4), (1, 1), 0), id="windows"),
        pytest.param((torch.int64, (6,), (0,), 0), id="one number repeated"),
        pytest.param(contiguous(torch.complex128), id="scalar"),
    ],
)
def test_layouts(place: str, layout: Layout) -> None:
    check_both_ways([layout, contiguous(torch.uint8, 33), layout], place)


@pytest.mark.parametrize("place", PLACES)
def test_tensors_beyond_what_is_counted_in_32_bits_are_packed_in_parts(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_layout, "MAX_PIECE_UNITS", 7)
    spread = (torch.int16, (3, 5, 6), (80, 13, 2), 1)
    assert len(MemoryLayout.of(2, *spread[1:3], 2).pieces) == 15
    check_both_ways([spread, contiguous(torch.uint8, 500), (torch.float32, (2, 9), (40, 4), 0)], place)


@pytest.mark.parametrize("place", PLACES)
def test_interleaved_destinations_are_no_overlap(place: str) -> None:
    halves = torch.arange(60, dtype=torch.int16).to(place).view(6, 10)
    target = torch.zeros_like(halves)
    sources, parts = [halves[:, :4], halves[:, 4:]], [target[:, :4], target[:, 4:]]
    _, out = staging_for(sources, place)
    pack(sources, out, num_programs=1)
    unpack(out, parts, num_programs=1)
    assert torch.equal(target, halves)


@pytest.mark.parametrize("place", PLACES)
def test_a_caller_may_bring_the_table_to_the_device(place: str) -> None:
    tensors = [filled(contiguous(torch.bfloat16, 40), place)[1]]
    table = PackTable(tensors)
    words = table.words.clone().to(place)
    table.device_copy = words
    assert table.upload() is words
    _, out = staging_for(tensors, place)
    launch_pack(table, out, num_programs=1)
    before = tensors[0].clone()
    tensors[0].zero_()
    launch_unpack(out, table, num_programs=1)
    assert bits(tensors[0]) == bits(before)


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
        pack([source], staging[:nbytes], num_programs=2)
        unpack(staging[:nbytes], [target], num_programs=2)
        assert torch.equal(source, target)


def test_packed_bytes_of_a_contiguous_tensor_are_its_own() -> None:
    tensors = [torch.randn(5, 7), torch.zeros(0), torch.randn(3).to(torch.float64)]
    offsets, total = packed_layout(tensors)
    assert (offsets, total) == ([0, 256, 256], 256 + 24)
    out = torch.zeros(total, dtype=torch.uint8)
    pack_reference(tensors, out)
    assert torch.equal(out[:140], tensors[0].view(torch.uint8).view(-1))
    assert torch.equal(out[256:], tensors[2].view(torch.uint8))
    assert not out[140:256].any()


def test_nothing_is_an_empty_layout() -> None:
    assert packed_layout([]) == ([], 0)
    pack([], torch.empty(0, dtype=torch.uint8), num_programs=1)
    unpack(torch.empty(0, dtype=torch.uint8), [torch.empty(0, 3)], num_programs=1)


@pytest.mark.parametrize(
    ("element_bytes", "sizes", "strides", "alignment", "units"),
    [
        (2, (64, 128), (128, 1), 0, [(16, ((1024, 1),))]),  # contiguous: one run
        (2, (128, 64), (1, 128), 0, [(16, ((1024, 1),))]),  # transposed: the same run
        (2, (64, 8), (16, 1), 0, [(16, ((64, 2),))]),  # rows of one unit
        (2, (64, 32), (48, 1), 8, [(8, ((8, 1), (64, 12)))]),  # the address allows 8
        (4, (10, 3), (5, 1), 0, [(4, ((3, 1), (10, 5)))]),
        (1, (37,), (1,), 0, [(16, ((2, 1),)), (1, ((5, 1),))]),  # its last bytes by themselves
        (4, (1, 1), (9, 9), 4, [(4, ((1, 1),))]),
        (8, (5, 6), (0, 1), 0, [(16, ((3, 1),))]),  # repeated rows once
        (1, (1 << 31, 2), (1, 1 << 32), 1, [(1, ((1 << 30, 1),))] * 4),
        (2, (3, 1 << 30), (1 << 31, 2), 0, [(2, ((1 << 30, 2),))] * 3),
    ],
)
def test_units(
    element_bytes: int, sizes: tuple[int, ...], strides: tuple[int, ...], alignment: int, units: list[object]
) -> None:
    layout = MemoryLayout.of(element_bytes, sizes, strides, alignment)
    assert [(piece.unit_bytes, piece.dims) for piece in layout.pieces] == units
    ends = [piece.packed_offset + piece.units * piece.unit_bytes for piece in layout.pieces]
    assert [piece.packed_offset for piece in layout.pieces] == [0, *ends[:-1]]
    assert ends[-1] == layout.nbytes


def resized_to_nothing() -> Tensor:
    """(4,) float32 without memory."""
    t = torch.zeros(4)
    t.untyped_storage().resize_(0)
    return t


def test_a_refresh_renews_addresses_alone() -> None:
    buffer = torch.zeros(64, 24)
    first, second = [buffer[:8], buffer[8:16, :4]], [buffer[16:24], buffer[24:32, :4]]
    table = PackTable(first)
    before = table.words.clone()
    table.device_copy = before
    assert not table.refresh([t.view_as(t) for t in first])
    assert table.upload() is before
    assert table.refresh(second)
    assert table.upload() is not before
    assert torch.equal(table.words, PackTable(second).words)
    assert int((table.words != before).sum()) == 2
    assert table.refresh([buffer[16:24], buffer[24:32, 1:5]])  # off the 16-byte boundary: narrower units
    assert torch.equal(table.words, PackTable([buffer[16:24], buffer[24:32, 1:5]]).words)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([torch.zeros(4)], "the 2 tensors it was built for, got 1"),
        ([torch.zeros(4), torch.zeros(5)], "tensor 1 as it was"),
        ([torch.zeros(4), torch.zeros(4, 2)[:, 0]], "tensor 1 as it was"),
        ([torch.zeros(4), torch.zeros(4, device="meta")], "all tensors on cpu, got tensor 1 on meta"),
        ([torch.zeros(4), resized_to_nothing()], "tensor 1 without"),
    ],
)
def test_a_refresh_with_another_batch_is_refused(tensors: list[Tensor], message: str) -> None:
    kept = [torch.zeros(4), torch.zeros(4)]
    table = PackTable(kept)
    before = table.words.clone()
    with pytest.raises(ValueError, match=message):
        table.refresh(tensors)
    assert torch.equal(table.words, before)


def test_moved_addresses_are_taken_without_a_tensor() -> None:
    tensors = [torch.zeros(40, dtype=torch.uint8), torch.zeros(0), torch.zeros(5, 7)[:, :3]]
    others = [torch.zeros(41, dtype=torch.uint8)[1:], torch.zeros(0), torch.zeros(5, 7)[:, :3]]  # off the 16-byte boundary
    table = PackTable(tensors)
    before = table.words.clone()
    table.device_copy = before
    assert not table.move([t.data_ptr() for t in tensors])
    assert table.upload() is before
    assert table.move([t.data_ptr() for t in others])
    assert table.upload() is not before
    assert torch.equal(table.words, PackTable(others).words)
    words = table.words.clone()
    with pytest.raises(ValueError, match="tensor 2 without"):
        table.move([*(t.data_ptr() for t in tensors[:2]), 0])
    assert torch.equal(table.words, words)
    assert table.move([t.data_ptr() for t in tensors])
    assert torch.equal(table.words, before)


def test_destinations_are_checked_again_once_they_moved() -> None:
    memory = torch.zeros(64, dtype=torch.uint8)
    table = PackTable([memory[:16], memory[16:32]])
    table.check_destinations("unpack")
    table.refresh([memory[:16], memory[:16]])
    with pytest.raises(ValueError, match="tensors 0 and 1 overlap"):
        table.check_destinations("unpack")


def facts(t: Tensor) -> tuple[object, ...]:
    return t.device, t.dtype, t.shape, t.stride()


@pytest.mark.skipif(pack_table._tensor_guards() is None, reason="this torch has no guards to believe")
@given(batch=st.lists(layouts(), min_size=1, max_size=3), other=st.lists(layouts(), min_size=1, max_size=3))
def test_a_guard_passes_what_is_laid_out_alike_and_nothing_else(batch: list[Layout], other: list[Layout]) -> None:
    tensors, others = ([filled(layout, "cpu")[1] for layout in some] for some in (batch, other))
    guard = LayoutGuard(tensors)
    assert guard.passes([filled(layout, "cpu")[1] for layout in batch])
    assert guard.passes(others) == (list(map(facts, tensors)) == list(map(facts, others)))


def test_what_a_guard_does_not_know_is_looked_at() -> None:
    """A tensor that is there twice, one that requires a gradient, a parameter."""
    tensors = [torch.zeros(4), torch.zeros(4)]
    table = PackTable(tensors)
    assert table.refresh([torch.zeros(4) for _ in tensors])
    for t in (torch.zeros(4), torch.zeros(4, requires_grad=True), torch.nn.Parameter(torch.zeros(4))):
        assert table.refresh([t, t])
        assert torch.equal(table.words, PackTable([t, t]).words)


@pytest.mark.parametrize("passes", [True, False])
def test_guards_that_tell_nothing_apart_are_not_believed(passes: bool) -> None:
    """`passes`: what torch's class, in whose place another is, says of everything."""
    assert not pack_table._tells_apart(lambda *_, **__: SimpleNamespace(check=lambda *_: passes))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: [torch.zeros(4), torch.zeros(4, device="meta")], "all tensors on cpu, got tensor 1 on meta"),
        (lambda: [torch.zeros(4, device="meta")], "tensor 0 without"),
        (lambda: [torch.zeros(4), torch.zeros(4, 4).to_sparse()], "tensor 1 of layout torch.sparse_coo"),
        (lambda: [torch.zeros(4), torch.as_strided(torch.zeros(4**9), (2,) * 9, tuple(4**i for i in range(9)))],
         "tensor 1: expected at most 8 dimensions"),
    ],
)  # fmt: skip
def test_what_cannot_be_packed_is_named(make: Callable[[], list[Tensor]], message: str) -> None:
    tensors = make()
    for refuse in (packed_layout, PackTable):
        with pytest.raises(ValueError, match=message):
            refuse(tensors)


@pytest.mark.parametrize(
    ("out", "num_programs", "message"),
    [
        (torch.zeros(200, dtype=torch.uint8), 1, "of 268 bytes or more, got 200: tensor 2 ends at 268"),
        (torch.zeros(512), 1, "flat, contiguous uint8"),
        (torch.zeros(512, dtype=torch.uint8)[1:], 1, "16-byte boundary"),
        (torch.zeros(512, dtype=torch.uint8), 0, "num_programs >= 1"),
        (torch.zeros(512, dtype=torch.uint8, device="meta"), 1, "staging buffer on cpu"),
    ],
)
def test_bad_buffers_are_refused(out: Tensor, num_programs: int, message: str) -> None:
    tensors = [torch.ones(4), torch.ones(4), torch.ones(3)]
    with pytest.raises(ValueError, match=message):
        pack(tensors, out, num_programs=num_programs)
    with pytest.raises(ValueError, match=message):
        unpack(out, tensors, num_programs=num_programs)
    assert all(bool((t == 1).all()) for t in tensors)


def test_a_staging_buffer_over_a_tensor_is_refused() -> None:
    memory = torch.zeros(1024, dtype=torch.uint8)
    with pytest.raises(ValueError, match="tensor 1 lies in it"):
        pack([torch.zeros(4), memory[200:300]], memory[:512], num_programs=1)


@pytest.mark.parametrize(
    ("pick", "message"),
    [
        (lambda base: [base[:8], base[4:12]], "tensors 0 and 1 overlap"),
        (lambda base: [base[:2], base[40:50], base[40:50]], "tensors 1 and 2 overlap"),
        (lambda base: [base[90:], base.unfold(0, 4, 2)], "elements of tensor 1|tensors 0 and 1"),
        (lambda base: [base.view(10, 10)[:, :5], base.view(10, 10)[:, 4:]], "tensors 0 and 1 overlap"),
    ],
)
def test_overlapping_destinations_are_refused(pick: Callable[[Tensor], list[Tensor]], message: str) -> None:
    base = torch.arange(100.0)
    before = base.clone()
    with pytest.raises(ValueError, match=message):
        unpack(torch.zeros(4096, dtype=torch.uint8), pick(base), num_programs=1)
    assert torch.equal(base, before)


def test_destinations_too_interleaved_to_check_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chameleon_mm.kernels.memory_layout.MAX_CHECKED_RUNS", 19)
    base = torch.zeros(10, 10)
    with pytest.raises(ValueError, match="plainly apart"):
        unpack(torch.zeros(4096, dtype=torch.uint8), [base[:, :5], base[:, 5:]], num_programs=1)


@pytest.mark.parametrize("block_bytes", [32, 100])
def test_a_bad_block_is_refused(block_bytes: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        PackTable([torch.zeros(4)], block_bytes=block_bytes)


def test_launch_metadata_carries_the_bytes_read_and_written() -> None:
    told = pack_kernel.launch_metadata((4, 1, 1), SimpleNamespace(name="pack_kernel"), {"nbytes": 97})
    assert told == {"name": "pack_kernel_97B", "bytes": 194}
