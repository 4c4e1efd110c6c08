"""Record of one step as the simulator ran it: kernels, copies, memory, and each saved storage that moved.

    device = WatchedDevice(spec)                    # a SimDevice that notes its copies
    watch = Watch(device)                           # a dispatch mode: time and memory before and after each operator and hook
    with watch.hooks(executor.save, executor.use), watch:
        ...                                         # the step
    watch.step()                                    # all times in microseconds since the step began

What is noted is read from the device's own clocks and counters, which costs it nothing: the step takes the time that it takes
unwatched. A swap is put together from what was seen: states of its saved storage after each hook, copies by their addresses.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from chameleon_mm.device import SimDevice
from chameleon_mm.device.sim.stream import SimStream
from chameleon_mm.device.specs import GpuSpec
from chameleon_mm.saved import SwappedView
from chameleon_mm.saved.saved_storage import SavedStorage
from chameleon_mm.saved.state import State

PHASES = ("forward", "backward", "optimizer")


class Kernel(NamedTuple):
    """Time of one operator on the compute stream."""

    phase: str
    start_us: float
    end_us: float


class Copy(NamedTuple):
    """Time of one copy on its engine, and the addresses that it copied from and to."""

    direction: str
    """"d2h" or "h2d"."""
    start_us: float
    end_us: float
    nbytes: int
    device_address: int
    host_address: int


class Reading(NamedTuple):
    """Allocated device memory from a moment on."""

    at_us: float
    allocated_bytes: int


@dataclass(kw_only=True)
class Swap:
    """Record of one saved storage that moved. Moments are those of the compute stream."""

    nbytes: int
    save_us: float
    save_hook: int
    """Number of the hook, as a plan counts them."""
    out: Copy | None = None
    reclaim_us: float | None = None
    reclaim_hook: int | None = None
    prefetch_us: float | None = None
    prefetch_hook: int | None = None
    back: Copy | None = None
    use_us: float | None = None
    use_hook: int | None = None

    @property
    def moved_whole(self) -> bool:
        """Whether all of it went out and came back, and each of its moments was seen."""
        seen = (self.reclaim_us, self.prefetch_us, self.use_us)
        return None not in seen and all(copy is not None and copy.nbytes == self.nbytes for copy in (self.out, self.back))


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Record of one step, from its first operator to its last."""

    kernels: tuple[Kernel, ...]
    copies: tuple[Copy, ...]
    swaps: tuple[Swap, ...]
    readings: tuple[Reading, ...]
    """Readings in the order in which they were taken; several may be of one moment."""
    step_us: float
    peak_bytes: int
    """Peak by the device's own counter."""
    stall_us: float = 0.0
    """Time that compute waited for copies, as the session counts it."""


class WatchedDevice(SimDevice):
    """A `SimDevice` that notes every copy of the streams made by `new_stream`."""

    def __init__(self, spec: str | GpuSpec) -> None:
        super().__init__(spec)
        self.copies: list[Copy] = []
        """Copies so far, by the device's own clock."""

    def new_stream(self, name: str) -> SimStream:
        return cast(SimStream, _NotingStream(super().new_stream(name), self))  # all else is passed on to the stream itself

    def note_copies(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Note the copies `(dst, src)` that were just issued, all one way."""
        to_host = self.is_host_memory(pairs[0][0])
        direction = "d2h" if to_host else "h2d"
        for (dst, src), span in zip(pairs, self.copy_spans(direction)[-len(pairs) :], strict=True):
            ends = (src, dst) if to_host else (dst, src)
            self.copies.append(Copy(direction, span.start_us, span.end_us, span.nbytes, *(end.data_ptr() for end in ends)))


class _NotingStream:
    """A stream of a `WatchedDevice`."""

    def __init__(self, stream: SimStream, device: WatchedDevice) -> None:
        self._stream = stream
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def copy(self, dst: Tensor, src: Tensor, *, speculative: bool = False) -> None:
        self._stream.copy(dst, src, speculative=speculative)
        self._device.note_copies([(dst, src)])

    def copy_batch(self, pairs: Sequence[tuple[Tensor, Tensor]], *, speculative: bool = False) -> None:
        self._stream.copy_batch(pairs, speculative=speculative)
        self._device.note_copies(pairs)


@dataclass
class _Seen:
    """A swap in the making. The storage is held weakly: autograd's handle is its lifetime."""

    swap: Swap
    saved: weakref.ref[SavedStorage]
    addresses: range


class Watch(TorchDispatchMode):
    """Mode that notes the operators of one step as they run, and `watched` hooks. Of one use, in `device.compute()`."""

    def __init__(self, device: WatchedDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch annotates no argument of it
        self.phase = PHASES[0]
        self._device = device
        self._stream = device.current_stream()
        self._begin_us = max(self._stream.ready_us, device.host_us)  # nothing can be launched earlier
        self._kernels: list[Kernel] = []
        self._readings = [Reading(0.0, device.allocated_bytes())]
        self._in_hook = False
        self._hooks = 0
        self._seen: dict[int, _Seen] = {}
        """Swaps under way, by the id of the saved storage, which is not given again while its handles live."""
        self._swaps: list[Swap] = []
        self._first_copy = self._matched = len(device.copies)

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._in_hook:  # the library's own: told from outside of the hook
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
        """The context of saved-tensor hooks that do what `save` and `use` do, watched."""

        def watched_save(t: Tensor) -> Any:
            begin = t.untyped_storage().data_ptr()
            addresses = range(begin, begin + t.untyped_storage().nbytes())
            handle = self._run_hook(save, t)
            if isinstance(handle, SwappedView):
                self._note_save(handle.claim.saved, addresses)
            self._look()
            return handle

        def watched_use(handle: Any) -> Tensor:
            seen = self._seen.get(id(handle.claim.saved)) if isinstance(handle, SwappedView) else None
            result: Tensor = self._run_hook(use, handle)
            if seen is not None and seen.swap.use_us is None:
                seen.swap.use_us, seen.swap.use_hook = self._now_us, self._hooks - 1
            self._look()
            return result

        return saved_tensors_hooks(watched_save, watched_use)

    def step(self, *, stall_us: float = 0.0) -> Step:
        """Return the record. To be called when the step has ended."""
        self._read()
        copies = [self._since_begin(copy) for copy in self._device.copies[self._first_copy :]]
        return Step(
            kernels=tuple(self._kernels),
            copies=tuple(copies),
            swaps=tuple(swap for swap in self._swaps if swap.out is not None),
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
            self._hooks += 1
            self._read()

    def _note_save(self, saved: SavedStorage, addresses: range) -> None:
        known = self._seen.get(id(saved))
        if known is None or known.saved() is not saved:
            swap = Swap(nbytes=saved.nbytes, save_us=self._now_us, save_hook=self._hooks - 1)
            self._swaps.append(swap)
            self._seen[id(saved)] = _Seen(swap, weakref.ref(saved), addresses)

    def _look(self) -> None:
        """Look at what the hook that just ended did to each saved storage."""
        new, self._matched = self._device.copies[self._matched :], len(self._device.copies)
        for key, seen in list(self._seen.items()):
            saved, swap = seen.saved(), seen.swap
            for copy in new:
                if copy.direction == "d2h" and swap.reclaim_us is None and copy.device_address in seen.addresses:
                    swap.out = self._since_begin(copy)
                elif copy.direction == "h2d" and swap.out is not None and copy.host_address == swap.out.host_address:
                    swap.back = self._since_begin(copy)
            if saved is None or saved.state is State.RETIRED:
                del self._seen[key]
                continue
            if swap.reclaim_us is None and saved.state is State.ON_HOST:
                swap.reclaim_us, swap.reclaim_hook = self._now_us, self._hooks - 1
            if swap.reclaim_us is not None and swap.prefetch_us is None and saved.state in (State.SWAPPING_IN, State.RESTORED):
                swap.prefetch_us, swap.prefetch_hook = self._now_us, self._hooks - 1

    def _since_begin(self, copy: Copy) -> Copy:
        return copy._replace(start_us=copy.start_us - self._begin_us, end_us=copy.end_us - self._begin_us)
