"""A run of the demo's training on a device of the library, swapped or not: nothing but the swapping can differ.

program = Program(...)                        # the training itself
with session_of(model) as session:            # Unswapped, or a SwapSession
    for each step:
        with session.step():
            program.step(number)
its numbers, the time and the peak of each step -> RunResult
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Self

from torch import nn

from chameleon_mm.demo.model import GPT
from chameleon_mm.demo.program import Numbers, Program, Rows, TrainConfig
from chameleon_mm.device.protocols import Device
from chameleon_mm.device.reproducible import reproducible

if TYPE_CHECKING:
    from chameleon_mm.session import SwapSession


class Unswapped:
    """The session of a run that swaps nothing: torch as it comes."""

    def __init__(self, model: nn.Module) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def step(self) -> AbstractContextManager[None]:
        return nullcontext()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult(Numbers):
    """Result of one run: its numbers, its peak and its times."""

    step_us: tuple[float, ...]
    """Time of each step on the compute stream, by device events (simulated time on the simulator)."""
    step_peak_bytes: tuple[int, ...]
    """Peak of device memory in each step, model and optimizer included."""
    model_bytes: int
    """Bytes of parameters and buffers."""
    peak_bytes: int
    """Peak of device memory, in steps and before them."""


def train(
    config: TrainConfig,
    rows: Rows,
    device: Device,
    session_of: Callable[[GPT], SwapSession | Unswapped] = Unswapped,
    *,
    on_step: Callable[[], None] = lambda: None,
) -> RunResult:
    """Train from `config.seed` on `device`, one step per element of `rows`, inside `session_of(model)`.

    Seeds torch's default generators and resets the device's peaks, also before each step. `on_step` is called as each step has
    been enqueued. Raises what the session and the device raise: `torch.OutOfMemoryError` where the run does not fit, and
    `ValueError` for another number of rows than of steps.
    """
    gc.collect()  # a cycle of torch's keeps the last run's optimizer and with it the model: it is not this run's memory
    device.reset_peaks()
    with reproducible(), device.compute():
        program = Program(config, rows, device.torch_device)
        peaks = [device.peak_allocated_bytes()]
        marks = [device.current_stream().record(timed=True)]
        with session_of(program.model) as session:
            for number in range(config.steps):
                device.reset_peaks()
                with session.step():
                    program.step(number)
                marks.append(device.current_stream().record(timed=True))
                peaks.append(device.peak_allocated_bytes())
                on_step()
        marks[-1].synchronize()
    device.synchronize()
    # Outside compute(): these copies are the host's, not part of what the simulator prices and counts.
    numbers = program.numbers()
    return RunResult(
        **{field.name: getattr(numbers, field.name) for field in fields(numbers)},
        step_us=tuple(end.elapsed_us(start) for start, end in pairwise(marks)),
        step_peak_bytes=tuple(peaks[1:]),
        model_bytes=sum(tensor.nbytes for tensor in (*program.model.parameters(), *program.model.buffers())),
        peak_bytes=max(peaks),
    )
