"""Train models larger than GPU memory in eager PyTorch: swap activations to pinned host memory, bit-exact and overlapped.

    import chameleon_mm as cm

    session = cm.SwapSession(hbm_budget="20GiB")
    with session:
        for batch in loader:
            with session.step():
                loss = model(batch); loss.backward(); opt.step(); opt.zero_grad()
    print(session.report())

Importing this package loads none of its modules, and no torch. Each name of `__init__.pyi` is imported at its first use. None
initialises CUDA or imports cupy or triton.
"""

from __future__ import annotations

# Import NumPy before torch. torch imports NumPy from C++ and ignores all errors. A Ctrl-C at that moment would be lost, and a
# later line would fail on a half-imported NumPy.
import numpy as np  # noqa: F401 - imported here for the order, not for its names
from lazy_loader import attach_stub

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
