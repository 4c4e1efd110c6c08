"""Snapshot of what a step begins with, so that it can begin again; tells whether its parameters are still as they were.

snapshot = StepSnapshot(model, device, pool, buffers)    # before the step: random states, buffers, gradients that exist
with snapshot.watching(): ...                            # the step, which fails
snapshot.obstacle() -> why it may not begin again        # an optimizer stepped; a parameter was written or replaced
snapshot.restore()                                       # as often as it takes
snapshot.release()
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from chameleon_mm.device import Device
from chameleon_mm.pinned import PinnedPool
from chameleon_mm.profiler.retry import RandomState
from chameleon_mm.rerun.buffer_copies import BufferCopies
from chameleon_mm.rerun.gradient_copies import GradientCopy, snapshot_of


class StepSnapshot:
    """Snapshot of the step that begins now, on the calling thread.

    Raises `HostMemoryExhausted` or `torch.OutOfMemoryError` where there is no memory for the copies, with nothing changed.
    """

    def __init__(self, model: nn.Module, device: Device, pool: PinnedPool, buffers: BufferCopies) -> None:
        self._stepped = False
        self._random = RandomState(device)
        self._buffers = buffers
        self._model = model
        self._parameters = [(parameter, _mark(parameter)) for parameter in model.parameters()]
        buffers.take()
        self._gradients: list[tuple[nn.Parameter, GradientCopy | None]] = []
        try:
            for parameter, _ in self._parameters:
                self._gradients.append((parameter, snapshot_of(parameter.grad, device, pool)))
        except BaseException:
            self.release()
            raise

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note whether an optimizer steps on the model: fused ones write parameters without moving their version counters."""
        ids = {id(parameter) for parameter, _ in self._parameters}

        def note(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if any(id(parameter) in ids for group in optimizer.param_groups for parameter in group["params"]):
                self._stepped = True

        hook = register_optimizer_step_pre_hook(note)
        try:
            yield
        finally:
            hook.remove()

    def obstacle(self) -> str | None:
        """Reason why the step may not begin again; None: there is none."""
        if self._stepped:
            return "its optimizer had begun to step, and a second step would add to the first"
        now = list(self._model.parameters())
        if len(now) != len(self._parameters) or any(
            parameter is not before or _mark(parameter) != mark
            for parameter, (before, mark) in zip(now, self._parameters, strict=True)
        ):
            return "a parameter of the model had changed, and would be changed twice"
        return None

    def restore(self) -> None:
        """Restore random states, buffers and gradients. Raises `torch.OutOfMemoryError` where a gradient finds no room."""
        for parameter, snapshot in self._gradients:
            if snapshot is None:  # first: what the step made of them makes room for the others
                parameter.grad = None
        for parameter, snapshot in self._gradients:
            if snapshot is not None:
                snapshot.restore(parameter)
        self._buffers.restore()
        self._random.restore()

    def release(self) -> None:
        """Release the copies of gradients: the step will not begin again."""
        for _, snapshot in self._gradients:
            if snapshot is not None:
                snapshot.release()
        self._gradients = []


def _mark(parameter: nn.Parameter) -> tuple[int, int]:
    """A value that differs once the parameter was written to, or its data replaced; a write through `.data` changes nothing
    that tells."""
    plain = type(parameter) is nn.Parameter and parameter.layout is torch.strided
    version = -1 if parameter.is_inference() else parameter._version
    return version, parameter.data_ptr() if plain else 0
