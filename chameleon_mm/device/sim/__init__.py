"""A simulated GPU for everything above the device layer: same code, no hardware."""

from __future__ import annotations

from chameleon_mm.device.sim.cost import CostModel, Span
from chameleon_mm.device.sim.device import SimDevice
from chameleon_mm.device.sim.observer import SimObserver
from chameleon_mm.device.sim.stream import SimEvent, SimStream

__all__ = ["CostModel", "SimDevice", "SimEvent", "SimObserver", "SimStream", "Span"]
