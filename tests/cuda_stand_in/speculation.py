"""Tells the runtime which copies of ours are speculative, as the simulator is told: a write in place may overtake their reads.

The model may write a saved tensor while it is copied out: for those bytes a version counter has moved, so that a use raises
eager's error, or nobody saved them. CUDA itself knows nothing of that, and the library has no reason to tell it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tests.cuda_stand_in import library


def install() -> None:
    """Has `CudaStream.copy` say so from here on."""
    from chameleon_mm.device.cuda.cuda_stream import CudaStream

    CudaStream.copy = _telling(CudaStream.copy)  # type: ignore[method-assign]  # for the whole process: there is no other place


def _telling(method: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(method)
    def told(*args: Any, speculative: bool = False, **kwargs: Any) -> None:
        kind = library.copy_kind(library.SPECULATIVE if speculative else library.STRICT)
        try:
            method(*args, speculative=speculative, **kwargs)
        finally:
            library.copy_kind(kind)

    return told
