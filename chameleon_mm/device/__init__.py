"""The device layer: small protocols (`Device`, `Stream`, `Event`), a real GPU and a simulated one behind them.

    device = resolve_device(None)              # CUDA if available, else the simulator; callers are the same for both
    h2d = device.new_stream("h2d")

Importing this package loads no torch: names are imported at their first use. Building a `CudaDevice` initialises CUDA.
"""

from __future__ import annotations

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
