"""What compute loses to traffic that never pauses: copies that keep the link busy throughout, and pack kernels beside it.

    saturated:  for ways in (H2D, D2H, both):  matrix products alone | copies alone, longer than they | together
                slowdown = compute beside copies / compute alone;  kept = copies alone / copies beside compute
    packing:    for programs in (4, 16, ...):  the same with pack kernels on a stream of their own

The simulator's streams take nothing from one another but the host's time: it shows that, and no contention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from chameleon_mm.bench._buffers import Buffers
from chameleon_mm.bench._measure import Cell, Column, Figure, Results, Waived, interleave
from chameleon_mm.bench._overlap_work import Beside, Copier, Sample, Sizes, Traffic, compute_us, count_for, operators
from chameleon_mm.bench._report import Bound, Found, median_of
from chameleon_mm.device import CudaDevice
from chameleon_mm.device.packing import packed_offsets
from chameleon_mm.device.protocols import Device

WAYS: dict[str, tuple[str, ...]] = {"H2D": ("h2d",), "D2H": ("d2h",), "both ways": ("h2d", "d2h")}
PROGRAMS = (4, 16, 64, 132)
"""Sizes of the pack kernel's grid: from a few SMs to all of an H200's."""

MAX_SLOWDOWN, MIN_KEPT = 1.01, 0.97

_LONGER = 1.25  # copies last longer than the compute that is measured beside them: they never pause while it runs
_PACK_SHARE = 0.9  # of the compute's time, as what is packed would come from that compute
_LIMIT_S = 2.0
_TENSORS = 64


def columns(traffic: str, kept: str) -> list[Column]:
    """Slowdown and what is kept of the traffic's rate, measured and simulated."""
    about = {
        "slowdown": ("slowdown", f"compute beside {traffic} / compute alone, by round"),
        "kept": (kept, f"{traffic} alone / {traffic} beside compute, in time, by round"),
        "gbps": ("alone GB/s", f"bytes / time of {traffic} alone / 1e9"),
    }
    return [
        Column(key=prefix + key, title=title, formula=formula, simulated=bool(prefix))
        for prefix in ("", "simulated_")
        for key, (title, formula) in about.items()
    ]


def saturated(device: Device, buffers: Buffers, sizes: Sizes, *, repeats: int) -> Results:
    """Matrix products beside copies that never pause. Call inside `device.compute()`."""
    results = _table("overlap, saturated link", device, columns("copies", "of link"))
    copier = Copier(device, buffers, sizes.chunk_bytes)
    gemm = operators(device, sizes)["gemm"]
    count = count_for(partial(compute_us, device, gemm), sizes.target_us)
    alone_us = compute_us(device, gemm, count)
    for ways, names in WAYS.items():
        copies = count_for(partial(copier.run_us, names), _LONGER * alone_us)
        beside = Beside(copier, gemm, count, names, copies)
        nbytes = copies * sizes.chunk_bytes * len(names)
        params = {"operators": count, "copies_each_way": copies, "bytes": nbytes}
        results.add(f"gemm, {ways}", params, _cells(device, _taken(beside, repeats), nbytes))
    return results


def packing(device: Device, buffers: Buffers, sizes: Sizes, *, repeats: int) -> Results:
    """Matrix products beside pack kernels, by the number of their programs. Call inside `device.compute()`."""
    results = _table("overlap, packing", device, columns("packing", "of its rate"))
    results.notes.append(f"one launch packs {_TENSORS} tensors; GB/s of packed bytes, each of them read and written")
    gemm = operators(device, sizes)["gemm"]
    count = count_for(partial(compute_us, device, gemm), sizes.target_us)
    alone_us = compute_us(device, gemm, count)
    packers = (
        {f"{n} programs": CudaDevice(device.index, pack_programs=n) for n in PROGRAMS}
        if isinstance(device, CudaDevice)
        else {"packing": device}
    )
    nbytes = sizes.chunk_bytes * (2 if isinstance(device, CudaDevice) else 1)
    for name, packer in packers.items():
        packs = Packs(packer, buffers, nbytes)
        launches = count_for(partial(packs.run_us, Packs.NAMES), _PACK_SHARE * alone_us)
        beside = Beside(packs, gemm, count, Packs.NAMES, launches)
        params = {"operators": count, "launches": launches, "bytes": launches * nbytes}
        results.add(f"gemm, {name}", params, _cells(device, _taken(beside, repeats), launches * nbytes))
    return results


def bounds(device: Device, results: Results) -> list[Bound]:
    """What matrix products may lose to copies, and copies to them."""
    waived: Found = Waived(f"measured on a CUDA GPU alone; this run is on a {device.name}")
    found = []
    for row in results.rows:
        slowdown, kept = (waived if device.simulated else median_of(row.cells[key]) for key in ("slowdown", "kept"))
        found.append(Bound(name=f"{row.name}: slowdown", limit=MAX_SLOWDOWN, unit="x", found=slowdown))
        found.append(Bound(name=f"{row.name}: of the link", limit=MIN_KEPT, found=kept, at_most=False))
    return found


class Packs(Traffic):
    """Launches that pack the same tensors over and over, on a stream of their own."""

    NAMES = ("pack",)

    def __init__(self, device: Device, buffers: Buffers, nbytes: int) -> None:
        """`nbytes` in a launch, a multiple of 64 * 128."""
        super().__init__(device, {"pack": device.new_stream("pack")})
        self._sources = buffers.on_device(nbytes).split(nbytes // _TENSORS)
        self._offsets, total = packed_offsets([t.numel() for t in self._sources])
        self._staging = buffers.on_device(total)

    def issue_one(self, name: str, turn: int) -> None:
        self.streams[name].pack(self._staging, self._sources, self._offsets)


def _table(theme: str, device: Device, titles: Sequence[Column]) -> Results:
    results = Results(theme, device, titles)
    if device.simulated:
        results.notes.append("simulated streams take nothing from one another but the host's time to launch")
    return results


def _taken(beside: Beside, repeats: int) -> dict[str, list[Sample]]:
    peers = beside.peers()
    return interleave(
        {name: peers[name] for name in ("compute", "copies", "together")}, warmup=1, repeats=repeats, limit_s=_LIMIT_S
    )


def _cells(device: Device, samples: Mapping[str, Sequence[Sample]], nbytes: int) -> dict[str, Cell]:
    rounds = list(zip(samples["compute"], samples["copies"], samples["together"], strict=True))
    figures = {
        "slowdown": ([together.compute_us / compute.compute_us for compute, _, together in rounds], "1"),
        "kept": ([alone.traffic_us / together.traffic_us for _, alone, together in rounds], "1"),
        "gbps": ([nbytes / (alone.traffic_us * 1e3) for _, alone, _ in rounds], "GB/s"),
    }
    return beside_its_kind(device, figures)


def beside_its_kind(device: Device, figures: Mapping[str, tuple[Sequence[float], str]]) -> dict[str, Cell]:
    """Figures under the columns of this device's kind, simulated or measured; the other kind's columns waived."""
    here, there = ("simulated_", "") if device.simulated else ("", "simulated_")
    if device.simulated:
        reason = f"measured on a CUDA GPU alone; this run is on a {device.name}"
    else:
        reason = "this run is on a real GPU; --device sim gives the simulator's figures"
    cells: dict[str, Cell] = {there + key: Waived(reason) for key in figures}
    for key, (values, unit) in figures.items():
        cells[here + key] = Figure.of(values, unit, simulated=device.simulated)
    return cells
