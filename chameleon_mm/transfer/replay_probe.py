"""Finds out which matrix products and convolutions give the same bits when they run again on one device.

    replayable_on(device)       # base names of operators that may run again there: the products among them were tried

Each product runs several times on the same numbers, its results in other memory, for sizes of several kernels. What was found
is kept for each device, driver and version of torch, in a file beside the calibrations; of a simulated one, whose operators are
the CPU's, for the process alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from chameleon_mm.device import Device
from chameleon_mm.trace.replayable import DEFAULT, PRODUCTS
from chameleon_mm.transfer.calibration_cache import keep, kept

_log = logging.getLogger(__name__)

_KIND = "replays"

_REPEATS = 3

_SIZES = ((64, 4096, 64), (256, 512, 384), (33, 77, 129), (1, 2048, 512))
"""Rows, summed length and columns of the products: long sums that a kernel may split, whole tiles, odd sizes, and a vector."""

_known: dict[tuple[str, str], frozenset[str]] = {}
"""Products that were tried in this process, by device and driver."""


def replayable_on(device: Device) -> frozenset[str]:
    """Base names of the operators that may run again on `device`. Tries the products the first time, in less than a second and
    16 MiB of device memory; without that memory no product is admitted."""
    key = device.name, device.driver
    if key not in _known:
        products = (kept(device, _KIND) or {}).get("exact_products")
        if not isinstance(products, list):
            products = sorted(exact_products(device))
            keep(device, _KIND, {"exact_products": products})
        _known[key] = frozenset(map(str, products)) & PRODUCTS
    return DEFAULT | _known[key]


def exact_products(device: Device) -> frozenset[str]:
    """Base names of the products that gave the same bits each time."""
    exact = set[str]()
    try:
        for names, run in _products(device.torch_device):
            if all(_is_exact(run, dtype) for dtype in (torch.float32, torch.bfloat16)):
                exact.update(f"aten::{name}" for name in names)
    except torch.OutOfMemoryError:
        _log.info("chameleon_mm: products are not recomputed: there is no memory to try them")
        return frozenset()
    return frozenset(exact) & PRODUCTS


Run = Callable[[torch.dtype], Iterable[Callable[[], Tensor]]]
"""Calls of one product, for a dtype, each on inputs of its own."""


def _is_exact(run: Run, dtype: torch.dtype) -> bool:
    try:
        return all(_gives_the_same(call) for call in run(dtype))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # no kernel for that dtype
        _log.info("chameleon_mm: a product in %s could not be tried: %s", dtype, str(error))
        return False


def _gives_the_same(call: Callable[[], Tensor]) -> bool:
    first = call()
    others = [call() for _ in range(_REPEATS)]  # all of them held, so that each is in other memory
    return all(torch.equal(first.view(torch.uint8), other.view(torch.uint8)) for other in others)


def _products(device: torch.device) -> Iterator[tuple[tuple[str, ...], Run]]:
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)

    def matrices(dtype: torch.dtype, batch: tuple[int, ...] = ()) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for rows, length, columns in _SIZES:
            yield (
                numbers(*batch, rows, length, dtype=dtype),
                numbers(*batch, length, columns, dtype=dtype),
                numbers(columns, dtype=dtype),
            )

    def convolutions(dtype: torch.dtype) -> Iterable[Callable[[], Tensor]]:
        for channels, side in ((3, 33), (32, 16)):
            x, w = numbers(2, channels, side, side, dtype=dtype), numbers(16, channels, 3, 3, dtype=dtype)
            yield lambda x=x, w=w: torch.conv2d(x, w, padding=1)  # type: ignore[misc]  # the defaults bind what the loop has

    yield ("mm",), lambda dtype: [lambda a=a, b=b: a @ b for a, b, _ in matrices(dtype)]  # type: ignore[misc]  # as above
    yield (
        ("addmm", "addmm_"),
        lambda dtype: [
            lambda a=a, b=b, c=c: torch.addmm(c, a, b)  # type: ignore[misc]  # as above
            for a, b, c in matrices(dtype)
        ],
    )
    yield ("bmm",), lambda dtype: [lambda a=a, b=b: torch.bmm(a, b) for a, b, _ in matrices(dtype, (3,))]  # type: ignore[misc]  # as above
    yield (
        ("baddbmm",),
        lambda dtype: [
            lambda a=a, b=b, c=c: torch.baddbmm(c, a, b)  # type: ignore[misc]  # as above
            for a, b, c in matrices(dtype, (3,))
        ],
    )
    yield ("convolution", "cudnn_convolution", "mkldnn_convolution"), convolutions
