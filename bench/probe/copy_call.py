"""Host time of the driver's own copy call: the part of a hook that no library saves.

    out_us, back_us = copy_call_us(index, nbytes)      # one cudaMemcpyAsync to pinned memory, and one from it

    a batch of calls; clock; then the stream is waited for         # less as many calls of a function that does nothing, made
                                                                   # in the same way

The calls go through ctypes, whose own time is the larger part: that is what the function that does nothing takes away.
"""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

_CALLS, _BATCHES = 64, 15
_TO_DEVICE, _TO_HOST = 1, 2  # cudaMemcpyKind


def copy_call_us(index: int, nbytes: int) -> tuple[float, float]:
    """Microseconds on the host of one asynchronous copy of `nbytes` out, to pinned memory, and of one back."""
    device = torch.device("cuda", index)
    inner, outer = torch.zeros(nbytes, dtype=torch.uint8, device=device), torch.zeros(nbytes, dtype=torch.uint8).pin_memory()
    runtime = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10_cuda.so"))  # finds what it is linked with
    copy, nothing = runtime.cudaMemcpyAsync, ctypes.CDLL(None).abs  # looks at its first argument alone
    for function in (copy, nothing):
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    with torch.cuda.device(device):
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))  # the zeros -> the copies
        handle = stream.cuda_stream
        out = (outer.data_ptr(), inner.data_ptr(), nbytes, _TO_HOST, handle)
        back = (inner.data_ptr(), outer.data_ptr(), nbytes, _TO_DEVICE, handle)
        if copy(*out) != 0:
            raise RuntimeError("copy call: cudaMemcpyAsync refused a copy to pinned memory")
        taken: dict[str, list[float]] = {"out": [], "back": []}
        for _ in range(_BATCHES):
            for name, arguments in (("out", out), ("back", back)):
                stream.synchronize()
                with_copy = _batch_us(copy, arguments)
                stream.synchronize()
                taken[name].append(with_copy - _batch_us(nothing, arguments))
        stream.synchronize()  # the copies -> whoever has this memory next
    return max(0.0, median(taken["out"])), max(0.0, median(taken["back"]))


def _batch_us(function: Any, arguments: tuple[int, ...]) -> float:
    """Microseconds of one call in a batch."""
    began = time.perf_counter_ns()
    for _ in range(_CALLS):
        function(*arguments)
    return (time.perf_counter_ns() - began) / 1e3 / _CALLS
