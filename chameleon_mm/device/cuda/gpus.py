"""The GPUs that torch sees, told without a context on any of them where that can be.

for gpu in visible_gpus(): gpu.name, gpu.total_bytes, gpu.pci_id
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class VisibleGpu:
    """One GPU as torch sees it."""

    index: int
    name: str
    total_bytes: int
    capability: str
    pci_id: str | None
    """PCI address as sysfs names it, "0000:06:00.0"; None where torch does not tell."""


def cuda_is_available() -> bool:
    """Whether torch can use a CUDA GPU here. Starts no context on any of them."""
    return torch.cuda.is_available()


def visible_gpus() -> list[VisibleGpu]:
    """The GPUs that torch sees, in its order; none where there is no CUDA. Starts CUDA where there is."""
    gpus = []
    for index in range(torch.cuda.device_count() if cuda_is_available() else 0):
        about = torch.cuda.get_device_properties(index)
        gpus.append(
            VisibleGpu(
                index=index,
                name=about.name,
                total_bytes=about.total_memory,
                capability=f"{about.major}.{about.minor}",
                pci_id=pci_id(about),
            )
        )
    return gpus


def pci_id(about: Any) -> str | None:
    """PCI address of a GPU by its properties, as sysfs names it, or None where torch does not tell."""
    # Not in torch's type stubs, and not in every build.
    domain, bus, slot = (getattr(about, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
    return None if bus is None else f"{domain or 0:04x}:{bus:02x}:{slot or 0:02x}.0"
