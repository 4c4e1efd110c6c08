"""`chameleon-mm bench pinned`: time and memory of a block of `PinnedPool`, against torch's pinned cache.

    time:   with 256 and 100,000 blocks live, repeatedly release one and allocate another              -> us
    waste:  replay recorded training steps on both; maximum of bytes reserved / maximum of bytes live  -> ratio
    bounds: limits that the pool promises, each held or not

Times are the host's own: the pool runs on a device that gives addresses without memory, and its events are complete. Torch's
cache really pins memory, so it is timed only on a CUDA GPU. Waste is counted, and the same on every machine.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from chameleon_mm.bench._environment import environment, processor_name
from chameleon_mm.bench._measure import Cell, Column, Figure, Results, Waived, interleave
from chameleon_mm.bench._report import Bound, Report, median_of, over
from chameleon_mm.device import resolve_device
from chameleon_mm.device.protocols import Device
from chameleon_mm.device.sim import SimDevice
from chameleon_mm.pool.pool import PinnedPool
from chameleon_mm.units import GIB, KIB, TIB

MAX_POOL_US, MAX_GROWTH, MAX_RESERVED_RATIO = 5.0, 3.0, 1.10

LIVE = (256, 100_000)
"""Numbers of live blocks: as many as one training step holds, and far more than that."""

TRACES = Path(__file__).resolve().parent / "traces"

_SMALLEST, _LARGEST, _PAIRS = 4 * KIB, 256 * KIB, 1000
_MOST_PINNED = 1000  # torch's blocks: 100,000 of them would pin 8 GB

_TIME = (
    Column(key="pool", title="PinnedPool us", formula="CPU time of PinnedBlock.release + PinnedPool.allocate"),
    Column(key="event", title="with event us", formula="the same, released after a complete event, allocated for a stream"),
    Column(key="torch", title="torch us", formula="CPU time to drop a tensor + torch.empty(..., pin_memory=True)"),
)
_WASTE = (
    Column(key="peak", title="peak live GiB", formula="the most bytes live, as asked for / 2**30", on_stand_in=True),
    Column(key="pool", title="PinnedPool", formula="the most bytes reserved / peak live", on_stand_in=True),
    Column(key="torch", title="torch", formula="the most bytes reserved, by torch's rule / peak live", on_stand_in=True),
)


def run(args: argparse.Namespace, console: Console) -> int:
    """Measure, print, and write the file asked for. Returns 1 if a bound is missed that does not depend on the machine, else 0.

    Raises `ValueError` for bad usage, before anything is measured.
    """
    if args.repeats < 1:
        raise ValueError(f"--repeats: expected 1 or more, got {args.repeats}")
    device = resolve_device(args.device)
    with console.status("measuring ..."):
        report = measure(device, repeats=args.repeats)
    report.deliver(args, console)
    return int(report.failed)


def measure(device: Device, live: Sequence[int] = LIVE, *, repeats: int = 9) -> Report:
    """Measure both tables, and the bounds on them. Without a GPU they have the processor's name: no figure is simulated."""
    header, tables = environment("pinned", device), {"time": times(device, live, repeats=repeats), "waste": waste(device)}
    if device.simulated:
        header |= {"device": processor_name(), "simulated": False}
    for table in tables.values():
        table.header |= {"device": header["device"], "simulated": header["simulated"]}
    return Report(header=header, tables=tables, bounds=[*time_bounds(tables["time"]), *waste_bounds(tables["waste"])])


def time_bounds(table: Results) -> list[Bound]:
    """Bounds on the time of a pair with the fewest live blocks, and on its growth to the most live blocks."""
    bounds = []
    for key, what in (("pool", "PinnedPool"), ("event", "PinnedPool with an event")):
        few, many = (median_of(table.rows[place].cells[key]) for place in (0, -1))
        bounds.append(Bound(name=f"{what}, {table.rows[0].name}", limit=MAX_POOL_US, unit="us", found=few))
        growth = f"{what}, {table.rows[-1].name} over {table.rows[0].name}"
        bounds.append(Bound(name=growth, limit=MAX_GROWTH, unit="x", found=over(many, few)))
    return bounds


def waste_bounds(table: Results) -> list[Bound]:
    found = {f"{row.name}: reserved / peak live": median_of(row.cells["pool"]) for row in table.rows}
    return [Bound(name=name, limit=MAX_RESERVED_RATIO, found=ratio, counted=True) for name, ratio in found.items()]


# --- time


class AddressesOnly(SimDevice):
    """Device whose pinned memory has sizes and no bytes."""

    def alloc_pinned(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="meta")

    def free_pinned(self, memory: Tensor) -> None:
        """Do nothing: there is no memory to free."""


class _Instant:
    """Stream, and also a complete event on it: times are then the pool's own, without the device's part."""

    name = "instant"

    def query(self) -> bool:
        return True

    def synchronize(self, *_: object) -> None:
        """Do nothing: every event is complete."""

    wait = synchronize


def times(device: Device, live: Sequence[int], *, repeats: int) -> Results:
    """Table with a row for each number of live blocks: microseconds to release one and allocate another."""
    table = Results("pinned time", device, _TIME)
    table.notes.append(f"blocks of {_SMALLEST} to {_LARGEST} bytes, evenly in the logarithm; peers interleaved")
    instant: Any = _Instant()
    for count in sorted(live):
        with PinnedPool(TIB, AddressesOnly()) as pool, PinnedPool(TIB, AddressesOnly()) as copied_into:
            peers = {
                "pool": _churn(count, pool.allocate, lambda block: block.release()),
                "event": _churn(count, partial(copied_into.allocate, stream=instant), lambda block: block.release(instant)),
            }
            waived = "torch pins memory on a CUDA GPU alone" if device.simulated else f"not for more than {_MOST_PINNED} blocks"
            if not device.simulated and count <= _MOST_PINNED:
                pinned = partial(torch.empty, dtype=torch.uint8, pin_memory=True)
                peers["torch"] = _churn(count, pinned, lambda tensor: None)
            samples = interleave(peers, repeats=repeats)
            peers.clear()  # the pools close only without live blocks
        cells: dict[str, Cell] = {"torch": Waived(waived)}
        cells |= {key: Figure.of(taken, "us", simulated=False) for key, taken in samples.items()}
        table.add(f"{count} live", {"live": count}, cells)
    return table


def _churn(live: int, allocate: Callable[[int], Any], release: Callable[[Any], object]) -> Callable[[], float]:
    """Return a function that replaces 1,000 of `live` blocks and returns microseconds of CPU time for each. The places and
    sizes are the same for every peer."""
    draw = random.Random(0)
    work = [(draw.randrange(live), int(_SMALLEST * (_LARGEST // _SMALLEST) ** draw.random())) for _ in range(_PAIRS)]
    blocks = [allocate(work[place % _PAIRS][1]) for place in range(live)]

    def pair_us() -> float:
        gc.disable()  # as timeit does: a collection would slow the peer that happens to run
        try:
            start = time.thread_time()
            for place, size in work:
                release(blocks[place])
                blocks[place] = None  # torch's tensor is released by dropping it
                blocks[place] = allocate(size)
            return (time.thread_time() - start) / _PAIRS * 1e6
        finally:
            gc.enable()

    return pair_us


# --- waste


def waste(device: Device) -> Results:
    """Table with a row for each trace of recorded steps in `bench/traces`."""
    table = Results("pinned waste", device, _WASTE)
    for path in sorted(TRACES.glob("*.jsonl.gz")):
        trace = read_trace(path)
        peak, reserved = played(trace)
        ratios = {"pool": reserved / peak, "torch": reserved_by_torch(trace) / peak}
        cells = {key: Figure.of([ratio], "1", simulated=False) for key, ratio in ratios.items()}
        name = path.name.removesuffix(".jsonl.gz")
        table.add(name, {"trace": name}, {"peak": Figure.of([peak / GIB], "GiB", simulated=False)} | cells)
    return table


def read_trace(path: Path) -> list[tuple[int, int]]:
    """Calls of recorded steps, in order: `(block, nbytes)` for an allocation, `(block, -nbytes)` for the release."""
    with gzip.open(path, "rt", encoding="ascii") as file:
        _, *entries = (json.loads(line) for line in file)
    sizes = {entry[1]: entry[2] for entry in entries if entry[0] == "+"}
    return [(entry[1], sizes[entry[1]] if entry[0] == "+" else -sizes[entry[1]]) for entry in entries if entry != ["step"]]


def played(trace: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Maximum of requested live bytes in `trace`, and maximum of bytes that a pool reserves for it."""
    live = peak = 0
    blocks: dict[int, Any] = {}
    with PinnedPool(TIB, AddressesOnly()) as pool:
        for block, nbytes in trace:
            if nbytes > 0:
                blocks[block] = pool.allocate(nbytes)
            else:
                blocks.pop(block).release()
            live += nbytes
            peak = max(peak, live)
        return peak, pool.stats().peak_reserved_bytes


def reserved_by_torch(trace: Sequence[tuple[int, int]]) -> int:
    """Maximum bytes that torch's pinned cache reserves for `trace`. A request takes a power of two of bytes, and memory
    reserved for one size serves only that size (aten/src/ATen/core/CachingHostAllocator.h)."""
    reserved = 0
    unused: Counter[int] = Counter()
    for _, nbytes in trace:
        size = 1 << (abs(nbytes) - 1).bit_length()
        if nbytes < 0:
            unused[size] += 1
        elif unused[size]:
            unused[size] -= 1
        else:
            reserved += size
    return reserved
