"""The model's own CPU ops as the simulated GPU's compute: a dispatch mode that orders, counts and prices each of them.

    reads   -> each input's bytes, checked against the copies that touch them        (before the operator runs)
    run     -> the real CPU operator: the numbers are real
    writes  -> results and mutated inputs; new storages are charged for, and may not fit
    time    -> host: launch cost; stream: max(its time, host's) + price of the kernel
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from chameleon_mm.device.sim.cost import bytes_touched, flops_of

if TYPE_CHECKING:
    from chameleon_mm.device.sim.device import SimDevice
    from chameleon_mm.device.sim.stream import SimStream

_HOST_READS = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "unique_dim", "_unique2", "masked_select"}
"""Operators whose result the host needs before it goes on: on a GPU each waits for the stream."""

_NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_", "resize_", "detach"}
"""Operators that launch nothing besides the views, which their schemas tell."""


@dataclass(frozen=True, slots=True)
class OpFacts:
    """What an operator's schema says, read once."""

    name: str
    kernel: bool
    host_reads: bool
    mutated: tuple[int, ...]
    mutated_names: tuple[str, ...]

    @staticmethod
    def of(func: torch._ops.OpOverload) -> OpFacts:
        schema = func._schema
        name = schema.name.partition("::")[2]
        aliases = [r.alias_info for r in schema.returns if r.alias_info is not None]
        is_view = bool(aliases) and not any(alias.is_write for alias in aliases)
        written = [(i, a) for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
        return OpFacts(
            name,
            kernel=not is_view and name not in _NO_KERNEL,
            host_reads=name in _HOST_READS,
            mutated=tuple(i for i, a in written if not a.kwarg_only),
            mutated_names=tuple(a.name for _, a in written),
        )


class SimCompute(TorchDispatchMode):
    """While active, this thread's CPU ops run on a simulated device's current stream."""

    def __init__(self, device: SimDevice) -> None:
        super().__init__()
        self._device = device
        self._facts: dict[torch._ops.OpOverload, OpFacts] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        facts = self._facts.get(func)
        if facts is None:
            facts = self._facts[func] = OpFacts.of(func)
        device = self._device
        inputs = [t for t in _plain_tensors((args, kwargs)) if device.owns(t) or device.is_host_memory(t)]
        with device.lock:
            device.settle()
            stream = device.current_stream()
            device.begin_op(stream, inputs)
            if facts.kernel:
                device.access(stream, inputs, write=False, label=f"{facts.name} on {stream.name}")
        out = func(*args, **kwargs)
        with device.lock:
            self._book(facts, stream, inputs, func, args, kwargs, out)
        return out

    def _book(
        self,
        facts: OpFacts,
        stream: SimStream,
        inputs: list[Tensor],
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
    ) -> None:
        device = self._device
        results = [t for t in _plain_tensors(out) if device.owns(t) or device.is_host_memory(t)]
        mutated = [t for i in facts.mutated if i < len(args) for t in _plain_tensors(args[i])]
        mutated += [t for n in facts.mutated_names if n in kwargs for t in _plain_tensors(kwargs[n])]
        device.adopt_results(stream, results, mutated)
        if not facts.kernel:
            device.host_us += device.cost.view_us
            return
        device.access(stream, [*results, *mutated], write=True, label=f"{facts.name} on {stream.name}")
        touched = [*inputs, *results]
        dtype = results[0].dtype if results else (inputs[0].dtype if inputs else torch.float32)
        price = device.cost.kernel_us(flops_of(func, args, kwargs, out), bytes_touched(touched), dtype)
        device.run_kernel(stream, price)
        if facts.host_reads:
            device.host_waits_for(stream)


def _plain_tensors(value: Any) -> Iterator[Tensor]:
    """The strided CPU tensors in a nest of arguments; wrapper subclasses give what they wrap."""
    if isinstance(value, Tensor):
        if is_traceable_wrapper_subclass(value):
            for attribute in value.__tensor_flatten__()[0]:
                yield from _plain_tensors(getattr(value, attribute))
        elif value.device.type == "cpu" and value.layout is torch.strided and not isinstance(value, FakeTensor):
            yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _plain_tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _plain_tensors(item)


