"""The GPUs and how they hang on the host.

    nvidia-smi (or torch, where there is none) names each GPU and its PCI address
    nvidia-smi, else /sys/bus/pci/devices/<address>   link generation and width, now and at most
    /sys/bus/pci/devices/<address>/numa_node          which host memory is near

Each GPU has three rows, so that a link that cannot be read hides neither the GPU nor its node.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

from chameleon_mm.device.cuda import VisibleGpu, visible_gpus
from chameleon_mm.doctor.report import Finding, Machine, Unavailable, run_probe
from chameleon_mm.units import MIB, format_size

_QUERY = (
    "name", "memory.total", "compute_cap", "pci.bus_id",
    "pcie.link.gen.current", "pcie.link.width.current", "pcie.link.gen.max", "pcie.link.width.max",
)  # fmt: skip
_GENERATION_OF_GT_PER_S = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}


def gpus(machine: Machine) -> Iterator[Finding]:
    """Rows of the section `gpu`: three for each GPU, or one that says why there is none."""
    found: list[VisibleGpu] = []

    def search() -> tuple[str, Any]:
        found.extend(_found(machine))
        return f"{len(found)} found", len(found)

    yield run_probe("gpu", "GPUs", search)
    for index, gpu in enumerate(found):
        yield run_probe("gpu", f"{index}", partial(_identity, gpu))
        yield run_probe("gpu", f"{index} link", partial(_link, machine, gpu))
        yield run_probe("gpu", f"{index} NUMA node", partial(_numa_node, machine, gpu))


def _found(machine: Machine) -> list[VisibleGpu]:
    try:
        found = [_of_smi(line) for line in _smi(machine)]
        why = "nvidia-smi names no GPU"
    except Unavailable as error:
        found, why = [], str(error)
    found = found or visible_gpus()
    if not found:
        raise Unavailable(f"{why}, and torch finds no GPU either")
    return found


def _smi(machine: Machine) -> list[list[str]]:
    answer = machine.run(["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"])
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.splitlines() if line.strip()]
    for row in rows:
        if len(row) != len(_QUERY):
            raise Unavailable(f"nvidia-smi: expected {len(_QUERY)} columns, got {row}")
    return rows


def _of_smi(row: list[str]) -> VisibleGpu:
    name, memory_mib, capability, bus_id, *numbers = row
    names = ("generation", "width", "max_generation", "max_width")
    return VisibleGpu(
        name=name,
        total_bytes=int(memory_mib) * MIB if memory_mib.isdecimal() else None,
        capability=capability,
        pci_id=_as_sysfs_names_it(bus_id),
        link={key: int(text) for key, text in zip(names, numbers, strict=True) if text.isdecimal()},
    )


def _as_sysfs_names_it(bus_id: str) -> str | None:
    """PCI address as sysfs has it: "00000000:06:00.0" becomes "0000:06:00.0"."""
    match = re.fullmatch(r"([0-9a-f]{4,8}):([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", bus_id.lower())
    return f"{int(match[1], 16):04x}:{match[2]}" if match else None


def _identity(gpu: VisibleGpu) -> tuple[str, Any]:
    memory = "memory unknown" if gpu.total_bytes is None else format_size(gpu.total_bytes)
    text = f"{gpu.name}, {memory}, compute capability {gpu.capability}, PCI {gpu.pci_id or 'address unknown'}"
    return text, {
        "name": gpu.name, "total_bytes": gpu.total_bytes, "compute_capability": gpu.capability, "pci_id": gpu.pci_id,
    }  # fmt: skip


def _link(machine: Machine, gpu: VisibleGpu) -> tuple[str, Any]:
    link = gpu.link if len(gpu.link) == 4 else _link_of_sysfs(machine, gpu)
    now, most = (f"PCIe {link[f'{of}generation']}.0 x{link[f'{of}width']}" for of in ("", "max_"))
    return (now if now == most else f"{now} now, at most {most} (an idle GPU lowers its link)"), link


def _link_of_sysfs(machine: Machine, gpu: VisibleGpu) -> dict[str, int]:
    folder = _pci_folder(gpu)
    link: dict[str, int] = {}
    for of, prefix in (("current", ""), ("max", "max_")):
        speed = machine.read(f"{folder}/{of}_link_speed")
        generation = _GENERATION_OF_GT_PER_S.get(speed.partition(" ")[0])
        width = machine.read(f"{folder}/{of}_link_width")
        if generation is None or not width.isdecimal():
            raise Unavailable(f"/{folder}: no PCIe link ({speed or 'no speed'}, width {width or 'none'})")
        link |= {f"{prefix}generation": generation, f"{prefix}width": int(width)}
    return link


def _numa_node(machine: Machine, gpu: VisibleGpu) -> tuple[str, Any]:
    node = int(machine.read(f"{_pci_folder(gpu)}/numa_node"))
    if node < 0:
        raise Unavailable("the kernel ties this GPU to no node (one node, or a virtual machine)")
    return str(node), node


def _pci_folder(gpu: VisibleGpu) -> str:
    if gpu.pci_id is None:
        raise Unavailable("the GPU's PCI address is unknown")
    return f"sys/bus/pci/devices/{gpu.pci_id}"
