"""Record of one step as the simulator ran it: kernels, copies, hooks, memory.

    device = WatchedDevice(spec)                    # a SimDevice that notes its copies
    watch = Watch(device)                           # a dispatch mode: time and memory before and after each operator and hook
    with watch.hooks(executor.save, executor.use), watch:
        ...                                         # the step
    watch.step()                                    # all times in microseconds since the step began

All figures are read from the device's own clocks and counters, which takes no simulated time: a watched step takes as long as
an unwatched one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from chameleon_mm.device import SimDevice
from chameleon_mm.device.sim.machine import SimStream
from chameleon_mm.device.specs import GpuSpec

PHASES = ("forward", "backward", "optimizer")


class Kernel(NamedTuple):
    """Time of one operator on the compute stream."""

    phase: str
    start_us: float
    end_us: float


class Copy(NamedTuple):
    """Time of one copy on its engine."""

    direction: str
    """"d2h" or "h2d"."""
    start_us: float
    end_us: float
    nbytes: int


class Reading(NamedTuple):
    """Allocated device memory from a moment on."""

    at_us: float
    allocated_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Record of one step, from its first operator to its last."""

    kernels: tuple[Kernel, ...]
    copies: tuple[Copy, ...]
    hooks_us: tuple[float, ...]
    """Time of the compute stream after each hook."""
    readings: tuple[Reading, ...]
    """Readings in the order in which they were taken; several may have the same time."""
    step_us: float
    peak_bytes: int
    """Peak by the device's own counter."""
    stall_us: float = 0.0
    """Time that compute waited for copies, as the session counts it."""


class WatchedDevice(SimDevice):
    """`SimDevice` that notes every copy of the streams made by `new_stream`."""

    def __init__(self, spec: str | GpuSpec) -> None:
        super().__init__(spec)
        self.copies: list[Copy] = []
        """Copies so far, by the device's own clock."""

    def new_stream(self, name: str) -> SimStream:
        return cast(SimStream, _NotingStream(super().new_stream(name), self))  # it passes all other calls on to the stream

    def note_copy(self, *, out: bool) -> None:
        """Note the copy that was just issued."""
        direction = "d2h" if out else "h2d"
        span = self.copy_spans(direction)[-1]
        self.copies.append(Copy(direction, span.start_us, span.end_us, span.nbytes))


class _NotingStream:
    """A stream of a `WatchedDevice`."""

    def __init__(self, stream: SimStream, device: WatchedDevice) -> None:
        self._stream, self._device = stream, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def copy(self, dst: Tensor, src: Tensor, *, speculative: bool = False) -> None:
        self._stream.copy(dst, src, speculative=speculative)
        self._device.note_copy(out=self._device.is_host_memory(dst))

    def copy_storage(self, storage: torch.UntypedStorage, host: Tensor, *, out: bool, **which: Any) -> None:
        self._stream.copy_storage(storage, host, out=out, **which)
        self._device.note_copy(out=out)


class Watch(TorchDispatchMode):
    """Mode that notes the operators of one step as they run, and the hooks of `hooks`. Use it once, in `device.compute()`."""

    def __init__(self, device: WatchedDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch annotates no argument of it
        self.phase = PHASES[0]
        self._device = device
        self._stream = device.current_stream()
        self._begin_us = max(self._stream.ready_us, device.host_us)  # nothing can be launched earlier
        self._kernels: list[Kernel] = []
        self._readings = [Reading(0.0, device.allocated_bytes())]
        self._in_hook = False
        self._hooks_us: list[float] = []
        self._first_copy = len(device.copies)

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._in_hook:  # an operator of the library: `_run_hook` notes the whole hook
            return func(*args, **(kwargs or {}))
        self._read()
        ready_us = self._stream.ready_us
        result = func(*args, **(kwargs or {}))
        end_us = self._stream.ready_us
        if end_us > ready_us:
            start_us = min(max(ready_us, self._device.host_us), end_us)  # it starts once the host has launched it
            self._kernels.append(Kernel(self.phase, start_us - self._begin_us, end_us - self._begin_us))
            self._readings.append(Reading(start_us - self._begin_us, self._device.allocated_bytes()))
        self._read()
        return result

    def hooks(self, save: Callable[[Tensor], Any], use: Callable[[Any], Tensor]) -> AbstractContextManager[Any]:
        """Context of saved-tensor hooks that call `save` and `use`, watched."""
        return saved_tensors_hooks(partial(self._run_hook, save), partial(self._run_hook, use))

    def step(self, *, stall_us: float = 0.0) -> Step:
        """Return the record. Call it when the step has ended."""
        self._read()
        begin_us = self._begin_us
        copies = [
            copy._replace(start_us=copy.start_us - begin_us, end_us=copy.end_us - begin_us)
            for copy in self._device.copies[self._first_copy :]
        ]
        return Step(
            kernels=tuple(self._kernels),
            copies=tuple(copies),
            hooks_us=tuple(self._hooks_us),
            readings=tuple(self._readings),
            step_us=self._now_us,
            peak_bytes=self._device.peak_allocated_bytes(),
            stall_us=stall_us,
        )

    @property
    def _now_us(self) -> float:
        return max(0.0, self._stream.ready_us - self._begin_us)

    def _read(self) -> None:
        self._readings.append(Reading(self._now_us, self._device.allocated_bytes()))

    def _run_hook(self, hook: Callable[[Any], Any], argument: Any) -> Any:
        self._read()
        self._in_hook = True
        try:
            return hook(argument)
        finally:
            self._in_hook = False
            self._hooks_us.append(self._now_us)
            self._read()
