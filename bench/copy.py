"""Copies between host and device: each way by size, pinned against pageable, and both ways at once.

for size: interleave H2D and D2H from pinned and from pageable memory      -> GB/s, ratio
          H2D and D2H together, on a stream each                           -> GB/s in total

chameleon-mm bench copy --sizes 1MiB,64MiB --json copy.json
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial

import torch
from rich.console import Console
from torch import Tensor

from chameleon_mm.bench._buffers import Buffers
from chameleon_mm.bench._measure import Cell, Figure, Results, Waived, columns, interleave, timed_us
from chameleon_mm.bench._stand_in import computes_on_cpu
from chameleon_mm.device import resolve_device
from chameleon_mm.device.protocols import Device, Stream
from chameleon_mm.errors import HostMemoryExhausted
from chameleon_mm.units import GIB, KIB, MIB, format_size, parse_size

_GPU_SIZES = (64 * KIB, 256 * KIB, 1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, 1 * GIB)
_CPU_SIZES = (64 * KIB, 256 * KIB, 1 * MIB, 4 * MIB, 16 * MIB)  # one core really moves every byte
_GPU_SAMPLE_BYTES = 256 * MIB
_CPU_SAMPLE_BYTES = 4 * MIB
_MAX_COPIES = 64
_LIMIT_S = 4.0

_FORMULAS = {
    "pinned": ("pinned GB/s", "size * copies / time between two events around them / 1e9"),
    "pageable": ("pageable GB/s", "the same from and to memory that is not page-locked"),
    "ratio": ("ratio", "pinned / pageable, of the samples taken in the same round"),
}
_NO_PAGEABLE = Waived("a simulated link knows pinned memory alone")
_BLOCKING = Waived("a pageable copy holds the host until it is staged: one thread cannot keep both directions busy")


def run(args: argparse.Namespace, console: Console) -> int:
    """Measure, print, write what was asked for. Returns 0; raises `ValueError` for an unknown device or a malformed size."""
    device = resolve_device(args.device)
    sizes = _parse_sizes(args.sizes) if args.sizes else _CPU_SIZES if computes_on_cpu(device) else _GPU_SIZES
    measure(device, sizes, repeats=args.repeats).deliver(args, console)
    return 0


def measure(device: Device, sizes: Sequence[int], *, repeats: int = 9) -> Results:
    """Measure `sizes` on `device`. Returns a table with a row for each direction, and one for both at once."""
    results = Results("copy", device, columns(_FORMULAS, simulated=device.simulated))
    results.notes.append("both ways: the bytes of both directions over the time from their common start until both are done")
    h2d, d2h = device.new_stream("h2d"), device.new_stream("d2h")
    for size in sizes:
        copies = copies_per_sample(size, on_cpu=computes_on_cpu(device))
        params = {"bytes": size, "copies": copies}
        names = [f"{way} {format_size(size)}" for way in ("H2D", "D2H", "both ways")]
        try:
            with Buffers(device) as buffers:
                rows = _measure_size(device, buffers, h2d, d2h, size, copies, repeats)
        except (HostMemoryExhausted, torch.OutOfMemoryError) as error:  # a device too small for this size still has the others
            rows = [dict.fromkeys(_FORMULAS, Waived(str(error)))] * 3
        for name, cells in zip(names, rows, strict=True):
            results.add(name, params, cells)
    return results


def copies_per_sample(size: int, *, on_cpu: bool) -> int:
    """Number of copies of `size` bytes that one sample issues back to back: enough that neither the events nor the last copy's
    tail decide the figure, and so few that the driver's queue never fills up, which would make the host wait."""
    wanted = _CPU_SAMPLE_BYTES if on_cpu else _GPU_SAMPLE_BYTES
    return max(1, min(_MAX_COPIES, wanted // max(1, size)))


def _measure_size(
    device: Device, buffers: Buffers, h2d: Stream, d2h: Stream, size: int, copies: int, repeats: int
) -> list[dict[str, Cell]]:
    hbm_in, hbm_out = buffers.on_device(size), buffers.on_device(size)
    pinned_in, pinned_out = buffers.pinned(size), buffers.pinned(size)
    ways: dict[str, tuple[Stream, Tensor, Tensor]] = {
        "h2d pinned": (h2d, hbm_in, pinned_in),
        "d2h pinned": (d2h, pinned_out, hbm_out),
    }
    if not device.simulated:
        ways["h2d pageable"] = (h2d, hbm_in, buffers.pageable(size))
        ways["d2h pageable"] = (d2h, buffers.pageable(size), hbm_out)

    def one_way(stream: Stream, dst: Tensor, src: Tensor) -> Callable[[], float]:
        def issue() -> None:
            for _ in range(copies):
                stream.copy(dst, src)

        return lambda: size * copies / timed_us(stream, issue) / 1e3

    def both_ways() -> float:
        start = device.current_stream().record(timed=True)
        h2d.wait(start)  # neither direction may begin before the common start of both
        d2h.wait(start)
        for _ in range(copies):
            h2d.copy(hbm_in, pinned_in)
            d2h.copy(pinned_out, hbm_out)
        ends = [stream.record(timed=True) for stream in (h2d, d2h)]
        for end in ends:
            end.synchronize()
        return 2 * size * copies / max(end.elapsed_us(start) for end in ends) / 1e3

    peers = {name: one_way(*way) for name, way in ways.items()} | {"both": both_ways}
    samples = interleave(peers, repeats=repeats, limit_s=_LIMIT_S)
    return [
        _row(device, samples["h2d pinned"], samples.get("h2d pageable", _NO_PAGEABLE)),
        _row(device, samples["d2h pinned"], samples.get("d2h pageable", _NO_PAGEABLE)),
        _row(device, samples["both"], _NO_PAGEABLE if device.simulated else _BLOCKING),
    ]


def _row(device: Device, pinned: list[float], pageable: list[float] | Waived) -> dict[str, Cell]:
    """Cells of a row."""
    figure = partial(Figure.of, simulated=device.simulated)
    cells: dict[str, Cell] = {"pinned": figure(pinned, "GB/s")}
    if isinstance(pageable, Waived):
        return cells | dict.fromkeys(("pageable", "ratio"), pageable)
    ratio = [fast / slow for fast, slow in zip(pinned, pageable, strict=True)]
    return cells | {"pageable": figure(pageable, "GB/s"), "ratio": figure(ratio, "1")}


def _parse_sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(parse_size(part, what="--sizes") for part in text.split(","))
    if not all(sizes):
        raise ValueError(f"--sizes: expected sizes of at least one byte, got {text!r}; leave out the empty one")
    return sizes
