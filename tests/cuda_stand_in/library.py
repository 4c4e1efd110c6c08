"""Functions of the substitute runtime that CUDA lacks: operators report their accesses, tests query the runtime.

    begin(stream)                                       an operator is about to run on it: what the stream holds runs first
    access(stream, address, size, kind, operator)       the operator reads or writes these bytes
    copy_kind(kind)                                     of which kind the copies are that this thread queues from here on
    wrote(stream, address, size)                        they stay hidden until something orders itself after the stream
    capturing(stream), capture_call(...)                the same for a stream that is being captured into a graph

It is the library that torch has loaded, which has to be imported before: another CUDA runtime may be installed on the machine.
Where torch may have loaded none or another, ask `control.is_loaded` first.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

NAME = "libcudart.so.13"
CALL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
"""A function that a captured graph calls, with the number that it was given as its data."""

runtime = ctypes.CDLL(NAME, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)


def _function(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    function = getattr(runtime, name)
    function.restype, function.argtypes = result, arguments
    return function  # type: ignore[no-any-return]  # ctypes types no function of a library


_begin = _function("standin_stream_begin", ctypes.c_int, ctypes.c_void_p)
access = _function("standin_access", None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_char_p)
wrote = _function("standin_stream_wrote", None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
capturing = _function("standin_capturing", ctypes.c_int, ctypes.c_void_p)
capture_call = _function("standin_capture_call", None, ctypes.c_void_p, CALL, CALL, ctypes.c_void_p, ctypes.c_char_p)
count = _function("standin_count", ctypes.c_long, ctypes.c_char_p)
pending = _function("standin_pending", ctypes.c_long)
copy_kind = _function("standin_copy_kind", ctypes.c_int, ctypes.c_int)
READ, WRITE, WRITE_IN_PLACE = 0, 1, 2
"""Kinds of access. Written in place is a tensor that was there before the operator."""

STRICT, SPECULATIVE, INTO_PLACE = 0, 1, 2
"""Kinds of copies. A write in place may overtake the read of a speculative one; the third is such a write itself."""

violations = _function("standin_violations", ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t)

_synchronize = _function("cudaStreamSynchronize", ctypes.c_int, ctypes.c_void_p)
_capture_info = _function("cudaStreamGetCaptureInfo", ctypes.c_int, ctypes.c_void_p, *[ctypes.c_void_p] * 6)
_error_text = _function("cudaGetErrorString", ctypes.c_char_p, ctypes.c_int)


def begin(stream: int) -> None:
    """Raise `RuntimeError` for an error of an earlier call of this thread, as torch does at a launch."""
    if error := _begin(stream):
        raise RuntimeError(f"CUDA error: {_error_text(error).decode()}")


def synchronize(stream: int) -> None:
    """Make the host wait for the stream, as for an operator whose result's size depends on data."""
    if error := _synchronize(stream):
        raise RuntimeError(f"CUDA error: {_error_text(error).decode()}")


def capture_id(stream: int) -> int:
    """Number of the capture that the stream takes part in; streams that were forked from one have the same."""
    status, number = ctypes.c_int(), ctypes.c_ulonglong()
    if error := _capture_info(stream, ctypes.byref(status), ctypes.byref(number), None, None, None, None):
        raise RuntimeError(f"CUDA error: {_error_text(error).decode()}")
    return number.value
