"""Below the library, on a CUDA device: how soon the caching allocator has a block back, and how fast memory is pinned.

    reclaim:  per layer: allocate, compute, copy out on a side stream, free; by record_stream, or by a wait and a drop
              gap = free_requested -> free_completed of each block, in the allocator's own history
    pinning:  bytes / time of `Device.alloc_pinned`

    python3 -m chameleon_mm.bench._reclaim_gap --json gap.json

Uses torch.cuda directly, because it measures the parts below the device layer. No other code outside that layer does so.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from chameleon_mm.bench._environment import environment
from chameleon_mm.bench._measure import Cell, Column, Figure, Results, Waived, interleave
from chameleon_mm.bench._options import add_output_arguments
from chameleon_mm.bench._report import Report
from chameleon_mm.bench._stand_in import computes_on_cpu
from chameleon_mm.device import resolve_device
from chameleon_mm.device.protocols import Device
from chameleon_mm.units import GIB, MIB

BY_RECORD_STREAM, BY_WAIT = "record_stream", "wait and drop"
_LAYERS = 16
_HISTORY_ENTRIES = 100_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Return exit code 0, or 1 if there is no CUDA device."""
    parser = argparse.ArgumentParser(prog="python3 -m chameleon_mm.bench._reclaim_gap", description=__doc__.splitlines()[0])
    add_output_arguments(parser)
    parser.set_defaults(device="cuda")
    args = parser.parse_args(arguments)
    console = Console()
    try:
        report = measure(resolve_device(args.device))
    except RuntimeError as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        return 1
    report.deliver(args, console)
    return 0


def measure(device: Device) -> Report:
    """Measure both tables."""
    # Products take longer than the copy of a block, so that copies keep up.
    nbytes, side, pinned_bytes = (2 * MIB, 256, 16 * MIB) if computes_on_cpu(device) else (64 * MIB, 8192, GIB)
    gaps = Results(
        "reclaim gap",
        device,
        (
            Column(key="gap", title="gap us", formula="free_requested -> free_completed of a block"),
            Column(key="peak", title="peak blocks", formula="most bytes allocated / bytes of a block", on_stand_in=True),
        ),
    )
    gaps.notes.append(f"{_LAYERS} layers of one block each; the host runs ahead of the device")
    for way in (BY_RECORD_STREAM, BY_WAIT):
        gaps.add(way, {"bytes": nbytes}, _layers(way, nbytes, side))
    pinning = Results("pinning", device, (Column(key="rate", title="GB/s", formula="bytes / time of Device.alloc_pinned"),))
    samples = interleave({"rate": lambda: _pin_gbps(device, pinned_bytes)}, warmup=1, repeats=5)["rate"]
    pinning.add("alloc_pinned", {"bytes": pinned_bytes}, {"rate": Figure.of(samples, "GB/s", simulated=False)})
    return Report(header=environment("reclaim", device), tables={"gap": gaps, "pinning": pinning})


def _pin_gbps(device: Device, nbytes: int) -> float:
    began = time.perf_counter()
    memory = device.alloc_pinned(nbytes)
    took = time.perf_counter() - began
    device.free_pinned(memory)
    return nbytes / took / 1e9


def _layers(way: str, nbytes: int, side: int) -> dict[str, Cell]:
    compute, d2h = torch.cuda.current_stream(), torch.cuda.Stream()
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
            if way == BY_RECORD_STREAM:
                block.record_stream(d2h)  # the call under test; the library never makes it (Note [Reclaim])
            else:
                held.append((block, d2h.record_event()))
            del block
            torch.mm(a, b, out=c)
            if len(held) > 1:
                _let_go(held, compute)
        while held:
            _let_go(held, compute)
        peak = torch.cuda.max_memory_allocated() - before
        torch.cuda.synchronize()
        torch.empty(1, device="cuda")  # the allocator checks its events only at an allocation
        found = gaps_us(torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()], nbytes)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    gap: Cell = Figure.of(found, "us", simulated=False) if found else Waived("no block came back")
    return {"gap": gap, "peak": Figure.of([peak / nbytes], "1", simulated=False)}


def _let_go(held: deque[tuple[Tensor, torch.cuda.Event]], compute: torch.cuda.Stream) -> None:
    block, done = held.popleft()
    compute.wait_event(done)
    del block


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


if __name__ == "__main__":
    sys.exit(main())
