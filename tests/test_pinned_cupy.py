"""Pool as CuPy's pinned allocator: against a stand-in for the parts of CuPy that it uses, and with CuPy on a GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from chameleon_mm.device.sim import SimDevice
from chameleon_mm.errors import DeviceUnavailable, HostMemoryExhausted
from chameleon_mm.pool.pool import PinnedPool
from chameleon_mm.units import MIB


class PinnedMemoryPointer:
    """Equivalent of CuPy's: `mem` has `ptr` and `size`. A buffer of the bytes from `ptr` on (here by NumPy's interface)."""

    def __init__(self, mem: Any, offset: int) -> None:
        self.mem = mem
        self.ptr = mem.ptr + offset

    def __int__(self) -> int:
        return int(self.ptr)

    def size(self) -> int:
        return int(self.mem.size - (self.ptr - self.mem.ptr))

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "shape": (self.size(),), "typestr": "|u1", "data": (self.ptr, False)}


class CUDARuntimeError(RuntimeError):
    """Equivalent of CuPy's error, made from a status."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(f"status {status}")


class PinnedMemory:
    """Pinned memory of `cupy.cuda`: a current allocator, whose result must be a `PinnedMemoryPointer`."""

    def __init__(self) -> None:
        self.allocator: Any = None

    def set_pinned_memory_allocator(self, allocator: Any) -> None:
        self.allocator = allocator

    def alloc_pinned_memory(self, size: int) -> PinnedMemoryPointer:
        pointer = self.allocator(size)
        if type(pointer) is not PinnedMemoryPointer:
            raise TypeError(f"expected a PinnedMemoryPointer, got {type(pointer).__name__}")
        return pointer


@pytest.fixture
def cupy_cuda(monkeypatch: pytest.MonkeyPatch) -> PinnedMemory:
    memory = PinnedMemory()
    cuda: Any = ModuleType("cupy.cuda")
    cuda.PinnedMemoryPointer = PinnedMemoryPointer
    cuda.runtime = SimpleNamespace(CUDARuntimeError=CUDARuntimeError)
    package: Any = ModuleType("cupy")
    package.cuda = cuda
    monkeypatch.setitem(sys.modules, "cupy", package)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    return memory


@pytest.fixture
def pool(sim: SimDevice) -> Iterator[PinnedPool]:
    with PinnedPool("1MiB", sim) as pool:
        yield pool


@pytest.mark.usefixtures("no_gc")
def test_cupy_allocates_from_the_pool_and_gives_back_with_the_last_pointer(pool: PinnedPool, cupy_cuda: PinnedMemory) -> None:
    cupy_cuda.set_pinned_memory_allocator(pool.as_cupy_allocator())
    pointer = cupy_cuda.alloc_pinned_memory(1000)
    assert (pointer.size(), int(pointer) % 4096, pool.stats().requested_bytes) == (1000, 0, 1000)
    array = np.asarray(pointer).view(np.float64)
    array[:] = 1.5
    address = int(pointer)
    del pointer
    assert pool.stats().num_live == 1, "the array holds the pointer, which holds the memory"
    assert bool((array == 1.5).all())
    del array
    assert pool.stats().num_live == 0
    assert int(cupy_cuda.alloc_pinned_memory(1000)) == address


def test_no_bytes_are_a_null_pointer(pool: PinnedPool, cupy_cuda: PinnedMemory) -> None:
    cupy_cuda.set_pinned_memory_allocator(pool.as_cupy_allocator())
    pointer = cupy_cuda.alloc_pinned_memory(0)
    assert (int(pointer), pointer.size()) == (0, 0)


def test_exhaustion_is_the_error_at_which_cupy_copies_without_pinning(pool: PinnedPool, cupy_cuda: PinnedMemory) -> None:
    cupy_cuda.set_pinned_memory_allocator(pool.as_cupy_allocator())
    with pytest.raises(CUDARuntimeError) as caught:
        cupy_cuda.alloc_pinned_memory(2 * MIB)
    assert caught.value.status == 2
    assert isinstance(caught.value.__cause__, HostMemoryExhausted)


def test_without_cupy_it_says_what_to_install(pool: PinnedPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceUnavailable, match=r"expected CuPy, got none .*: install cupy-cuda13x"):
        pool.as_cupy_allocator()


# --- CuPy itself


@pytest.fixture
def cupy() -> Iterator[Any]:
    module = pytest.importorskip("cupy")
    before = module.get_default_pinned_memory_pool().malloc
    try:
        yield module
    finally:
        module.cuda.set_pinned_memory_allocator(before)


@pytest.fixture
def cupyx() -> Any:
    return pytest.importorskip("cupyx")


@pytest.mark.gpu
def test_cupy_itself_uses_the_pool(cupy: Any, cupyx: Any) -> None:
    with PinnedPool("64MiB", "cuda") as pool:
        cupy.cuda.set_pinned_memory_allocator(pool.as_cupy_allocator())
        host = cupyx.empty_pinned((1000,), np.float32)
        host[:] = np.arange(1000)
        assert pool.stats().num_live == 1
        assert torch.from_numpy(host).is_pinned()
        on_gpu = cupy.empty(1000, np.float32)
        on_gpu.set(host)
        assert np.array_equal(cupy.asnumpy(on_gpu), np.arange(1000, dtype=np.float32))
        assert np.array_equal(cupy.asnumpy(cupy.asarray(np.arange(10)[::2])), np.arange(10)[::2])  # staged
        assert cupyx.zeros_pinned((0,), np.float32).size == 0
        del host
        cupy.cuda.Device().synchronize()
        cupy.cuda.alloc_pinned_memory(1)  # CuPy lets its own staging memory go at the next call
        assert pool.stats().num_live == 0


@pytest.mark.gpu
def test_cupy_itself_never_writes_memory_that_a_copy_still_reads(cupy: Any, cupyx: Any) -> None:
    nbytes = 64 << 20
    with PinnedPool(nbytes, "cuda") as pool:  # room for one: every array gets the same bytes
        cupy.cuda.set_pinned_memory_allocator(pool.as_cupy_allocator())
        for stream in (cupy.cuda.Stream.null, cupy.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)):
            with stream:
                targets = [cupy.empty(nbytes, np.uint8) for _ in range(8)]
                for value, target in enumerate(targets):
                    host = cupyx.empty_pinned((nbytes,), np.uint8)
                    host[:] = value
                    target.set(host)
                    del host
                stream.synchronize()
                assert [bool((target == value).all()) for value, target in enumerate(targets)] == [True] * 8


@pytest.mark.gpu
def test_cupys_error_for_exhaustion_is_ours_to_raise(cupy: Any) -> None:
    with PinnedPool("1MiB", "cuda") as pool:
        cupy.cuda.set_pinned_memory_allocator(pool.as_cupy_allocator())
        with pytest.raises(cupy.cuda.runtime.CUDARuntimeError) as caught:
            cupy.cuda.alloc_pinned_memory(2 * MIB)
        assert isinstance(caught.value.__cause__, HostMemoryExhausted)
        with pytest.warns(RuntimeWarning, match="synchronous transfer"):
            on_gpu = cupy.asarray(np.zeros(2 * MIB, np.uint8))
        assert not bool(on_gpu.any())
