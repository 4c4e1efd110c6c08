"""Triton kernels without a GPU: Triton's own interpreter runs them on the device's memory, in the order of their stream.

A kernel that is launched with CUDA tensors is interpreted; compiling without a launch (`warmup`, `triton.compile`) stays
Triton's. Reads by addresses out of a table are not reported to the runtime: it sees tensors alone.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tests.cuda_stand_in import library
from tests.cuda_stand_in.memory import HostView, hide, report

_interpreting = threading.RLock()
"""The interpreter replaces functions of `triton.language` while a kernel runs: one kernel at a time."""


@functools.cache
def _interpreted(fn: Any) -> Any:
    from triton.runtime.interpreter import InterpretedFunction

    return InterpretedFunction(fn)


_scopes: dict[int, Any] = {}
"""Modules of functions that the running kernel has called: id of their globals -> state to restore when it ends."""


def _interpret_module_of(fn: Any) -> None:
    """Put the interpreter in the language's place for a function's module, which may know it by another name than the kernel's.

    Triton does so at each call, which takes as long as the call.
    """
    from triton.runtime.interpreter import _patch_lang

    if id(fn.__globals__) not in _scopes:
        _scopes[id(fn.__globals__)] = _patch_lang(fn)


@contextmanager
def _scopes_restored() -> Iterator[None]:
    try:
        yield
    finally:
        while _scopes:
            _scopes.popitem()[1].restore()  # the latest first: each restores the state that it found


def lead(jit: Any) -> None:
    """Lets the kernels of `triton.runtime.jit` be interpreted."""
    compiled_run, plain_call = jit.JITFunction.run, jit.JITFunction.__call__

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        tensors = [a for a in given if isinstance(a, Tensor) and a.is_cuda]
        if warmup or not tensors:
            return compiled_run(self, *args, grid=grid, warmup=warmup, **kwargs)
        stream = torch._C._cuda_getCurrentRawStream(tensors[0].device.index)
        if library.capturing(stream):
            raise NotImplementedError("CUDA stand-in: a Triton kernel cannot be captured into a graph")
        library.begin(stream)
        what = self.fn.__name__.encode()
        view = HostView()
        before = [view.of(t).clone() for t in tensors]
        for t in tensors:
            report(stream, t, library.READ, what)
        low = [view.of(a) if isinstance(a, Tensor) else a for a in args]
        low_kwargs = {name: view.of(a) if isinstance(a, Tensor) else a for name, a in kwargs.items()}
        with _interpreting, _scopes_restored(), torch.no_grad():
            _interpret_module_of(self.fn)  # first, so restored last: the executor restores its own patch before the helpers'
            _interpreted(self.fn).run(*low, grid=grid, warmup=False, **low_kwargs)
        written = [t for t, old in zip(tensors, before, strict=True) if not _same_bytes(view.of(t), old)]
        for t in written:
            report(stream, t, library.WRITE, what)
        hide(stream, written)
        return None

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        """A function that a kernel calls."""
        if not _interpreting._is_owned():  # type: ignore[attr-defined]  # what threading.Condition asks a lock
            return plain_call(self, *args, **kwargs)
        _interpret_module_of(self.fn)
        return _interpreted(self.fn).rewrite()(*args, **kwargs)

    jit.JITFunction.run, jit.JITFunction.__call__ = run, call


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))
