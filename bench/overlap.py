"""Compute beside copies: what copies cost the compute they run beside, and how much of their own time disappears behind it.

for work in (matrix products, a memory-bound loop), for ways in (H2D, D2H, both):
    interleave: compute alone | copies alone | serial: compute, then copies | together: both from the same start
    slowdown = compute beside copies / compute alone
    hidden   = (serial - together) / copies alone          # the serial run of the same work, not a constant

chameleon-mm bench overlap --json overlap.json
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from rich.console import Console
from torch import Tensor

from chameleon_mm.bench._buffers import Buffers
from chameleon_mm.bench._measure import Cell, Column, Figure, Results, Waived, add_output_arguments, interleave, timed_us
from chameleon_mm.device import resolve_device
from chameleon_mm.device.protocols import Device, Event, Stream
from chameleon_mm.units import MIB

_WAYS: dict[str, tuple[str, ...]] = {"H2D": ("h2d",), "D2H": ("d2h",), "both ways": ("h2d", "d2h")}
_RING = 4  # chunks of pinned memory that copies rotate among, so that no single one sits in the processor's cache
_COPY_SHARE = 0.9  # of the compute's time: the engines are busy almost throughout, and all of it could be hidden
_LIMIT_S = 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large the work is."""

    gemm: int
    """Side of the square matrices."""
    stream_elements: int
    """Elements of each of the three tensors of the memory-bound loop."""
    dtype: torch.dtype
    chunk_bytes: int
    """Size of one copy."""
    target_us: float
    """How long the compute alone should take: the number of operators follows."""


_GPU_SIZES = Sizes(gemm=8192, stream_elements=128 * MIB, dtype=torch.bfloat16, chunk_bytes=32 * MIB, target_us=30_000)
_SIM_SIZES = Sizes(gemm=768, stream_elements=4 * MIB, dtype=torch.float32, chunk_bytes=1 * MIB, target_us=150)


def _columns(*, simulated: bool) -> tuple[Column, ...]:
    prefix = "simulated_" if simulated else ""
    titles = {
        "compute": ("compute us", "operators alone"),
        "copies": ("copies us", "copies alone"),
        "slowdown": ("slowdown", "compute beside copies / compute alone, by round"),
        "hidden": ("hidden", "(compute then copies - both from one start) / copies alone, by round: 1 is all of it"),
    }
    return tuple(
        Column(key=prefix + key, title=title, formula=formula, simulated=simulated) for key, (title, formula) in titles.items()
    )


class Sample(NamedTuple):
    """One run: until everything was done, and until the compute was."""

    total_us: float
    compute_us: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Register the options of `chameleon-mm bench overlap`."""
    add_output_arguments(parser)
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="samples of each figure (default: %(default)s)")


def run(args: argparse.Namespace, console: Console) -> int:
    """Measure, print, write what was asked for. Returns 0; raises `ValueError` for an unknown device."""
    device = resolve_device(args.device)
    results = measure(device, _SIM_SIZES if device.simulated else _GPU_SIZES, repeats=args.repeats)
    results.deliver(args, console)
    return 0


def measure(device: Device, sizes: Sizes, *, repeats: int = 7) -> Results:
    """The table of both kinds of compute beside copies each way and both ways at once."""
    if device.simulated:
        repeats = min(repeats, 2)  # virtual time repeats itself exactly; the second round shows it
    results = Results("overlap", device, [*_columns(simulated=False), *_columns(simulated=True)])
    results.notes.append("gemm: matrix products; mul: products by element, bound by memory bandwidth")
    with Buffers(device) as buffers, device.compute():
        copier = Copier(device, buffers, sizes.chunk_bytes)
        for work, operator in _operators(device, sizes).items():
            count = _count_for(partial(_compute_us, device, operator), sizes.target_us)
            compute_us = _compute_us(device, operator, count)
            for ways, names in _WAYS.items():
                copies = _count_for(partial(copier.run_us, names), _COPY_SHARE * compute_us)
                beside = Beside(copier, operator, count, names, copies)
                samples = interleave(beside.peers(), warmup=1, repeats=repeats, limit_s=_LIMIT_S)
                params = {"operators": count, "copies_each_way": copies, "bytes_each_way": copies * sizes.chunk_bytes}
                results.add(f"{work}, {ways}", params, derive(device, samples))
    return results


class Copier:
    """Issues copies each way from a ring of pinned memory, and compute beside them."""

    def __init__(self, device: Device, buffers: Buffers, chunk_bytes: int) -> None:
        self.device = device
        self.streams: dict[str, Stream] = {name: device.new_stream(name) for name in ("h2d", "d2h")}
        self._hbm = {name: buffers.on_device(chunk_bytes) for name in self.streams}
        self._ring = {name: buffers.pinned(chunk_bytes * _RING).split(chunk_bytes) for name in self.streams}

    def issue(self, names: Sequence[str], turn: int) -> None:
        """One copy in each of the directions `names`."""
        for name in names:
            hbm, host = self._hbm[name], self._ring[name][turn % _RING]
            dst, src = (hbm, host) if name == "h2d" else (host, hbm)
            self.streams[name].copy(dst, src)

    def start(self, names: Sequence[str], after: Event) -> None:
        """Let no copy begin before `after`."""
        for name in names:
            self.streams[name].wait(after)

    def finish(self, names: Sequence[str], start: Event, compute_end: Event) -> Sample:
        """Wait for everything; times from `start`."""
        ends = [self.streams[name].record(timed=True) for name in names]
        for end in (*ends, compute_end):
            end.synchronize()
        compute_us = compute_end.elapsed_us(start)
        return Sample(max([compute_us, *(end.elapsed_us(start) for end in ends)]), compute_us)

    def run(self, names: Sequence[str], copies: int) -> Sample:
        """Copies alone."""
        start = self.device.current_stream().record(timed=True)
        self.start(names, start)
        for turn in range(copies):
            self.issue(names, turn)
        return self.finish(names, start, start)

    def run_us(self, names: Sequence[str], copies: int) -> float:
        """Time until the last of the copies alone is done."""
        return self.run(names, copies).total_us


@dataclass(frozen=True, slots=True)
class Beside:
    """The same compute and the same copies, alone, in turn and together."""

    copier: Copier
    operator: Callable[[], None]
    count: int
    names: tuple[str, ...]
    copies: int

    def peers(self) -> dict[str, Callable[[], Sample]]:
        return {"compute": self.compute, "copies": self.copy, "serial": self.serial, "together": self.together}

    def compute(self) -> Sample:
        elapsed = _compute_us(self.copier.device, self.operator, self.count)
        return Sample(elapsed, elapsed)

    def copy(self) -> Sample:
        return self.copier.run(self.names, self.copies)

    def serial(self) -> Sample:
        stream = self.copier.device.current_stream()
        start = stream.record(timed=True)
        for _ in range(self.count):
            self.operator()
        computed = stream.record(timed=True)
        self.copier.start(self.names, computed)  # not before the compute is done: that is what serial means
        for turn in range(self.copies):
            self.copier.issue(self.names, turn)
        return self.copier.finish(self.names, start, computed)

    def together(self) -> Sample:
        stream = self.copier.device.current_stream()
        start = stream.record(timed=True)
        self.copier.start(self.names, start)
        turn = 0
        for done in range(self.count):
            # Spread over the operators: issuing all copies first would leave the compute waiting for the host.
            while turn * self.count <= done * self.copies and turn < self.copies:
                self.copier.issue(self.names, turn)
                turn += 1
            self.operator()
        computed = stream.record(timed=True)
        for rest in range(turn, self.copies):
            self.copier.issue(self.names, rest)
        return self.copier.finish(self.names, start, computed)


def _operators(device: Device, sizes: Sizes) -> dict[str, Callable[[], None]]:
    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device.torch_device, dtype=sizes.dtype)

    a, b, c = (random(sizes.gemm, sizes.gemm) for _ in range(3))
    x, y, z = (random(sizes.stream_elements) for _ in range(3))

    def gemm() -> None:
        torch.mm(a, b, out=c)

    def multiply() -> None:
        torch.mul(x, y, out=z)

    return {"gemm": gemm, "mul": multiply}


def _compute_us(device: Device, operator: Callable[[], None], count: int) -> float:
    def work() -> None:
        for _ in range(count):
            operator()

    return timed_us(device.current_stream(), work)


def _count_for(run_us: Callable[[int], float], target_us: float) -> int:
    """How many repetitions take about `target_us`, by the time that four of them take once they are warm."""
    run_us(4)
    return max(4, round(4 * target_us / run_us(4)))


def derive(device: Device, samples: Mapping[str, Sequence[Sample]]) -> dict[str, Cell]:
    """The cells of one row from the samples of its four peers, round by round."""
    rounds = list(zip(*(samples[name] for name in ("compute", "copies", "serial", "together")), strict=True))
    figures = {
        "compute": ([compute.total_us for compute, _, _, _ in rounds], "us"),
        "copies": ([copies.total_us for _, copies, _, _ in rounds], "us"),
        "slowdown": ([together.compute_us / compute.compute_us for compute, _, _, together in rounds], "1"),
        "hidden": ([(serial.total_us - both.total_us) / copies.total_us for _, copies, serial, both in rounds], "1"),
    }
    here, there = ("simulated_", "") if device.simulated else ("", "simulated_")
    if device.simulated:
        reason = f"measured on a CUDA GPU alone; this run is on a {device.name}"
    else:
        reason = "this run is on a real GPU; --device sim gives the simulator's figures"
    cells: dict[str, Cell] = {there + key: Waived(reason) for key in figures}
    for key, (values, unit) in figures.items():
        cells[here + key] = Figure.of(values, unit, simulated=device.simulated)
    return cells
