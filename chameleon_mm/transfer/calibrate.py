"""Measures the rates of the link: the first guess of a session, which corrects them by its own copies.

    rates = calibrate(device)           # GB/s each way alone, and both ways at once
    keep(device, "link", rates)         # for the next processes: see calibration_cache.py

Everything goes through the device protocol: a simulated device is measured in virtual time, and gives the same each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from statistics import median

from torch import Tensor

from chameleon_mm.device import Device, Event, Stream
from chameleon_mm.units import MIB

_PIECE_BYTES = 32 * MIB
_PIECES = 4
_ROUNDS = 5

Way = tuple[Stream, Tensor, Tensor]
"""A direction: its stream, destination and source."""


def calibrate(device: Device) -> dict[str, float]:
    """Measure `device`, which should be idle, with 64 MiB of device memory and of pinned memory: medians of five rounds, after
    one that warms up. Waits for the device. Raises `torch.OutOfMemoryError` and `HostMemoryExhausted`.

    Returns rates in 1e9 bytes a second: `h2d_gbps` and `d2h_gbps`, nothing the other way; `duplex_gbps`, both added up.
    """
    compute, d2h, h2d = device.current_stream(), device.new_stream("d2h"), device.new_stream("h2d")
    with ExitStack() as stack:
        hosts, hbm = [], []
        for _ in range(2):
            hosts.append(device.alloc_pinned(_PIECE_BYTES))
            stack.callback(device.free_pinned, hosts[-1])
        for _ in range(2):
            hbm.append(compute.alloc(_PIECE_BYTES))
            stack.callback(compute.free, hbm[-1])
        stack.callback(device.synchronize)  # the first to be called: no copy runs any more as its memory is freed
        out, back = (d2h, hosts[0], hbm[0]), (h2d, hbm[1], hosts[1])
        rounds = [[_rate(device, compute, ways) for ways in ([back], [out], [back, out])] for _ in range(1 + _ROUNDS)]
    return dict(zip(("h2d_gbps", "d2h_gbps", "duplex_gbps"), map(median, zip(*rounds[1:], strict=True)), strict=True))


def busy_gbps(marks_us: Sequence[Sequence[float]], piece_bytes: int) -> float:
    """Rate in GB/s of several streams together while all are busy, from when each began and when each of its pieces was
    complete."""
    begin, end = max(marks[0] for marks in marks_us), min(marks[-1] for marks in marks_us)
    moved = 0.0
    for marks in marks_us:
        for left, right in pairwise(marks):
            shared = max(0.0, min(right, end) - max(left, begin))
            moved += piece_bytes * shared / (right - left)
    return moved / ((end - begin) * 1e3)


def _rate(device: Device, compute: Stream, ways: Sequence[Way]) -> float:
    """Rate in GB/s of all `ways` together, for as long as every one of them is busy."""
    start = compute.record(timed=True)
    events: list[list[Event]] = [[] for _ in ways]
    for stream, _, _ in ways:
        stream.wait(start)  # orders the copies after all earlier work, and their time after `start`
    for i in range(_PIECES + 1):
        for (stream, dst, src), recorded in zip(ways, events, strict=True):
            if i:
                stream.copy(dst, src)
            recorded.append(stream.record(timed=True))
    device.synchronize()
    return busy_gbps([[event.elapsed_us(start) for event in recorded] for recorded in events], _PIECE_BYTES)
