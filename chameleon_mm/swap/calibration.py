"""Measure the copy rates of a link, and find operators of a device that replay bit for bit. Keep the results on disk.

    rates = calibrate(device)           # GB/s each way alone, and both ways at once
    keep(device, "link", rates)         # store them for later processes

All work goes through the device protocol. A simulated device is measured in virtual time, and gives the same rates each time.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from chameleon_mm.device import Device, Event, Stream
from chameleon_mm.files import cache_folder, read_file, write_file
from chameleon_mm.replayable import DEFAULT, PRODUCTS
from chameleon_mm.units import MIB

# --- Results of measurements, kept for later processes: a JSON file per kind, device and driver
#
# A simulated device has no file, because measuring it is quick. An unreadable file is ignored, with a warning in the log.

_log = logging.getLogger(__name__)


def kept(device: Device, kind: str) -> dict[str, Any] | None:
    """Return the stored values of `kind` for `device`, its driver and this version of torch; None if there are none."""
    if device.simulated:
        return None
    try:
        record = json.loads(read_file(cache_file(device, kind), MIB))
        return dict(record["values"]) if record["about"] == _about(device) else None
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError, ValueError, TypeError, KeyError) as error:  # RuntimeError: no home, deep nesting
        _log.warning("chameleon_mm: the cached %s of %s is passed over, as it cannot be read: %s", kind, device.name, error)
        return None


def keep(device: Device, kind: str, values: Mapping[str, Any]) -> bool:
    """Write `values` as JSON. Returns False for a simulated device, or, with a log message, if writing fails."""
    if device.simulated:
        return False
    try:
        text = json.dumps({"about": _about(device), "values": values}, indent=2)
        write_file(cache_file(device, kind), text + "\n", private=True)
    except (OSError, RuntimeError) as error:
        _log.info("chameleon_mm: %s of %s cannot be kept: %s", kind, device.name, error)
        return False
    return True


def cache_file(device: Device, kind: str) -> Path:
    """Return the path of the file of `kind` for `device` and its driver. Raises as `cache_folder` does."""
    name, driver = (re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-") for text in (device.name, device.driver))
    return cache_folder() / f"{kind}-{name}-{driver}.json"


def _about(device: Device) -> dict[str, str]:
    """Return the facts on which the values depend: the device, its driver, and the version of torch."""
    return {"device": device.name, "driver": device.driver, "torch": str(torch.__version__)}


# --- calibrate

_PIECE_BYTES = 32 * MIB
_PIECES = 4
_ROUNDS = 5

Way = tuple[Stream, Tensor, Tensor]
"""Direction of a copy: its stream, destination and source."""


def calibrate(device: Device) -> dict[str, float]:
    """Measure the copy rates of `device`, which should be idle: medians of five rounds after a warm-up. Uses 64 MiB of device
    and of pinned memory. Waits for the device. Raises `torch.OutOfMemoryError` and `HostMemoryExhausted`.

    Returns rates in 1e9 bytes/s: `h2d_gbps` and `d2h_gbps` with the other way idle; `duplex_gbps`, the sum of both at once.
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
        stack.callback(device.synchronize)  # called first, so that all copies end before their memory is freed
        out, back = (d2h, hosts[0], hbm[0]), (h2d, hbm[1], hosts[1])
        rounds = [[_rate(device, compute, ways) for ways in ([back], [out], [back, out])] for _ in range(1 + _ROUNDS)]
    return dict(zip(("h2d_gbps", "d2h_gbps", "duplex_gbps"), map(median, zip(*rounds[1:], strict=True)), strict=True))


def busy_gbps(marks_us: Sequence[Sequence[float]], piece_bytes: int) -> float:
    """Return the combined rate in GB/s of several streams while all are busy. `marks_us`: for each stream, the time of its
    begin and the completion times of its pieces."""
    begin, end = max(marks[0] for marks in marks_us), min(marks[-1] for marks in marks_us)
    moved = 0.0
    for marks in marks_us:
        for left, right in pairwise(marks):
            shared = max(0.0, min(right, end) - max(left, begin))
            moved += piece_bytes * shared / (right - left)
    return moved / ((end - begin) * 1e3)


def _rate(device: Device, compute: Stream, ways: Sequence[Way]) -> float:
    """Return the combined rate in GB/s of all `ways` while all are busy."""
    start = compute.record(timed=True)
    events: list[list[Event]] = [[] for _ in ways]
    for stream, _, _ in ways:
        stream.wait(start)  # orders the copies, and their times, after `start` and all earlier work
    for i in range(_PIECES + 1):
        for (stream, dst, src), recorded in zip(ways, events, strict=True):
            if i:
                stream.copy(dst, src)
            recorded.append(stream.record(timed=True))
    device.synchronize()
    return busy_gbps([[event.elapsed_us(start) for event in recorded] for recorded in events], _PIECE_BYTES)


# --- Probe: find the matrix products and convolutions that give the same bits when they run again on a device
#
# Each product runs several times on the same inputs, with results in different memory, for sizes that use several kernels.
# Findings are kept in a file as above, for each device, driver and version of torch. A simulated device runs the CPU's
# operators; its findings are kept only for the process.

_KIND = "replays"

_REPEATS = 3

_SIZES = ((64, 4096, 64), (256, 512, 384), (33, 77, 129), (1, 2048, 512))
"""Rows, inner length and columns of the products: long sums that a kernel may split, whole tiles, odd sizes, a vector."""

_known: dict[tuple[str, str], frozenset[str]] = {}
"""Products that gave the same bits, by device and driver, measured or loaded in this process."""


def replayable_on(device: Device) -> frozenset[str]:
    """Return the base names of the operators that may run again on `device`. The first call tries the products, which takes
    about 1 s and 16 MiB of device memory. Without that memory no product is admitted."""
    key = device.name, device.driver
    if key not in _known:
        products = (kept(device, _KIND) or {}).get("exact_products")
        if not isinstance(products, list):
            with _disable_current_modes():  # a simulated device would count the memory
                products = sorted(exact_products(device))
            keep(device, _KIND, {"exact_products": products})
        _known[key] = frozenset(map(str, products)) & PRODUCTS
    return DEFAULT | _known[key]


def exact_products(device: Device) -> frozenset[str]:
    """Return the base names of the products that gave the same bits each time."""
    differing, tried = set[str](), set[str]()
    repeats = 1 if device.simulated else _REPEATS  # a CPU runs bfloat16 slowly, and its kernels have no order that varies
    try:
        for dtype in (torch.float32, torch.bfloat16):
            for names, calls in _calls(device.torch_device, dtype):
                (tried if _is_exact(calls, dtype, repeats) else differing).update(f"aten::{name}" for name in names)
    except torch.OutOfMemoryError:
        _log.info("chameleon_mm: products are not recomputed: there is no memory to try them")
        return frozenset()
    return frozenset(tried - differing) & PRODUCTS


_PRODUCTS: tuple[tuple[tuple[str, ...], tuple[int, ...], Callable[[Tensor, Tensor, Tensor], Tensor]], ...] = (
    (("mm",), (), lambda a, b, c: a @ b),
    (("addmm", "addmm_"), (), lambda a, b, c: torch.addmm(c, a, b)),
    (("bmm",), (3,), lambda a, b, c: torch.bmm(a, b)),
    (("baddbmm",), (3,), lambda a, b, c: torch.baddbmm(c, a, b)),
)
"""Base names of products, the batch of their matrices, and a call: (rows, length), (length, columns), (columns) -> product."""


def _is_exact(calls: Iterable[Callable[[], Tensor]], dtype: torch.dtype, repeats: int) -> bool:
    try:
        return all(_gives_the_same(call, repeats) for call in calls)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # no kernel for that dtype
        _log.info("chameleon_mm: a product in %s could not be tried: %s", dtype, str(error))
        return False


def _gives_the_same(call: Callable[[], Tensor], repeats: int) -> bool:
    first = call()
    others = [call() for _ in range(repeats)]  # all are held, so that each has different memory
    return all(torch.equal(first.view(torch.uint8), other.view(torch.uint8)) for other in others)


def _calls(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[tuple[str, ...], Iterator[Callable[[], Tensor]]]]:
    """Yield base names of products, and calls of these products in `dtype`, each with its own inputs."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shapes: tuple[int, ...]) -> list[Tensor]:
        return [torch.randn(shape, generator=generator).to(device=device, dtype=dtype) for shape in shapes]

    for names, batch, product in _PRODUCTS:
        inputs = (numbers((*batch, rows, length), (*batch, length, columns), (columns,)) for rows, length, columns in _SIZES)
        yield names, (partial(product, *given) for given in inputs)
    images = (numbers((2, channels, side, side), (16, channels, 3, 3)) for channels, side in ((3, 33), (32, 16)))
    convolutions = ("convolution", "cudnn_convolution", "mkldnn_convolution")
    yield convolutions, (partial(torch.conv2d, *given, padding=1) for given in images)
