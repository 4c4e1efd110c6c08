"""The three small protocols that a GPU and the simulator share.

    ready = compute.record()              # an event: everything enqueued on `compute` so far
    d2h.wait(ready)                       # orders d2h after it, on the device; the host does not wait
    d2h.copy(host, hbm)
    done = d2h.record()
    compute.wait(done); compute.free(hbm); del hbm      # the block is compute's again, in stream order

A buffer is a flat, contiguous `torch.uint8` tensor: device memory from `Stream.alloc`, pinned host memory (or a slice of
it) from `Device.alloc_pinned`. A method belongs here only if the simulator can tell the truth about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Event(Protocol):
    """A point in a stream's work. Complete when everything enqueued on that stream before it is done."""

    def query(self) -> bool:
        """Whether the event is complete now. Never waits. True orders the caller's later launches after the event."""

    def synchronize(self) -> None:
        """The host waits until the event is complete."""

    def elapsed_us(self, since: Event) -> float:
        """Microseconds on the device from `since` to this event. Both must be `timed` and complete (`ValueError` otherwise)."""


@runtime_checkable
class Stream(Protocol):
    """A queue of device work, done in order."""

    @property
    def name(self) -> str:
        """`compute`, `d2h`, `h2d`, or what `new_stream` was given."""

    def alloc(self, nbytes: int) -> Tensor:
        """A flat uint8 tensor of device memory that belongs to this stream: usable by it at once, by others after a wait.

        Raises `torch.OutOfMemoryError` when the device has no such memory left.
        """

    def free(self, buffer: Tensor) -> None:
        """Note that this stream hands `buffer` back: call it right before dropping the last reference.

        Every access on other streams must be ordered before this point of this stream (their event waited on here, or seen
        complete by the host). It costs nothing; the simulator tells its observer.
        """

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Free the device memory of `storage` (`nbytes` is 0), or allocate `nbytes` for it, which has none.

        The storage, and with it every tensor over it, stays. Its memory belongs to this stream as that of `alloc` does, and is
        handed back as by `free`, under the same conditions. Raises `torch.OutOfMemoryError` with nothing changed.
        """

    def copy(self, dst: Tensor, src: Tensor, *, speculative: bool = False) -> None:
        """Enqueue an asynchronous copy between two flat uint8 tensors of equal size; the direction follows from where they
        live. The caller keeps both alive until an event after the copy is complete or waited on. `speculative`: an operator
        may write `src` meanwhile; what arrives is then undefined, and the caller knows not to use it. Raises `ValueError`
        for unequal sizes or other dtypes or layouts."""

    def copy_storage(self, storage: torch.UntypedStorage, host: Tensor, *, out: bool) -> None:
        """Enqueue a copy of all of `storage`, device memory, to the flat uint8 tensor `host` of pinned memory (`out`), or back.
        As `copy` does, a copy out being speculative, without a tensor over the storage."""

    def pack(self, dst: Tensor, sources: Sequence[Tensor], offsets: Sequence[int]) -> None:
        """Enqueue a kernel that copies each of `sources` to `dst` from its offset on; the other bytes of `dst` stay.

        All are flat uint8 buffers in device memory and share no bytes, but sources may with one another. Offsets are bytes:
        those of `packed_offsets` make accesses wide. In this stream's order, as an operator's work: the caller keeps the
        buffers as for `copy`. Raises `ValueError`, naming the buffer by its index, before anything is enqueued.
        """

    def unpack(self, destinations: Sequence[Tensor], src: Tensor, offsets: Sequence[int]) -> None:
        """Enqueue a kernel that copies to each of `destinations`, whole, what lies in `src` from its offset on.

        The inverse of `pack`, under the same conditions; destinations share no bytes with anything.
        """

    def add_checksum(self, out: Tensor, src: Tensor) -> None:
        """Enqueue a kernel that adds the checksum of `src`, (n,) uint8, to the int64 that `out`, (8,) uint8, holds, modulo
        2**64.

        The checksum has 64 bits and depends on the value and the position of each byte: `kernels.checksum`. Both are flat
        buffers in device memory. In this stream's order, as an operator's work: the caller keeps them as for `copy`. For
        compute streams. Raises `ValueError` before anything is enqueued.
        """

    def record(self, *, timed: bool = False) -> Event:
        """An event after all work enqueued so far. Untimed events cost a tenth of timed ones: use them for ordering."""

    def record_again(self, event: Event) -> None:
        """Record an untimed event of this kind of stream once more: it is that of a later point from now on. For an event that
        nobody has still to wait for."""

    def wait(self, event: Event) -> None:
        """Order this stream's later work after `event`, on the device. The host does not wait."""

    def is_current(self) -> bool:
        """Whether it is the calling thread's current compute stream, and no graph is captured there."""


class MemoryReading(NamedTuple):
    """Reading of the device's memory counters at one moment."""

    allocated_bytes: int
    """Bytes in live tensors (not what the caching allocator reserves)."""
    cumulative_bytes: int
    """Bytes ever allocated, never decreasing: their growth between two readings bounds the peak between them."""
    peak_bytes: int
    """Peak as `Device.peak_allocated_bytes` tells it."""
    unused_bytes: int = 0
    """Bytes of `allocated_bytes` that are set aside for a window of parameters, and not allocated."""


@runtime_checkable
class Device(Protocol):
    """One GPU, real or simulated."""

    @property
    def name(self) -> str:
        """Name for people: "NVIDIA H200" or "simulated H200"."""

    @property
    def simulated(self) -> bool: ...

    @property
    def driver(self) -> str:
        """Versions of what carries the work out: figures measured under one driver say nothing of another."""

    @property
    def host_us(self) -> float:
        """The host's clock in microseconds from some fixed point: real, or on the simulator virtual."""

    @property
    def torch_device(self) -> torch.device:
        """Device of torch on which models and batches are put: `cuda:N`, or `cpu` for the simulator."""

    @property
    def capacity(self) -> int:
        """Bytes of device memory that the allocator may hand out."""

    @property
    def block_slack_bytes(self) -> int:
        """The most bytes by which a block is larger than the request, rounded up to 512. 0: blocks are always cut."""

    def current_stream(self) -> Stream:
        """The calling thread's compute stream. Ask on the thread and at the moment of use; never inside one's own
        `with stream(...)`."""

    def new_stream(self, name: str) -> Stream: ...

    def capturing(self) -> bool:
        """Whether the calling thread's current stream is being captured into a graph.

        Nothing may then be asked of the device but this: an event query, a wait for the host or a reading of memory breaks a
        capture or says nothing of the replay, and a copy would be replayed without the host that has to follow it. Never
        waits, never raises, and starts no context. The simulator captures nothing: always False.
        """

    def alloc_pinned(self, nbytes: int) -> Tensor:
        """A flat uint8 tensor of `nbytes` of page-locked host memory (plain memory on the simulator).

        Page-aligned. Raises `HostMemoryExhausted` (a `MemoryError`) saying what was asked and why it failed.
        """

    def free_pinned(self, memory: Tensor) -> None:
        """Free what `alloc_pinned` returned, whole. All device work on it must be complete."""

    def alloc_pageable(self, nbytes: int) -> Tensor:
        """A flat uint8 tensor of `nbytes` of ordinary host memory, for where no more can be pinned: slower, never wrong.

        A copy to or from it may keep the host waiting. Its last reference frees it: keep one until device work on it is
        complete. Raises `HostMemoryExhausted` (a `MemoryError`).
        """

    def allocated_bytes(self) -> int:
        """Bytes of device memory in live tensors now (not what the caching allocator reserves)."""

    def read_memory(self) -> MemoryReading:
        """Allocated bytes now and in all, in one call into the allocator: cheap enough for a hook."""

    def peak_allocated_bytes(self) -> int:
        """The most `allocated_bytes` has been since the process or the last reset by the user."""

    def peak_reserved_bytes(self) -> int | None:
        """The most the caching allocator has reserved, or None where there is no such allocator (the simulator)."""

    def reset_peaks(self) -> None:
        """Start both peaks again from now. For benchmarks and demos: the library itself never resets what a user reads."""

    def release_unused(self) -> None:
        """Give back to the driver what the caching allocator has reserved and nobody uses. Waits for the device. The simulator
        reserves nothing."""

    def allocator_hook(self) -> AllocatorHook | None:
        """A new hook in the device's allocator, to which storages may be lent; None where it has none."""

    def owns(self, tensor: Tensor) -> bool:
        """Whether `tensor`'s memory is this device's (the simulator: a plain CPU tensor that is not pinned memory of its)."""

    def synchronize(self) -> None:
        """The host waits for all streams of the device."""

    def record_all(self) -> tuple[Event, ...]:
        """Events after all work that the process has given to streams so far: those of every device in use, whoever made them.
        For memory whose users are not known.

        The host does not wait where the driver can record such an event, and the simulator always can. Else the host waits
        until the work is done, and there is no event. Not while a graph is captured.
        """

    def compute(self) -> AbstractContextManager[Any]:
        """A context in which this thread's torch ops are this device's compute. Re-entrant.

        On CUDA nothing needs doing. The simulator prices, counts and orders the CPU ops that run inside.
        """


# --- Protocols of a hook in the device's allocator, which reclaims memory in the middle of an allocation that finds none
#
# Between two hooks of autograd the model allocates as it likes. A storage that is being copied to the host is lent to the
# allocator meanwhile, with the event after the copy and the stream that owns its memory. Where the allocator finds no block,
# it makes the owner wait for the event and takes the memory. Note [Reclaim].


class HeldStorage(Protocol):
    """A storage whose memory the allocator may reclaim: then it has none, and no bytes."""

    @property
    def reclaimed(self) -> bool:
        """Whether the allocator has reclaimed its memory."""

    def withdraw(self) -> bool:
        """Take it back, so that the allocator reclaims it no more. Returns False where it has. Once."""


class AllocatorHook(Protocol):
    """Interface of a hook to which one session lends storages. Any thread may allocate, and none of our locks is taken then."""

    @property
    def reclaimed(self) -> int:
        """Number of storages that the allocator has reclaimed, so far."""

    def hold(self, storage: torch.UntypedStorage, done: Event, owner: Stream, tensors: int) -> HeldStorage | None:
        """Hold `storage`, of `owner`'s memory, whose copy is complete at `done`; None: it is not one that may be held.

        Its memory goes when nobody else refers to the storage than `tensors` tensors and one attribute of the caller, in one of
        two ways: the copy is complete, or `owner` waits for it because memory is short. Until `withdraw` the caller gives it to
        nobody.
        """

    def set_limits(self, limit_bytes: int, growth_bytes: int | None) -> None:
        """Set what the allocator may take from the device, and what may be allocated until this is set again (None: not known).

        Memory is short where the two together pass what the allocator or the device has.
        """
