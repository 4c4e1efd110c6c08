"""Measures what each path costs on this machine's link, host and kernels, and decides where one path should end.

    measured = calibrate(device)             # well under 4 s, once the kernels were compiled
    measured.thresholds.path(nbytes)         # Path.PACK, ...
    CalibrationCache().get(device)           # the same from the cache, or measured now and kept: see calibration_cache.py

    for each size:  n copies of it by each path, between two timed events      -> GB/s, host us per copy
    one path's cost per copy = its time on the link + its time on the host
    a path ends where the next, plainer one costs at most a tenth more, here and at all larger sizes

Everything goes through the device protocol: a simulated device is measured in virtual time, and gives the same each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor

from chameleon_mm.device import Device, Event, Stream
from chameleon_mm.device.packing import PACK_ALIGN_BYTES, packed_offsets
from chameleon_mm.transfer.route import Path, Thresholds
from chameleon_mm.units import KIB, MIB, round_up

SIZES_BYTES = tuple(4 * KIB << i for i in range(11))
"""Sizes that are measured, 4 KiB to 4 MiB: from where nothing moves to where every path is at the link's rate."""

TOLERANCE = 0.1
"""Share by which a plainer path may cost more than the path before it: packing takes staging memory and SMs, which are not in
the figures."""

_MOST_COPIES = 64  # about as many small tensors as a layer saves
_RUN_BYTES = 8 * MIB
_PIECE_BYTES = 32 * MIB
_PIECES = 4
_MOVING = (Path.PACK, Path.DIRECT)


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """Measurement of `count` copies of `nbytes` each to the host, by one path, one after the other."""

    path: Path
    nbytes: int
    count: int
    gbps: float
    """Rate in 1e9 bytes a second, from when the first copy could begin until the last has arrived. A host that is slower shows
    here, too."""
    host_us: float
    """Host time per copy."""

    @property
    def link_us(self) -> float:
        """Time per copy, as `gbps` has it."""
        return self.nbytes / (self.gbps * 1e3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Measurements of one device, and the thresholds that follow from them."""

    device: str
    driver: str
    versions: dict[str, str]
    thresholds: Thresholds
    curve: tuple[CurvePoint, ...]
    h2d_gbps: float
    """Rate from pinned host to device, in pieces of 32 MiB, nothing the other way."""
    d2h_gbps: float
    duplex_gbps: float
    """Rate of both directions added up, while both are busy."""
    simulated: bool
    """Whether the figures are a simulator's: of its cost model, not of any machine."""

    def to_dict(self) -> dict[str, Any]:
        """Dictionary that JSON can hold, and `from_dict` takes back."""
        curve = [{**asdict(point), "path": point.path.value} for point in self.curve]
        return {**asdict(self), "curve": curve}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Calibration:
        """The calibration that `to_dict` gave. Raises `KeyError`, `TypeError` or `ValueError` for anything else."""
        curve = tuple(CurvePoint(**{**point, "path": Path(point["path"])}) for point in values["curve"])
        calibration = cls(**{**values, "thresholds": Thresholds(**values["thresholds"]), "curve": curve})
        rates: list[Any] = [calibration.h2d_gbps, calibration.d2h_gbps, calibration.duplex_gbps, *(p.gbps for p in curve)]
        if not all(isinstance(rate, float) and rate > 0 for rate in rates):
            raise ValueError(f"calibration: expected rates above 0, got {rates}")
        return calibration


def calibrate(device: Device, *, budget_s: float = 4.0, rounds: int = 5) -> Calibration:
    """Measure `device`, which should be idle: 72 MiB of device memory and 64 MiB of pinned memory for a moment.

    Each figure is the median of `rounds`; there are fewer when `budget_s`, by the device's own clock, is used up, and one at
    least. A round that comes first and is not counted warms up: where kernels were never compiled, it does that, whatever the
    budget. Waits for the device.

    Raises `ValueError` for a budget or a number of rounds that is not positive, `torch.OutOfMemoryError` and
    `HostMemoryExhausted`.
    """
    if not budget_s > 0 or rounds < 1:
        raise ValueError(f"calibrate: expected budget_s above 0 and a round or more, got {budget_s} and {rounds}")
    deadline_us = device.host_us + budget_s * 1e6
    with _bench(device) as bench:
        bench.round()
        measured: list[tuple[list[CurvePoint], tuple[float, float, float]]] = []
        while not measured or (len(measured) < rounds and device.host_us < deadline_us):
            measured.append((bench.round(), bench.rates()))
    curve = tuple(
        CurvePoint(
            path=points[0].path,
            nbytes=points[0].nbytes,
            count=points[0].count,
            gbps=median(point.gbps for point in points),
            host_us=median(point.host_us for point in points),
        )
        for points in zip(*(points for points, _ in measured), strict=True)
    )
    h2d_gbps, d2h_gbps, duplex_gbps = (median(rate) for rate in zip(*(rates for _, rates in measured), strict=True))
    return Calibration(
        device=device.name,
        driver=device.driver,
        versions=installed_versions(),
        thresholds=thresholds_of(curve),
        curve=curve,
        h2d_gbps=h2d_gbps,
        d2h_gbps=d2h_gbps,
        duplex_gbps=duplex_gbps,
        simulated=device.simulated,
    )


def thresholds_of(curve: Sequence[CurvePoint]) -> Thresholds:
    """Sizes at which each path ends, among those that were measured.

    A copy's cost is its time on the link plus its time on the host: which of the two a training step lacks is not known here.
    PACK ends at the first size from which on DIRECT costs at most `TOLERANCE` more than it, and at the largest, for beyond it
    nothing was measured. What stays on the device is no question of speed.
    """
    cost = {(point.path, point.nbytes): point.link_us + point.host_us for point in curve}
    sizes = sorted({point.nbytes for point in curve})
    pack_ends = _takes_over(sizes, lambda nbytes: cost[Path.DIRECT, nbytes], lambda nbytes: cost[Path.PACK, nbytes])
    stay = Thresholds().stay_below_bytes
    return Thresholds(stay_below_bytes=stay, pack_below_bytes=max(stay, pack_ends))


def _takes_over(sizes: Sequence[int], plainer: Callable[[int], float], other: Callable[[int], float]) -> int:
    """The smallest size from which on `plainer` costs hardly more; the largest size in any case."""
    first = sizes[-1]
    for nbytes in reversed(sizes):
        if plainer(nbytes) > (1 + TOLERANCE) * other(nbytes):
            break
        first = nbytes
    return first


def installed_versions() -> dict[str, str]:
    """Versions of what the figures depend on beside the driver: torch, and what takes part where it is installed."""
    versions = {"torch": str(torch.__version__)}
    for name in ("triton", "cuda-bindings", "cupy-cuda13x", "cupy-cuda12x", "cupy"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


class _Bench:
    """Buffers and streams to measure with. All device work is complete between any two measurements."""

    def __init__(self, device: Device, hbm: tuple[Tensor, Tensor], staging: Tensor, host: tuple[Tensor, Tensor]) -> None:
        self._device = device
        self._out_hbm, self._in_hbm = hbm
        self._staging = staging
        self._out_host, self._in_host = host
        self._compute = device.current_stream()
        self._d2h, self._h2d = device.new_stream("d2h"), device.new_stream("h2d")

    def round(self) -> list[CurvePoint]:
        """Measure every size by every path, once; paths take turns, so that what changes meanwhile changes for all."""
        return [self._point(path, nbytes) for nbytes in SIZES_BYTES for path in _MOVING]

    def rates(self) -> tuple[float, float, float]:
        """Rates in GB/s to the device, to the host, and both at once."""
        return (
            self._rate([(self._h2d, self._in_hbm, self._in_host)]),
            self._rate([(self._d2h, self._out_host, self._out_hbm)]),
            self._rate([(self._h2d, self._in_hbm, self._in_host), (self._d2h, self._out_host, self._out_hbm)]),
        )

    def _point(self, path: Path, nbytes: int) -> CurvePoint:
        count = min(_MOST_COPIES, _RUN_BYTES // nbytes)
        offsets, total = packed_offsets([nbytes] * count)
        sources = [self._out_hbm[offset : offset + nbytes] for offset in offsets]
        pairs = [(self._out_host[offset : offset + nbytes], source) for offset, source in zip(offsets, sources, strict=True)]
        packed = (self._out_host[:total], self._staging[:total])
        start = self._compute.record(timed=True)
        self._d2h.wait(start)  # orders the copies after all earlier work, and their time after `start`
        began_us = self._device.host_us
        if path is Path.PACK:
            self._compute.pack(packed[1], sources, offsets)
            self._d2h.wait(self._compute.record())  # orders the copy after the kernel
            self._d2h.copy(*packed)
        else:
            for dst, src in pairs:
                self._d2h.copy(dst, src)
        host_us = self._device.host_us - began_us
        end = self._d2h.record(timed=True)
        self._device.synchronize()
        gbps = nbytes * count / (end.elapsed_us(start) * 1e3)
        return CurvePoint(path=path, nbytes=nbytes, count=count, gbps=gbps, host_us=host_us / count)

    def _rate(self, ways: list[tuple[Stream, Tensor, Tensor]]) -> float:
        """Rate in GB/s of all `ways` together, for as long as every one of them is busy."""
        start = self._compute.record(timed=True)
        events: list[list[Event]] = [[] for _ in ways]
        for stream, _, _ in ways:
            stream.wait(start)  # orders the copies after all earlier work, and their time after `start`
        for i in range(_PIECES + 1):
            for (stream, dst, src), recorded in zip(ways, events, strict=True):
                if i:
                    stream.copy(dst, src)
                recorded.append(stream.record(timed=True))
        self._device.synchronize()
        return busy_gbps([[event.elapsed_us(start) for event in recorded] for recorded in events], _PIECE_BYTES)


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


@contextmanager
def _bench(device: Device) -> Iterator[_Bench]:
    """Context of a bench; frees its memory at the end."""
    compute = device.current_stream()
    with _pinned(device) as out_host, _pinned(device) as in_host:
        hbm = [compute.alloc(_PIECE_BYTES) for _ in range(2)]
        staging = compute.alloc(round_up(_RUN_BYTES, PACK_ALIGN_BYTES))
        try:
            yield _Bench(device, (hbm[0], hbm[1]), staging, (out_host, in_host))
        finally:
            device.synchronize()
            for buffer in (*hbm, staging):
                compute.free(buffer)


@contextmanager
def _pinned(device: Device) -> Iterator[Tensor]:
    memory = device.alloc_pinned(_PIECE_BYTES)
    try:
        yield memory
    finally:
        device.free_pinned(memory)
