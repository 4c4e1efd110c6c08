"""Packing by kernels: which kernel is launched with what, what is kept, and that copies do it where no kernel can.

The kernels are played by copies of what their table says. Under Triton's interpreter, in a process of its own, they run.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from chameleon_mm.device.packing import Packer, PackKernels, PackPlans, packed_offsets
from chameleon_mm.kernels.pack_table import PackTable

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
SIZES = (1, 16, 17, 4096)


class PlayedKernels:
    """The kernels as far as a packer uses them, by copies; notes each launch. `fails` is raised by all of them."""

    def __init__(self, fails: Exception | None = None) -> None:
        self.fails = fails
        self.built = 0
        self.launched: list[tuple[str, int, int]] = []

    def load(self) -> PackKernels:
        return PackKernels(table=self._table, pack=self._pack, unpack=self._unpack)

    def _table(self, buffers: Sequence[Tensor]) -> PackTable:
        self.built += 1
        return PackTable(buffers)

    def _pack(self, table: PackTable, out: Tensor, *, num_programs: int) -> None:
        for address, place, nbytes in self._launch("pack", table, out, num_programs):
            ctypes.memmove(out.data_ptr() + place, address, nbytes)

    def _unpack(self, buffer: Tensor, table: PackTable, *, num_programs: int) -> None:
        for address, place, nbytes in self._launch("unpack", table, buffer, num_programs):
            ctypes.memmove(address, buffer.data_ptr() + place, nbytes)

    def _launch(self, what: str, table: PackTable, staging: Tensor, num_programs: int) -> list[list[int]]:
        """Address, place and bytes of each row: what a kernel finds in the table."""
        if self.fails is not None:
            raise self.fails
        table.check_staging(what, staging)
        self.launched.append((what, len(table.offsets), num_programs))
        rows = table.upload()[: table.num_rows * table.row_words].view(table.num_rows, table.row_words).tolist()
        return [[row[0], row[1], row[2] * row[3]] for row in rows]


def aligned(nbytes: int) -> Tensor:
    """Memory on a 128-byte boundary, as an allocator on a GPU gives it."""
    memory = torch.zeros(nbytes + 128, dtype=torch.uint8)
    start = -memory.data_ptr() % 128
    return memory[start : start + nbytes]


def buffers_of(sizes: Sequence[int]) -> list[Tensor]:
    return [aligned(nbytes).random_(1, 256) for nbytes in sizes]


def pack_and_unpack(packer: Packer, first: int = 0) -> bool:
    """Whether `packer` packed behind `first` bytes and unpacked, exactly, and wrote nothing else."""
    sources, back = buffers_of(SIZES), [torch.zeros_like(t) for t in buffers_of(SIZES)]
    offsets, total = packed_offsets(SIZES)
    offsets = [first + offset for offset in offsets]
    staging = aligned(first + total + 64)
    plans = PackPlans(CPU)
    if not packer.pack(plans, staging, sources, offsets):
        return False
    want = torch.zeros_like(staging)
    for source, offset in zip(sources, offsets, strict=True):
        want[offset : offset + source.numel()] = source
    done = packer.unpack(plans, back, staging, offsets)
    return done and torch.equal(staging, want) and all(torch.equal(*pair) for pair in zip(sources, back, strict=True))


@pytest.mark.parametrize("first", [0, 128, 4096])
def test_what_is_packed_is_what_comes_back(first: int) -> None:
    kernels = PlayedKernels()
    assert pack_and_unpack(Packer(num_programs=5, load=kernels.load), first)
    # Once on a single buffer, to know that they work; then with the programs that were asked for.
    assert kernels.launched == [("pack", 1, 1), ("unpack", 1, 1), ("pack", 4, 5), ("unpack", 4, 5)]


@pytest.fixture(params=["guards", "no guards"])
def told(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are recognised by torch's guards, then by looking at each buffer."""
    if request.param == "no guards":
        monkeypatch.setattr("chameleon_mm.kernels.pack_table._tensor_guards", lambda: None)


@pytest.mark.usefixtures("told")
def test_a_batch_like_an_earlier_one_is_recognised_and_another_one_is_not() -> None:
    kernels = PlayedKernels()
    packer, plans, staging = Packer(load=kernels.load), PackPlans(CPU), aligned(1024)
    for sizes in ([100, 32], [101, 32], [100, 33], [100, 32]):  # all at the same places
        for offsets in ([0, 128], (0, 128)):
            sources = buffers_of(sizes)
            sources[0] = aligned(sizes[0]).fill_(7)
            assert packer.pack(plans, staging.fill_(0), sources, offsets)
            assert torch.equal(staging[:101], torch.cat([sources[0], torch.zeros(101 - sizes[0], dtype=torch.uint8)]))
            assert torch.equal(staging[128 : 128 + sizes[1]], sources[1])
    assert packer.pack(plans, staging[512:], buffers_of([100, 32]), [0, 128])
    built_to_try = 2
    assert (kernels.built, len(plans)) == (built_to_try + 3, 3)


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize(
    ("odd", "match"),
    [
        (torch.zeros(32, dtype=torch.int8), "buffer 1 as a flat.* got torch.int8"),
        (torch.zeros(64, dtype=torch.uint8)[::2], r"buffer 1 .* strides \(2,\)"),
        (torch.zeros(1, 32, dtype=torch.uint8), r"buffer 1 .* shape \(1, 32\)"),
        (torch.zeros(32, dtype=torch.uint8, device="meta"), "buffer 1 .* on meta"),
    ],
    ids=["dtype", "strides", "dimensions", "elsewhere"],
)
def test_what_would_be_refused_at_first_is_refused_of_a_known_batch_too(odd: Tensor, match: str) -> None:
    kernels = PlayedKernels()
    packer, plans, staging = Packer(load=kernels.load), PackPlans(CPU), aligned(512)
    assert packer.pack(plans, staging, buffers_of([16, 32]), [0, 128])
    launched = list(kernels.launched)
    with pytest.raises(ValueError, match=match):
        packer.pack(plans, staging, [aligned(16), odd], [0, 128])
    for small in (staging[:159], staging.view(torch.int8), staging.view(2, 256)):
        with pytest.raises(ValueError, match=r"^pack: expected (buffer 1 within the|the) staging buffer"):
            packer.pack(plans, small, buffers_of([16, 32]), [0, 128])
    with pytest.raises(ValueError, match="an offset for each of 2 buffers, got 1"):
        packer.pack(plans, staging, buffers_of([16, 32]), [0])
    with pytest.raises(ValueError, match=r"buffer 0 within .* got \[-128, -112\)"):
        packer.pack(plans, staging, buffers_of([16, 32]), [-128, 0])
    assert kernels.launched == launched


def test_a_list_of_offsets_may_change_after_the_call() -> None:
    kernels = PlayedKernels()
    packer, plans, staging = Packer(load=kernels.load), PackPlans(CPU), aligned(512)
    offsets = [0, 128]
    assert packer.pack(plans, staging, buffers_of([16, 32]), offsets)
    offsets[1] = 256  # not where packing would put it
    assert not packer.pack(plans, staging, buffers_of([16, 32]), offsets)
    assert packer.pack(plans, staging, buffers_of([16, 32]), [0, 128])


@pytest.mark.usefixtures("told")
def test_one_source_may_be_packed_twice() -> None:
    kernels = PlayedKernels()
    packer, plans, staging, source = Packer(load=kernels.load), PackPlans(CPU), aligned(512), buffers_of([64])[0]
    for _ in range(2):
        assert packer.pack(plans, staging.fill_(0), [source, source], [0, 128])
        assert torch.equal(staging[:64], source)
        assert torch.equal(staging[128:192], source)
    assert len(plans) == 1


def test_nothing_to_pack_is_done_at_once() -> None:
    kernels = PlayedKernels()
    assert Packer(load=kernels.load).pack(PackPlans(CPU), aligned(16), [], [])
    assert kernels.built == 0


def test_plans_are_kept_within_bounds_the_last_used_ones() -> None:
    kernels = PlayedKernels()
    packer, plans, staging = Packer(load=kernels.load), PackPlans(CPU), aligned(512)
    for nbytes in range(1, 101):
        assert packer.pack(plans, staging, buffers_of([1]), [0])
        assert packer.pack(plans, staging, buffers_of([1 + nbytes]), [0])
    built_to_try = 2
    assert (kernels.built, len(plans)) == (built_to_try + 101, 32)


def test_where_few_were_left_out_each_run_has_its_launch() -> None:
    """Twelve were packed, two of them are gone: three runs, one of a single buffer."""
    kernels = PlayedKernels()
    packer, plans = Packer(num_programs=5, load=kernels.load), PackPlans(CPU)
    sizes = list(range(100, 112))
    sources = buffers_of(sizes)
    offsets, total = packed_offsets(sizes)
    staging = aligned(total)
    assert packer.pack(plans, staging, sources, offsets)
    left = [i for i in range(12) if i not in (1, 7)]
    back = buffers_of([sizes[i] for i in left])
    assert packer.unpack(plans, back, staging, [offsets[i] for i in left])
    assert all(torch.equal(buffer, sources[i]) for buffer, i in zip(back, left, strict=True))
    assert kernels.launched[2:] == [("pack", 12, 5), ("unpack", 1, 5), ("unpack", 5, 5), ("unpack", 4, 5)]


@pytest.mark.parametrize("offsets", [[0, 64], [128, 0], [0, 256], [8, 136]], ids=["dense", "order", "gap", "alignment"])
def test_other_places_are_left_to_copies(offsets: list[int]) -> None:
    kernels = PlayedKernels()
    assert not Packer(load=kernels.load).pack(PackPlans(CPU), aligned(512), buffers_of([16, 32]), offsets)
    assert kernels.launched == []


@pytest.mark.parametrize("error", [ImportError("No module named 'triton'"), RuntimeError("gcc: not found"), KeyError("sm_999")])
def test_kernels_that_do_not_work_are_left_alone_and_named_once(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    packer = Packer(load=PlayedKernels(fails=error).load)
    with caplog.at_level(logging.WARNING, logger="chameleon_mm"):
        for _ in range(3):
            assert not packer.pack(PackPlans(CPU), aligned(512), buffers_of([16]), [0])
    assert [str(error) in record.message for record in caplog.records] == [True]
    assert caplog.records[0].exc_info is None


def test_triton_that_is_missing_is_left_alone() -> None:
    def load() -> PackKernels:
        raise ModuleNotFoundError("No module named 'triton'")

    assert not Packer(load=load).unpack(PackPlans(CPU), buffers_of([16]), aligned(512), [0])


def test_no_memory_for_a_table_is_no_reason_to_give_kernels_up() -> None:
    kernels = PlayedKernels(fails=torch.OutOfMemoryError("out of memory"))
    packer = Packer(load=kernels.load)
    assert not packer.pack(PackPlans(CPU), aligned(512), buffers_of([16]), [0])
    kernels.fails = None
    assert packer.pack(PackPlans(CPU), aligned(512), buffers_of([16]), [0])
    kernels.fails = torch.OutOfMemoryError("out of memory")
    assert not packer.pack(PackPlans(CPU), aligned(512), buffers_of([16]), [0])


def test_an_error_of_a_kernel_that_works_is_raised() -> None:
    kernels = PlayedKernels()
    packer = Packer(load=kernels.load)
    assert pack_and_unpack(packer)
    kernels.fails = RuntimeError("an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        packer.pack(PackPlans(CPU), aligned(512), buffers_of([16]), [0])


@pytest.mark.parametrize("programs", [0, -1])
def test_a_grid_of_nothing_is_refused(programs: int) -> None:
    with pytest.raises(ValueError, match="pack_programs: expected 1 or more"):
        Packer(programs)


def test_neither_plans_nor_tables_keep_a_buffer(no_gc: None) -> None:
    kernels = PlayedKernels()
    packer, plans, staging, sources = Packer(load=kernels.load), PackPlans(CPU), aligned(512), buffers_of([16, 32])
    assert packer.pack(plans, staging, sources, [0, 128])
    kept = [weakref.ref(t) for t in (staging, *sources)]
    del staging, sources
    assert [ref() for ref in kept] == [None] * 3
