"""What compute loses to traffic that never pauses: copies that keep the link busy throughout, and pack kernels beside it.

    saturated:  for ways in (H2D, D2H, both):  matrix products alone | copies alone, longer than they | together
                slowdown = compute beside copies / compute alone;  kept = copies alone / copies beside compute
    packing:    for programs in (4, 16, ...):  the same with pack kernels on a stream of their own
    packed:     what packing is for: batches packed and copied out, as fast as the link takes them
                of link = copies alone / batches packed and copied beside compute

The simulator's streams take nothing from one another but the host's time: it shows that, and no contention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from chameleon_mm.bench._buffers import Buffers
from chameleon_mm.bench._measure import Cell, Column, Figure, Results, Waived, interleave
from chameleon_mm.bench._overlap_work import Beside, Copier, Sample, Sizes, Traffic, compute_us, count_for, operators
from chameleon_mm.bench._report import Bound, Found, median_of
from chameleon_mm.device import CudaDevice
from chameleon_mm.device.packing import packed_offsets
from chameleon_mm.device.protocols import Device, Event
from chameleon_mm.units import format_size

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
        results.add(f"gemm, {ways}", params, _cells(device, _taken(beside.peers(), repeats), nbytes))
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
        launches = sizes.launches or count_for(partial(packs.run_us, Packs.NAMES), _PACK_SHARE * alone_us)
        beside = Beside(packs, gemm, count, Packs.NAMES, launches)
        params = {"operators": count, "launches": launches, "bytes": launches * nbytes}
        results.add(f"gemm, {name}", params, _cells(device, _taken(beside.peers(), repeats), launches * nbytes))
    return results


def packed(device: Device, buffers: Buffers, sizes: Sizes, *, repeats: int) -> Results:
    """Matrix products beside batches that are packed and copied out at the rate of the link. Call inside `device.compute()`."""
    about = columns("packed copies", "of link")
    link = "copies of as many bytes, alone / packing and copying them beside compute, in time, by round"
    formulas = {"kept": link, "gbps": "bytes / time of copies alone / 1e9"}
    results = _table("overlap, packed copies", device, [replace(c, formula=formulas.get(_key(c), c.formula)) for c in about])
    results.notes.append(f"each batch is {_TENSORS} tensors, {format_size(sizes.chunk_bytes)} in all: one launch, one copy")
    gemm = operators(device, sizes)["gemm"]
    count = count_for(partial(compute_us, device, gemm), sizes.target_us)
    alone_us = compute_us(device, gemm, count)
    copier, batches = Copier(device, buffers, sizes.chunk_bytes), PackedCopies(device, buffers, sizes.chunk_bytes)
    units = sizes.launches or count_for(partial(copier.run_us, PackedCopies.NAMES), _LONGER * alone_us)
    peers = Beside(batches, gemm, count, PackedCopies.NAMES, units).peers()
    peers["copies"] = partial(copier.run, PackedCopies.NAMES, units)
    nbytes = units * sizes.chunk_bytes
    params = {"operators": count, "batches": units, "bytes": nbytes}
    results.add("gemm, packed D2H", params, _cells(device, _taken(peers, repeats), nbytes))
    return results


def bounds(device: Device, *tables: Results) -> list[Bound]:
    """What matrix products may lose to copies, packed ones included, and copies to them."""
    waived: Found = Waived(f"measured on a CUDA GPU alone; this run is on a {device.name}")
    found = []
    for row in (row for table in tables for row in table.rows):
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


class PackedCopies(Traffic):
    """Batches as the library moves them: packed on a stream of their own, each carried to pinned memory by one copy."""

    NAMES = ("d2h",)

    def __init__(self, device: Device, buffers: Buffers, nbytes: int) -> None:
        """`nbytes` in a batch, a multiple of 64 * 128."""
        super().__init__(device, {"d2h": device.new_stream("d2h")})
        self._pack = device.new_stream("pack")
        self._sources = buffers.on_device(nbytes).split(nbytes // _TENSORS)
        self._offsets, total = packed_offsets([t.numel() for t in self._sources])
        # Two, so that one is packed while the other is copied; as many on the host, so that each copy has a place.
        self._staging = [buffers.on_device(total) for _ in range(2)]
        self._host = [buffers.pinned(total) for _ in range(2)]
        self._copied: list[Event | None] = [None, None]

    def start(self, names: Sequence[str], after: Event) -> None:
        super().start(names, after)
        self._pack.wait(after)

    def issue_one(self, name: str, turn: int) -> None:
        slot, copies = turn % 2, self.streams[name]
        if (copied := self._copied[slot]) is not None:
            self._pack.wait(copied)  # the copy out of this staging buffer, before it is packed into again
        self._pack.pack(self._staging[slot], self._sources, self._offsets)
        copies.wait(self._pack.record())  # the kernel that fills it, before the copy out of it
        copies.copy(self._host[slot], self._staging[slot])
        self._copied[slot] = copies.record()


def _key(column: Column) -> str:
    return column.key.removeprefix("simulated_")


def _table(theme: str, device: Device, titles: Sequence[Column]) -> Results:
    results = Results(theme, device, titles)
    if device.simulated:
        results.notes.append("simulated streams take nothing from one another but the host's time to launch")
    return results


def _taken(peers: Mapping[str, Callable[[], Sample]], repeats: int) -> dict[str, list[Sample]]:
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
        reason = f"this run is on {device.name}; --device sim gives the simulator's figures"
    cells: dict[str, Cell] = {there + key: Waived(reason) for key in figures}
    for key, (values, unit) in figures.items():
        cells[here + key] = Figure.of(values, unit, simulated=device.simulated)
    return cells
