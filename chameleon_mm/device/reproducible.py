"""The same program twice, the same bits twice: torch's deterministic kernels, for as long as a block lasts.

    with reproducible():
        first = train(...)
        second = train(...)                       # equal bit for bit, or an operator without such a kernel has raised

Whoever compares a swapped run with an unswapped one needs it: without it the two may differ for reasons of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def reproducible() -> Iterator[None]:
    """Two runs of one program give the same bits inside: torch's deterministic mode, put back as it was afterwards.

    On a GPU the backward of fused attention adds in whatever order threads finish unless asked not to. An operator that has no
    deterministic kernel raises `RuntimeError` inside, naming itself; a mode that only warns is no way out, for under it
    memory-efficient attention keeps its faster order.

    Matrix products need no environment variable: torch gives cuBLAS a workspace per handle and stream, and none of the
    releases that this package runs on asks for CUBLAS_WORKSPACE_CONFIG any more (pytorch#161749).
    """
    flags: Any = torch.utils.deterministic  # its attribute is a property that torch adds at run time
    mode, fill = torch.get_deterministic_debug_mode(), flags.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("error")
    flags.fill_uninitialized_memory = False  # comes with the mode, changes no result and costs bandwidth
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        flags.fill_uninitialized_memory = fill
