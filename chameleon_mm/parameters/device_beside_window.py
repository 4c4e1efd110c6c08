"""Memory of a device as an executor sees it beside a window: what lies in the window counts as all that is set aside for it.

So what comes and goes in the window is no growth of the model to whoever reads memory, and takes nothing from what is planned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from chameleon_mm.device import Device
from chameleon_mm.device.protocols import MemoryReading

if TYPE_CHECKING:
    from chameleon_mm.parameters.window import Window


class DeviceBesideWindow:
    """A device whose readings of memory count a window at its full size. All else is the device's own."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._window: Callable[[], Window | None] = lambda: None
        self._taken_bytes = 0
        """Bytes that the window has allocated in all."""

    def set_window(self, window: Callable[[], Window | None]) -> None:
        """Count a window from now on, for as long as `window()` returns it."""
        self._window = window

    def note_taken(self, nbytes: int) -> None:
        """Note memory that the window has allocated."""
        self._taken_bytes += nbytes

    def allocated_bytes(self) -> int:
        """Bytes in live tensors, with the window at its full size."""
        return self._device.allocated_bytes() + self._beside()

    def read_memory(self) -> MemoryReading:
        """Read memory as `Device.read_memory` does, with the window at its full size, and without what it allocates."""
        now, unused = self._device.read_memory(), self._beside()
        return MemoryReading(now.allocated_bytes + unused, now.cumulative_bytes - self._taken_bytes, now.peak_bytes, unused)

    def _beside(self) -> int:
        window = self._window()
        return 0 if window is None else window.charged_bytes - window.resident_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)


def beside_window(device: Device) -> tuple[Device, DeviceBesideWindow]:
    """A device beside a window that is set later, as the protocol has it and as what it is."""
    beside = DeviceBesideWindow(device)
    return cast(Device, beside), beside
