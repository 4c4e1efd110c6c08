"""Snapshot of one gradient, to be restored later, bit for bit.

    snapshot = snapshot_of(parameter.grad, device, pool)    # None where there is no gradient
    ... a step adds to it, zeroes it, drops it ...
    snapshot.restore(parameter)                             # as often as it takes
    snapshot.release()

On the host, for device memory is what is short. By a copy: one set aside and added again later would be another sum, for
(g + a) + b is not g + (a + b), and a step that clips or zeroes `.grad` must find what it would have found.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from chameleon_mm.device import Device, Event
from chameleon_mm.errors import HostMemoryExhausted
from chameleon_mm.pinned import PinnedBlock, PinnedPool
from chameleon_mm.rerun.dense import dense_bytes


class GradientOnHost:
    """A gradient's bytes on the host. The gradient itself is not held: a step that drops it has its memory."""

    __slots__ = ("_block", "_device", "_last", "_like", "_of")

    def __init__(self, grad: Tensor, source: Tensor, device: Device, pool: PinnedPool) -> None:
        compute = device.current_stream()
        try:
            self._block: PinnedBlock = pool.allocate(source.numel(), compute)
        except HostMemoryExhausted:
            self._block = pool.allocate_pageable(source.numel(), compute)
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


def snapshot_of(grad: Tensor | None, device: Device, pool: PinnedPool) -> GradientCopy | None:
    """Snapshot of a gradient; None of none. Raises `HostMemoryExhausted`; `torch.OutOfMemoryError` for one that stays on the
    device."""
    if grad is None:
        return None
    source = dense_bytes(grad)
    if source is None or not source.numel() or not device.owns(grad):
        return GradientOnDevice(grad)
    return GradientOnHost(grad, source, device, pool)
