"""Page-locking host memory: how fast by which method, what it does to a running matrix product, and whose addresses work.

    cudaHostAlloc(n)                                   | the driver allocates, zeroes and locks
    mmap(n), populate on t threads, cudaHostRegister   | we allocate and zero, the driver locks

Uses torch.cuda and CuPy directly: see __init__.py.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from chameleon_mm.bench._measure import Figure, interleave
from chameleon_mm.bench.probe.copies import on_stand_in, random_bytes
from chameleon_mm.device.pinning import populated_pages
from chameleon_mm.units import GIB, MIB

_GPU_BYTES = 1 * GIB
_CPU_BYTES = 16 * MIB
_PORTABLE = 1  # cudaHostAllocPortable = cudaHostRegisterPortable
_ATTRIBUTES = {  # cudaDeviceAttr, by the runtime's header
    "cudaDevAttrPageableMemoryAccess": 88,
    "cudaDevAttrCanUseHostPointerForRegisteredMem": 91,
    "cudaDevAttrHostRegisterSupported": 99,
    "cudaDevAttrPageableMemoryAccessUsesHostPageTables": 100,
}
_GEMM_SIDE, _CPU_GEMM_SIDE = 8192, 256
_GEMMS_PER_SAMPLE = 4
_GEMM_SECONDS, _CPU_GEMM_SECONDS = 2.5, 0.2


def rates() -> dict[str, Any]:
    """GB/s of pinning a GiB by each method, and for the second one apart: populating and registering."""
    answer: dict[str, Any] = {
        "bytes": _bytes(),
        "cpus": len(os.sched_getaffinity(0)),
        "transparent_hugepages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
    }
    samples = interleave({"s": partial(_seconds, _host_alloc)}, warmup=1, repeats=3)["s"]
    answer["cudaHostAlloc"] = _gbps([lock for _, lock in samples])
    for threads in (1, 2, 4, 8, 16):
        samples = interleave({"s": partial(_seconds, partial(_register, threads))}, warmup=1, repeats=3)["s"]
        answer[f"populate and cudaHostRegister, {threads} threads"] = {
            "total": _gbps([populate + lock for populate, lock in samples]),
            "populate": _gbps([populate for populate, _ in samples]),
            "cudaHostRegister": _gbps([lock for _, lock in samples]),
        }
    return answer


def beside_gemm() -> dict[str, Any]:
    """Time of matrix products alone, and while another thread pins and unpins a GiB over and over by each method.

    Two clocks: events (did the device run slower?) and the host's around issue and completion (was the host held up?).
    """
    answer: dict[str, Any] = {"alone": _gemms(None)}
    for name, method in (("cudaHostAlloc", _host_alloc), ("populate and cudaHostRegister", partial(_register, 8))):
        answer[f"beside {name}"] = _gemms(method)
    return answer


def host_pointers() -> dict[str, Any]:
    """Whether the device reads and writes registered memory at its host address, by attribute and by trying it."""
    from cupy.cuda import runtime

    device = torch.cuda.current_device()
    answer: dict[str, Any] = {name: runtime.deviceGetAttribute(number, device) for name, number in _ATTRIBUTES.items()}
    if not (answer["cudaDevAttrCanUseHostPointerForRegisteredMem"] and answer["cudaDevAttrHostRegisterSupported"]):
        # Trying would be an illegal access, after which no CUDA call of this process works.
        return answer | {"tried": {"waived": "the attributes say that it does not work"}}
    memory = populated_pages(4 * MIB, threads=1, madvise=_madvise)
    before = random_bytes(memory.numel())
    memory.copy_(before)
    runtime.hostRegister(memory.data_ptr(), memory.numel(), _PORTABLE)
    try:
        seen = runtime.pointerGetAttributes(memory.data_ptr())
        on_device = torch.as_tensor(_HostAddress(memory), device="cuda")
        same_address = on_device.data_ptr() == memory.data_ptr()
        read_exact = torch.equal(on_device.clone().cpu(), before)
        on_device.bitwise_not_()
        torch.cuda.synchronize()
        written_exact = torch.equal(memory, before.bitwise_not())
        del on_device
    finally:
        torch.cuda.synchronize()
        runtime.hostUnregister(memory.data_ptr())
    return answer | {
        "tried": {
            "device_address_is_host_address": getattr(seen, "devicePointer", None) == memory.data_ptr(),
            "kernels_used_the_host_address": same_address,
            "device_read_exact": read_exact,
            "device_write_exact": written_exact,
        }
    }


class _HostAddress:
    """Presents host memory as a CUDA array, so that torch's kernels get its untranslated address."""

    def __init__(self, memory: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (memory.numel(),),
            "typestr": "|u1",
            "data": (memory.data_ptr(), False),
            "strides": None,
            "version": 2,
        }


Method = Callable[[], tuple[float, float, Callable[[], object]]]
"""Pins `_bytes()`: seconds populating, seconds in the driver, and how to give the memory back."""


def _bytes() -> int:
    return _CPU_BYTES if on_stand_in() else _GPU_BYTES


def _host_alloc() -> tuple[float, float, Callable[[], object]]:
    from cupy.cuda import runtime

    nbytes = _bytes()
    start = time.perf_counter()
    address = runtime.hostAlloc(nbytes, _PORTABLE)
    return 0.0, time.perf_counter() - start, partial(runtime.freeHost, address)


def _register(threads: int) -> tuple[float, float, Callable[[], object]]:
    from cupy.cuda import runtime

    nbytes = _bytes()
    start = time.perf_counter()
    memory = populated_pages(nbytes, threads=threads, madvise=_madvise)
    populated = time.perf_counter()
    runtime.hostRegister(memory.data_ptr(), nbytes, _PORTABLE)
    locked = time.perf_counter()

    def release(memory: Tensor = memory) -> None:  # holds the pages until the driver has let go of them
        runtime.hostUnregister(memory.data_ptr())

    return populated - start, locked - populated, release


def _seconds(method: Method) -> tuple[float, float]:
    populate, lock, release = method()
    release()
    return populate, lock


def _gbps(seconds: list[float]) -> dict[str, Any]:
    return Figure.of([_bytes() / s / 1e9 for s in seconds], "GB/s", simulated=False).to_dict()


def _gemms(method: Method | None) -> dict[str, Any]:
    side, seconds = (_CPU_GEMM_SIDE, _CPU_GEMM_SECONDS) if on_stand_in() else (_GEMM_SIDE, _GEMM_SECONDS)
    a, b = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    c = torch.empty_like(a)
    for _ in range(_GEMMS_PER_SAMPLE):
        torch.mm(a, b, out=c)
    torch.cuda.synchronize()
    stop = threading.Event()
    pinned = 0

    def pin_until_stopped() -> int:
        count = 0
        while method is not None and not stop.is_set():
            _seconds(method)
            count += 1
        return count

    device_us, host_us = [], []
    with ThreadPoolExecutor(1) as pool:
        pinning = pool.submit(pin_until_stopped)
        try:
            end_at = time.perf_counter() + seconds
            while time.perf_counter() < end_at:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                began = time.perf_counter()
                start.record()
                for _ in range(_GEMMS_PER_SAMPLE):
                    torch.mm(a, b, out=c)
                end.record()
                end.synchronize()
                host_us.append((time.perf_counter() - began) * 1e6 / _GEMMS_PER_SAMPLE)
                device_us.append(start.elapsed_time(end) * 1e3 / _GEMMS_PER_SAMPLE)
        finally:
            stop.set()
        pinned = pinning.result()
    return {
        "pinned_gib": pinned * _bytes() / GIB,
        "gemm_by_events": Figure.of(device_us, "us", simulated=False).to_dict(),
        "gemm_by_host": Figure.of(host_us, "us", simulated=False).to_dict(),
        "slowest_by_host_us": max(host_us),
    }


def _madvise(address: int, nbytes: int, advice: int) -> int:
    """`madvise(2)` without the GIL, so that threads populate side by side: 0 or the error number."""
    call = ctypes.CDLL(None, use_errno=True).madvise
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    call.restype = ctypes.c_int
    return 0 if call(address, nbytes, advice) == 0 else ctypes.get_errno()


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        return f"unreadable: {error}"
