"""Triton kernels without a GPU: Triton's own interpreter runs them on the device's memory, in the order of their stream.

A kernel that is launched with CUDA tensors is interpreted; compiling without a launch (`warmup`, `triton.compile`) stays
Triton's. What a kernel reads by addresses out of a table is not told to the runtime: it sees tensors alone.
"""

from __future__ import annotations

import functools
import threading
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
        with _interpreting, torch.no_grad():
            _interpreted(self.fn).run(*low, grid=grid, warmup=False, **low_kwargs)
        written = [t for t, old in zip(tensors, before, strict=True) if not _same_bytes(view.of(t), old)]
        for t in written:
            report(stream, t, library.WRITE, what)
        hide(stream, written)
        return None

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        """A function that a kernel calls."""
        from triton.runtime.interpreter import _patch_lang

        if not _interpreting._is_owned():  # type: ignore[attr-defined]  # what threading.Condition asks a lock
            return plain_call(self, *args, **kwargs)
        scope = _patch_lang(self.fn)  # its module may know the language by another name than the kernel's
        try:
            return _interpreted(self.fn).rewrite()(*args, **kwargs)
        finally:
            scope.restore()

    jit.JITFunction.run, jit.JITFunction.__call__ = run, call


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))
