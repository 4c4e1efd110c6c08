"""Operators under no dispatch mode, under one that does nothing, and under the watch that notes how storages are made.

sample = modes(device, operators)["call watch"]()     # a fresh mode; the median loop: us for an operator, us for a view
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from chameleon_mm.bench._hooks_peers import TENSOR_BYTES, TIMED_STEPS, UNPLANNED_STEPS, quiet
from chameleon_mm.bench.profiler import PassThrough
from chameleon_mm.device.protocols import Device
from chameleon_mm.profiler.call_watch import CallWatch
from chameleon_mm.profiler.calls import Value

NO_MODE = "no mode"
EMPTY_MODE = "a mode that does nothing"
CALL_WATCH = "call watch"


class ModeSample(NamedTuple):
    """Figures of one way in one round."""

    kernel_us: float
    """Host time of an operator that makes bytes, with gradient."""
    view_us: float
    """Host time of one that makes a view."""


def modes(device: Device, operators: int) -> Mapping[str, Callable[[], ModeSample]]:
    """Every way by its name, the one that the others are compared with first."""
    with device.compute():
        leaf = torch.zeros(TENSOR_BYTES // 4, device=device.torch_device, requires_grad=True)
    ways: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        NO_MODE: nullcontext,
        EMPTY_MODE: PassThrough,
        CALL_WATCH: lambda: CallWatch(device, _nothing),
    }
    return {name: partial(_sample, device, leaf, operators, mode) for name, mode in ways.items()}


def _sample(device: Device, leaf: Tensor, operators: int, mode: Callable[[], AbstractContextManager[Any]]) -> ModeSample:
    with device.compute(), quiet(device):
        taken = [_loops(leaf, operators, mode()) for _ in range(UNPLANNED_STEPS + TIMED_STEPS)][-TIMED_STEPS:]
    return ModeSample(median(sample.kernel_us for sample in taken), median(sample.view_us for sample in taken))


def _loops(leaf: Tensor, operators: int, mode: AbstractContextManager[Any]) -> ModeSample:
    with mode:
        start = time.process_time_ns()
        y = leaf
        for _ in range(operators):
            y = y.sin()
        middle = time.process_time_ns()
        for _ in range(operators):
            y.view(-1)
        end = time.process_time_ns()
    return ModeSample((middle - start) / 1e3 / operators, (end - middle) / 1e3 / operators)


def _nothing(value: Value) -> None:
    """Do nothing before a write."""
