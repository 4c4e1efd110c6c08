"""Three small protocols that the GPU and the simulator implement: `Event`, `Stream`, `Device`.

    ready = compute.record()              # an event after everything enqueued on `compute` so far
    d2h.wait(ready)                       # d2h waits for it on the device; the host does not wait
    d2h.copy(host, hbm)
    done = d2h.record()
    compute.wait(done); compute.free(hbm); del hbm      # compute may reuse the block, in stream order

A buffer is a flat, contiguous `torch.uint8` tensor: device memory from `Stream.alloc`, or pinned host memory (or a slice of
it) from `Device.alloc_pinned`. A method belongs here only if the simulator can implement it truthfully.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Event(Protocol):
    """A point in a stream's work. It is complete when everything enqueued on that stream before it is done."""

    def query(self) -> bool:
        """True if the event is complete now. Never waits. True orders the caller's later launches after the event."""

    def synchronize(self) -> None:
        """Block the host until the event is complete."""

    def elapsed_us(self, since: Event) -> float:
        """Microseconds on the device from `since` to this event. Raises `ValueError` unless both are `timed` and complete."""


@runtime_checkable
class Stream(Protocol):
    """A queue of device work, done in order."""

    @property
    def name(self) -> str:
        """Name: `compute`, `d2h`, `h2d`, or the argument of `new_stream`."""

    def alloc(self, nbytes: int) -> Tensor:
        """Allocate a flat uint8 tensor of this stream's device memory: usable here at once, on other streams after a wait.

        Raises `torch.OutOfMemoryError` if the device has too little memory left.
        """

    def free(self, buffer: Tensor) -> None:
        """Hand `buffer` back at this point of the stream. Call it right before dropping the last reference.

        Every access on other streams must be ordered before this point: its event was waited on here, or the host saw it
        complete. The call costs nothing. The simulator reports it to its observer.
        """

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Free the device memory of `storage` (`nbytes` is 0), or allocate `nbytes` for a storage without memory.

        The storage and every tensor over it stay. The memory belongs to this stream as after `alloc`. It is handed back as by
        `free`, under the same conditions. Raises `torch.OutOfMemoryError` with nothing changed.
        """

    def copy(self, dst: Tensor, src: Tensor, *, speculative: bool = False) -> None:
        """Enqueue an asynchronous copy between two flat uint8 tensors of equal size. The direction follows from their memory.
        The caller keeps both alive until an event after the copy is complete or waited on. `speculative`: an operator may
        write `src` meanwhile; then the copied bytes are undefined and the caller must not use them. Raises `ValueError` for
        unequal sizes, other dtypes or other layouts."""

    def copy_storage(
        self, storage: torch.UntypedStorage, host: Tensor, *, start: int = 0, part: slice | None = None, out: bool
    ) -> None:
        """Enqueue a copy of the bytes of `storage`, in device memory, from byte `start` on to `part` (None: all) of the flat
        uint8 tensor `host` (`out`), or back. Like `copy`, but without a tensor over the storage. A copy out is speculative.
        Raises `ValueError` if the storage has fewer bytes than that."""

    def copy_behind(
        self, owner: Stream, storage: torch.UntypedStorage, host: Tensor, offset: int, *, out: bool, again: Event | None = None
    ) -> Event:
        """Enqueue a copy of a whole storage to the flat uint8 tensor `host`, from its byte `offset` on (`out`), or back. It
        comes after all work of `owner` so far. Returns an event after it. `again`: an untimed event of this device that is no
        longer used, which may be recorded again. Raises `ValueError` if `host` has fewer bytes than that."""

    def pack(self, dst: Tensor, sources: Sequence[Tensor], offsets: Sequence[int]) -> None:
        """Enqueue a kernel that copies each of `sources` into `dst` at its offset. The other bytes of `dst` do not change.

        All are flat uint8 buffers in device memory. `dst` shares no bytes with sources; sources may overlap. Offsets are in
        bytes; those of `packed_offsets` allow wide accesses. The kernel runs in stream order. The caller keeps the buffers
        alive as for `copy`. Raises `ValueError` with the buffer's index before anything is enqueued.
        """

    def unpack(self, destinations: Sequence[Tensor], src: Tensor, offsets: Sequence[int]) -> None:
        """Enqueue a kernel that fills each of `destinations` with the bytes of `src` at its offset.

        The inverse of `pack`, under the same conditions. Destinations overlap neither each other nor `src`.
        """

    def add_checksum(self, out: Tensor, src: Tensor) -> None:
        """Enqueue a kernel that adds the checksum of `src`, (n,) uint8, modulo 2**64 to `out`, (8,) uint8 that holds an int64.

        The checksum has 64 bits and depends on the value and the position of each byte: `kernels.checksum`. Both are flat
        buffers in device memory. The kernel runs in stream order, on a compute stream. The caller keeps the buffers alive as
        for `copy`. Raises `ValueError` before anything is enqueued.
        """

    def record(self, *, timed: bool = False) -> Event:
        """Record an event after all work enqueued so far. Untimed events cost a tenth of timed ones: use them for ordering."""

    def wait(self, event: Event) -> None:
        """Order this stream's later work after `event` on the device. The host does not wait."""

    def is_current(self) -> bool:
        """True if this is the calling thread's current compute stream and captures no graph."""


class MemoryReading(NamedTuple):
    """Reading of the device's memory counters at one moment."""

    allocated_bytes: int
    """Bytes in live tensors (not what the caching allocator reserves)."""
    cumulative_bytes: int
    """Total of all allocated bytes, never decreasing. Its growth between two readings bounds the peak between them."""
    peak_bytes: int
    """Peak, as from `Device.peak_allocated_bytes`."""
    unused_bytes: int = 0
    """Part of `allocated_bytes` that is reserved for a window of parameters but not allocated."""


@runtime_checkable
class Device(Protocol):
    """A GPU, real or simulated."""

    @property
    def name(self) -> str:
        """Name to display: "NVIDIA H200" or "simulated H200"."""

    @property
    def simulated(self) -> bool: ...

    @property
    def driver(self) -> str:
        """Versions of driver and runtime. Times measured under one version are not valid for another."""

    @property
    def host_us(self) -> float:
        """Host clock in microseconds since a fixed point: real time, or virtual time on the simulator."""

    @property
    def torch_device(self) -> torch.device:
        """torch device for models and batches: `cuda:N`, or `cpu` for the simulator."""

    @property
    def capacity(self) -> int:
        """Bytes of device memory that the allocator may allocate."""

    @property
    def block_slack_bytes(self) -> int:
        """Maximum bytes by which a block exceeds the request rounded up to 512. 0: blocks are always split."""

    def current_stream(self) -> Stream:
        """Return the calling thread's compute stream. Call it on the thread and at the moment of use, never inside your own
        `with stream(...)`."""

    def new_stream(self, name: str) -> Stream: ...

    def capturing(self) -> bool:
        """True if the calling thread's current stream is being captured into a graph.

        Then call no other method of the device. An event query, a host wait or a memory reading breaks the capture, or says
        nothing about the replay. A captured copy would be replayed without the host code that must follow it. This
        method never waits, never raises, and starts no context. Always False on the simulator, which captures nothing.
        """

    def alloc_pinned(self, nbytes: int) -> Tensor:
        """Allocate a flat, page-aligned uint8 tensor of `nbytes` of page-locked host memory (plain memory on the simulator).

        Raises `HostMemoryExhausted` (a `MemoryError`) with the request and the reason.
        """

    def free_pinned(self, memory: Tensor) -> None:
        """Free a whole tensor from `alloc_pinned`. All device work on it must be complete."""

    def alloc_pageable(self, nbytes: int) -> Tensor:
        """Allocate a flat uint8 tensor of `nbytes` of ordinary host memory, for when no more can be pinned.

        A copy to or from it is slower and may block the host. Its last reference frees it: keep one until device work on it is
        complete. Raises `HostMemoryExhausted` (a `MemoryError`).
        """

    def allocated_bytes(self) -> int:
        """Bytes of device memory in live tensors now (not what the caching allocator reserves)."""

    def read_memory(self) -> MemoryReading:
        """Read the memory counters in one call into the allocator. Cheap enough for a hook."""

    def memory_reader(self) -> Callable[[], Sequence[int]]:
        """Return a function that reads memory at less cost: the fields of a `MemoryReading`. The cumulative count
        lacks `cumulative_offset` bytes, and is lower after a reset of the device's statistics."""

    def cumulative_offset(self) -> int:
        """Bytes of the cumulative count from before the latest reset of the device's statistics."""

    def peak_allocated_bytes(self) -> int:
        """Maximum of `allocated_bytes` since the process began or the user last reset it."""

    def peak_reserved_bytes(self) -> int | None:
        """Maximum of the bytes that the caching allocator reserved; None on the simulator, which has no such allocator."""

    def cache_flushes(self) -> int:
        """Times that the caching allocator found no memory and returned its unused memory to the driver; 0 on the simulator."""

    def reset_peaks(self) -> None:
        """Restart both peaks from now. For benchmarks and demos: the library itself never resets values that users read."""

    def release_unused(self) -> None:
        """Return reserved but unused memory of the caching allocator to the driver. Waits for the device. The simulator
        reserves nothing."""

    def allocator_hook(self) -> AllocatorHook | None:
        """Return a new hook in the device's allocator, to which storages can be lent; None if the device has none."""

    def native_loop(self, streams: tuple[Stream, Stream]) -> tuple[ModuleType, int, tuple[int, int]] | None:
        """Return the C++ helper that runs the hooks of planned steps, with its numbers for this device and the streams of
        copies out and back; None without a helper."""

    def owns(self, tensor: Tensor) -> bool:
        """True if `tensor` is in this device's memory. On the simulator: a plain CPU tensor outside its pinned memory."""

    def synchronize(self) -> None:
        """Block the host until all streams of the device are done."""

    def record_all(self) -> tuple[Event, ...]:
        """Record events after all work of this process so far, on all streams of all devices in use, including streams of other
        libraries. For memory whose users are unknown.

        The host does not wait if the driver can record such an event; the simulator always can. Else the host waits until the
        work is done, and the tuple has no event for it. Must not be called while a graph is captured.
        """

    def compute(self) -> AbstractContextManager[Any]:
        """Return a context in which this thread's torch ops are this device's compute. Re-entrant.

        On CUDA it does nothing. The simulator prices, counts and orders the CPU ops that run inside.
        """


# --- Protocols of a hook in the device's allocator: it reclaims memory during an allocation that finds no free block.
#
# Between two autograd hooks the model may allocate any amount. During its copy to the host, a storage is lent to the allocator,
# with the event after the copy and the stream that owns the memory. If the allocator finds no block, it makes the owner wait
# for the event and takes the memory. Note [Reclaim].


class HeldStorage(Protocol):
    """A storage whose memory the allocator may reclaim. After that, the storage has 0 bytes."""

    @property
    def reclaimed(self) -> bool:
        """True if the allocator has reclaimed its memory."""

    def withdraw(self) -> bool:
        """Take the storage back, so that it cannot be reclaimed any more. Returns False if it was reclaimed. Call it once."""


class AllocatorHook(Protocol):
    """Interface of a hook to which one session lends storages. Any thread may allocate; reclaiming takes no lock of ours."""

    @property
    def reclaimed(self) -> int:
        """Number of storages that the allocator has reclaimed so far."""

    def hold(self, storage: torch.UntypedStorage, done: Event, owner: Stream, tensors: int) -> HeldStorage | None:
        """Hold `storage`, in `owner`'s memory, whose copy is complete at `done`. Return None if it must not be held.

        The memory is reclaimed only while `tensors` tensors and one attribute of the caller are all that refers to the storage.
        Also, the copy must be complete, or memory must be short; then `owner` waits for the copy. The caller passes the storage
        to no other code before `withdraw`.
        """

    def set_limits(self, limit_bytes: int, growth_bytes: int | None) -> None:
        """Set the maximum bytes that the allocator may reserve, and that are allocated until the next call (None: unknown).

        Memory is short if `growth_bytes` exceed the room below the limit, or the free memory of the device.
        """
