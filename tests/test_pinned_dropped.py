"""Pool tensor that is dropped while a stream copies from it: the next owner of its bytes waits for that copy.

    staged = pool.empty(...); side.copy(target, staged); del staged; again = pool.empty(...); again.fill_(2)

However the tensor was reached, whichever thread drops it, whoever allocates next. Without the wait the simulator raises
`SimRaceError`, and on CUDA's stand-in the wrong bytes arrive. A block that was released after an event waits for that alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from chameleon_mm.device.protocols import Device, Event, Stream
from chameleon_mm.device.sim import SimDevice
from chameleon_mm.pool.pool import PinnedPool
from chameleon_mm.units import MIB
from tests._fakes import refusing
from tests._programs import on_a_thread
from tests._run_scripts import ROOT, python
from tests.cuda_stand_in import control
from tests.observed import SimRaceError

pytestmark = pytest.mark.usefixtures("no_gc")

SIZE = 1 * MIB

ALIASES: dict[str, Callable[[Tensor], Any]] = {
    "the tensor": lambda t: t,
    "a view": lambda t: t[1:].detach(),
    "another dtype": lambda t: t.view(torch.float32),
    "its storage": lambda t: t.untyped_storage(),
    "numpy": lambda t: t.numpy()[5:],
    "memoryview": lambda t: t.numpy().data,
    "torch's dlpack": from_dlpack,
    "numpy's dlpack": np.from_dlpack,
    "a capsule": lambda t: t.__dlpack__(),
}
"""Objects that may be the last holder of the bytes."""


def start_copy(device: Device, staged: Tensor, side: Stream) -> Tensor:
    """Copy `staged` to device memory on `side`, which is still under way when this returns."""
    with device.compute():
        compute = device.current_stream()
        target = compute.alloc(staged.numel())
        target.zero_()
        side.wait(compute.record())
        side.copy(target, staged)
    return target


def staged_ones(device: Device, allocator: PinnedPool) -> Tensor:
    staged = allocator.allocate(SIZE).tensor((SIZE,), torch.uint8)
    with device.compute():
        return staged.fill_(1)


def dropped_under_a_copy(device: Device, allocator: PinnedPool) -> tuple[Tensor, int]:
    """The target of a copy on another stream whose source was dropped, and the address of that."""
    staged = staged_ones(device, allocator)
    return start_copy(device, staged, device.new_stream("side")), staged.data_ptr()


def write_next(device: Device, allocator: PinnedPool, address: int) -> None:
    """Get the bytes at `address` and write them on the host."""
    again = allocator.allocate(SIZE).tensor((SIZE,), torch.uint8)
    assert again.data_ptr() == address
    with device.compute():
        again.fill_(2)


def check(device: Device, target: Tensor) -> None:
    device.synchronize()
    assert torch.equal(target.cpu(), torch.ones(SIZE, dtype=torch.uint8))


@pytest.mark.parametrize("alias", ALIASES.values(), ids=ALIASES.keys())
def test_the_next_owner_waits_for_a_copy_on_another_stream(device: Device, alias: Callable[[Tensor], Any]) -> None:
    with PinnedPool(SIZE, device) as pool:
        side = device.new_stream("side")
        staged = staged_ones(device, pool)
        address = staged.data_ptr()
        held = alias(staged)
        target = start_copy(device, staged, side)
        del staged
        assert pool.stats().num_live == 1
        del held
        assert pool.stats().num_live == 0
        write_next(device, pool, address)
        check(device, target)


def test_it_waits_for_every_stream(device: Device) -> None:
    with PinnedPool(SIZE, device) as pool:
        staged = staged_ones(device, pool)
        address = staged.data_ptr()
        targets = [start_copy(device, staged, device.new_stream("side")) for _ in range(5)]
        del staged
        write_next(device, pool, address)
        for target in targets:
            check(device, target)


def test_copying_and_dropping_on_another_thread(device: Device) -> None:
    with PinnedPool(SIZE, device) as pool:
        given = [staged_ones(device, pool)]
        address = given[0].data_ptr()
        targets: list[Tensor] = []

        def copy_and_drop() -> None:
            staged = given.pop()
            targets.append(start_copy(device, staged, device.new_stream("the thread's")))

        on_a_thread(copy_and_drop)
        assert pool.stats().num_live == 0
        write_next(device, pool, address)
        check(device, targets[0])


def test_a_raw_buffer_of_a_dropped_block_waits_too(device: Device) -> None:
    with PinnedPool(SIZE, device) as pool:
        block = pool.allocate(SIZE)
        block.tensor((SIZE,), torch.uint8).fill_(1)
        target = start_copy(device, block.buffer, device.new_stream("side"))
        address = block.buffer.data_ptr()
        del block
        write_next(device, pool, address)
        check(device, target)


def test_a_stream_that_gets_the_bytes_waits_and_the_host_does_not(device: Device) -> None:
    with PinnedPool(SIZE, device) as pool:
        side, d2h = device.new_stream("side"), device.new_stream("d2h")
        with device.compute():
            twos = device.current_stream().alloc(SIZE)
            twos.fill_(2)
        d2h.wait(device.current_stream().record())
        staged = staged_ones(device, pool)
        target = start_copy(device, staged, side)
        under_way = side.record()
        del staged
        block = pool.allocate(SIZE, stream=d2h)
        if device.simulated:
            assert not under_way.query()
        d2h.copy(block.buffer, twos)
        block.release(after=d2h.record())
        check(device, target)


def test_closing_the_pool_waits(device: Device) -> None:
    pool = PinnedPool(SIZE, device)
    target, _ = dropped_under_a_copy(device, pool)
    pool.close()  # frees the memory: the simulator raises SimRaceError under a copy
    check(device, target)


def test_a_dropped_tensor_that_no_copy_used_is_free_at_once(sim: SimDevice) -> None:
    with PinnedPool(SIZE, sim) as pool:
        del (staged := [pool.empty((SIZE,), torch.uint8)])[:]
        assert pool.allocate(SIZE).pending_events == ()
        assert not staged


def test_without_cuda_there_is_nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from chameleon_mm.device.cuda import cuda_stream

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert cuda_stream.events_after_all_work() == ()


def test_a_release_after_an_event_records_no_other(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    with PinnedPool(SIZE, device) as pool:
        monkeypatch.setattr(type(device), "record_all", refusing(AssertionError, "all work of the device asked for"))
        side, d2h = device.new_stream("side"), device.new_stream("d2h")
        block = pool.allocate(SIZE)
        block.tensor((SIZE,), torch.uint8).fill_(1)
        target = start_copy(device, block.buffer, side)
        event = side.record()
        block.release(after=event)
        for _ in range(3):
            block = pool.allocate(SIZE)
            assert block.pending_events == (event,) or event.query()
            block.release()
        block = pool.allocate(SIZE, stream=d2h)
        block.release(after=d2h.record())
        pool.take_back()
        check(device, target)


@pytest.mark.parametrize(
    "record_all",
    [lambda device: (), lambda device: (device.current_stream().record(),)],
    ids=["no event", "the current stream alone"],
)
def test_without_the_wait_the_simulator_names_the_race(
    record_all: Callable[[Device], tuple[Event, ...]], sim: SimDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SimDevice, "record_all", record_all)
    pool = PinnedPool(SIZE, sim)
    target, address = dropped_under_a_copy(sim, pool)
    with pytest.raises(SimRaceError, match=r"write of .* by fill_ on the host is not ordered after read .* on side"):
        write_next(sim, pool, address)
    sim.synchronize()
    del target


# --- on CUDA alone


@pytest.mark.gpu
@pytest.mark.skipif(not control.is_loaded(), reason="a GPU may be fast enough to be right by luck")
@pytest.mark.usefixtures("fresh_blocks")
def test_without_the_wait_wrong_bytes_arrive_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    from chameleon_mm.device.cuda import CudaDevice

    device = CudaDevice()
    monkeypatch.setattr(CudaDevice, "record_all", lambda self: (self.current_stream().record(),))
    with PinnedPool(SIZE, device) as pool:
        target, address = dropped_under_a_copy(device, pool)
        write_next(device, pool, address)
        with pytest.raises(AssertionError):
            check(device, target)


@pytest.mark.gpu
def test_where_the_driver_has_no_such_event_the_host_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    from chameleon_mm.device.cuda import CudaDevice, cuda_stream

    monkeypatch.setattr(cuda_stream, "_record_context", lambda event: False)
    device = CudaDevice()
    with PinnedPool(SIZE, device) as pool:
        staged = staged_ones(device, pool)
        address = staged.data_ptr()
        side = device.new_stream("side")
        target = start_copy(device, staged, side)
        under_way = side.record()
        del staged
        assert device.record_all() == ()
        assert under_way.query()
        write_next(device, pool, address)
        check(device, target)


@pytest.mark.gpu
def test_a_stream_that_torch_does_not_know_is_waited_for() -> None:
    """The stream is the runtime's own, as other libraries make them, and is destroyed before the bytes are used again."""
    from chameleon_mm.device.cuda import CudaDevice

    device = CudaDevice()
    if device.cupy_runtime is None:
        pytest.skip("makes the stream with CuPy, which is not installed")
    with PinnedPool(SIZE, device) as pool:
        staged = staged_ones(device, pool)
        target = torch.zeros(SIZE, dtype=torch.uint8, device=device.torch_device)
        device.synchronize()
        from cupy import cuda

        foreign = cuda.Stream(non_blocking=True)
        device.cupy_runtime.memcpyAsync(target.data_ptr(), staged.data_ptr(), SIZE, 1, foreign.ptr)
        address = staged.data_ptr()
        del staged
        write_next(device, pool, address)
        check(device, target)


# --- at exit

AT_EXIT = """
import sys, torch, chameleon_mm as cm
from tests.observed import observe_all
observe_all()
device = cm.resolve_device(sys.argv[1])
pool = cm.PinnedPool(1 << 20, device)
with device.compute():
    staged = pool.empty((1 << 20,), torch.uint8).fill_(1)
    target = device.current_stream().alloc(1 << 20)
    side = device.new_stream("side")
    side.wait(device.current_stream().record())
    side.copy(target, staged)
    if "drop" in sys.argv: del staged
"""


@pytest.mark.ci
@pytest.mark.parametrize("how", ["keep", "drop"])
def test_dropped_at_the_end_of_the_interpreter(device: Device, how: str) -> None:
    ended = python(["-c", AT_EXIT, "sim" if device.simulated else "cuda", how], ROOT)
    assert (ended.code, ended.err) == (0, "")
