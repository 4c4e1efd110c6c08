from . import integrations
from .api.attach import Attachment, attach
from .api.save_on_cpu import install, save_on_cpu, uninstall
from .api.session import SwapSession
from .device import CudaDevice, SimDevice, resolve_device
from .device.region_partitions import compiled_partition
from .errors import (
    BlockInUseError,
    BlockReleasedError,
    ChameleonError,
    DeviceUnavailable,
    HostMemoryExhausted,
    InfeasibleBudget,
    PoolStateError,
    RecomputeMismatch,
    SessionClosedError,
    TransferFailed,
)
from .pool.block import PinnedBlock
from .pool.pool import PinnedPool
from .report.report import SwapReport
from .state.snapshots import Snapshot, SnapshotWrite

__version__: str

__all__ = [
    "Attachment", "BlockInUseError", "BlockReleasedError", "ChameleonError", "CudaDevice", "DeviceUnavailable",
    "HostMemoryExhausted", "InfeasibleBudget", "PinnedBlock", "PinnedPool", "PoolStateError",
    "RecomputeMismatch", "SessionClosedError", "SimDevice", "Snapshot", "SnapshotWrite", "SwapReport",
    "SwapSession", "TransferFailed", "attach", "compiled_partition", "install", "integrations",
    "resolve_device", "save_on_cpu", "uninstall",
]  # fmt: skip
