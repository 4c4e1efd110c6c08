"""Measures the rates of the link: the first guess of a session, which corrects them by its own copies.

    calibrate(device)                    # GB/s each way alone, and both ways at once
    CalibrationCache().store(measured)   # for the next processes: see calibration_cache.py

Everything goes through the device protocol: a simulated device is measured in virtual time, and gives the same each time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor

from chameleon_mm.device import Device, Event, Stream
from chameleon_mm.units import MIB

_PIECE_BYTES = 32 * MIB
_PIECES = 4
_ROUNDS = 5

Way = tuple[Stream, Tensor, Tensor]
"""A direction: its stream, destination and source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Measured rates of one device's link, in 1e9 bytes a second, copied in pieces of 32 MiB."""

    device: str
    driver: str
    versions: dict[str, str]
    h2d_gbps: float
    """Rate from pinned host to device, nothing the other way."""
    d2h_gbps: float
    duplex_gbps: float
    """Rate of both directions added up, while both are busy."""
    simulated: bool

    def to_dict(self) -> dict[str, Any]:
        """Dictionary that JSON can hold, and `from_dict` takes back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Calibration:
        """The calibration that `to_dict` gave. Raises `TypeError` or `ValueError` for anything else."""
        calibration = cls(**values)
        rates: list[Any] = [calibration.h2d_gbps, calibration.d2h_gbps, calibration.duplex_gbps]
        if not all(isinstance(rate, float) and rate > 0 for rate in rates):
            raise ValueError(f"calibration: expected rates above 0, got {rates}")
        return calibration


def calibrate(device: Device) -> Calibration:
    """Measure `device`, which should be idle, with 64 MiB of device memory and of pinned memory: medians of five rounds, after
    one that warms up. Waits for the device. Raises `torch.OutOfMemoryError` and `HostMemoryExhausted`."""
    compute, d2h, h2d = device.current_stream(), device.new_stream("d2h"), device.new_stream("h2d")
    with ExitStack() as stack:
        out_host, in_host = (stack.enter_context(_pinned(device)) for _ in range(2))
        out_hbm, in_hbm = (stack.enter_context(_allocated(device, compute)) for _ in range(2))
        out, back = (d2h, out_host, out_hbm), (h2d, in_hbm, in_host)
        rounds = [[_rate(device, compute, ways) for ways in ([back], [out], [back, out])] for _ in range(1 + _ROUNDS)]
    h2d_gbps, d2h_gbps, duplex_gbps = map(median, zip(*rounds[1:], strict=True))
    return Calibration(
        device=device.name, driver=device.driver, versions=installed_versions(), h2d_gbps=h2d_gbps, d2h_gbps=d2h_gbps,
        duplex_gbps=duplex_gbps, simulated=device.simulated,
    )  # fmt: skip


def installed_versions() -> dict[str, str]:
    """Versions of what measurements depend on besides the driver: torch, and what takes part where it is installed."""
    versions = {"torch": str(torch.__version__)}
    for name in ("triton", "cuda-bindings", "cupy-cuda13x", "cupy-cuda12x", "cupy"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


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


@contextmanager
def _allocated(device: Device, compute: Stream) -> Iterator[Tensor]:
    memory = compute.alloc(_PIECE_BYTES)
    try:
        yield memory
    finally:
        device.synchronize()
        compute.free(memory)


@contextmanager
def _pinned(device: Device) -> Iterator[Tensor]:
    memory = device.alloc_pinned(_PIECE_BYTES)
    try:
        yield memory
    finally:
        device.free_pinned(memory)
