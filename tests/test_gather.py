"""A small view of a large storage goes without the rest of it, and comes back exactly where it was.

Part.of(t), pack, unpack: bytes and geometry, over random layouts
executor: what is moved, when the storage goes, who shares what, when all of it moves instead
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import chameleon_mm as cm
from chameleon_mm.device import Device
from chameleon_mm.plan.rule import DefaultRule, Limits
from chameleon_mm.swap.executor import Executor
from chameleon_mm.swap.gathered_part import Part
from chameleon_mm.swap.handles import SwappedView
from chameleon_mm.swap.host_copy import State
from tests._fakes import leave_out_meeting, refusing
from tests._ordering import SLOW_LINK
from tests._programs import saved_by, swapping_executor
from tests.observed import SimRaceError

ROWS, ROW = 64, 1024
BIG_BYTES = ROWS * ROW * 4

DTYPES = [torch.uint8, torch.bool, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64, torch.complex128]


# --- the bytes of a view


@st.composite
def views(draw: st.DrawFn) -> Tensor:
    """Random view of random bits: dimensions narrowed, strided, permuted, repeated by stride 0, of any dtype."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    dtype = draw(st.sampled_from(DTYPES))
    count = torch.Size(shape).numel()
    bits = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8)
    t = bits.view(dtype).view(shape)
    for dim in range(t.dim()):
        first, step = draw(st.integers(0, t.shape[dim] - 1)), draw(st.integers(1, 3))
        t = t[(slice(None),) * dim + (slice(first, None, step),)]
    t = t.permute(draw(st.permutations(range(t.dim()))))
    return t.unsqueeze(0).expand(draw(st.integers(1, 3)), *t.shape) if draw(st.booleans()) else t


def bits_of(t: Tensor) -> Tensor:
    return t.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)  # also of one element of any stride


@given(views())
def test_any_view_is_packed_and_unpacked_bit_for_bit(t: Tensor) -> None:
    part = Part.of(t)
    assert part is not None
    repeats = t.shape[0] if t.stride(0) == 0 else 1
    assert part.nbytes == t.numel() * t.element_size() // repeats
    packed = part.pack(t.untyped_storage())
    assert packed.nbytes() == part.nbytes
    back = torch.full((part.end_byte,), 0xA5, dtype=torch.uint8)
    part.unpack(packed, back.untyped_storage())
    again = torch.empty(0, dtype=t.dtype).set_(back.untyped_storage(), t.storage_offset(), t.shape, t.stride())
    assert torch.equal(bits_of(again), bits_of(t))
    covered, size = torch.zeros(t.untyped_storage().nbytes(), dtype=torch.uint8), t.element_size()
    covered.as_strided((*t.shape, size), (*(stride * size for stride in t.stride()), 1), t.storage_offset() * size).fill_(1)
    untouched = back[covered[: part.end_byte] == 0]
    assert torch.equal(untouched, torch.full_like(untouched, 0xA5))


@pytest.mark.parametrize(
    "t",
    [torch.zeros(10).as_strided((4, 3), (2, 1)), torch.zeros(10).unfold(0, 4, 2), torch.zeros(0), torch.zeros(3, 0)],
    ids=str,
)
def test_overlapping_and_empty_views_are_no_part(t: Tensor) -> None:
    assert Part.of(t) is None


# --- in the executor


def swapper_on(device: Device, pool: cm.PinnedPool, *, min_bytes: int = 1024, leaving_bytes: int | None = 0) -> Executor:
    limits = Limits(leaving_bytes=leaving_bytes, ahead_bytes=1 << 20)
    return swapping_executor(device, pool, limits, min_bytes=min_bytes, pack_below_bytes=0)


def gathered(swapper: Executor, *rows: int | tuple[int, slice]) -> tuple[list[Tensor], list[SwappedView]]:
    """Save rows of a large storage that nothing else holds, before an operator that has ended. Return bytes and handles."""
    big = torch.randn(ROWS, ROW, device=swapper.device.torch_device)
    expected, handles = [big[row].clone() for row in rows], [saved_by(swapper, big[row]) for row in rows]
    del big
    next_op(swapper)
    return expected, handles


def next_op(swapper: Executor) -> None:
    """Run a differentiable op and a hook: tensors saved before may now be gathered and copied."""
    torch.ones(1, device=swapper.device.torch_device, requires_grad=True).exp()
    swapper.save(torch.ones(1, device=swapper.device.torch_device))


@pytest.fixture
def pool(device: Device) -> cm.PinnedPool:
    return cm.PinnedPool("8MiB", device=device)


@pytest.mark.usefixtures("no_gc")
def test_the_last_row_moves_alone_and_its_storage_goes_at_once(device: Device, pool: cm.PinnedPool) -> None:
    swapper = swapper_on(device, pool, leaving_bytes=None)
    with device.compute():
        before = device.allocated_bytes()
        big = torch.randn(ROWS, 4, ROW // 4, device=device.torch_device)
        expected = big[:, -1].clone()
        handle = saved_by(swapper, big[:, -1])
        del big
        next_op(swapper)
        # Gathered in stream order: the storage is free before any byte has crossed. Left: `expected`, and as much packed.
        assert device.allocated_bytes() <= before + 2 * expected.nbytes + 4096
        swapper.end_step(completed=False)
        got = swapper.use(handle)
        assert torch.equal(got, expected)
        assert (got.stride(), got.storage_offset()) == ((ROW, 1), 3 * ROW // 4)
    totals = swapper.metrics.totals
    assert (totals.gathers, totals.bytes_swapped_out, totals.bytes_swapped_in) == (1, BIG_BYTES // 4, BIG_BYTES // 4)
    del handle, got
    assert pool.stats().num_live == 0


@pytest.mark.usefixtures("no_gc")
def test_views_of_one_part_share_one_copy_and_one_storage(device: Device, pool: cm.PinnedPool) -> None:
    swapper = swapper_on(device, pool)
    with device.compute():
        big = torch.randn(ROWS, ROW, device=device.torch_device)
        rows = big[3:5].clone()
        handles = [saved_by(swapper, big[3:5]), saved_by(swapper, big[3:5].t()), saved_by(swapper, big[3:5].view(torch.int32))]
        del big
        next_op(swapper)
        first, second, third = (swapper.use(handle) for handle in handles)
        assert torch.equal(first, rows)
        assert torch.equal(second, rows.t())
        assert torch.equal(third, rows.view(torch.int32))
        assert first.untyped_storage() is second.untyped_storage() is third.untyped_storage()
    assert swapper.metrics.totals.bytes_swapped_out == 2 * ROW * 4


def test_a_saved_storage_that_lives_on_is_used_itself(device: Device, pool: cm.PinnedPool) -> None:
    swapper = swapper_on(device, pool)
    with device.compute():
        big = torch.randn(ROWS, ROW, device=device.torch_device)
        handle = saved_by(swapper, big[7])
        next_op(swapper)
        assert swapper.use(handle).untyped_storage() is big.untyped_storage()
    assert swapper.metrics.totals.bytes_swapped_in == 0


@pytest.mark.parametrize(
    ("rows", "alone"),
    [(1, DefaultRule().max_gathered), (4, 4), (16, 1), (17, 0)],
    ids=["by count", "by bytes", "a quarter", "more"],
)
def test_many_views_end_in_one_copy_of_all(rows: int, alone: int, device: Device, pool: cm.PinnedPool) -> None:
    swapper = swapper_on(device, pool)
    with device.compute():
        big = torch.randn(ROWS, ROW, device=device.torch_device)
        expected = big.clone()
        starts = range(0, ROWS - rows + 1, rows)
        handles = {start: saved_by(swapper, big[start : start + rows]) for start in starts}
        del big
        next_op(swapper)
        for start, handle in handles.items():
            assert torch.equal(swapper.use(handle), expected[start : start + rows])
    assert swapper.metrics.totals.gathers == alone
    assert swapper.metrics.totals.bytes_swapped_out == alone * rows * ROW * 4 + BIG_BYTES
    handles.clear()
    del handle
    assert len(swapper.registry) == 0
    assert not swapper.claims._parts


def test_less_than_is_worth_a_copy_stays_packed(device: Device, pool: cm.PinnedPool) -> None:
    swapper = swapper_on(device, pool, min_bytes=BIG_BYTES)
    with device.compute():
        before = device.allocated_bytes()
        (expected,), (handle,) = gathered(swapper, (9, slice(100, 200)))
        assert device.allocated_bytes() < before + 8192
        assert torch.equal(swapper.use(handle), expected)
    assert handle.claim.saved.state is State.ON_DEVICE
    assert swapper.metrics.totals.bytes_swapped_out == 0


def test_what_was_written_to_is_not_gathered_and_raises(device: Device, pool: cm.PinnedPool) -> None:
    swapper = swapper_on(device, pool)
    with device.compute():
        big = torch.randn(ROWS, ROW, device=device.torch_device)
        handle = saved_by(swapper, big[0])
        big.add_(1)
        next_op(swapper)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            swapper.use(handle)
    assert swapper.metrics.totals.gathers == 0


def test_without_memory_to_gather_into_all_of_it_moves(
    device: Device, pool: cm.PinnedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    swapper = swapper_on(device, pool)
    monkeypatch.setattr(Part, "pack", refusing(torch.OutOfMemoryError, "no room"))
    with device.compute():
        (expected,), (handle,) = gathered(swapper, 5)
        assert torch.equal(swapper.use(handle), expected)
    assert (swapper.metrics.totals.gathers, swapper.metrics.totals.bytes_swapped_out) == (0, BIG_BYTES)


def test_a_use_that_does_not_fit_gives_back_and_tries_again(
    device: Device, pool: cm.PinnedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    swapper, unpack, refusals = swapper_on(device, pool), Part.unpack, iter([True])

    def refuse_once(self: Part, packed: torch.UntypedStorage, into: torch.UntypedStorage) -> None:
        if next(refusals, False):
            raise torch.OutOfMemoryError("no room")
        unpack(self, packed, into)

    with device.compute():
        (expected,), (handle,) = gathered(swapper, 5)
        monkeypatch.setattr(Part, "unpack", refuse_once)
        assert torch.equal(swapper.use(handle), expected)
    assert swapper.metrics.totals.oom_retries == 1


def gathered_and_used(*, gathered_on_side: bool, used_on_side: bool) -> None:
    """Over a slow link, under the race detector: a missing wait raises."""
    device = cm.SimDevice(SLOW_LINK)
    swapper = swapper_on(device, cm.PinnedPool("8MiB", device=device))
    side = device.new_compute_stream("side")
    with device.compute():
        big = torch.randn(ROWS, ROW)
        expected = big[5].clone()
        handle = saved_by(swapper, big[5])
        del big
        with device.stream(side) if gathered_on_side else nullcontext():
            next_op(swapper)
        again = torch.randn(ROWS, ROW)  # the storage's memory, perhaps
        if used_on_side:
            side.wait(device.current_stream().record())
            with device.stream(side):
                assert torch.equal(swapper.use(handle), expected)
                assert torch.equal(swapper.use(handle), expected)
        assert torch.equal(swapper.use(handle), expected)
        del again, handle
    assert len(swapper.registry) == 0


@pytest.mark.parametrize("used_on_side", [False, True])
@pytest.mark.parametrize("gathered_on_side", [False, True])
def test_streams_are_ordered_around_a_gather(gathered_on_side: bool, used_on_side: bool) -> None:
    gathered_and_used(gathered_on_side=gathered_on_side, used_on_side=used_on_side)


@pytest.mark.parametrize("left_out", [1, 2], ids=["before it", "after it"])
def test_without_the_streams_meeting_a_gather_is_a_race(left_out: int, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out_meeting(monkeypatch, left_out)
    with pytest.raises(SimRaceError):
        gathered_and_used(gathered_on_side=True, used_on_side=False)
