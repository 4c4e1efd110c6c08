"""Pool as CuPy's pinned allocator, with CuPy itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from chameleon_mm.device.sim import SimDevice
from chameleon_mm.errors import DeviceUnavailable, HostMemoryExhausted
from chameleon_mm.pool.pool import PinnedPool
from chameleon_mm.units import MIB


@pytest.fixture
def pool(sim: SimDevice) -> Iterator[PinnedPool]:
    with PinnedPool("1MiB", sim) as pool:
        yield pool


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
        assert not cupy.asnumpy(on_gpu).any()
