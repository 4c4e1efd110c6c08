"""A simulated GPU: the same calls as a real one, with virtual clocks, counted memory and a capacity.

device = SimDevice("h200", hbm_bytes="2GiB")
with device.compute():                     # CPU ops are its compute: counted, priced, ordered
    loss = model(x)
d2h = device.new_stream("d2h"); d2h.wait(ready); d2h.copy(host, hbm)      # see machine.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, is_traceable_wrapper_subclass_type

from chameleon_mm.device.compiled_regions import Region, RegionMode, Run, find_regions
from chameleon_mm.device.operators import (
    OpCall,
    OpFactsCache,
    collect_tensors,
    inner_bytes,
    run_in_parts,
    runs_in_parts,
)
from chameleon_mm.device.pinning import pageable_memory
from chameleon_mm.device.protocols import AllocatorHook, MemoryReading, Stream
from chameleon_mm.device.sim.cost_model import CostModel, Span
from chameleon_mm.device.sim.machine import HOST_LEAD, Machine, SimEvent, SimObserver, SimStream
from chameleon_mm.device.specs import GpuSpec, spec_by_name
from chameleon_mm.device.uncompiled import import_dynamo
from chameleon_mm.errors import check_type
from chameleon_mm.units import parse_size

# --- The model's CPU ops as the simulated GPU's compute: a dispatch mode that orders, counts and prices each of them
# reads   -> each input's bytes, before the operator runs
# run     -> the real CPU operator, with real numbers
# writes  -> results and mutated inputs; new storages and scratch memory are counted, and may not fit
# time    -> host: launch cost; stream: max(its time, the host's) + the kernel's time


def _plain(nest: list[Any]) -> list[Tensor]:
    """Tensors of simulated memory in a nest, without wrapper subclasses."""
    found: dict[int, Tensor] = {}
    collect_tensors(nest, "cpu", found)
    return [t for t in found.values() if not is_traceable_wrapper_subclass_type(type(t))]


class SimCompute(RegionMode):
    """Mode in which this thread's CPU ops run on a simulated device's current stream.

    Wrapper subclasses unwrap first, and composite operators are decomposed (in inference mode they arrive whole). So the mode
    prices the kernels that a GPU would launch. Raises errors of allocations and of the observer. An operator whose results do
    not fit has run, like one that fails half-way on a GPU. Its mutated inputs are changed, and its generator has advanced.

    The unseen kernels of a compiled region, such as Inductor's, count as one kernel, with the time to read its arguments and
    write its results. Memory that it allocates and frees unseen is not counted.
    """

    def __init__(self, machine: Machine) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch annotates no argument of it
        import_dynamo()
        self.machine = machine
        self._facts = OpFactsCache("cpu")  # the CPU's kernels run and decide the results

    def __enter__(self) -> Self:
        find_regions()
        super().__enter__()  # type: ignore[no-untyped-call]  # torch annotates no method of it
        return self

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for kind in types:
            if issubclass(kind, FakeTensor):
                return func(*args, **kwargs)  # no memory, no kernel
            if is_traceable_wrapper_subclass_type(kind):
                return NotImplemented  # the subclass handles it, with this mode still active for its inner tensors
        facts = self._facts[func]
        if runs_in_parts(facts, args, kwargs):
            return run_in_parts(func, args, kwargs, self)
        with torch._C.DisableTorchFunction():  # no function mode sees it, as for any operator called from C++
            return self._launch(OpCall(facts, func, args, kwargs, device_type="cpu"))

    def run_region(self, region: Region, run: Run, args: list[Any]) -> Any:
        machine, inputs = self.machine, _plain(args)
        if any(isinstance(t, FakeTensor) for t in inputs):
            return run(args)
        with machine.lock:
            machine.ledger.settle()
            stream = machine.current_stream()
            machine.observer.launch(stream)
            label = f"{region.name} on {stream.name}"
            read_bytes = machine.access(stream, inputs, write=False, label=label)
        inputs.clear()
        out = run(args)
        with machine.lock:
            machine.ledger.settle()
            unseen = [t for t in _plain([out]) if machine.ledger.find(t.untyped_storage()) is None]
            if unseen:
                written_bytes = machine.access(stream, unseen, write=True, label=label)
                machine.host_us += machine.cost.launch_us
                machine.run_kernel(stream, machine.cost.kernel_us(0, read_bytes + written_bytes, unseen[0].dtype))
        return out

    def _launch(self, call: OpCall) -> Any:
        machine, facts = self.machine, call.facts
        with machine.lock:
            machine.ledger.settle()
            stream = machine.current_stream()
            machine.observer.launch(stream)
            hosts = [machine.is_host(t) for t in call.inputs.values()]
            if facts.kernel and hosts and all(hosts) and (facts.in_place or facts.host_reads):
                return self._run_on_host(call)
            label = f"{facts.name} on {stream.name}"
            read_bytes = machine.access(stream, call.read(), write=False, label=label) if facts.kernel else 0
        out = call.run()
        if any(isinstance(t, FakeTensor) for t in call.written.values()):
            return out  # a factory under a FakeTensorMode: no memory, no kernel
        if call.inputs or call.written:
            with machine.lock:
                machine.ledger.settle()  # storages that died while the operator ran make room for its results
                for t in call.written.values():  # all of them first: check that they fit before the observer checks for races
                    machine.ledger.adopt(t.untyped_storage())
                if facts.kernel:
                    machine.ledger.lend(inner_bytes(call))
                    written_bytes = machine.access(stream, call.written.values(), write=True, label=label)
                    self._take_time(call, stream, read_bytes, written_bytes, any(hosts))
                else:
                    machine.host_us += machine.cost.view_us
                    if facts.uninitialised:
                        for t in call.written.values():
                            machine.observer.allocated(stream, t.untyped_storage())
        return out

    def _run_on_host(self, call: OpCall) -> Any:
        """Run an operator on pinned memory only. With a real GPU, the host also runs it at once, in program order."""
        label = f"{call.facts.name} on the host"
        self.machine.host_access(call.read(), write=False, label=label)
        out = call.run()
        self.machine.host_access(call.mutated.values(), write=True, label=label)
        return out

    def _take_time(self, call: OpCall, stream: SimStream, read_bytes: int, written_bytes: int, reads_host: bool) -> None:
        machine, facts = self.machine, call.facts
        machine.host_us += machine.cost.launch_us
        if facts.copies and reads_host:
            ends = [machine.is_host(t) for t in call.written.values()]
            machine.transfer(stream, written_bytes, to_host=all(ends), from_host=not all(ends))
            if not call.non_blocking:
                machine.host_waits_for(stream)
            return
        if facts.gathers:
            read_bytes = min(read_bytes, 2 * written_bytes)
        touched = read_bytes + written_bytes
        machine.run_kernel(stream, machine.cost.kernel_us(call.flops(), touched, call.dtype, facts.name))
        if facts.host_reads:
            machine.host_waits_for(stream)


class SimDevice:
    """A simulated GPU: virtual clocks, two copy engines and a capacity.

    `spec` names a GPU (`chameleon_mm.device.SPECS`) or is a `GpuSpec`; `hbm_bytes` overrides its capacity.
    `moves_bytes` False: memory is counted and copies take time, but no bytes are written, so no physical memory is used. For
    steps whose operators compute nothing either. `host_lead`: kernels that the host may be ahead of a stream; at more it waits.
    Thread-safe; all threads count as one host.
    Work outside `compute()` is not seen: its tensors count from their first copy on, its accesses never. A missing wait or a
    use of freed memory raises no error, unless an observer raises one.
    Raises `ValueError` for an unknown spec or size, and `TypeError` for arguments of another type.
    """

    simulated = True
    driver = "simulated"
    torch_device = torch.device("cpu")
    block_slack_bytes = 0

    def __init__(
        self,
        spec: str | GpuSpec = "h200",
        hbm_bytes: int | str | None = None,
        *,
        cost: CostModel | None = None,
        moves_bytes: bool = True,
        host_lead: int = HOST_LEAD,
    ) -> None:
        self.spec = spec_by_name(spec) if isinstance(spec, str) else spec
        check_type("spec", self.spec, GpuSpec, "the name of a GPU or a GpuSpec", "pass one of chameleon_mm.device.SPECS")
        if cost is not None:
            check_type("cost", cost, CostModel, "a CostModel or None", "leave it out")
        check_type("moves_bytes", moves_bytes, bool, "True or False", "pass one of the two")
        check_type("host_lead", host_lead, int, "a number of kernels", "leave it out")
        if host_lead < 1:
            raise ValueError(f"host_lead: expected 1 kernel or more, got {host_lead}; leave it out")
        self.capacity = self.spec.hbm_bytes if hbm_bytes is None else parse_size(hbm_bytes, what="hbm_bytes")
        self.cost = cost or CostModel(spec=self.spec)
        self._machine = Machine(self.capacity, self.cost, moves_bytes=moves_bytes, host_lead=host_lead)

    @property
    def name(self) -> str:
        return f"simulated {self.spec.name}"

    @property
    def host_us(self) -> float:
        """Host's virtual clock in microseconds: the cost of its launches so far, and its waits."""
        return self._machine.host_us

    def attach_observer(self, observer: SimObserver) -> None:
        """Make `observer` the only observer of all work from now on. Call it before the device's first work."""
        self._machine.observe(observer)

    # --- memory

    def alloc_pinned(self, nbytes: int) -> Tensor:
        return self._host_memory(nbytes)

    def alloc_pageable(self, nbytes: int) -> Tensor:
        """Allocate as `Device.alloc_pageable` does. Priced like pinned memory, because no rate was measured."""
        return self._host_memory(nbytes)

    def _host_memory(self, nbytes: int) -> Tensor:
        memory = pageable_memory(nbytes)
        with self._machine.lock:
            self._machine.ledger.adopt(memory.untyped_storage(), host=True)
        return memory

    def free_pinned(self, memory: Tensor) -> None:
        """Free as `Device.free_pinned` does. Raises `ValueError` unless `memory` is a whole, live allocation."""
        self._machine.forget_host_memory(memory)

    def is_host_memory(self, tensor: Tensor) -> bool:
        """True if the tensor lies in memory from `alloc_pinned` or `alloc_pageable`."""
        buffer = self._machine.ledger.find(tensor.untyped_storage())
        return buffer is not None and buffer.host

    def owns(self, tensor: Tensor) -> bool:
        return tensor.is_cpu and tensor.layout is torch.strided and not self.is_host_memory(tensor)

    def allocated_bytes(self) -> int:
        """Count as `Device.allocated_bytes` does, with each storage rounded up to 512 bytes."""
        with self._machine.lock:
            self._machine.ledger.settle()
            return self._machine.ledger.allocated_bytes

    def peak_allocated_bytes(self) -> int:
        return self._machine.ledger.peak_bytes

    def peak_reserved_bytes(self) -> None:
        return None

    def cache_flushes(self) -> int:
        return 0

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

    def memory_reader(self) -> Callable[[], MemoryReading]:
        return self.read_memory

    def cumulative_offset(self) -> int:
        return 0

    def native_loop(self, streams: tuple[Stream, Stream]) -> None:
        """Return None: the simulator's streams are Python objects."""

    def allocator_hook(self) -> AllocatorHook | None:
        """Return None: this device's allocator has no hook."""
        return None

    # --- streams

    def current_stream(self) -> SimStream:
        return self._machine.current_stream()

    def new_stream(self, name: str) -> SimStream:
        return self._machine.make_stream(name, for_copies=True)

    def capturing(self) -> bool:
        """Return False: the simulator has no graphs."""
        return False

    def new_compute_stream(self, name: str = "compute") -> SimStream:
        return self._machine.make_stream(name, for_copies=False)

    @contextmanager
    def stream(self, stream: SimStream) -> Iterator[SimStream]:
        """Make `stream` this thread's current compute stream, as `torch.cuda.stream` does.

        From then on it works in program order. Autograd on CPU has no streams: backward runs on the caller's current one.
        """
        check_type("stream", stream, SimStream, "a stream of this device", "pass device.new_compute_stream()")
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
        """Latest copies on the engine of "d2h" or "h2d": those that a copy issued now may overlap."""
        with self._machine.lock:
            return tuple(self._machine.engines[direction].spans)

    def compute(self) -> AbstractContextManager[SimDevice]:
        """Return a context as `Device.compute` does: CPU ops of this thread, backward included, run on `current_stream()`."""
        return _Compute(self, self._machine)


class _Compute:
    """Context manager of `SimDevice.compute`. Not a generator: that would end its mode on the thread that drops it."""

    def __init__(self, device: SimDevice, machine: Machine) -> None:
        self._device = device
        self._machine = machine
        self._mode: SimCompute | None = None

    def __enter__(self) -> SimDevice:
        modes = _get_current_dispatch_mode_stack()
        if not any(isinstance(mode, SimCompute) and mode.machine is self._machine for mode in modes):
            self._mode = SimCompute(self._machine)
            self._mode.__enter__()
        return self._device

    def __exit__(self, *error: object) -> None:
        mode, self._mode = self._mode, None
        if mode is not None:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # as above
        if error[0] is None:
            self._device.allocated_bytes()  # raises the observer's errors about freed blocks, here at the latest
