"""Doubles of devices that several tests play with."""

from __future__ import annotations

from chameleon_mm.device import SimDevice


class PlayedStandIn(SimDevice):
    """A device of the stand-in's name that says it is not simulated, as the stand-in says."""

    @property
    def name(self) -> str:
        return "CUDA stand-in, no GPU"

    @property
    def simulated(self) -> bool:
        return False
