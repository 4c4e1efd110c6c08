"""A GPU that is not there: the same calls, with virtual clocks, counted memory and a capacity.

device = SimDevice("h200", hbm_bytes="2GiB")
with device.compute():                     # CPU ops are its compute: counted, priced, ordered
    loss = model(x)
d2h = device.new_stream("d2h"); d2h.wait(ready); d2h.copy(host, hbm)      # see sim_stream.py
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from chameleon_mm.device.allocator_hook import AllocatorHook
from chameleon_mm.device.pinning import pageable_memory
from chameleon_mm.device.protocols import MemoryReading
from chameleon_mm.device.sim.compute import SimCompute
from chameleon_mm.device.sim.cost_model import CostModel, Span
from chameleon_mm.device.sim.machine import Machine
from chameleon_mm.device.sim.observer import SimObserver
from chameleon_mm.device.sim.sim_stream import SimEvent, SimStream
from chameleon_mm.device.specs import GpuSpec, spec_by_name
from chameleon_mm.units import parse_size


class SimDevice:
    """A simulated GPU: virtual clocks, two copy engines and a capacity.

    `spec` names a GPU (`chameleon_mm.device.SPECS`) or is a `GpuSpec`; `hbm_bytes` overrides its capacity.
    `moves_bytes` off: memory is counted and copies take their time, but none of it is written, so that it takes no physical
    memory; for steps whose operators compute nothing either.
    Thread-safe; all threads count as one host. What runs outside `compute()` is not seen: its tensors count from their first
    copy on, its accesses never. Work that lacks a wait, or uses freed memory, gets no error unless an observer raises one.
    Raises `ValueError` for an unknown spec or size.
    """

    def __init__(
        self,
        spec: str | GpuSpec = "h200",
        hbm_bytes: int | str | None = None,
        *,
        cost: CostModel | None = None,
        moves_bytes: bool = True,
    ) -> None:
        self.spec = spec_by_name(spec) if isinstance(spec, str) else spec
        self.capacity = self.spec.hbm_bytes if hbm_bytes is None else parse_size(hbm_bytes, what="hbm_bytes")
        self.cost = cost or CostModel(spec=self.spec)
        self._machine = Machine(self.capacity, self.cost, moves_bytes=moves_bytes)

    @property
    def name(self) -> str:
        return f"simulated {self.spec.name}"

    @property
    def simulated(self) -> bool:
        return True

    @property
    def driver(self) -> str:
        return "simulated"

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def block_slack_bytes(self) -> int:
        return 0

    @property
    def host_us(self) -> float:
        """The host's virtual clock, in microseconds: what launching has cost so far, and what it waited for."""
        return self._machine.host_us

    def attach_observer(self, observer: SimObserver) -> None:
        """Tell `observer` of all work from now on, and no other. Call it before the device's first work."""
        self._machine.observe(observer)

    def __repr__(self) -> str:
        return f"<SimDevice {self.spec.name}, {self.capacity} bytes>"

    # --- memory

    def alloc_pinned(self, nbytes: int) -> Tensor:
        return self._host_memory(nbytes)

    def alloc_pageable(self, nbytes: int) -> Tensor:
        """Allocate as `Device.alloc_pageable` does: priced as pinned memory is, for want of a measured rate."""
        return self._host_memory(nbytes)

    def _host_memory(self, nbytes: int) -> Tensor:
        memory = pageable_memory(nbytes)
        self._machine.host_memory(memory)
        return memory

    def free_pinned(self, memory: Tensor) -> None:
        """Free as `Device.free_pinned` does. Raises `ValueError` for all but a whole, live allocation."""
        self._machine.forget_host_memory(memory)

    def is_host_memory(self, tensor: Tensor) -> bool:
        """Whether the tensor lies in memory that `alloc_pinned` or `alloc_pageable` gave."""
        buffer = self._machine.ledger.find(tensor.untyped_storage())
        return buffer is not None and buffer.host

    def owns(self, tensor: Tensor) -> bool:
        return tensor.is_cpu and tensor.layout is torch.strided and not self.is_host_memory(tensor)

    def allocated_bytes(self) -> int:
        """Count as `Device.allocated_bytes` does, each storage rounded up to 512."""
        with self._machine.lock:
            self._machine.ledger.settle()
            return self._machine.ledger.allocated_bytes

    def peak_allocated_bytes(self) -> int:
        return self._machine.ledger.peak_bytes

    def peak_reserved_bytes(self) -> None:
        return None

    def reset_peaks(self) -> None:
        with self._machine.lock:
            self._machine.ledger.peak_bytes = self.allocated_bytes()

    def release_unused(self) -> None:
        pass

    def read_memory(self) -> MemoryReading:
        with self._machine.lock:
            ledger = self._machine.ledger
            ledger.settle()
            return MemoryReading(ledger.allocated_bytes, ledger.cumulative_bytes, ledger.peak_bytes)

    def allocator_hook(self) -> AllocatorHook | None:
        """None: its allocator reclaims nothing by itself."""
        return None

    # --- streams

    def current_stream(self) -> SimStream:
        return self._machine.current_stream()

    def new_stream(self, name: str) -> SimStream:
        return self._machine.make_stream(name, for_copies=True)

    def capturing(self) -> bool:
        """False: there are no graphs here."""
        return False

    def new_compute_stream(self, name: str = "compute") -> SimStream:
        """Another stream for `stream(...)`."""
        return self._machine.make_stream(name, for_copies=False)

    @contextmanager
    def stream(self, stream: SimStream) -> Iterator[SimStream]:
        """Make `stream` this thread's current compute stream, as `torch.cuda.stream` does.

        From then on it works in program order. Autograd on CPU knows no streams: a backward runs where it is called.
        """
        before = self.current_stream()
        self._machine.make_current(stream)
        try:
            yield stream
        finally:
            self._machine.make_current(before)

    def synchronize(self) -> None:
        self._machine.synchronize()

    def record_all(self) -> tuple[SimEvent, ...]:
        return (self._machine.record(),)

    def copy_spans(self, direction: str) -> tuple[Span, ...]:
        """The copies of "d2h" or "h2d" that lie latest on their engine: those that a copy issued now may run beside."""
        return self._machine.copy_spans(direction)

    def compute(self) -> AbstractContextManager[SimDevice]:
        """Context as `Device.compute`: this thread's CPU ops, and those of a backward it starts, run on `current_stream()`."""
        return _Compute(self, self._machine)


class _Compute:
    """Context manager as an object rather than a generator: one that a thread left behind must not end its mode on whichever
    thread drops it."""

    def __init__(self, device: SimDevice, machine: Machine) -> None:
        self._device = device
        self._machine = machine
        self._mode: SimCompute | None = None

    def __enter__(self) -> SimDevice:
        modes = _get_current_dispatch_mode_stack()
        if not any(isinstance(mode, SimCompute) and mode.machine is self._machine for mode in modes):
            self._mode = SimCompute(self._machine)
            self._mode.__enter__()  # type: ignore[no-untyped-call]  # torch annotates no argument of it
        return self._device

    def __exit__(self, *error: object) -> None:
        mode, self._mode = self._mode, None
        if mode is not None:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # as above
        if error[0] is None:
            self._device.allocated_bytes()  # what an observer found when a block was freed is raised here at the latest
