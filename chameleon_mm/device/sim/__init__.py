"""A simulated GPU: code above the device layer runs on it unchanged, without hardware."""

from __future__ import annotations

from chameleon_mm.device.sim.cost_model import CostModel, Span
from chameleon_mm.device.sim.machine import SimEvent, SimObserver, SimStream
from chameleon_mm.device.sim.sim_device import SimDevice

__all__ = ["CostModel", "SimDevice", "SimEvent", "SimObserver", "SimStream", "Span"]
