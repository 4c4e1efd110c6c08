"""The model's own CPU ops as the simulated GPU's compute: a dispatch mode that orders, counts and prices each of them.

reads   -> each input's bytes                                                    (before the operator runs)
run     -> the real CPU operator: the numbers are real
writes  -> results and mutated inputs; new storages are charged for, and may not fit; so is what it takes for itself meanwhile
time    -> host: launch cost; stream: max(its time, host's) + price of the kernel
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from chameleon_mm.device.inner_memory import inner_bytes
from chameleon_mm.device.op_call import OpCall
from chameleon_mm.device.operators import OpFactsCache, run_in_parts, runs_in_parts
from chameleon_mm.device.sim.machine import Machine
from chameleon_mm.device.sim.sim_stream import SimStream
from chameleon_mm.uncompiled import import_dynamo


class SimCompute(TorchDispatchMode):
    """While active, this thread's CPU ops run on a simulated device's current stream.

    Wrapper subclasses take themselves apart first, composite operators are taken apart (in inference mode they arrive whole):
    what is priced is what a GPU would launch. Raises what an allocation or an observer raises; an operator whose
    results do not fit has run, as one that fails half-way on a GPU has: what it mutated is mutated, its generator has moved.
    """

    def __init__(self, machine: Machine) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch annotates no argument of it
        import_dynamo()
        self.machine = machine
        self._facts = OpFactsCache("cpu")  # whose kernels run, and decide what they give

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for kind in types:
            if issubclass(kind, FakeTensor):
                return func(*args, **kwargs)  # no memory, no kernel
            if is_traceable_wrapper_subclass_type(kind):
                return NotImplemented  # asks the subclass, with this mode still active for what it is made of
        facts = self._facts[func]
        if runs_in_parts(facts, func, args, kwargs):
            return run_in_parts(func, args, kwargs, self)
        return self._launch(OpCall(facts, func, args, kwargs, device_type="cpu"))

    def _launch(self, call: OpCall) -> Any:
        machine, facts = self.machine, call.facts
        with machine.lock:
            machine.ledger.settle()
            stream = machine.current_stream()
            machine.observer.launch(stream)
            hosts = [machine.ledger.adopt(t.untyped_storage()).host for t in call.inputs.values()]
            if facts.kernel and hosts and all(hosts) and (facts.in_place or facts.host_reads):
                return self._run_on_host(call)
            label = f"{facts.name} on {stream.name}"
            read_bytes = machine.access(stream, call.read(), write=False, label=label) if facts.kernel else 0
        out = call.run()
        if any(isinstance(t, FakeTensor) for t in call.written.values()):
            return out  # a factory under a FakeTensorMode: no memory, no kernel
        if call.inputs or call.written:
            with machine.lock:
                machine.ledger.settle()  # what died while the operator ran makes room for its results
                for t in call.written.values():  # all of them first: whether they fit comes before whether they race
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
        """Pinned memory alone: on a GPU's machine the host does it, at once, in its own program order."""
        label = f"{call.facts.name} on the host"
        self.machine.host_access(call.read(), write=False, label=label)
        out = call.run()
        self.machine.host_access(call.mutated.values(), write=True, label=label)
        return out

    def _take_time(self, call: OpCall, stream: SimStream, read_bytes: int, written_bytes: int, reads_host: bool) -> None:
        machine, facts = self.machine, call.facts
        machine.host_us += machine.cost.launch_us
        if facts.copies and reads_host:
            ends = [machine.ledger.adopt(t.untyped_storage()).host for t in call.written.values()]
            machine.transfer(stream, written_bytes, to_host=all(ends), from_host=not all(ends))
            if not call.non_blocking:
                machine.host_waits_for(stream)
            return
        if facts.gathers:
            read_bytes = min(read_bytes, 2 * written_bytes)
        machine.run_kernel(stream, machine.cost.kernel_us(call.flops(), read_bytes + written_bytes, call.dtype))
        if facts.host_reads:
            machine.host_waits_for(stream)
