"""How fast host memory is pinned, and what copies into it are worth.

    pinning: for page size: for threads:  populate n bytes; register them         -> GB/s of each, and of both
             the device's own alloc_pinned | cudaHostAlloc | torch's pin_memory   -> GB/s
    copies:  D2H into a block of the pool, into a torch pinned tensor             -> GB/s, ratio
             host time of the call, and whether the copy is still under way then

Without a GPU only populating is measured: it is the larger part, and the one that threads and page size change.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from chameleon_mm.bench._buffers import Buffers
from chameleon_mm.bench._measure import Cell, Column, Figure, Results, Waived, interleave, timed_us
from chameleon_mm.bench.probe.pools import Pinned, has_cupy, host_alloc, registered, torch_empty_pinned, torch_pinned
from chameleon_mm.device.pinning import populated_pages
from chameleon_mm.device.protocols import Device
from chameleon_mm.errors import HostMemoryExhausted
from chameleon_mm.pinned import PinnedPool
from chameleon_mm.units import MIB, format_size

_MADV_NOHUGEPAGE = 15
_PAGES = {"2 MiB pages": False, "4 KiB pages": True}
_THREADS = (1, 2, 4, 8)
_COPY_SIZES = (1 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
_COPIES_BYTES = 512 * MIB
_MAX_COPIES = 32
_NO_GPU = "measured on a CUDA GPU alone; none took part in this run"

PINNING_COLUMNS = (
    Column(key="populate", title="populate GB/s", formula="bytes / time until every page is there, zeroed / 1e9"),
    Column(key="lock", title="lock GB/s", formula="bytes / time in the driver / 1e9"),
    Column(key="total", title="total GB/s", formula="bytes / time of both / 1e9"),
)
COPY_COLUMNS = (
    Column(key="block", title="block GB/s", formula="bytes * copies / time between two events around them / 1e9"),
    Column(key="torch", title="torch GB/s", formula="the same into torch.empty(..., pin_memory=True)"),
    Column(key="ratio", title="ratio", formula="block / torch, of the samples taken in the same round"),
    Column(key="call", title="call us", formula="host time of issuing one copy into a block"),
    Column(key="pending", title="still copying", formula="1: the copy was not complete when its call had returned; 0: it was"),
)


def pinning(device: Device, nbytes: int, *, repeats: int = 3) -> Results:
    """The table of pinning `nbytes` on `device`: by page size and threads, and by other ways where there is a GPU."""
    results = Results("pinned pinning", device, PINNING_COLUMNS)
    results.notes.append(f"{format_size(nbytes)} at a time, given back in between; {_usable_cpus()} usable CPUs")
    for pages, small in _PAGES.items():
        for threads in (count for count in _THREADS if count == 1 or count <= _usable_cpus()):
            way = partial(registered if not device.simulated else _populated, nbytes, threads, _madvise(small_pages=small))
            name = f"{pages}, {threads} thread{'s' * (threads > 1)}"
            results.add(name, {"pages": pages, "threads": threads, "bytes": nbytes}, _by_phase(device, way, nbytes, repeats))
    others: dict[str, Callable[[int], Pinned]] = {
        "ours, as the pool does": partial(_own, device), "cudaHostAlloc": host_alloc, "torch pin_memory": torch_pinned,
    }  # fmt: skip
    # In one run, interleaved: the claim is a ratio between them.
    why_not = dict.fromkeys(others if device.simulated else (), _NO_GPU)
    if not device.simulated and not has_cupy():
        why_not["cudaHostAlloc"] = "called through CuPy, which is not installed here"
    ways = {name: partial(_total_s, partial(way, nbytes)) for name, way in others.items() if name not in why_not}
    samples = interleave(ways, warmup=1, repeats=repeats)
    for name in others:
        cells: dict[str, Cell]
        if name in samples:
            one = Waived("one call does both")
            cells = {"populate": one, "lock": one, "total": _gbps(samples[name], nbytes)}
        else:
            cells = dict.fromkeys((c.key for c in PINNING_COLUMNS), Waived(why_not[name]))
        results.add(name, {"way": name, "bytes": nbytes}, cells)
    return results


def copies(device: Device, sizes: Sequence[int] = _COPY_SIZES, *, repeats: int = 9) -> Results:
    """The table of D2H copies into blocks of a pool beside torch's pinned tensors. Waived whole without a GPU."""
    results = Results("pinned copies", device, COPY_COLUMNS)
    for size in sizes:
        params = {"bytes": size}
        if device.simulated:
            cells: dict[str, Cell] = dict.fromkeys((c.key for c in COPY_COLUMNS), Waived(_NO_GPU))
        else:
            cells = _copies_of(device, size, repeats)
        results.add(f"D2H {format_size(size)}", params, cells)
    return results


def _copies_of(device: Device, size: int, repeats: int) -> dict[str, Cell]:
    count = max(1, min(_MAX_COPIES, _COPIES_BYTES // size))
    d2h = device.new_stream("d2h")
    with Buffers(device) as buffers, PinnedPool(2 * size, device, size) as pool:
        hbm = buffers.on_device(size)
        block = pool.allocate(size, stream=d2h)
        theirs = torch_empty_pinned(size)

        def rate(host: Tensor) -> float:
            def issue() -> None:
                for _ in range(count):
                    d2h.copy(host, hbm)

            return size * count / timed_us(d2h, issue) / 1e3

        targets = {"block": block.buffer, "torch": theirs}
        samples = interleave({name: partial(rate, target) for name, target in targets.items()}, repeats=repeats)
        calls, pending = [], []
        for _ in range(repeats):
            device.synchronize()
            start = time.perf_counter()
            d2h.copy(targets["block"], hbm)
            calls.append((time.perf_counter() - start) * 1e6)
            done = d2h.record()
            pending.append(float(not done.query()))
            done.synchronize()
        block.release(after=d2h.record())
    ratios = [ours / other for ours, other in zip(samples["block"], samples["torch"], strict=True)]
    return {
        "block": Figure.of(samples["block"], "GB/s", simulated=False),
        "torch": Figure.of(samples["torch"], "GB/s", simulated=False),
        "ratio": Figure.of(ratios, "1", simulated=False),
        "call": Figure.of(calls, "us", simulated=False),
        "pending": Figure.of(pending, "1", simulated=False),
    }


def _by_phase(device: Device, way: Callable[[], Pinned], nbytes: int, repeats: int) -> dict[str, Cell]:
    try:
        taken = interleave({"way": partial(_phases, way)}, warmup=1, repeats=repeats)["way"]
    except (ImportError, OSError, RuntimeError, HostMemoryExhausted) as error:  # no CuPy, no such memory, or refused
        return dict.fromkeys((column.key for column in PINNING_COLUMNS), Waived(str(error)))
    populate = _gbps([populate for populate, _ in taken], nbytes)
    if device.simulated:
        return {"populate": populate, "lock": Waived(_NO_GPU), "total": Waived(_NO_GPU)}
    return {
        "populate": populate,
        "lock": _gbps([lock for _, lock in taken], nbytes),
        "total": _gbps([populate + lock for populate, lock in taken], nbytes),
    }


def _phases(way: Callable[[], Pinned]) -> tuple[float, float]:
    pinned = way()
    pinned.release()
    return pinned.populate_s, pinned.lock_s


def _total_s(way: Callable[[], Pinned]) -> float:
    return sum(_phases(way))


def _populated(nbytes: int, threads: int, madvise: Callable[[int, int, int], int]) -> Pinned:
    start = time.perf_counter()
    memory = [populated_pages(nbytes, threads=threads, madvise=madvise)]
    return Pinned(populate_s=time.perf_counter() - start, lock_s=0.0, release=memory.clear)


def _own(device: Device, nbytes: int) -> Pinned:
    start = time.perf_counter()
    memory = device.alloc_pinned(nbytes)
    return Pinned(populate_s=0.0, lock_s=time.perf_counter() - start, release=partial(device.free_pinned, memory))


def _madvise(*, small_pages: bool) -> Callable[[int, int, int], int]:
    """`madvise(2)` without the GIL; with `small_pages` it takes back the advice for huge ones before each."""
    call = ctypes.CDLL(None, use_errno=True).madvise
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    call.restype = ctypes.c_int

    def madvise(address: int, nbytes: int, advice: int) -> int:
        if small_pages:
            call(address, nbytes, _MADV_NOHUGEPAGE)
        return ctypes.get_errno() if call(address, nbytes, advice) else 0

    return madvise


def _gbps(seconds: Sequence[float], nbytes: int) -> Figure:
    return Figure.of([nbytes / s / 1e9 for s in seconds], "GB/s", simulated=False)


def _usable_cpus() -> int:
    return len(os.sched_getaffinity(0))
