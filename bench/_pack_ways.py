"""Ways to copy many tensors from the device to pinned memory, timed alike.

    with Buffers(device) as buffers:
        work = Work.of(buffers, nbytes, count)                      # random bytes, and where each tensor goes
        for name, way in Ways(device, work).by_name().items():
            sample = measured(device, work, way)                    # GB/s, host us per tensor

    start = compute.record(); the way; compute waits for it; end = compute.record()       # the same two events for all

The loop is torch's own, on the current stream; on a GPU it is asynchronous, too, because the memory is pinned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from chameleon_mm.bench._buffers import Buffers
from chameleon_mm.bench._measure import Waived
from chameleon_mm.device.packing import PACK_PROGRAMS, packed_offsets
from chameleon_mm.device.protocols import Device, Event
from chameleon_mm.swap.copy_queue import CopyQueue, Move
from chameleon_mm.swap.swap_outs import GROUP_BYTES, PACK_BELOW_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Tensors of `nbytes` each on the device, and flat pinned memory for each of them."""

    nbytes: int
    tensors: list[Tensor]
    """(nbytes,) uint8 each."""
    host: Tensor
    """(count * nbytes,) uint8, pinned: tensor i goes to byte i * nbytes."""
    staging: Tensor
    """(count * nbytes,) uint8, on the device."""

    @classmethod
    def of(cls, buffers: Buffers, nbytes: int, count: int) -> Work:
        """Allocate from `buffers`. `nbytes` is a multiple of 512, so that packed tensors are adjacent."""
        tensors = list(buffers.on_device(nbytes * count).split(nbytes))
        host, staging = buffers.pinned(nbytes * count), buffers.on_device(nbytes * count)
        return cls(nbytes=nbytes, tensors=tensors, host=host, staging=staging)

    @property
    def places(self) -> list[Tensor]:
        """Destination of each tensor, (nbytes,) uint8."""
        return list(self.host.split(self.nbytes))

    @property
    def expected(self) -> Tensor:
        """Bytes that `host` must hold afterwards, in separate memory."""
        return torch.cat([t.reshape(-1) for t in self.tensors]).cpu()


class Sample(NamedTuple):
    """Figures of one run of a way."""

    gbps: float
    """1e9 bytes a second, from the earliest begin of the first copy until the last has arrived."""
    host_us: float
    """Host time per tensor until all copies are queued, without waits for the link."""


Way = Callable[[Event], float]
"""Enqueues all copies after the event, and orders the current stream after them. Returns the host's time in us."""


def measured(device: Device, work: Work, way: Way) -> Sample:
    """Run `way` once. The device is idle before and after."""
    device.synchronize()
    compute = device.current_stream()
    start = compute.record(timed=True)
    host_us = way(start)
    end = compute.record(timed=True)
    device.synchronize()
    count = len(work.tensors)
    return Sample(work.nbytes * count / (end.elapsed_us(start) * 1e3), host_us / count)


def is_exact(device: Device, work: Work, way: Way, expected: Tensor) -> bool:
    """True if `way` copies exactly `work.expected`: the rate of a wrong copy means nothing."""
    work.host.zero_()
    measured(device, work, way)
    return torch.equal(work.host, expected)


NAMES: Mapping[str, tuple[str, str]] = {
    "ours": ("ours", "as the executor: packed or alone by its size, through a `CopyQueue`"),
    "pack": ("pack", f"one pack kernel of {PACK_PROGRAMS} programs into device memory, one copy"),
    "loop": ("loop", "a copy of its own for each tensor, asynchronous: copy_, and on the simulator Stream.copy"),
}
"""Way -> title of its column, and description."""


class Ways:
    """All ways of `NAMES` for one work, with the streams and tables that they keep between runs."""

    def __init__(self, device: Device, work: Work) -> None:
        self._device, self._work = device, work
        self._compute, self._d2h = device.current_stream(), device.new_stream("d2h")
        self._queue = CopyQueue(device, "d2h", out=True)
        self._offsets = packed_offsets([work.nbytes] * len(work.tensors)).offsets

    def by_name(self) -> dict[str, Way | Waived]:
        """Each way, or the reason why it is impossible."""
        table: dict[str, Way | Waived] = {"ours": self._ours, "pack": self._pack, "loop": self._loop}
        if len(self._work.tensors) == 1:
            table["pack"] = Waived("one block: there is nothing to pack")
        return table

    def _ours(self, start: Event) -> float:
        work, began_us = self._work, self._device.host_us
        sources = work.tensors
        with self._device.compute():
            moves = self._carried(sources) if work.nbytes < PACK_BELOW_BYTES else self._alone(sources)
        host_us = self._device.host_us - began_us
        begun = 0
        while begun < len(moves):
            began_us, before = self._device.host_us, (begun, moves[begun].next_byte)
            self._queue.hand_over()
            while begun < len(moves) and moves[begun].done is not None:
                begun += 1
            if begun == len(moves) or (begun, moves[begun].next_byte) != before:
                host_us += self._device.host_us - began_us  # time counts only if a copy was handed over; else the link was busy
        if (done := moves[-1].done) is not None:
            self._compute.wait(done)  # the queue is a FIFO: the end of the last is the end of all
        return host_us

    def _carried(self, sources: Sequence[Tensor]) -> list[Move]:
        """Packed groups, as the executor makes them: a kernel packs as many tensors as fit, and one move copies them."""
        work, moves, size = self._work, [], GROUP_BYTES // self._work.nbytes
        for first in range(0, len(sources), size):
            group = sources[first : first + size]
            offsets, total = packed_offsets([t.numel() for t in group])
            packed = work.staging[first * work.nbytes :][:total]
            self._compute.pack(packed, group, offsets)
            ready = self._compute.record()  # orders the copy after the kernel
            moves.append(self._submit(work.host[first * work.nbytes :][:total], packed, ready))
        return moves

    def _alone(self, sources: Sequence[Tensor]) -> list[Move]:
        ready = self._compute.record()  # orders the copies after the operators that wrote their sources
        return [self._submit(place, t, ready) for place, t in zip(self._work.places, sources, strict=True)]

    def _submit(self, host: Tensor, t: Tensor, ready: Event) -> Move:
        return self._queue.submit(Move(t.untyped_storage(), host, [ready], start=int(t.storage_offset())))

    def _pack(self, start: Event) -> float:
        work, began_us = self._work, self._device.host_us
        self._compute.pack(work.staging, work.tensors, self._offsets)
        self._d2h.wait(self._compute.record())  # orders the copy after the kernel
        self._d2h.copy(work.host, work.staging)
        self._compute.wait(self._d2h.record())
        return self._device.host_us - began_us

    def _loop(self, start: Event) -> float:
        places, began_us = self._work.places, self._device.host_us
        if self._device.simulated:
            self._d2h.wait(start)
            for place, t in zip(places, self._work.tensors, strict=True):
                self._d2h.copy(place, t)
            self._compute.wait(self._d2h.record())
        else:
            for place, t in zip(places, self._work.tensors, strict=True):
                place.copy_(t, non_blocking=True)
        return self._device.host_us - began_us
