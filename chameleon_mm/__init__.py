"""Train models larger than the GPU's memory in eager PyTorch: swap activations to pinned host memory, exactly, overlapped.

    import chameleon_mm as cm

    session = cm.SwapSession(hbm_budget="20GiB")
    with session:
        for batch in loader:
            with session.step():
                loss = model(batch); loss.backward(); opt.step(); opt.zero_grad()
    print(session.report())

Importing this starts no CUDA and imports neither cupy nor triton.
"""

from __future__ import annotations

# Before torch, which imports NumPy from C++ and ignores whatever that raises: an interrupt (Ctrl-C) at that moment would be
# lost, and NumPy left half imported, for some later line to fail on.
import numpy as np  # noqa: F401 - for when it is imported, not for its names

from chameleon_mm import integrations
from chameleon_mm.api.attach import Attachment, attach
from chameleon_mm.api.save_on_cpu import install, save_on_cpu, uninstall
from chameleon_mm.api.session import SwapSession
from chameleon_mm.device import CudaDevice, SimDevice, resolve_device
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
    "SnapshotWrite", "SwapMismatch", "SwapReport", "SwapSession", "TransferFailed", "attach", "install", "integrations",
    "merge_reports", "resolve_device", "save_on_cpu", "uninstall",
]  # fmt: skip
