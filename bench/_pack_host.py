"""What packing costs the host before its kernel is launched: real time of this processor, with a GPU or without one.

for each number of tensors in a batch: interleave, CPU time of the thread per tensor
    same      PackTable.refresh, nothing moved
    moved     ... every tensor at another address
    all       places in the staging buffer; then CudaStream.pack: batch recognised, table found and renewed, everything checked
    back      CudaStream.unpack into those tensors
    build     a new PackTable: once per kind of batch

The stream's device is played by this processor: what CUDA itself would be asked is left out, which is the current stream and
device, the table's upload and the launch.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from chameleon_mm.bench._environment import processor_name
from chameleon_mm.bench._measure import Column, Figure, Results, interleave
from chameleon_mm.device.cuda import CudaStream
from chameleon_mm.device.packing import Packer, PackKernels, packed_offsets
from chameleon_mm.device.protocols import Device
from chameleon_mm.units import KIB

COUNTS = (16, 64, 256, 1024, 4096)
"""Tensors in a batch: 4 MiB of them, a group's load, are 32 of 128 KiB and 1024 of 4 KiB."""

_TENSOR_BYTES = 4 * KIB
_CALLS = 2048  # tensors per sample, whatever the batch: enough that the clock's own time is nothing

_COLUMNS = tuple(
    Column(key=key, title=f"{key} us", formula=f"CPU time per tensor of {what}")
    for key, what in {
        "same": "PackTable.refresh, no address changed",
        "moved": "PackTable.refresh, every address changed",
        "all": "packed_offsets, and CudaStream.pack but for what CUDA does, every address changed",
        "back": "CudaStream.unpack but for what CUDA does, every address changed",
        "build": "PackTable(tensors), once per kind of batch",
    }.items()
)


def measure(device: Device, counts: Sequence[int] = COUNTS, *, repeats: int = 9) -> Results:
    """A row for each number of tensors. The tensors lie in host memory: only addresses and layouts are looked at."""
    results = Results("pack, before the launch", device, _COLUMNS)
    # Nothing here is the device's, simulated or not: the figures bear the processor's name.
    results.header |= {"device": processor_name(), "simulated": False}
    results.notes.append(f"contiguous tensors of {_TENSOR_BYTES} bytes; no kernel is launched; on {processor_name()}")
    for count in counts:
        samples = interleave(_works(count), repeats=repeats)
        cells = {name: Figure.of(taken, "us", simulated=False) for name, taken in samples.items()}
        results.add(f"{count} tensors", {"tensors": count, "bytes": _TENSOR_BYTES}, cells)
    return results


def _works(count: int) -> dict[str, Callable[[], float]]:
    from chameleon_mm.kernels.pack import PackTable

    batches = [_batch(count) for _ in range(2)]
    sizes = [_TENSOR_BYTES] * count
    staging = _aligned(packed_offsets(sizes).total_bytes)
    still, moving = PackTable(batches[0]), PackTable(batches[1])
    still.refresh(batches[0])
    stream, places = _stream(), packed_offsets(sizes).offsets
    turns = {name: cycle(batches) for name in ("moved", "all", "back")}
    works: dict[str, Callable[[], object]] = {
        "same": lambda: still.refresh(batches[0]),
        "moved": lambda: moving.refresh(next(turns["moved"])),
        "all": lambda: stream.pack(staging, next(turns["all"]), packed_offsets(sizes).offsets),
        "back": lambda: stream.unpack(next(turns["back"]), staging, places),
        "build": lambda: PackTable(batches[0]),
    }
    return {name: _per_tensor(work, count) for name, work in works.items()}


def _batch(count: int) -> list[Tensor]:
    return [torch.zeros(_TENSOR_BYTES, dtype=torch.uint8) for _ in range(count)]


def _aligned(nbytes: int) -> Tensor:
    buffer = torch.empty(nbytes + 127, dtype=torch.uint8)
    return buffer[-buffer.data_ptr() % 128 :][:nbytes]


def _per_tensor(work: Callable[[], object], count: int) -> Callable[[], float]:
    calls = max(1, _CALLS // count)

    def sample_us() -> float:
        gc.disable()  # as timeit does: a collection would fall on whoever is running
        try:
            start = time.thread_time()
            for _ in range(calls):
                work()
            return (time.thread_time() - start) / (calls * count) * 1e6
        finally:
            gc.enable()

    return sample_us


def _stream() -> CudaStream:
    """A stream whose device is this processor, which launches nothing."""
    raw: Any = SimpleNamespace(cuda_stream=0, stream_id=0)
    device: Any = SimpleNamespace(
        torch_device=torch.device("cpu"), packer=Packer(load=_without_launch), is_current=lambda: True
    )  # fmt: skip
    stream = CudaStream(device, raw, "compute")
    device.current_stream = lambda: stream
    return stream


class _Launches:
    """A kernel in Triton's place: takes a grid, then arguments, and does nothing."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._launch

    def _launch(self, *args: object, **options: object) -> None: ...


def _without_launch() -> PackKernels:
    """What the packer takes for kernels: all that they do up to the launch."""
    from chameleon_mm.kernels.pack import PackTable, launch

    kernel = _Launches()

    def pack(table: PackTable, staging: Tensor, *, num_programs: int) -> None:
        launch(kernel, "pack", table, staging, num_programs)

    def unpack(staging: Tensor, table: PackTable, *, num_programs: int) -> None:
        table.check_destinations("unpack")
        launch(kernel, "unpack", table, staging, num_programs)

    return PackKernels(table=PackTable, pack=pack, unpack=unpack)
