"""Times each operator of a step on the device, without ever making the host wait inside the step.

    times.begin(); times.ran(0, call); ...            # a timed event after every few operators: a stretch
    times.pause(); ...swapping...; times.resume()     # what is between them belongs to no operator
    for op, us in times.resolve(): ...                # after the step: each stretch divided among its operators

A timed event costs the host 5 us on a GPU, as much as an operator, so there is one for several of them, and a stretch is
divided in proportion to an estimate: the larger of what the bytes and what the FLOPs ask for. The simulator gives one for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from chameleon_mm.device import Device, Event
from chameleon_mm.device.op_call import OpCall
from chameleon_mm.units import MIB

OPS_PER_EVENT = 16
"""Operators per timed event on a GPU: 5 us of host time for each are then 3 % of what the dispatch mode takes."""

FLOPS_PER_BYTE = 200
"""Operations that take as long as one byte of device memory: 197 on an A100 and 295 on an H100, in half precision."""

SHORTEST_KERNEL_BYTES = 4 * MIB
"""Bytes that device memory moves in the 2 us that the shortest kernel takes."""

_READS_LENGTHS = {
    "_flash_attention_forward", "_flash_attention_backward", "_efficient_attention_forward", "_efficient_attention_backward",
}  # fmt: skip
"""Operators whose FLOPs torch counts by reading lengths from the device, for which the host would wait."""


@dataclass(slots=True)
class _Stretch:
    """Operators between two events."""

    start: Event
    end: Event | None = None
    ops: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)


class EventTimes:
    """Times by events on the current stream, one after every `ops_per_event` operators (None: each one on a simulated device).

    Raises `ValueError` for less than one.
    """

    def __init__(self, device: Device, *, ops_per_event: int | None = None) -> None:
        if ops_per_event is not None and ops_per_event < 1:
            raise ValueError(f"ops_per_event: expected 1 or more, got {ops_per_event}")
        self._device = device
        self._ops_per_event = ops_per_event or (1 if device.simulated else OPS_PER_EVENT)
        self._current: _Stretch | None = None
        self._closed: list[_Stretch] = []

    def begin(self) -> None:
        self.resume()

    def ran(self, op: int, call: OpCall) -> None:
        """Note that operator number `op` was launched."""
        stretch = self._current
        if stretch is None:
            return
        stretch.ops.append(op)
        stretch.weights.append(1.0 if self._ops_per_event == 1 else weight_of(call))
        if len(stretch.ops) >= self._ops_per_event:
            self._current = _Stretch(self._close(stretch))

    def pause(self) -> None:
        """Count what follows until `resume` as no operator's time."""
        stretch, self._current = self._current, None
        if stretch is not None and stretch.ops:
            self._close(stretch)

    def resume(self) -> None:
        self._current = _Stretch(self._mark())

    def resolve(self) -> Iterator[tuple[int, float]]:
        """Yield number and microseconds of each operator. The step is over; the host may wait for the device."""
        self.pause()
        closed, self._closed = self._closed, []
        for stretch in closed:
            assert stretch.end is not None
            stretch.end.synchronize()
            stretch.start.synchronize()  # on another stream it need not be over, and CUDA tells no time of a pending event
            # Below 0 only where a stretch began on one stream and ended on another that was not as far.
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
    """Times by a price, for operators that do not run: fake tensors have shapes and no kernels.

    `price(flops, nbytes, dtype)` is what a kernel takes in microseconds: a `CostModel`'s `kernel_us`.
    """

    def __init__(self, price: Callable[[int, int, torch.dtype], float]) -> None:
        self._price = price
        self._times: list[tuple[int, float]] = []

    def begin(self) -> None:
        """Does nothing: no clock runs."""

    def ran(self, op: int, call: OpCall) -> None:
        price = self._price(_flops(call), call.touched_bytes(), call.dtype) if call.facts.kernel else 0.0
        self._times.append((op, price))

    def pause(self) -> None:
        """Does nothing: no clock runs."""

    def resume(self) -> None:
        """Does nothing: no clock runs."""

    def resolve(self) -> Iterator[tuple[int, float]]:
        yield from self._times


OpTimes = EventTimes | PricedTimes
"""Takes the time of operators. Called by one thread at a time."""


def weight_of(call: OpCall) -> float:
    """Weight of a call's time in comparison with others, in bytes of device memory; 0 where it launches nothing."""
    if not call.facts.kernel:
        return 0.0
    return max(call.touched_bytes(), _flops(call) / FLOPS_PER_BYTE, SHORTEST_KERNEL_BYTES)


def _flops(call: OpCall) -> int:
    if call.facts.name in _READS_LENGTHS:
        return 0
    try:
        return call.flops()
    except Exception:  # noqa: BLE001 - a formula of torch's that does not know these arguments; an estimate must not end a step
        return 0
