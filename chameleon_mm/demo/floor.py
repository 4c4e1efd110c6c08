"""The smallest budget within which the demo's training runs with all that can be swapped swapped: measured, in two steps.

floor = measure_floor(config, rows, device_of, session_of)
floor.smallest_bytes, floor.why
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from chameleon_mm.demo.program import Program, Rows, TrainConfig
from chameleon_mm.demo.train import train
from chameleon_mm.device.protocols import Device
from chameleon_mm.errors import InfeasibleBudget
from chameleon_mm.parameters.window_size import LEAST_STORAGES, charged_sizes, least_window, window_for
from chameleon_mm.session import SwapSession
from chameleon_mm.units import format_size

_STEPS = 2
"""Steps that are measured: the first is recorded and makes the optimizer's state, the second is as those after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The least device memory that the training takes."""

    window_bytes: int
    """Bytes for parameters and gradients."""
    beside_bytes: int
    """Bytes of all else at the peak: rows, activations, optimizer state that is stepped, what operators hold."""
    smallest_bytes: int
    """The smallest budget that leaves so much beside the window that it sets aside."""

    @property
    def why(self) -> str:
        """Text of what it is made of."""
        return (
            f"{format_size(self.window_bytes)} for parameters and gradients ({LEAST_STORAGES} times the largest), "
            f"{format_size(self.beside_bytes)} for rows, activations, the optimizer state that is being stepped and temporaries"
        )


def measure_floor(
    config: TrainConfig, rows: Rows, device_of: Callable[[], Device], session_of: Callable[[Device, Program, int], SwapSession]
) -> Floor:
    """Train for two steps with the least on the device. `session_of(device, program, budget)` makes a session that swaps
    parameters. Raises what the session and the device raise."""
    short = replace(config, steps=min(_STEPS, config.steps))
    sizes = charged_sizes(Program(short, rows[: short.steps], device_of().torch_device, on_host=True).model.parameters())
    device, least = device_of(), 0

    def with_the_least(program: Program) -> SwapSession:
        nonlocal least
        try:
            return session_of(device, program, 1)
        except InfeasibleBudget as refusal:
            least = refusal.smallest_bytes or 1
        return session_of(device, program, least)

    peak = train(short, rows[: short.steps], device, with_the_least, on_host=True).peak_bytes
    window = least_window(sizes)
    beside = peak - window
    smallest = peak
    while smallest - window_for(sizes, smallest) < beside:
        smallest += beside - (smallest - window_for(sizes, smallest))
    return Floor(window_bytes=window, beside_bytes=beside, smallest_bytes=smallest)
