"""Bytes that torch's caching allocator has handed out on a GPU: by the C++ helper `memory` where it is built, else by torch.

read = reader(index)
now, ever, peak = read()        # bytes allocated now, in all so far, and the most at once
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch

from chameleon_mm import native

Reading = tuple[int, int, int]
"""Bytes allocated now; in all; the most at once: the last two since the process began or somebody reset them in torch."""


def reader(index: int) -> Callable[[], Reading]:
    """Function that reads the memory of the GPU number `index`, for a process that has initialised CUDA."""
    of_torch = partial(torch_reader, index)
    module = None if torch.version.cuda is None else native.load("memory")
    if module is None:
        return of_torch
    helper: Callable[[], Reading] = partial(module.read, index)
    # An allocator that is put in torch's place may count where the helper does not look. The two are compared up to five times,
    # as another thread may allocate between the readings.
    with suppress(RuntimeError):
        if any(helper() == of_torch() for _ in range(5)):
            return helper
    return of_torch


def torch_reader(index: int) -> Reading:
    """Read by torch alone, which makes dictionaries of all that the allocator counts."""
    # The nested form: torch.cuda.memory_allocated and its like flatten and sort a hundred keys to return one of them.
    found = torch.cuda.memory_stats_as_nested_dict(index)["allocated_bytes"]["all"]
    return int(found["current"]), int(found["allocated"]), int(found["peak"])
