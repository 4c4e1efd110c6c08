"""Copies of what a step changes before it fails: gradients on the host, buffers on the device.

start = StepStart(model, device, pool, buffers)    # before the step: random states, buffers, gradients that exist
with start.watching(): ...                         # the step, which fails
start.obstacle() -> why it may not begin again     # an optimizer stepped; a parameter was written or replaced
start.restore()                                    # as often as it takes
start.release()

Gradients by a copy, on the host, for device memory is what is short: one set aside and added again later would be another sum,
for (g + a) + b is not g + (a + b), and a step that clips or zeroes `.grad` must find what it would have found.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import TensorWeakRef

from chameleon_mm.dense_bytes import dense_bytes
from chameleon_mm.device import Device, Event
from chameleon_mm.errors import HostMemoryExhausted
from chameleon_mm.pinned import PinnedBlock, PinnedPool
from chameleon_mm.profiler.retry import RandomState


class GradientOnHost:
    """A gradient's bytes on the host. The gradient itself is not held: a step that drops it has its memory."""

    __slots__ = ("_block", "_device", "_last", "_like", "_of")

    def __init__(self, grad: Tensor, source: Tensor, device: Device, pool: PinnedPool) -> None:
        compute = device.current_stream()
        try:
            self._block: PinnedBlock = pool.allocate(source.numel(), compute)
        except HostMemoryExhausted:
            self._block = pool.allocate_pageable(source.numel())
        self._device = device
        self._of = TensorWeakRef(grad)
        self._like = _form(grad)
        # On compute: in order after what wrote the gradient, and before whatever the step does with it.
        compute.copy(self._block.buffer, source)
        self._last: Event = compute.record()

    def restore(self, parameter: nn.Parameter) -> None:
        """Copy back into the tensor that the gradient was, which a bucket may be made of; where nobody holds it, into one like
        it."""
        grad = self._of()
        if grad is None or _form(grad) != self._like:
            grad = parameter.grad = None  # what the step made of it makes room
            shape, stride, dtype, device = self._like
            grad = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        destination = dense_bytes(grad)
        assert destination is not None
        compute = self._device.current_stream()
        compute.copy(destination, self._block.buffer)
        self._last = compute.record()
        parameter.grad = grad

    def release(self) -> None:
        self._block.release(after=self._last)


def _form(t: Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]:
    return t.shape, t.stride(), t.dtype, t.device


class GradientOnDevice:
    """A gradient that is more than bytes in a row: sparse, or a wrapper subclass."""

    __slots__ = ("_copy",)

    def __init__(self, grad: Tensor) -> None:
        self._copy = grad.detach().clone()

    def restore(self, parameter: nn.Parameter) -> None:
        parameter.grad = self._copy.clone()  # the step may write to it, and fail again

    def release(self) -> None:
        """Does nothing: device memory goes with the last reference."""


GradientCopy = GradientOnHost | GradientOnDevice


def copy_of(grad: Tensor | None, device: Device, pool: PinnedPool) -> GradientCopy | None:
    """Copy of a gradient; None of none. Raises `HostMemoryExhausted`; `torch.OutOfMemoryError` for one that stays on the
    device."""
    if grad is None:
        return None
    source = dense_bytes(grad)
    if source is None or not source.numel() or not device.owns(grad):
        return GradientOnDevice(grad)
    return GradientOnHost(grad, source, device, pool)


class BufferCopies:
    """Copies of a model's buffers, on the buffers' own device.

    All are copied for every step: batch norm writes its running statistics without moving their version counters, so nothing
    tells which have changed. They are small; in one call they cost little.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._tables: list[tuple[dict[str, Tensor | None], dict[str, Tensor | None]]] = []
        """Tables of buffers, one of each module: as it is, and as it was."""
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        """Buffers by id: each with its copy."""

    def take(self) -> None:
        """Copy what the buffers hold now. Raises `torch.OutOfMemoryError`."""
        self._tables = [(module._buffers, dict(module._buffers)) for module in self._model.modules()]
        buffers = {id(b): b for _, table in self._tables for b in table.values() if b is not None}
        known, self._copies = self._copies, {}
        again: list[tuple[Tensor, Tensor]] = []
        with torch.no_grad():
            for key, buffer in buffers.items():
                pair = known.get(key)
                # Resized or made another kind in place: `clone` takes it as it is.
                if pair is not None and pair[0] is buffer and _same_kind(pair[1], buffer):
                    again.append(pair)
                else:
                    pair = buffer, buffer.detach().clone()
                self._copies[key] = pair
            if again:
                torch._foreach_copy_([copy for _, copy in again], [buffer for buffer, _ in again])

    def restore(self) -> None:
        """Put back which tensors the buffers were, and what they held."""
        for table, as_it_was in self._tables:
            table.clear()
            table.update(as_it_was)
        with torch.no_grad():
            for buffer, copy in self._copies.values():
                self._put_back(buffer, copy)

    @staticmethod
    def _put_back(buffer: Tensor, copy: Tensor) -> None:
        into, of = dense_bytes(buffer), dense_bytes(copy)
        if not _same_kind(copy, buffer):
            buffer.data = copy.clone()  # resized, or converted
        elif into is not None and of is not None:
            into.copy_(of)  # past its version counter: a graph from before the step may have saved it
        elif 0 not in buffer.stride():  # one that repeats its elements can be written by nobody
            buffer.copy_(copy)


def _same_kind(copy: Tensor, buffer: Tensor) -> bool:
    return (
        type(copy) is type(buffer)
        and copy.layout is torch.strided is buffer.layout
        and (copy.shape, copy.dtype, copy.device) == (buffer.shape, buffer.dtype, buffer.device)
        and (copy.stride() == buffer.stride() or dense_bytes(buffer) is None)
    )


class StepStart:
    """What the step that begins now needs to begin again, on the calling thread.

    Raises `HostMemoryExhausted` or `torch.OutOfMemoryError` where there is no memory for the copies, with nothing changed.
    """

    def __init__(self, model: nn.Module, device: Device, pool: PinnedPool, buffers: BufferCopies) -> None:
        self._stepped: list[Optimizer] = []
        self._random = RandomState(device)
        self._buffers = buffers
        self._model = model
        self._parameters = [(parameter, _mark(parameter)) for parameter in model.parameters()]
        buffers.take()
        self._gradients: list[tuple[nn.Parameter, GradientCopy | None]] = []
        try:
            for parameter, _ in self._parameters:
                self._gradients.append((parameter, copy_of(parameter.grad, device, pool)))
        except BaseException:
            self.release()
            raise

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note whether an optimizer steps on the model: fused ones write parameters without moving their version counters."""
        ids = {id(parameter) for parameter, _ in self._parameters}

        def note(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if any(id(parameter) in ids for group in optimizer.param_groups for parameter in group["params"]):
                self._stepped.append(optimizer)

        hook = register_optimizer_step_pre_hook(note)
        try:
            yield
        finally:
            hook.remove()

    def obstacle(self, restored: Optimizer | None = None) -> str | None:
        """Reason why the step may not begin again; None: there is none. `restored`: the optimizer that will be restored first,
        with all parameters; None: nothing but this is."""
        now = list(self._model.parameters())
        if restored is not None:
            if any(optimizer is not restored for optimizer in self._stepped):
                return "an optimizer of the model's had begun to step that the session does not know"
            same = len(now) == len(self._parameters) and all(p is q for p, (q, _) in zip(now, self._parameters, strict=True))
            return None if same else "a parameter of the model had been replaced by another"
        if self._stepped:
            return "its optimizer had begun to step, and a second step would add to the first"
        if len(now) != len(self._parameters) or any(
            parameter is not before or _mark(parameter) != mark
            for parameter, (before, mark) in zip(now, self._parameters, strict=True)
        ):
            return "a parameter of the model had changed, and would be changed twice"
        return None

    def restore(self) -> None:
        """Restore random states, buffers and gradients. Raises `torch.OutOfMemoryError` where a gradient finds no room."""
        for parameter, copy in self._gradients:
            if copy is None:  # first: what the step made of them makes room for the others
                parameter.grad = None
        for parameter, copy in self._gradients:
            if copy is not None:
                copy.restore(parameter)
        self._buffers.restore()
        self._random.restore()

    def release(self) -> None:
        """Release the copies of gradients: the step will not begin again."""
        for _, copy in self._gradients:
            if copy is not None:
                copy.release()
        self._gradients = []


def _mark(parameter: nn.Parameter) -> tuple[int, int]:
    """A value that differs once the parameter was written to, or its data replaced; a write through `.data` changes nothing
    that tells."""
    with torch._C.DisableTorchFunction():  # asked of what may be away, and stays so: its storage stays, its memory does not
        plain = type(parameter) is nn.Parameter and parameter.layout is torch.strided
        version = -1 if parameter.is_inference() else parameter._version
        return version, parameter.untyped_storage()._cdata if plain else 0
