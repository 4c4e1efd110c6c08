"""Train models larger than GPU memory in eager PyTorch: swap activations to pinned host memory, bit-exact and overlapped.

    import chameleon_mm as cm

    session = cm.SwapSession(hbm_budget="20GiB")
    with session:
        for batch in loader:
            with session.step():
                loss = model(batch); loss.backward(); opt.step(); opt.zero_grad()
    print(session.report())

Importing this package does not initialise CUDA and imports neither cupy nor triton.
"""

from __future__ import annotations

# Import NumPy before torch. torch imports NumPy from C++ and ignores all errors. A Ctrl-C at that moment would be lost, and a
# later line would fail on a half-imported NumPy.
import numpy as np  # noqa: F401 - imported here for the order, not for its names

from chameleon_mm import integrations
from chameleon_mm.api.attach import Attachment, attach
from chameleon_mm.api.save_on_cpu import install, save_on_cpu, uninstall
from chameleon_mm.api.session import SwapSession
from chameleon_mm.device import CudaDevice, SimDevice, resolve_device
from chameleon_mm.device.compiled_regions import compiled_partition
from chameleon_mm.errors import (
    BlockCorruptedError,
    BlockInUseError,
    BlockReleasedError,
    ChameleonError,
    DeviceUnavailable,
    HostMemoryExhausted,
    InfeasibleBudget,
    PoolStateError,
    RecomputeMismatch,
    SessionClosedError,
    SwapMismatch,
    TransferFailed,
)
from chameleon_mm.pool.block import PinnedBlock
from chameleon_mm.pool.pool import PinnedPool
from chameleon_mm.report.merged_report import MergedReport, merge_reports
from chameleon_mm.report.report import SwapReport
from chameleon_mm.state.snapshots import Snapshot, SnapshotWrite

__version__ = "0.1.0"

__all__ = [
    "Attachment", "BlockCorruptedError", "BlockInUseError", "BlockReleasedError", "ChameleonError", "CudaDevice",
    "DeviceUnavailable", "HostMemoryExhausted", "InfeasibleBudget", "MergedReport", "PinnedBlock", "PinnedPool",
    "PoolStateError", "RecomputeMismatch", "SessionClosedError", "SimDevice", "Snapshot",
    "SnapshotWrite", "SwapMismatch", "SwapReport", "SwapSession", "TransferFailed", "attach", "compiled_partition", "install",
    "integrations",
    "merge_reports", "resolve_device", "save_on_cpu", "uninstall",
]  # fmt: skip
