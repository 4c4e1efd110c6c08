"""Both sides of an overlap: operators on the compute stream, and traffic on other streams.

    traffic = copier(device, buffers, chunk_bytes)        # or packed_copies
    beside = Beside(traffic, operator, count, ("h2d",), units)
    interleave(beside.peers())          # compute alone | traffic alone | serial: compute, then traffic | together

Traffic consists of units (a copy or a packed batch), which are spread over the operators: if all were issued first, compute
would wait for the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from chameleon_mm.bench._buffers import Buffers
from chameleon_mm.bench._measure import timed_us
from chameleon_mm.device.packing import packed_offsets
from chameleon_mm.device.protocols import Device, Event, Stream

PACKED_TENSORS = 64

_RING = 4  # chunks of pinned memory that copies rotate among, so that none stays in the processor's cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of the work."""

    gemm: int
    """Side of the square matrices."""
    stream_elements: int
    """Elements of each of the three tensors of the memory-bound loop."""
    dtype: torch.dtype
    chunk_bytes: int
    """Size of one copy."""
    target_us: float
    """Target time of the compute alone; it determines the number of operators."""
    batches: int | None = None
    """Number of packed batches in a run; None: determined by the time of the compute that runs with them."""


class Sample(NamedTuple):
    """Times of one run, from its start: until all is done, until compute is done, until traffic is done."""

    total_us: float
    compute_us: float
    traffic_us: float = 0.0


@dataclass(frozen=True, slots=True)
class Traffic:
    """Traffic that runs at the same time as compute: units on named streams."""

    device: Device
    streams: dict[str, Stream]
    issue_one: Callable[[str, int], None]
    """Enqueues the n-th unit on the stream of a name."""
    packing: Stream | None = None
    """Another stream that takes part in each unit."""

    def issue(self, names: Sequence[str], turn: int) -> None:
        """Enqueue a unit on each of the streams `names`."""
        for name in names:
            self.issue_one(name, turn)

    def start(self, names: Sequence[str], after: Event) -> None:
        """Let no unit begin before `after`."""
        for name in names:
            self.streams[name].wait(after)
        if self.packing is not None:
            self.packing.wait(after)

    def finish(self, names: Sequence[str], start: Event, compute_end: Event) -> Sample:
        """Wait for everything, and return the times from `start`."""
        ends = [self.streams[name].record(timed=True) for name in names]
        for end in (*ends, compute_end):
            end.synchronize()
        compute_us = compute_end.elapsed_us(start)
        traffic_us = max([end.elapsed_us(start) for end in ends], default=0.0)
        return Sample(max(compute_us, traffic_us), compute_us, traffic_us)

    def run(self, names: Sequence[str], units: int) -> Sample:
        """Run units without compute."""
        start = self.device.current_stream().record(timed=True)
        self.start(names, start)
        for turn in range(units):
            self.issue(names, turn)
        return self.finish(names, start, start)

    def run_us(self, names: Sequence[str], units: int) -> float:
        """Time until the last unit is done, without compute."""
        return self.run(names, units).total_us


def copier(device: Device, buffers: Buffers, chunk_bytes: int) -> Traffic:
    """Copies each way, from and to a ring of pinned memory."""
    streams = {name: device.new_stream(name) for name in ("h2d", "d2h")}
    memory = {name: buffers.on_device(chunk_bytes) for name in streams}
    ring = {name: buffers.pinned(chunk_bytes * _RING).split(chunk_bytes) for name in streams}

    def issue_one(name: str, turn: int) -> None:
        hbm, host = memory[name], ring[name][turn % _RING]
        dst, src = (hbm, host) if name == "h2d" else (host, hbm)
        streams[name].copy(dst, src)

    return Traffic(device, streams, issue_one)


def packed_copies(device: Device, buffers: Buffers, nbytes: int) -> Traffic:
    """Batches as the library moves them: packed on a separate stream, each copied to pinned memory by one copy.

    `nbytes`: size of a batch, a multiple of 64 * 128.
    """
    copies, packing = device.new_stream("d2h"), device.new_stream("pack")
    sources = buffers.on_device(nbytes).split(nbytes // PACKED_TENSORS)
    offsets, total = packed_offsets([t.numel() for t in sources])
    # Two, so that one is packed while the other is copied; two on the host, so that each copy has a place.
    staging = [buffers.on_device(total) for _ in range(2)]
    host = [buffers.pinned(total) for _ in range(2)]
    copied: list[Event | None] = [None, None]

    def issue_one(name: str, turn: int) -> None:
        slot = turn % 2
        if (before := copied[slot]) is not None:
            packing.wait(before)  # the copy out of this staging buffer -> the next kernel that fills it
        packing.pack(staging[slot], sources, offsets)
        copies.wait(packing.record())  # the kernel that fills it -> the copy out of it
        copies.copy(host[slot], staging[slot])
        copied[slot] = copies.record()

    return Traffic(device, {"d2h": copies}, issue_one, packing)


@dataclass(frozen=True, slots=True)
class Beside:
    """Runs of the same compute and traffic: each alone, one after the other, and together."""

    traffic: Traffic
    operator: Callable[[], None]
    count: int
    names: tuple[str, ...]
    units: int

    def peers(self) -> dict[str, Callable[[], Sample]]:
        return {"compute": self.compute, "copies": self.alone, "serial": self.serial, "together": self.together}

    def compute(self) -> Sample:
        elapsed = compute_us(self.traffic.device, self.operator, self.count)
        return Sample(elapsed, elapsed)

    def alone(self) -> Sample:
        return self.traffic.run(self.names, self.units)

    def serial(self) -> Sample:
        stream = self.traffic.device.current_stream()
        start = stream.record(timed=True)
        for _ in range(self.count):
            self.operator()
        computed = stream.record(timed=True)
        self.traffic.start(self.names, computed)  # traffic starts when the compute is done
        for turn in range(self.units):
            self.traffic.issue(self.names, turn)
        return self.traffic.finish(self.names, start, computed)

    def together(self) -> Sample:
        stream = self.traffic.device.current_stream()
        start = stream.record(timed=True)
        self.traffic.start(self.names, start)
        turn = 0
        for done in range(self.count):
            while turn * self.count <= done * self.units and turn < self.units:
                self.traffic.issue(self.names, turn)
                turn += 1
            self.operator()
        computed = stream.record(timed=True)
        for rest in range(turn, self.units):
            self.traffic.issue(self.names, rest)
        return self.traffic.finish(self.names, start, computed)


def operators(device: Device, sizes: Sizes) -> dict[str, Callable[[], None]]:
    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device.torch_device, dtype=sizes.dtype)

    a, b, c = (random(sizes.gemm, sizes.gemm) for _ in range(3))
    x, y, z = (random(sizes.stream_elements) for _ in range(3))

    def gemm() -> None:
        torch.mm(a, b, out=c)

    def multiply() -> None:
        torch.mul(x, y, out=z)

    return {"gemm": gemm, "mul": multiply}


def compute_us(device: Device, operator: Callable[[], None], count: int) -> float:
    def work() -> None:
        for _ in range(count):
            operator()

    return timed_us(device.current_stream(), work)


def count_for(run_us: Callable[[int], float], target_us: float) -> int:
    """Number of repetitions that take about `target_us`, by the time of four repetitions after a warm-up."""
    run_us(4)
    return max(4, round(4 * target_us / run_us(4)))
