"""What the light profiler costs of a training step on a GPU: the same step under hooks that do nothing, and under its own.

each round: one step under either way, in turn     share = light / hooks alone - 1, on the device's clock
                                                   host  = what the host's threads took more, of the step

A step of this benchmark's model has some forty saves in each layer and keeps a GPU busy for milliseconds with each; the host,
which does the watching, runs ahead of it. So the share on the device's clock is what a user pays, and the host's is what it
would be for a model so small that the GPU waits for the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from chameleon_mm.bench._llama import Shape, Stack, noise
from chameleon_mm.bench._measure import Cell, Column, Figure, Results, Waived, interleave
from chameleon_mm.bench._profiler_peers import HOOKS, LIGHT, keep
from chameleon_mm.bench._report import Bound, median_of
from chameleon_mm.device.protocols import Device
from chameleon_mm.profiler.light import NEW_STORAGE, LightProfiler
from chameleon_mm.profiler.step_record import StepRecord

MAX_SHARE = 0.005
LAYERS = 2
"""Enough for a share: saves and work both grow with layers."""

_ON_A_SIMULATOR = Waived("on a simulator the CPU does the device's work: a share of that step says nothing of a GPU's")

_COLUMNS = (
    Column(key="step", title="step ms", formula="time between events around a step"),
    Column(key="share", title="share %", formula="100 * (step / step under hooks alone in the same round - 1)"),
    Column(
        key="host",
        title="host %",
        formula="100 * (processor time until all is launched, less that under hooks alone) / step",
    ),
)


class Sample(NamedTuple):
    """One step, microseconds."""

    step_us: float
    """On the device's clock."""
    host_us: float
    """Processor time of all the host's threads until everything was launched."""


def light_share(device: Device, shape: Shape, *, repeats: int, seed: int) -> tuple[Results, Bound]:
    """The table, and the bound on the share of a step. On a simulator both are waived."""
    table = Results("training", device, _COLUMNS)
    small = replace(shape, layers=min(shape.layers, LAYERS))
    rows: dict[str, dict[str, Cell]]
    if device.simulated:
        rows = {name: {column.key: _ON_A_SIMULATOR for column in _COLUMNS} for name in (HOOKS, LIGHT)}
    else:
        rows = _rows(samples(device, small, repeats=repeats, seed=seed))
        table.notes.append(f"light profiler: {small.layers} blocks of the same sizes, AdamW, nothing is swapped")
    for name, cells in rows.items():
        table.add(name, {"watch": name, **asdict(small)}, cells)
    share = median_of(rows[LIGHT]["share"])
    found = share if isinstance(share, Waived) else share / 100
    return table, Bound(name="light profiler, share of a training step over hooks alone", limit=MAX_SHARE, found=found)


def samples(device: Device, shape: Shape, *, repeats: int, seed: int) -> dict[str, list[Sample]]:
    """`repeats` steps under either way, in turn."""
    torch.manual_seed(seed)
    model = Stack(shape, device=device.torch_device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    x, target = (noise(shape, device.torch_device) for _ in range(2))

    def step() -> None:
        model.loss(x, target).backward()
        optimizer.step()
        optimizer.zero_grad()

    ways: dict[str, Callable[[Callable[[], None]], None]] = {HOOKS: _hooks_alone, LIGHT: _Watcher()}
    return interleave({name: partial(_sample, device, partial(way, step)) for name, way in ways.items()}, repeats=repeats)


def _sample(device: Device, step: Callable[[], None]) -> Sample:
    stream = device.current_stream()
    device.synchronize()
    start, host_ns = stream.record(timed=True), time.process_time_ns()
    step()
    host_us = (time.process_time_ns() - host_ns) / 1e3  # before the wait, in which the host does nothing but ask
    end = stream.record(timed=True)
    end.synchronize()
    return Sample(end.elapsed_us(start), host_us)


def _rows(taken: dict[str, list[Sample]]) -> dict[str, dict[str, Cell]]:
    figure = partial(Figure.of, simulated=False)
    none = Waived("it is what the light profiler is compared with")
    pairs = list(zip(taken[LIGHT], taken[HOOKS], strict=True))
    step_us = median(hooks.step_us for _, hooks in pairs)
    steps = {name: figure([sample.step_us / 1e3 for sample in found], "ms") for name, found in taken.items()}
    return {
        HOOKS: {"step": steps[HOOKS], "share": none, "host": none},
        LIGHT: {
            "step": steps[LIGHT],
            "share": figure([100 * (light.step_us / hooks.step_us - 1) for light, hooks in pairs], "%"),
            "host": figure([100 * (light.host_us - hooks.host_us) / step_us for light, hooks in pairs], "%"),
        },
    }


def _hooks_alone(step: Callable[[], None]) -> None:
    with saved_tensors_hooks(keep, keep):
        step()


class _Watcher:
    """As the executor has it: a step that is like the one before is followed."""

    def __init__(self) -> None:
        self._light = LightProfiler()
        self._before: StepRecord | None = None

    def __call__(self, step: Callable[[], None]) -> None:
        light = self._light
        light.begin_step()
        if self._before is not None:
            light.follow(self._before)
        with saved_tensors_hooks(self._on_save, self._on_use):
            step()
        self._before = light.end_step()

    def _on_save(self, t: Tensor) -> tuple[Tensor, int]:
        hook = self._light.num_hooks
        self._light.saved(t, NEW_STORAGE)  # whose storage it is, the executor knows: no cost of this profiler's
        return t, hook

    def _on_use(self, saved: tuple[Tensor, int]) -> Tensor:
        t, hook = saved
        self._light.used(hook)
        return t
