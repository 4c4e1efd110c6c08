"""Deterministic kernels of torch inside a `with` block, so that two runs of a program give the same bits.

    with reproducible():
        first = train(...)
        second = train(...)                       # equal bit for bit, or an operator without such a kernel has raised

Comparisons of a swapped run with an unswapped run need it: without it, two runs may differ for other reasons.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def reproducible() -> Iterator[None]:
    """Set torch's deterministic mode inside, so that two runs of a program give the same bits. Restore the old mode afterwards.

    By default, the backward of fused attention on a GPU adds in the order in which threads finish. An operator without a
    deterministic kernel raises `RuntimeError` with its name. The mode that only warns would not do: under it,
    memory-efficient attention keeps its faster order.

    Matrix products need no environment variable, because torch gives cuBLAS a workspace per handle and stream. No supported
    torch release requires CUBLAS_WORKSPACE_CONFIG any more (pytorch#161749).
    """
    flags: Any = torch.utils.deterministic  # torch adds `fill_uninitialized_memory` to the module at run time
    mode, fill = torch.get_deterministic_debug_mode(), flags.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("error")
    flags.fill_uninitialized_memory = False  # on with the mode by default; changes no result and costs bandwidth
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        flags.fill_uninitialized_memory = fill
