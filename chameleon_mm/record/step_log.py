"""Log of a recorded step, from which its trace is made: operators, saves, uses, and their storages.

    log = StepLog(device, model=model, optimizers=(), times=times)
    read, new = log.before(call); out = call.run(); log.after(call, read, new)      # a tick
    log.save(traced); log.use(traced)                                               # a tick each
    trace = log.finish(fingerprint)

    kind of a storage, from model and optimizer: parameter, buffer, gradient of a parameter, optimizer state
    otherwise by its use in the step:
        outlives it, written after the last backward         -> optimizer state
        exists before, outlives it, written earlier      -> buffer (running statistics)
        exists before                                      -> input
        made in the step: saved by autograd                  -> activation
                          else                               -> temporary

Operators and hooks share one log: one builder numbers the ticks of both, and one table has their storages.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from chameleon_mm.device import Device, Event
from chameleon_mm.device.compiled_regions import Region
from chameleon_mm.device.operators import OpCall, Tensors, collect_tensors, inner_bytes, touched_bytes
from chameleon_mm.plan.trace import StepPhase, TensorKind, Trace, TraceBuilder, UInt8s
from chameleon_mm.record.dispatch_state import in_backward, in_compiled_region
from chameleon_mm.record.storages import PeakReadings, Readings, StorageTable, TracedStorage
from chameleon_mm.units import MIB

# --- Time each operator of a step on the device. The host never waits inside the step.
#
# On a GPU a timed event costs the host 5 us, as much as an operator, so there is one event for several operators. Their time is
# divided in proportion to an estimate: the larger of the times for bytes and FLOPs. On the simulator each operator has an
# event.

OPS_PER_EVENT = 16
"""Number of operators per timed event on a GPU. The event's 5 us of host time are then 3 % of the dispatch mode's time."""

FLOPS_PER_BYTE = 200
"""FLOPs that take as long as one byte of device memory. In half precision: 197 on an A100, and 295 on an H100."""

SHORTEST_KERNEL_BYTES = 4 * MIB
"""Bytes that device memory moves in 2 us, the time of the shortest kernel."""

_READS_LENGTHS = {
    "_flash_attention_forward", "_flash_attention_backward", "_efficient_attention_forward", "_efficient_attention_backward",
}  # fmt: skip
"""Operators whose FLOPs torch counts by reading lengths from the device, for which the host would wait."""


@dataclass(slots=True)
class _Stretch:
    start: Event
    end: Event | None = None
    ops: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)


class EventTimes:
    """Operator times by events on the current stream, one per `ops_per_event` operators. None: `OPS_PER_EVENT`, simulated 1."""

    def __init__(self, device: Device, *, ops_per_event: int | None = None) -> None:
        self._device = device
        self._ops_per_event = ops_per_event or (1 if device.simulated else OPS_PER_EVENT)
        self._current: _Stretch | None = None
        self._closed: list[_Stretch] = []

    def ran(self, op: int, call: OpCall) -> None:
        stretch = self._current
        if stretch is None:
            return
        stretch.ops.append(op)
        stretch.weights.append(1.0 if self._ops_per_event == 1 else weight_of(call))
        if len(stretch.ops) >= self._ops_per_event:
            self._current = _Stretch(self._close(stretch))

    def alone(self, op: int, nbytes: int) -> None:
        """Note operator `op`, which touched `nbytes`. All time since the latest `resume` belongs to it."""
        if self._current is not None:
            self._current.ops.append(op)
            self._current.weights.append(1.0)
            self._current = _Stretch(self._close(self._current))

    def pause(self) -> None:
        """Exclude the time until `resume` from the operators' times."""
        stretch, self._current = self._current, None
        if stretch is not None and stretch.ops:
            self._close(stretch)

    def resume(self) -> None:
        self._current = _Stretch(self._mark())

    def resolve(self) -> Iterator[tuple[int, float]]:
        """Yield number and microseconds of each operator. Call it after the step: the host may wait for the device."""
        self.pause()
        closed, self._closed = self._closed, []
        for stretch in closed:
            assert stretch.end is not None
            stretch.end.synchronize()
            stretch.start.synchronize()  # a pending event of another stream has no time in CUDA
            # Below 0 only if a stretch began on one stream and ended on another that was behind.
            elapsed_us = max(0.0, stretch.end.elapsed_us(stretch.start))
            total = sum(stretch.weights)
            for op, weight in zip(stretch.ops, stretch.weights, strict=True):
                yield op, elapsed_us * (weight / total if total else 1 / len(stretch.ops))

    def _mark(self) -> Event:
        return self._device.current_stream().record(timed=True)

    def _close(self, stretch: _Stretch) -> Event:
        stretch.end = self._mark()
        self._closed.append(stretch)
        return stretch.end


class PricedTimes:
    """Operator times by a price, for operators on fake tensors, which run no kernels.

    `price(flops, nbytes, dtype, name)`: time of an operator's kernel in microseconds, such as a `CostModel`'s `kernel_us`.
    """

    def __init__(self, price: Callable[[int, int, torch.dtype, str], float]) -> None:
        self._price = price
        self._times: list[tuple[int, float]] = []

    def ran(self, op: int, call: OpCall) -> None:
        facts = call.facts
        price = self._price(_flops(call), call.touched_bytes(), call.dtype, facts.name) if facts.kernel else 0.0
        self._times.append((op, price))

    def alone(self, op: int, nbytes: int) -> None:
        self._times.append((op, self._price(0, nbytes, torch.float32, "")))

    def pause(self) -> None:
        """Do nothing: no clock runs."""

    resume = pause

    def resolve(self) -> Iterator[tuple[int, float]]:
        yield from self._times


OpTimes = EventTimes | PricedTimes
"""Source of operator times. Called by one thread at a time."""


def weight_of(call: OpCall) -> float:
    """Return the relative weight of a call's time, in bytes of device memory; 0 if it launches no kernel."""
    if not call.facts.kernel:
        return 0.0
    return max(call.touched_bytes(), _flops(call) / FLOPS_PER_BYTE, SHORTEST_KERNEL_BYTES)


def _flops(call: OpCall) -> int:
    if call.facts.name in _READS_LENGTHS:
        return 0
    try:
        return call.flops()
    except Exception:  # noqa: BLE001 - torch's formula may not support these arguments; an estimate must not end a step
        return 0


# --- step log

UNMOVABLE = -1
"""Tensor number of a hook with no storage or with several."""

_FRESH = ("lift_fresh", "lift")
"""Operators whose input was just made, unseen by any dispatch mode, as in `torch.tensor`."""


@dataclass(slots=True)
class RunningRegion:
    """Running direction of a compiled region."""

    op: int
    tick: int
    read: list[TracedStorage]
    mutated: list[TracedStorage]
    read_bytes: int
    readings: PeakReadings


class StepLog:
    """Log of the step that begins now. Parameters as in `Recorder`. Not thread-safe. Holds no storage."""

    def __init__(
        self,
        device: Device,
        *,
        model: nn.Module | None,
        optimizers: Iterable[Optimizer],
        times: OpTimes | None,
        is_hidden: Callable[[torch.UntypedStorage], bool] = lambda storage: False,
    ) -> None:
        self._device = device
        self._is_hidden = is_hidden
        self._device_type = device.torch_device.type
        self._readings = Readings(device)
        self._start_bytes = self._readings.allocated_bytes
        self.builder = TraceBuilder(start_bytes=self._start_bytes)
        self.table = StorageTable(self.builder, allocated_bytes=self._start_bytes)
        self.times = EventTimes(device) if times is None else times
        self._parameters: dict[int, weakref.ref[Tensor]] = {}
        self.trained: list[weakref.ref[Tensor]] = []
        """Parameters whose gradients the step made and kept; known once the step is finished."""
        self._last_backward = -1, -1
        """Number and tick of the last operator of a backward so far."""
        self._in_backward = self._fake = False
        for storage, kind in kinds_of(model, optimizers, self._device_type):
            self._expect(storage, kind)
        for parameter in () if model is None else model.parameters():
            self._parameters[id(parameter)] = weakref.ref(parameter)
        self.times.resume()

    # --- operators

    def before(self, call: OpCall) -> tuple[list[TracedStorage], list[torch.UntypedStorage]]:
        """Note that `call` runs next. Returns its input storages: those in the table, and those not in it."""
        self._update_table()
        self._update_phase()
        return self._look_up(call.inputs)

    def after(self, call: OpCall, read: list[TracedStorage], new_storages: list[torch.UntypedStorage]) -> None:
        """Record that `call` ran. `read` and `new_storages`: as `before` returned them."""
        self.table.record_deaths()
        given, written, inner = self._number(call, new_storages)
        # In a region: a name that no repeatable operator has.
        name = f"compiled::{call.facts.name}" if in_compiled_region() else call.func.name()
        writes, crossed = [traced.number for traced in written], call.link_bytes(self._device.owns)
        op = self._op(name, (*read, *given), writes, inner_bytes=inner, link_bytes=crossed)
        self._wrote(op, written)
        self.times.ran(op, call)

    def _op(self, name: str, read: Iterable[TracedStorage], writes: Sequence[int] = (), **more: Any) -> int:
        """Record an operator. `more`: arguments of the builder's `op`. Returns its number."""
        phase, reads = StepPhase.BACKWARD if self._in_backward else StepPhase.FORWARD, [traced.number for traced in read]
        return self.builder.op(name, phase, 0.0, reads=reads, writes=writes, **more)

    def _wrote(self, op: int, written: Iterable[TracedStorage]) -> None:
        """Note that the latest operator, number `op`, wrote to these storages."""
        for traced in written:
            traced.last_write = op
            traced.first_write = op if traced.first_write < 0 else traced.first_write
        if self._in_backward:
            self._last_backward = op, self.builder.num_ticks - 1

    # --- compiled regions

    def enter_region(self, region: Region, args: list[Any]) -> RunningRegion:
        """Record that one direction of a region begins, called with `args`. The arguments may be freed while it runs."""
        self._update_table()
        self._update_phase()
        inputs = _tensors_in(args, self._device_type)
        tick = self.builder.num_ticks
        _, unknown = self._look_up(inputs)
        self._readings.take(self.table, unknown, tick=tick)
        read, _ = self._look_up(inputs)
        mutated = _tensors_in([args[i] for i in region.mutated if i < len(args)], self._device_type)
        op = self._op(region.name, read)  # numbered now: a storage freed while it runs dies after it
        self.times.pause()
        self.times.resume()
        nbytes = sum(touched_bytes(t) for t in inputs.values())
        return RunningRegion(op, tick, read, self._look_up(mutated)[0], nbytes, PeakReadings(self._device))

    def leave_region(self, running: RunningRegion, out: Any) -> bool:
        """Record that the region ended with the result `out`. Returns True if the result is in memory not from torch's
        allocator, such as a CUDA graph's. Raises `RuntimeError` if another operator ran at the same time."""
        op, tick = running.op, running.tick
        if self.builder.num_ops != op + 1:
            raise RuntimeError("another thread's operators ran beside it")
        running.readings.take()
        self.table.record_deaths()
        outputs = _tensors_in(out if isinstance(out, (tuple, list)) else (out,), self._device_type)
        given, unknown = self._look_up(outputs)  # it also returns inputs that backward needs
        made = [self.table.add(storage, born=tick, counted=True) for storage in unknown]
        made_bytes = sum(traced.charged_bytes for traced in made)
        freed_bytes = self._readings.take(self.table, tick=tick, made_bytes=made_bytes)
        inner_bytes = running.readings.inner_bytes(freed_bytes)
        changed = [one for one in given if one not in running.read or one in running.mutated]
        written = [*changed, *(one for one in running.mutated if one not in given), *made]
        self._wrote(op, written)
        self.builder.amend_latest_op(
            writes=[traced.number for traced in written], inner_bytes=inner_bytes, passed_bytes=freed_bytes - inner_bytes
        )
        self.times.alone(op, running.read_bytes + sum(touched_bytes(t) for t in outputs.values()))
        return any(storage.nbytes() and not storage.resizable() for storage in unknown)

    def read_memory(self) -> None:
        """Take a new reading of memory, so that bytes allocated until now are not attributed to the next operator."""
        self.table.record_deaths()
        self._readings.take(self.table, tick=self.builder.num_ticks)

    # --- hooks

    def add_claim(self, storage: torch.UntypedStorage) -> TracedStorage:
        """Note a new claim on `storage`. Returns the storage's record in the trace."""
        if self.table.find(storage) is None:  # saved before any operator read it
            if storage.device.type == self._device_type:
                self._readings.take(self.table, [storage], tick=self.builder.num_ticks)
            else:
                self.table.add(storage, born=-1, counted=False)  # not counted: not on the traced device, such as a fake tensor
        return self.table.saved(storage)

    def save(self, saved: Iterable[TracedStorage | None]) -> int:
        """Record that autograd saved a tensor with these storages. Returns the hook's number."""
        self._update_table()
        self._update_phase()
        return self.builder.save(self._only(saved))

    def use(self, used: Iterable[TracedStorage | None]) -> int:
        """Record that autograd uses a saved tensor with these storages. Returns the hook's number."""
        self._update_table()
        traced = list(used)
        for one in traced:
            if one is not None:
                self.table.used(one)
        return self.builder.use(self._only(traced))

    # --- the end

    def forget(self) -> None:
        self._parameters.clear()
        self.table.forget()

    def finish(self, fingerprint: int) -> Trace:
        """Return the trace of the finished step; waits for the device. Call once."""
        self._update_table()
        self._note_gradients()
        parameters = [(ref, parameter) for ref in self._parameters.values() if (parameter := ref()) is not None]
        self.trained = [
            ref
            for ref, parameter in parameters
            for storage in storages_of(gradients_of([parameter]), self._device_type)
            if (traced := self.table.find(storage)) is not None and traced.born >= 0
        ]
        uncounted_bytes = self.table.end(fake=self._fake)
        for op, duration_us in self.times.resolve():
            self.builder.set_duration(op, duration_us)
        last_op, last_tick = self._last_backward
        for traced in self.table.traced:
            self.builder.kind(traced.number, kind_seen(traced, last_backward_op=last_op, last_backward_tick=last_tick))
            if 0 <= traced.sendable < self.builder.num_hooks:
                self.builder.sendable(traced.number, traced.sendable)
        trace = self.builder.finish(fingerprint)
        self._parameters.clear()
        return dataclasses.replace(
            trace, start_bytes=self._start_bytes + uncounted_bytes, op_phase=_with_optimizer(trace, last_op, last_tick)
        )

    # --- storages

    def _look_up(self, tensors: Tensors) -> tuple[list[TracedStorage], list[torch.UntypedStorage]]:
        """Return the device storages of `tensors`: those in the table, and those not in it."""
        known: dict[int, TracedStorage] = {}
        unknown: dict[int, torch.UntypedStorage] = {}
        for t in tensors.values():
            storage = t.untyped_storage()
            if isinstance(t, Parameter):
                self._note_parameter(t, storage)
            if self._is_hidden(storage):
                continue
            traced = self.table.find(storage)
            if traced is not None:
                known[traced.number] = traced
            elif self._device.owns(t):
                unknown[id(storage)] = storage
        return list(known.values()), list(unknown.values())

    def _note_parameter(self, parameter: Parameter, storage: torch.UntypedStorage) -> None:
        ref = self._parameters.get(id(parameter))
        if ref is None or ref() is not parameter:
            self._parameters[id(parameter)] = weakref.ref(parameter)
            self._expect(storage, TensorKind.PARAMETER)

    def _number(
        self, call: OpCall, new_storages: list[torch.UntypedStorage]
    ) -> tuple[list[TracedStorage], list[TracedStorage], int]:
        """Number the unknown storages among the call's inputs and results. Returns the new inputs, all written storages, and
        the call's inner memory in bytes."""
        tick, fresh = self.builder.num_ticks, call.facts.name in _FRESH
        fake = any(isinstance(t, FakeTensor) for t in (*call.inputs.values(), *call.written.values()))
        written, unknown = self._look_up(call.written)
        given_ids = {id(storage) for storage in new_storages}
        for storage in unknown:
            if id(storage) not in given_ids:
                written.append(self.table.add(storage, born=tick, counted=not fake))
        if fake:
            self._fake, inner = True, inner_bytes(call)
            for storage in new_storages:
                self.table.add(storage, born=tick if fresh else -1, counted=False)
        else:
            made_bytes = sum(traced.charged_bytes for traced in written if traced.born == tick)
            inner = self._readings.take(self.table, new_storages, tick=tick, fresh=fresh, made_bytes=made_bytes)
        given = {id(storage): traced for storage in new_storages if (traced := self.table.find(storage)) is not None}
        written.extend(given[id(storage)] for storage in unknown if id(storage) in given)
        return list(given.values()), written, inner

    def _update_table(self) -> None:
        self.table.record_deaths()
        self.table.poll()

    def _update_phase(self) -> None:
        """Read whether a backward runs. If one has just ended, note the gradients that it made."""
        was_in_backward, self._in_backward = self._in_backward, in_backward()
        if was_in_backward and not self._in_backward:
            self._note_gradients()

    def _note_gradients(self) -> None:
        parameters = [parameter for ref in self._parameters.values() if (parameter := ref()) is not None]
        for storage in storages_of(gradients_of(parameters), self._device_type):
            self._expect(storage, TensorKind.GRADIENT)

    def _expect(self, storage: torch.UntypedStorage, kind: TensorKind) -> None:
        if not self._is_hidden(storage):
            self.table.expect(storage, kind)

    def _only(self, storages: Iterable[TracedStorage | None]) -> int:
        """Return the number of the only storage among `storages`; `UNMOVABLE` if there is none or several."""
        numbers = {traced.number for traced in storages if traced is not None and traced.owner is self.table.owner}
        return numbers.pop() if len(numbers) == 1 else UNMOVABLE


def _with_optimizer(trace: Trace, last_op: int, last_tick: int) -> UInt8s:
    """Return the phases of the operators, with OPTIMIZER after the last backward until the next save."""
    phases = trace.op_phase.copy()
    if last_op >= 0:
        saves = trace.hook_tick[~trace.hook_use & (trace.hook_tick > last_tick)]
        end = trace.num_ticks if len(saves) == 0 else saves[0]
        after = (trace.op_tick > last_tick) & (trace.op_tick < end)
        phases[after] = StepPhase.OPTIMIZER
    return phases


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor | None]:
    """Return the gradients of the leaves among `parameters`. `functional_call` adds others, for whose `grad` torch warns."""
    return [parameter.grad for parameter in parameters if parameter.is_leaf]


def fsdp_parameters(models: Iterable[nn.Module]) -> Iterator[Any]:
    """Yield FSDP2's `FSDPParam` of each sharded parameter."""
    for module in (module for model in models for module in model.modules()):
        if (get_state := getattr(module, "_get_fsdp_state", None)) is not None:
            state = get_state()
            groups = getattr(state, "_fsdp_param_groups", None)  # before torch 2.12 a state has one group, not a list
            for group in (state._fsdp_param_group,) if groups is None else groups:
                yield from () if group is None else group.fsdp_params


def kinds_of(
    model: nn.Module | None, optimizers: Iterable[Optimizer], device_type: str
) -> Iterator[tuple[torch.UntypedStorage, TensorKind]]:
    """Yield the storages of a model and of optimizers, with their kinds. If a storage has two kinds, the later counts."""
    named: list[tuple[Iterable[Any], TensorKind]] = []
    if model is not None:
        named.append((model.buffers(), TensorKind.BUFFER))
        named.append((model.parameters(), TensorKind.PARAMETER))
        named.append((gradients_of(model.parameters()), TensorKind.GRADIENT))
    for optimizer in optimizers:
        named.extend((state.values(), TensorKind.OPTIMIZER) for state in optimizer.state.values())
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        named.append((parameters, TensorKind.PARAMETER))
        named.append(((parameter.grad for parameter in parameters), TensorKind.GRADIENT))
    for tensors, kind in named:
        for storage in storages_of(tensors, device_type):
            yield storage, kind


def storages_of(values: Iterable[Any], device_type: str) -> list[torch.UntypedStorage]:
    """Return the storages of the tensors among `values`. Wrapper subclasses are unwrapped; other values are ignored."""
    return [t.untyped_storage() for t in _tensors_in(values, device_type).values()]


def _tensors_in(values: Iterable[Any], device_type: str) -> Tensors:
    """Return the plain tensors on the device among `values`, including those inside wrapper subclasses."""
    found: Tensors = {}
    collect_tensors(_plain(values), device_type, found)
    return found


def _plain(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        wrapper: Any = value  # the stub's protocol class cannot be a Tensor for mypy
        if is_traceable_wrapper_subclass(wrapper):
            names, _ = wrapper.__tensor_flatten__()
            yield from _plain(getattr(wrapper, name) for name in names)
        elif isinstance(value, Tensor) and not is_lazy(value):
            yield value


def kind_seen(traced: TracedStorage, *, last_backward_op: int, last_backward_tick: int) -> TensorKind:
    """Return a storage's kind by its use in a finished step. `last_backward_op`, `last_backward_tick`: -1: no backward."""
    if traced.kind is not None:
        return traced.kind
    before = traced.born < 0
    written_after_backward = 0 <= last_backward_op < traced.last_write
    if written_after_backward and not traced.dead and (before or traced.born > last_backward_tick):
        return TensorKind.OPTIMIZER
    if before:
        was_written = traced.first_write >= 0 and not traced.dead
        return TensorKind.BUFFER if was_written else TensorKind.INPUT
    return TensorKind.ACTIVATION if traced.saved else TensorKind.TEMPORARY
