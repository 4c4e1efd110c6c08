"""Real GPU: the protocol's promises on the hardware; and tests without a GPU, on a runtime played by functions.

copies are exact at every size, events order and time, memory is counted, a refused pin leaves no error behind
"""

from __future__ import annotations

import errno
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from chameleon_mm.device.cuda import CudaDevice, CudaStream, cuda_is_available, visible_gpus
from chameleon_mm.device.cuda.cuda_device import pinning_calls
from chameleon_mm.device.packing import Packer, packed_offsets
from chameleon_mm.device.pinning import PageLocker
from chameleon_mm.device.protocols import Device
from chameleon_mm.device.sim import SimDevice
from chameleon_mm.errors import HostMemoryExhausted
from chameleon_mm.units import MIB
from tests._fakes import refusing
from tests._memory_limit import fraction_of_memory
from tests._programs import on_a_thread
from tests.cuda_stand_in import control

SIZES = [0, 1, 4095, MIB + 3]


@pytest.fixture
def cuda() -> CudaDevice:
    return CudaDevice()


@pytest.fixture(params=["cupy", "torch"])
def either(request: pytest.FixtureRequest) -> CudaDevice:
    """A CUDA device that copies by CuPy (skipped where there is none), then one that does so by torch alone."""
    device = CudaDevice()
    if request.param == "torch":
        device.cupy_runtime = None
    elif device.cupy_runtime is None:
        pytest.skip("CuPy is not installed, or not for this driver")
    return device


def _round_trip(device: Device, nbytes: int) -> None:
    """Random bytes to the device and back, through three streams ordered by events alone."""
    want = torch.randint(256, (nbytes,), dtype=torch.uint8)
    up, down = device.alloc_pinned(nbytes + 1), device.alloc_pinned(nbytes + 1)
    up[:nbytes].copy_(want)
    down.fill_(0)
    h2d, d2h, compute = device.new_stream("h2d"), device.new_stream("d2h"), device.current_stream()
    hbm = compute.alloc(nbytes)
    h2d.wait(compute.record())
    h2d.copy(hbm, up[:nbytes])
    d2h.wait(h2d.record())
    d2h.copy(down[:nbytes], hbm)
    done = d2h.record()
    done.synchronize()
    compute.wait(done)
    compute.free(hbm)
    del hbm
    assert torch.equal(down[:nbytes], want)
    assert int(down[nbytes]) == 0  # not a byte further
    for memory in (up, down):
        device.free_pinned(memory)


# ---------------------------------------------------------------------------------------------------------- on the hardware


@pytest.mark.gpu
@pytest.mark.parametrize("nbytes", [*SIZES, 64 * MIB + 1])
def test_copies_are_exact_by_cupy_and_by_torch(either: CudaDevice, nbytes: int) -> None:
    _round_trip(either, nbytes)


@pytest.mark.gpu
def test_a_wait_orders_a_copy_after_the_kernels_before_it_and_a_stream_without_one_runs_beside(either: CudaDevice) -> None:
    host, source = either.alloc_pinned(MIB), either.alloc_pinned(MIB)
    host.fill_(0)
    d2h, h2d, compute = either.new_stream("d2h"), either.new_stream("h2d"), either.current_stream()
    hbm, other = compute.alloc(MIB), compute.alloc(MIB)
    h2d.wait(compute.record())
    hbm.fill_(1)
    torch.cuda._sleep(1_000_000_000)  # about 0.5 s: a copy that did not wait would see ones
    busy = compute.record()
    h2d.copy(other, source)
    h2d.record().synchronize()
    assert not busy.query()
    hbm.fill_(2)
    ready = compute.record()
    # Or the sleep was no test. With threads the stand-in runs an operator on the host, once its stream is done sleeping.
    assert not ready.query() or (control.is_loaded() and control.mode() == "threads")
    d2h.wait(ready)
    d2h.copy(host, hbm)
    d2h.record().synchronize()
    assert host.eq(2).all()
    for memory in (host, source):
        either.free_pinned(memory)


@pytest.mark.gpu
def test_timed_events_measure_and_untimed_ones_say_why_not(cuda: CudaDevice) -> None:
    stream = cuda.current_stream()
    start = stream.record(timed=True)
    torch.cuda._sleep(1_000_000)
    end = stream.record(timed=True)
    end.synchronize()
    later = stream.record(timed=True)
    later.synchronize()
    assert 0 < end.elapsed_us(start) <= later.elapsed_us(start)
    with pytest.raises(ValueError, match="timed=True"):
        stream.record().elapsed_us(start)
    torch.cuda._sleep(200_000_000)
    pending = stream.record(timed=True)
    with pytest.raises(ValueError, match="still pending"):
        pending.elapsed_us(start)
    pending.synchronize()


@pytest.mark.gpu
def test_allocations_are_counted_and_freed_at_once(cuda: CudaDevice, no_gc: None) -> None:
    stream = cuda.current_stream()
    torch.cuda.empty_cache()  # a cached block that is a little larger would be handed out, and counted, whole
    before, driven = cuda.allocated_bytes(), cuda.read_memory().cumulative_bytes
    cuda.reset_peaks()
    hbm = stream.alloc(8 * MIB)
    assert (hbm.dtype, tuple(hbm.shape), hbm.device) == (torch.uint8, (8 * MIB,), cuda.torch_device)
    assert cuda.owns(hbm)
    assert cuda.allocated_bytes() == before + 8 * MIB == torch.cuda.memory_allocated(cuda.index)
    stream.free(hbm)
    del hbm
    assert cuda.allocated_bytes() == before
    assert cuda.peak_allocated_bytes() == before + 8 * MIB
    assert cuda.peak_reserved_bytes() >= cuda.peak_allocated_bytes()
    assert cuda.read_memory().cumulative_bytes == driven + 8 * MIB
    torch.cuda.reset_accumulated_memory_stats(cuda.index)
    assert cuda.read_memory().cumulative_bytes >= driven + 8 * MIB
    _, total = torch.cuda.mem_get_info(cuda.index)
    assert 0 < cuda.capacity <= total
    with fraction_of_memory(total // 10, cuda.index):
        assert cuda.capacity <= total // 10


@pytest.mark.gpu
def test_the_current_stream_is_the_users_and_the_calling_threads(cuda: CudaDevice) -> None:
    default = cuda.current_stream()
    assert cuda.current_stream() is default
    mine = torch.cuda.Stream(cuda.index)
    seen: list[CudaStream] = []
    with torch.cuda.stream(mine):
        inside = cuda.current_stream()
        assert inside.raw == mine
        assert inside.name == "compute"
        on_a_thread(lambda: seen.append(cuda.current_stream()))
        assert cuda.new_stream("h2d").alloc(4096).numel() == 4096  # a side stream's allocation leaves the current one
        assert torch.cuda.current_stream(cuda.index) == mine
    assert seen[0].raw == torch.cuda.default_stream(cuda.index)
    assert cuda.current_stream() is default


@pytest.mark.gpu
def test_streams_seen_are_remembered_within_bounds(cuda: CudaDevice) -> None:
    for address in range(1, 200):
        foreign = torch.cuda.ExternalStream(address * 64, device=cuda.index)  # never used, so it need not exist
        with torch.cuda.stream(foreign):
            assert cuda.current_stream().raw == foreign
    assert len(cuda._known_streams) <= 64


@pytest.mark.gpu
def test_pinned_memory_is_pinned_and_aligned(either: CudaDevice) -> None:
    memory = either.alloc_pinned(3 * MIB + 1)
    assert memory.is_pinned()
    assert memory[4096:].is_pinned()
    assert memory.data_ptr() % 4096 == 0
    assert not either.owns(memory)
    either.free_pinned(memory)
    with pytest.raises(ValueError, match="not yet freed"):
        either.free_pinned(memory)


@pytest.mark.gpu
def test_a_refused_pin_leaves_the_next_kernel_launch_working(cuda: CudaDevice) -> None:
    calls = pinning_calls(cuda.index)
    holding = PageLocker(calls)
    taken = holding.pin(MIB)

    def register_taken(address: int, nbytes: int) -> None:
        calls.register(taken.data_ptr(), MIB)  # registered already: the runtime refuses, and remembers that it did

    refusing = PageLocker(calls._replace(register=register_taken))
    memory = refusing.pin(MIB)  # by the fallback
    assert memory.is_pinned()
    with pytest.raises(HostMemoryExhausted, match=r"expected .* \(70368744177664 bytes\), got"):  # far more than there is
        PageLocker(calls, madvise=lambda *_: errno.ENOMEM).pin(1 << 46)
    doubled = torch.ones(8, device=cuda.torch_device) * 2
    cuda.synchronize()
    assert doubled.cpu().eq(2).all()
    refusing.unpin(memory)
    holding.unpin(taken)


@pytest.mark.gpu
def test_it_says_what_it_is(cuda: CudaDevice) -> None:
    assert not cuda.simulated
    assert cuda.name == torch.cuda.get_device_name(cuda.index)
    with cuda.compute(), cuda.compute():
        assert torch.ones(2, device=cuda.torch_device).sum().item() == 2
    gpus = visible_gpus()
    assert len(gpus) == torch.cuda.device_count()
    assert gpus[cuda.index].startswith(f"{cuda.index}: {cuda.name}, ")
    assert re.fullmatch(r"CUDA driver \d+\.\d, runtime .+", cuda.driver)
    before = cuda.host_us
    assert cuda.host_us >= before


@pytest.mark.gpu
@pytest.mark.parametrize("by", ["kernels", "copies"])
@pytest.mark.parametrize("where", ["current stream", "side stream"])
def test_packing_is_exact(cuda: CudaDevice, by: str, where: str) -> None:
    if by == "copies":
        cuda.packer = Packer(load=refusing(ImportError, "left out"))
    compute = cuda.current_stream()
    stream = compute if where == "current stream" else cuda.new_stream("side")
    sizes = [1, 15, 16, 17, 4096, 100_001]
    offsets, total = packed_offsets(sizes)
    for _ in range(2):
        sources = [torch.randint(256, (nbytes,), dtype=torch.uint8, device=cuda.torch_device) for nbytes in sizes]
        staging, back = compute.alloc(total), [compute.alloc(nbytes) for nbytes in sizes]
        staging.fill_(0)
        stream.wait(compute.record())
        stream.pack(staging, sources, offsets)
        stream.unpack(back, staging, offsets)
        compute.wait(stream.record())
        assert all(torch.equal(*pair) for pair in zip(sources, back, strict=True))
        want = torch.zeros(total, dtype=torch.uint8)
        for source, offset in zip(sources, offsets, strict=True):
            want[offset : offset + source.numel()] = source.cpu()
        assert torch.equal(staging.cpu(), want)
        stream.unpack(back[1::2], staging, offsets[1::2])  # a part of the packed buffers
        compute.wait(stream.record())
        assert all(torch.equal(*pair) for pair in zip(sources[1::2], back[1::2], strict=True))


@pytest.mark.gpu
def test_a_kernel_is_launched_on_its_stream(cuda: CudaDevice) -> None:
    seen: list[torch.cuda.Stream] = []

    def pack(*_: Any) -> bool:
        seen.append(torch.cuda.current_stream(cuda.index))
        return True

    cuda.packer = SimpleNamespace(pack=pack)  # type: ignore[assignment]  # notes where it is called
    side, compute = cuda.new_stream("side"), cuda.current_stream()
    buffer = torch.zeros(8, dtype=torch.uint8, device=cuda.torch_device)
    for stream in (side, compute):
        stream.pack(buffer, [buffer[:4]], [0])
    assert seen == [side.raw, compute.raw]


# --------------------------------------------------------------------------------- what no library that is installed answers


@pytest.mark.gpu
def test_what_does_not_fit_is_refused(cuda: CudaDevice) -> None:
    """Test each check once. The simulator makes them as well: `test_sim_memory.py` and `test_sim_pack.py` test all cases."""
    stream, buffer = cuda.new_stream("side"), torch.zeros(5, dtype=torch.uint8, device=cuda.torch_device)
    with pytest.raises(ValueError, match=r"^copy: expected equal sizes, got 5 bytes into 4"):
        stream.copy(buffer[:4], buffer)
    with pytest.raises(ValueError, match=r"^pack: expected buffer 1 within .* 5 bytes, got \[3, 7\)"):
        stream.pack(buffer, [buffer[:2], buffer[:4]], [0, 3])
    with pytest.raises(ValueError, match=r"^unpack: expected an offset for each of 2 buffers, got 1"):
        stream.unpack([buffer[:2], buffer[:4]], buffer, [0])
    with pytest.raises(TypeError, match="got SimEvent"):
        cuda.current_stream().wait(SimDevice().current_stream().record())
    with pytest.raises(torch.OutOfMemoryError):
        cuda.current_stream().alloc(1 << 50)


@pytest.mark.skipif(cuda_is_available(), reason="says what happens where there is no CUDA GPU")
def test_without_cuda_it_says_what_is_missing_and_what_to_use() -> None:
    with pytest.raises(RuntimeError, match=rf"got none: torch {torch.__version__.split('+')[0]}.*device='sim'"):
        CudaDevice(0)
    assert visible_gpus() == []
