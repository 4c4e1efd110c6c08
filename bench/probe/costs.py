"""What the host pays: microseconds per asynchronous copy, event, kernel launch and operator under a dispatch mode.

    synchronize; clock; call it 100 times; clock; synchronize     # by the host's clock: the device's time is not the question

A hundred small calls fit the driver's queue: none of them waits for the device. Uses torch.cuda directly: see __init__.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from chameleon_mm.bench._measure import Figure, interleave
from chameleon_mm.bench._stand_in import NO_TRITON
from chameleon_mm.bench.probe.copies import on_stand_in, random_bytes
from chameleon_mm.units import KIB

_CALLS = 100
_COPY_BYTES = 64 * KIB


class PassThrough(TorchDispatchMode):
    """Sees every operator and does nothing with it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def host_costs() -> dict[str, Any]:
    """Host microseconds per call, as figures by name."""
    stream = torch.cuda.current_stream()
    host, hbm = random_bytes(_COPY_BYTES).pin_memory(), random_bytes(_COPY_BYTES).cuda()
    small, out = torch.rand(256, device="cuda"), torch.empty(256, device="cuda")
    untimed, timed = torch.cuda.Event(), torch.cuda.Event(enable_timing=True)

    def under_a_mode() -> None:
        with PassThrough():  # type: ignore[no-untyped-call]  # the constructor is torch's, which has no types
            for _ in range(_CALLS):
                torch.mul(small, small, out=out)

    calls: dict[str, Callable[[], object]] = {
        "copy_ H2D 64 KiB": partial(hbm.copy_, host, non_blocking=True),
        "copy_ D2H 64 KiB": partial(host.copy_, hbm, non_blocking=True),
        "event record, untimed": partial(untimed.record, stream),
        "event record, timed": partial(timed.record, stream),
        "new event and record, untimed": lambda: torch.cuda.Event().record(stream),
        "new event and record, timed": lambda: torch.cuda.Event(enable_timing=True).record(stream),
        "wait_event": lambda: stream.wait_event(untimed),
        "operator": lambda: torch.mul(small, small, out=out),
    }
    if not on_stand_in():
        calls |= _triton_calls(hbm)
    memcpy = _cupy_memcpy(hbm.data_ptr(), host.data_ptr(), stream.cuda_stream)
    if memcpy is not None:
        calls["cudaMemcpyAsync by CuPy, 64 KiB"] = memcpy
    peers = {name: partial(_us_per_call, partial(_repeat, call)) for name, call in calls.items()}
    peers["operator under a dispatch mode"] = partial(_us_per_call, under_a_mode)
    untimed.record(stream)
    samples = interleave(peers, warmup=2, repeats=9, limit_s=10)
    answer: dict[str, Any] = {name: Figure.of(values, "us", simulated=False).to_dict() for name, values in samples.items()}
    added = [seen - bare for seen, bare in zip(samples["operator under a dispatch mode"], samples["operator"], strict=True)]
    answer["added by a dispatch mode"] = Figure.of(added, "us", simulated=False).to_dict()
    if memcpy is None:
        answer["cudaMemcpyAsync by CuPy, 64 KiB"] = {"waived": "CuPy is not installed"}
    if on_stand_in():
        answer["Triton launch"] = answer["copy_bytes, checks and launch"] = {"waived": NO_TRITON}
    return answer


def _triton_calls(hbm: Tensor) -> dict[str, Callable[[], object]]:
    from chameleon_mm.bench._copy_kernel import copy_bytes, copy_kernel

    return {
        "Triton launch": lambda: copy_kernel[(1,)](hbm, hbm, 0, 0, WIDE=True, BLOCK=1024, num_warps=4, enable_fp_fusion=False),
        "copy_bytes, checks and launch": lambda: copy_bytes(hbm[:4096], hbm[8192:12288], num_programs=1, block_bytes=1024),
    }


def _repeat(call: Callable[[], object]) -> None:
    for _ in range(_CALLS):
        call()


def _us_per_call(work: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter_ns()
    work()
    elapsed_ns = time.perf_counter_ns() - start
    torch.cuda.synchronize()
    return elapsed_ns / 1e3 / _CALLS


def _cupy_memcpy(dst: int, src: int, stream: int) -> Callable[[], object] | None:
    try:
        from cupy.cuda import runtime
    except ImportError:
        return None
    return partial(runtime.memcpyAsync, dst, src, _COPY_BYTES, runtime.memcpyHostToDevice, stream)
