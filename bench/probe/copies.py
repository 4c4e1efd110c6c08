"""Copy rates each way and together: by copy engine, by kernel, and one way by each.

    start; every stream waits for it; issue copies in turn; rate = all bytes / time until the last stream is done
    afterwards the bytes are compared: a rate of a wrong copy is no rate

Uses torch.cuda directly: see __init__.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from chameleon_mm.bench._measure import Figure, interleave
from chameleon_mm.bench._stand_in import NO_TRITON, is_stand_in
from chameleon_mm.units import MIB, format_size

_SIZES = (64 * 1024, 1 * MIB, 16 * MIB, 256 * MIB)
_CPU_SIZES = (64 * 1024, 1 * MIB)
_KERNEL_BYTES = 64 * MIB
_SAMPLE_BYTES = 512 * MIB
_CPU_SAMPLE_BYTES = 2 * MIB
_MAX_COPIES = 128
_LIMIT_S = 4.0

Copy = Callable[[Tensor, Tensor], object]


class Route(NamedTuple):
    """One direction: its own stream, its own memory, and who moves the bytes."""

    stream: torch.cuda.Stream
    dst: Tensor
    src: Tensor
    copy: Copy


def on_stand_in() -> bool:
    """Whether torch's current device is the CUDA stand-in: a rehearsal of these questions, in small."""
    return is_stand_in(torch.cuda.get_device_name())


def by_engine() -> dict[str, Any]:
    """GB/s of `cudaMemcpyAsync` for H2D, D2H and both, by size."""
    answer: dict[str, Any] = {}
    for size in _CPU_SIZES if on_stand_in() else _SIZES:
        h2d, d2h = _routes(size, _engine, _engine)
        answer[format_size(size)] = _rates({"h2d": [h2d], "d2h": [d2h], "both": [h2d, d2h]})
    return answer


def by_kernel() -> dict[str, Any]:
    """GB/s of the Triton copy kernel from and to pinned host memory, by number of programs; and beside the engine."""
    if on_stand_in():
        return {"waived": NO_TRITON}
    processors = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    answer: dict[str, Any] = {"bytes": _KERNEL_BYTES}
    for programs in (4, 16, 64, processors, 4 * processors):
        h2d, d2h = _routes(_KERNEL_BYTES, _kernel(programs), _kernel(programs))
        to_device, to_host = _routes(_KERNEL_BYTES, _engine, _engine)
        answer[f"{programs} programs"] = _rates(
            {
                "h2d": [h2d],
                "d2h": [d2h],
                "both": [h2d, d2h],
                "h2d by engine, d2h by kernel": [to_device, d2h],
                "h2d by kernel, d2h by engine": [h2d, to_host],
            }
        )
    return answer


def elapsed_us(routes: Sequence[Route], copies: int) -> float:
    """Microseconds from a common start until `copies` copies of every route are done."""
    start = torch.cuda.Event(enable_timing=True)
    start.record(torch.cuda.current_stream())
    for route in routes:
        route.stream.wait_event(start)  # none may begin before the time that all are measured from
    for _ in range(copies):
        for route in routes:
            with torch.cuda.stream(route.stream):
                route.copy(route.dst, route.src)
    ends = [torch.cuda.Event(enable_timing=True) for _ in routes]
    for end, route in zip(ends, routes, strict=True):
        end.record(route.stream)
    for end in ends:
        end.synchronize()
    return float(max(start.elapsed_time(end) for end in ends)) * 1e3


def _rates(groups: Mapping[str, Sequence[Route]]) -> dict[str, Any]:
    sample_bytes = _CPU_SAMPLE_BYTES if on_stand_in() else _SAMPLE_BYTES

    def rate(routes: Sequence[Route]) -> float:
        nbytes = sum(route.dst.numel() for route in routes)
        copies = max(1, min(_MAX_COPIES, sample_bytes // nbytes))
        return nbytes * copies / elapsed_us(routes, copies) / 1e3

    peers = {name: partial(rate, routes) for name, routes in groups.items()}
    samples = interleave(peers, warmup=1, repeats=7, limit_s=_LIMIT_S)
    answer: dict[str, Any] = {}
    for name, routes in groups.items():
        exact = all(torch.equal(route.dst.cpu(), route.src.cpu()) for route in routes)
        answer[name] = Figure.of(samples[name], "GB/s", simulated=False).to_dict() | {"exact": exact}
    return answer


def _routes(nbytes: int, copy_in: Copy, copy_out: Copy) -> tuple[Route, Route]:
    host_in, host_out = (random_bytes(nbytes).pin_memory() for _ in range(2))
    hbm_in, hbm_out = (random_bytes(nbytes).cuda() for _ in range(2))
    torch.cuda.synchronize()  # the memory is the compute stream's, and filled there
    return (
        Route(torch.cuda.Stream(), hbm_in, host_in, copy_in),
        Route(torch.cuda.Stream(), host_out, hbm_out, copy_out),
    )


def random_bytes(nbytes: int) -> Tensor:
    """Pageable host memory that is not zeros: a random MiB, over and over."""
    pattern = torch.randint(0, 256, (min(nbytes, MIB),), dtype=torch.uint8)
    return pattern.repeat(-(-nbytes // pattern.numel()))[:nbytes].contiguous()


def _engine(dst: Tensor, src: Tensor) -> object:
    return dst.copy_(src, non_blocking=True)


def _kernel(programs: int) -> Copy:
    from chameleon_mm.bench._copy_kernel import copy_bytes

    return partial(copy_bytes, num_programs=programs)
