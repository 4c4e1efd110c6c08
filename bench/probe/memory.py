"""The caching allocator under swapping: when freed memory comes back, and whether an operation that ran out can run again.

    reclaim:   per layer: allocate, compute, copy out on a side stream, let go; by record_stream, or by a wait and a drop
               free_requested -> free_completed of every block, and the peak
    oom_retry: under a memory fraction: fill, fail, leave the except block, let the victim go while its copy runs, retry

Uses torch.cuda directly: see __init__.py.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from chameleon_mm.bench._measure import Figure
from chameleon_mm.bench.probe.copies import on_stand_in
from chameleon_mm.units import GIB, MIB

_LAYERS = 16
_BLOCK_BYTES = 64 * MIB
_CPU_BLOCK_BYTES, _CPU_GEMM_SIDE = 2 * MIB, 256
_OOM_BYTES, _OOM_ROOM = 640 * MIB, GIB
_CPU_OOM_BYTES, _CPU_OOM_ROOM = 40 * MIB, 64 * MIB
_GEMM_SIDE = 8192  # longer than the copy of a block, so that copies keep up
_HISTORY_ENTRIES = 100_000


def reclaim() -> dict[str, Any]:
    """Gap between asking to free a block and its coming back, and peak bytes, for both ways of letting go."""
    return {
        "block_bytes": _block_bytes(),
        "layers": _LAYERS,
        "record_stream": _layers(by_record_stream=True),
        "wait_and_drop": _layers(by_record_stream=False),
    }


def _block_bytes() -> int:
    return _CPU_BLOCK_BYTES if on_stand_in() else _BLOCK_BYTES


def _layers(*, by_record_stream: bool) -> dict[str, Any]:
    compute, d2h = torch.cuda.current_stream(), torch.cuda.Stream()
    nbytes, side = _block_bytes(), _CPU_GEMM_SIDE if on_stand_in() else _GEMM_SIDE
    a, b = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    c = torch.empty_like(a)
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    torch.mm(a, b, out=c)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    held: deque[tuple[Tensor, torch.cuda.Event]] = deque()
    torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=_HISTORY_ENTRIES, clear_history=True)
    try:
        for _ in range(_LAYERS):
            block = torch.empty(nbytes, dtype=torch.uint8, device="cuda").random_()
            d2h.wait_event(compute.record_event())
            with torch.cuda.stream(d2h):
                host.copy_(block, non_blocking=True)
            if by_record_stream:
                block.record_stream(d2h)  # the very thing under test; the library never does it (Note [Reclaim])
            else:
                held.append((block, d2h.record_event()))
            del block
            torch.mm(a, b, out=c)
            if len(held) > 1:
                _let_go(held, compute)
        while held:
            _let_go(held, compute)
        # The host has run ahead: the device is still at work here.
        peak = torch.cuda.max_memory_allocated() - before
        early = gaps_us(_trace(), nbytes)
        torch.cuda.synchronize()
        torch.empty(1, device="cuda")  # only an allocation makes the allocator look at its events
        late = gaps_us(_trace(), nbytes)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    return {
        "peak_bytes": peak,
        "peak_blocks": peak / nbytes,
        "completed_before_the_device_was_done": len(early),
        "completed": len(late),
        "gap": Figure.of(late, "us", simulated=False).to_dict() if late else {"waived": "no block came back"},
    }


def _let_go(held: deque[tuple[Tensor, torch.cuda.Event]], compute: torch.cuda.Stream) -> None:
    block, done = held.popleft()
    compute.wait_event(done)
    del block


def _trace() -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    return entries


def gaps_us(entries: Iterable[Mapping[str, Any]], min_bytes: int) -> list[float]:
    """Microseconds from `free_requested` to `free_completed`, in order of completion, for blocks of `min_bytes` or more."""
    asked: dict[int, int] = {}
    gaps = []
    for entry in entries:
        if entry["size"] < min_bytes:
            continue
        if entry["action"] == "free_requested":
            asked[entry["addr"]] = entry["time_us"]
        elif entry["action"] == "free_completed" and entry["addr"] in asked:
            gaps.append(float(entry["time_us"] - asked.pop(entry["addr"])))
    return gaps


def oom_retry() -> dict[str, Any]:
    """Whether an allocation that failed succeeds once a victim was let go in stream order, with its copy still running."""
    size, room = (_CPU_OOM_BYTES, _CPU_OOM_ROOM) if on_stand_in() else (_OOM_BYTES, _OOM_ROOM)
    device = torch.cuda.current_device()
    compute, d2h = torch.cuda.current_stream(), torch.cuda.Stream()
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info(device)[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(device) + room) / total, device)
    try:
        victim = torch.empty(size, dtype=torch.uint8, device="cuda").random_()
        message = _failure(size)
        if message is None:
            raise RuntimeError("expected the second allocation to fail under the memory fraction, got a tensor")
        d2h.wait_event(compute.record_event())
        with torch.cuda.stream(d2h):
            host.copy_(victim, non_blocking=True)
        done = d2h.record_event()
        compute.wait_event(done)
        kept = victim.sum(dtype=torch.int64)
        del victim
        start = time.perf_counter_ns()
        again = torch.empty(size, dtype=torch.uint8, device="cuda")
        retry_us = (time.perf_counter_ns() - start) / 1e3
        before_copy_was_done = not done.query()
        again.fill_(1)
        torch.cuda.synchronize()
        exact = int(host.sum(dtype=torch.int64)) == int(kept)
        del again
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        torch.cuda.empty_cache()
    return {
        "caught": message.splitlines()[0],
        "retry_succeeded": True,
        "retry_host_us": retry_us,
        "retry_returned_before_the_copy_was_done": before_copy_was_done,
        "copy_exact": exact,
    }


def _failure(nbytes: int) -> str | None:
    """The message of an allocation that runs out, or None if it does not. Nothing of it stays alive: a traceback would."""
    try:
        torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        return str(error)
    return None
