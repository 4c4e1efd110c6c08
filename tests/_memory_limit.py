"""Limit of a GPU's memory for the process: torch's caching allocator runs out of memory for real."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def fraction_of_memory(nbytes: int, index: int) -> Iterator[None]:
    """Let the process hold `nbytes` of the GPU's memory; restore its limit at the end."""
    before = torch.cuda.get_per_process_memory_fraction(index)
    torch.cuda.set_per_process_memory_fraction(nbytes / torch.cuda.mem_get_info(index)[1], index)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, index)
