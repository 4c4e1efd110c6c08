"""The life of one saved storage: on the device, on its way out, on the host, on its way back.

    ON_DEVICE --swap_out--> SWAPPING_OUT --reclaim--> ON_HOST --swap_in--> SWAPPING_IN --use--> RESTORED --drop--> ON_HOST
        ^__ cancel_swap_out _____|                         any of them --retire (last handle gone)--> RETIRED

Everything here is per storage and orders exactly one buffer; which storage moves when is the executor's business. The life is
told in one file, long as it is: each way out of a state is to be read beside the ways into it.
"""

from __future__ import annotations

import enum
import logging
import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from chameleon_mm.device import Event, Stream
from chameleon_mm.errors import HostMemoryExhausted, SimError, TransferFailed
from chameleon_mm.pinned import PinnedBlock, PinnedPool
from chameleon_mm.policy import StorageAction
from chameleon_mm.saved.annotations import annotation
from chameleon_mm.saved.encoding import Encoding
from chameleon_mm.saved.gather import Part
from chameleon_mm.saved.handles import flat_bytes
from chameleon_mm.saved.metrics import Metrics
from chameleon_mm.saved.op_number import CallSite, OperatorNumber, call_site, current_operator, made_before
from chameleon_mm.saved.remainder import Remainder
from chameleon_mm.saved.saved_bytes import SavedBytes
from chameleon_mm.saved.streams import ComputeStreams
from chameleon_mm.saved.verify import Checksums, StorageChecksum
from chameleon_mm.transfer import Move, Transfer

if TYPE_CHECKING:
    from chameleon_mm.profiler.storages import TracedStorage
    from chameleon_mm.saved.packed_group import PackedGroup

_log = logging.getLogger(__name__)


class State(enum.Enum):
    """State of a saved storage: where its bytes are."""

    ON_DEVICE = "resident"
    """On the device alone. Begins when it is saved; ends when its copy out is queued."""
    SWAPPING_OUT = "leaving"
    """On the device, with a copy out queued or running. Ends when compute is ordered after that copy and the HBM is dropped."""
    ON_HOST = "on_host"
    """On the host. Begins when its HBM is dropped; ends when a copy back is queued, or it is unpacked from its group, wherever
    that is."""
    SWAPPING_IN = "arriving"
    """On the host, with a copy back queued or running. Ends at the first use, which orders compute after that copy."""
    RESTORED = "restored"
    """On both. Begins at the first use after a swap-in; ends when all its views were used, or it is dropped under pressure."""
    RETIRED = "retired"
    """Nowhere: the last handle is gone, and nothing is held any more."""


_NEXT = {
    State.ON_DEVICE: (State.SWAPPING_OUT, State.ON_HOST, State.RETIRED),
    State.SWAPPING_OUT: (State.ON_HOST, State.ON_DEVICE, State.RETIRED),
    State.ON_HOST: (State.SWAPPING_IN, State.RESTORED, State.RETIRED),
    State.SWAPPING_IN: (State.RESTORED, State.ON_HOST, State.RETIRED),
    State.RESTORED: (State.RESTORED, State.ON_HOST, State.RETIRED),
    State.RETIRED: (),
}
"""States that may follow each. From ON_DEVICE to ON_HOST at once goes what was packed into a group, in stream order."""


@dataclass(frozen=True, slots=True)
class SwapContext:
    """Everything that a storage needs to be swapped: one set per executor."""

    pool: PinnedPool
    transfer: Transfer
    metrics: Metrics
    streams: ComputeStreams
    checksums: Checksums | None = None
    """Checksums of what goes out, compared with what comes back; None: not checked."""


class LastSave:
    """The step and hook in which a storage was saved last, shared by all records of the storage."""

    __slots__ = ("claims", "epoch", "hook", "storage")

    def __init__(self, storage: weakref.ref[torch.UntypedStorage]) -> None:
        self.storage = storage
        self.epoch, self.hook = -1, 0
        self.claims = 0
        """Number of live claims on the storage."""


class SavedStorage:
    """The buffers of one saved storage, and the copies between them.

    A `PackedGroup` is one that stands for several small ones, a `SavedPart` one of which only a view was saved.
    """

    part: Part | None = None
    """Bytes of the storage that were saved; None: all of them."""
    gathered = False
    """Whether only the bytes of `part` are held, side by side: on the device as on the host."""

    def __init__(
        self, t: Tensor, saved: SavedBytes, alloc_stream: Stream, context: SwapContext, *, epoch: int, index: int
    ) -> None:
        storage = t.untyped_storage()
        self.state = State.ON_DEVICE
        self.nbytes = self._saved_nbytes = storage.nbytes()
        """Bytes that are held and moved: those of the saved storage, until it is gathered."""
        self.device: torch.UntypedStorage | None = storage
        """The device copy, held strongly. None when it was dropped."""
        self.first = weakref.ref(storage)
        """The storage that was saved, as long as anybody holds it."""
        self.latest = self.first
        """The device copy, whoever holds it: the saved storage itself, later what a swap-in made."""
        self._saved_bytes = [saved]
        """Saves from before the copy out began, none known to be included in another: what that copy has."""
        self._began_in: tuple[OperatorNumber, CallSite | None] | None = None
        """The operator at one of whose hooks the copy out was begun."""
        self.copies = 1
        """Number of copies of all of the storage so far, each by a record of its own, this one's included."""
        self.op_is_over = False
        """Whether the ops that saved it have ended, so that it may be copied."""
        self.epoch = epoch
        """The step in which it was saved, and the `index` of the save within it."""
        self.index = index
        self.views = 0
        """Handles made for it; `uses_left` of them were not used since the latest swap-in, which is number `swap_in_number`."""
        self.uses_left = 0
        self.swap_in_number = 0
        self._checksum = None if context.checksums is None else StorageChecksum(t, epoch, context.checksums)
        self.storage_id = id(storage)
        self._alloc_stream = alloc_stream
        self._context = context
        self._block: PinnedBlock | None = None
        self._out: Move | None = None
        self._in: Move | None = None
        self._read: Event | None = None
        """Event after the latest copy back that was handed over: until then the block is being read."""
        self._arrived_on: Stream | None = None
        self.dtype = t.dtype if t.numel() * t.element_size() == self.nbytes else None
        """dtype of all its elements, where the first view of it covers it; else None."""
        self._encoding: Encoding | None = None
        """The shorter form in which its bytes cross; None: they cross as they are."""
        self._encoded: Tensor | None = None
        """Its encoded bytes on the device, on their way out or back; `_encoded_stream` allocated them."""
        self._encoded_stream = alloc_stream
        self.group: PackedGroup | None = None
        """The group that it is packed in, if it is a small one: then the group has its bytes whenever `state` is ON_HOST."""
        self.traced: TracedStorage | None = None
        """Its record in the trace, where the step that saved it is recorded."""
        self.planned: StorageAction | None = None
        """Its action in the plan; None: no plan knows it."""
        self.last_save = LastSave(self.first)
        """The latest save of the storage, shared with its other records."""
        self._noted_in = -1
        """The last step in which the profiler saw a save of it."""
        self._remainder = Remainder(0, context.streams)
        """The part of it that stays on the device while the rest is on the host."""

    def note_save(self, epoch: int, hook: int) -> tuple[bool, int | None]:
        """It is saved at that hook of a step. Returns whether that is the first time in the step for this record, and how many
        hooks ago its storage was saved last in it, under any record; None: it was not."""
        first, self._noted_in = self._noted_in != epoch, epoch
        last = self.last_save
        hooks_ago = hook - last.hook if last.epoch == epoch else None
        last.epoch, last.hook = epoch, hook
        return first, hooks_ago

    def _to(self, state: State) -> None:
        """Go from one state to the next. Every change of `state` is made here."""
        if state not in _NEXT[self.state]:
            raise RuntimeError(f"a saved storage of {self.nbytes} bytes that is {self.state.value} cannot become {state.value}")
        self.state = state

    def _join_streams(self) -> None:
        self._context.streams.join_all(self._alloc_stream)

    # --- out

    @property
    def is_copyable(self) -> bool:
        """Whether some of it is as it was saved. If it was written to, its use can only raise; if it was resized, somebody
        refills it."""
        if self.device is None or self.device.nbytes() != self.nbytes:
            return False
        return not all(saved.probe.moved for saved in self._saved_bytes)

    def swap_out(self, *, pageable: bool = False, last_bytes: int | None = None) -> None:
        """Queue the copy out. Raises `HostMemoryExhausted` or `TransferFailed` with nothing changed.

        `pageable`: to ordinary memory, beyond the pool's limit. `last_bytes`: only the last bytes; the rest stays on the
        device.
        """
        assert self.state is State.ON_DEVICE and self.device is not None
        stays = 0 if last_bytes is None else self.nbytes - last_bytes
        block = (self._context.pool.allocate_pageable if pageable else self._context.pool.allocate)(self.nbytes - stays)
        self._remainder = Remainder(stays, self._context.streams)
        self._queue_copy(block, flat_bytes(self.device)[stays:])
        self._context.metrics.totals.pageable_swap_outs += pageable

    def swap_out_encoded(self, encoding: Encoding, current: Stream) -> None:
        """Queue the copy out in a shorter form: a kernel on `current`, which is the current stream, then the copy of its
        result.

        Raises `torch.OutOfMemoryError` too.
        """
        assert self.state is State.ON_DEVICE and self.device is not None
        block = self._context.pool.allocate(encoding.nbytes)
        try:
            encoded = current.alloc(encoding.nbytes)
            self._join_streams()  # Note [Swap-out]: the source was written by others, and `current` reads it
            encoding.encode(self.device, encoded, current)
            self._join_streams()  # ... and the allocating stream, after which the copy comes, follows what was written here
        except BaseException:
            block.release()
            raise
        self._encoding, self._encoded, self._encoded_stream = encoding, encoded, current
        try:
            self._queue_copy(block, encoded)
        except BaseException:
            self._encoding = self._encoded = None
            raise

    @property
    def transfer_bytes(self) -> int:
        """Bytes that cross the link."""
        return self.nbytes - self._remainder.nbytes if self._encoding is None else self._encoding.nbytes

    @property
    def remainder_bytes(self) -> int:
        """Device memory that it takes while it is on the host."""
        return self._remainder.nbytes

    @property
    def swap_in_bytes(self) -> int:
        """Device memory that a swap-in takes."""
        return self.nbytes if self._encoding is None else self.nbytes + self._encoding.nbytes

    def _queue_copy(self, block: PinnedBlock, source: Tensor) -> None:
        # Note [Swap-out]: the source was written by compute; Note [Host block]: the block's last use may still be running.
        ready = self._alloc_stream.record()
        after = [ready, *block.pending_events]
        if self._checksum is not None:
            assert self.device is not None
            self._join_streams()  # the checksum is taken on the current stream, which need not be the allocating one
            self._checksum.close(flat_bytes(self.device))
        with annotation("chameleon::swap_out"):
            out = self._context.transfer.swap_out(block.buffer, source, after, timed=self._context.metrics.timed)
        if out.failed:
            block.release()
            raise TransferFailed(f"a saved tensor of {self.nbytes} bytes could not be swapped out; it stays on the device")
        self._block, self._out = block, out
        self._context.metrics.moved(self._out, "out", self.transfer_bytes)
        self._began_in = current_operator(), call_site()
        self._to(State.SWAPPING_OUT)

    # --- in a group

    @property
    def alloc_stream(self) -> Stream:
        """The stream whose allocator the device copy belongs to."""
        return self._alloc_stream

    def pack_into(self, group: PackedGroup, packed: Tensor) -> None:
        """Drop the device copy: its bytes, all in `packed`, went into `group`, on a stream that the allocating stream has
        joined since."""
        assert self.state is State.ON_DEVICE and self.device is not None
        if self._checksum is not None:
            self._checksum.close(packed)
        self._alloc_stream.free(packed)
        self._began_in = current_operator(), call_site()
        self.device, self.group = None, group
        self._to(State.ON_HOST)

    def unpacked_into(self, storage: torch.UntypedStorage, compute: Stream) -> None:
        """Note that its bytes were unpacked into `storage`, on `compute`, the current stream."""
        assert self.state is State.ON_HOST and self.group is not None
        if self._checksum is not None:
            self._checksum.check(flat_bytes(storage))
        self.device, self._alloc_stream, self.latest = storage, compute, weakref.ref(storage)
        self.swap_in_number += 1
        self.uses_left = self.views
        self._to(State.RESTORED)

    # --- reclaim

    @property
    def reclaimed(self) -> bool:
        return self.state is not State.SWAPPING_OUT

    def copied(self) -> bool:
        assert self._out is not None
        if self._out.failed:
            self._undo_swap_out()
            return False
        if self._out.done is None or not self._out.done.query():
            return False
        if not self._encoding_was_exact():
            return False
        # The host saw the copy complete, so whatever it launches next is ordered after it: no wait is needed.
        if not self._copy_remainder():
            return False
        self._drop_device()
        return True

    def _encoding_was_exact(self) -> bool:
        """Whether what is on the host now stands for the storage; if not, its bytes go out as they are, if they still can.

        The copy must be complete: the status word came with it, and the host reads it.
        """
        encoding, block = self._encoding, self._block
        if encoding is None or block is None:  # no block: nobody wants it any more
            return True
        exact = encoding.is_exact(block.buffer)
        self._context.metrics.encoded(encoding.codec.name, str(encoding.dtype), exact=exact)
        if exact:
            return True
        self._context.metrics.totals.bytes_swapped_out += self.transfer_bytes  # `_undo_swap_out` takes off what did cross
        self._undo_swap_out()
        if self.is_copyable:
            with suppress(HostMemoryExhausted, TransferFailed):
                self.swap_out()
        return False

    def reclaim(self, *, in_plan_order: bool = False) -> None:
        """Order compute after the copy out and drop the device copy. `in_plan_order`: copies cross the link in the order of the
        plan."""
        assert self._out is not None
        issue = self._context.transfer.issue_out_in_order if in_plan_order else self._context.transfer.issue_out
        try:
            done = issue(self._out)
        except SimError:
            raise
        except RuntimeError as error:  # the copy was refused, so the tensor stays: a use finds it on the device
            _log.warning("chameleon_mm: %d bytes stay on the device, their copy out was refused: %s", self.nbytes, str(error))
            self._undo_swap_out()
            return
        if self._encoding is not None:
            done.synchronize()  # only the host can read whether the encoded bytes stand for the storage
            if not self._encoding_was_exact():
                if self.state is State.SWAPPING_OUT:
                    self.reclaim()  # as it is, this time
                return
        remainder_copied = self._copy_remainder()
        with annotation("chameleon::reclaim"):
            # Note [Reclaim]: the block's next owner on compute comes after the copy
            self._context.metrics.wait(self._alloc_stream, done, "out", None if self.planned is None else self.planned.tensor)
            if remainder_copied:
                self._drop_device()

    def _copy_remainder(self) -> bool:
        """Copy what is to stay on the device. Returns whether there was memory for it; else all of the storage stays."""
        assert self.device is not None
        if self._block is None:  # nobody wants it any more
            return True
        try:
            self._remainder.copy_out(self.device, self._alloc_stream)
        except torch.OutOfMemoryError:
            self._undo_swap_out()
            return False
        return True

    def cancel_swap_out(self) -> bool:
        """Cancel a copy out of which nothing was handed over: it is about to be used. Returns whether it was cancelled."""
        assert self._out is not None
        if self.state is not State.SWAPPING_OUT or not (self._out.failed or self._context.transfer.cancel_out(self._out)):
            return False
        self._undo_swap_out()
        return True

    def _undo_swap_out(self) -> None:
        self._context.metrics.totals.bytes_swapped_out -= self.transfer_bytes
        self._release_block()
        self._drop_encoded()
        self._out = self._encoding = None
        self._remainder = Remainder(0, self._context.streams)
        self._to(State.ON_DEVICE)

    def _drop_encoded(self) -> None:
        if self._encoded is not None:
            self._encoded_stream.free(self._encoded)
            self._encoded = None

    def _drop_device(self) -> None:
        assert self.device is not None
        self._join_streams()  # Note [Reclaim]: its next owner is whichever stream allocated it
        self._drop_encoded()
        self._alloc_stream.free(flat_bytes(self.device))
        self.device = None
        self._context.metrics.totals.bytes_reclaimed += self.nbytes - self._remainder.nbytes
        self._to(State.RETIRED if self._block is None else State.ON_HOST)

    # --- back

    def swap_in(self, compute: Stream) -> torch.UntypedStorage:
        """Allocate on `compute` and queue the copy back, into the storage returned.

        Raises `torch.OutOfMemoryError` or `TransferFailed` with nothing changed.
        """
        assert self.state is State.ON_HOST and self._block is not None and self._out is not None
        done_out = self._out.done
        assert done_out is not None, "HBM was dropped before its copy was handed over"
        destination = compute.alloc(self.nbytes)
        crossing = destination if self._encoding is None else compute.alloc(self._encoding.nbytes)
        # Note [Swap-in]: the block came from compute's pool, whose earlier owner may still be running there; and the host
        # copy must be whole before it is read.
        after = [compute.record(), done_out]
        arriving = crossing[self._remainder.nbytes :]
        with annotation("chameleon::swap_in"):
            back = self._context.transfer.swap_in(arriving, self._block.buffer, after, timed=self._context.metrics.timed)
        if back.failed:
            raise TransferFailed(f"a saved tensor of {self.nbytes} bytes could not be swapped in")
        self._remainder.copy_back(destination, compute)
        self._in = back
        self._context.metrics.moved(self._in, "in", self.transfer_bytes)
        if self._encoding is not None:
            self._encoded, self._encoded_stream = crossing, compute
        self.device = destination.untyped_storage()
        self.latest = weakref.ref(self.device)
        self._alloc_stream = compute
        self._arrived_on = None
        self.swap_in_number += 1
        self.uses_left = self.views
        self._to(State.SWAPPING_IN)
        return self.device

    def arrive(self, compute: Stream, *, prefetched: bool = False) -> torch.UntypedStorage:
        """Order `compute` after the copy back; the storage may then be used there. `prefetched`: the copy began before this
        use."""
        assert self.device is not None
        if self.group is not None:
            return self.device  # unpacked on the stream that allocated it
        assert self._in is not None
        arrived = self._read = self._context.transfer.issue_in(self._in)
        if self._arrived_on is not compute:
            if not arrived.query():
                tensor = None if self.planned is None else self.planned.tensor
                with annotation("chameleon::wait"):  # Note [Swap-in]: use after the bytes are there
                    self._context.metrics.wait(compute, arrived, "in", tensor, prefetched=prefetched)
            elif prefetched:
                self._context.metrics.on_time()
            self._arrived_on = compute
        if self._encoding is not None and self._encoded is not None:
            self._encoding.decode(self._encoded, self.device, compute)
            self._drop_encoded()
        if self._checksum is not None and self.state is State.SWAPPING_IN:
            self._checksum.check(flat_bytes(self.device))
        self._to(State.RESTORED)
        return self.device

    def drop_restored(self) -> None:
        """Drop a device copy that the host still has: nothing has to be copied.

        Raises `torch.OutOfMemoryError` with nothing changed where there is no memory for what of it stays.
        """
        assert self.state in (State.SWAPPING_IN, State.RESTORED) and self.device is not None
        self._remainder.copy_out(self.device, self._alloc_stream)
        if self.state is State.SWAPPING_IN:
            self._settle_arrival()
        self._drop_encoded()
        self._alloc_stream.free(flat_bytes(self.device))
        self.device = None
        self._to(State.ON_HOST)

    @property
    def swap_in_failed(self) -> bool:
        """Whether its copy back was refused after it was queued: it is still on the host."""
        return self.state is State.SWAPPING_IN and self._in is not None and self._in.failed

    def drop_if_held_elsewhere(self) -> None:
        """Drop our reference to the device copy, as all views were used; whoever still uses it holds it.

        One that moves in part is still held: its first bytes are nowhere else.
        """
        assert self.state is State.RESTORED
        if self._remainder.nbytes:
            return
        self.device = None
        self._to(State.ON_HOST)

    def is_record_of(self, storage: torch.UntypedStorage) -> bool:
        """Whether `storage` is the one that was saved, and still has its size."""
        return self.first() is storage and self._saved_nbytes == storage.nbytes()

    def includes(self, saved: SavedBytes, *, same_bytes: bool = False) -> bool:
        """Whether its copy, begun or not, is known to have these bytes of its storage, which are saved now.

        `same_bytes`: they are those of its `part`.
        """
        return any(earlier.copy_includes(saved, same_bytes=same_bytes) for earlier in self._saved_bytes)

    def supersedes(self, before: SavedStorage) -> None:
        """Note that this record replaces `before`, one of the same storage whose copy came too early for what is saved now.

        It waits for the stream that saves now: what was written on another one it has only by luck.
        """
        self.copies = before.copies + 1
        if before.part is None and self.part is None and before.is_allocated_on(self._alloc_stream):
            self._saved_bytes += [earlier for earlier in before._saved_bytes if not earlier.probe.moved]

    def try_include(self, saved: SavedBytes, t: Tensor, compute: Stream) -> bool:
        """Include these bytes, written on `compute`, in its copy out, if that begins later than now. Returns whether it does.

        A copy that began at another hook of the operator that saves `t` is not too early for what that operator was given.
        """
        if not self.is_allocated_on(compute) or self.gathered:
            return False
        if self.state is not State.ON_DEVICE and not self._was_given(saved, t):
            return False
        self._saved_bytes = [earlier for earlier in self._saved_bytes if not earlier.probe.moved]
        self._saved_bytes.append(saved)
        return True

    def _was_given(self, saved: SavedBytes, t: Tensor) -> bool:
        """Whether the operator that saves `t` was given it, and began the copy out.

        Who made `t` does not tell: operators that write in place save what they were given (`a.hypot_(b)`), and a function of
        one's own writes between operators that it calls. So a counter that has not moved since before the copy must say so.
        """
        if self._began_in is None:
            return False
        operator, site = self._began_in
        if operator != current_operator() or not self.includes(saved, same_bytes=True) or not made_before(t, operator):
            return False
        return site == call_site()

    def usable_elsewhere(self, compute: Stream) -> torch.UntypedStorage | None:
        """The device copy if somebody else still holds it, whole, and `compute` may use it without a wait."""
        storage = self.latest()
        if storage is None or storage.nbytes() != self.nbytes or not self.is_allocated_on(compute):
            return None
        return storage

    def is_allocated_on(self, compute: Stream) -> bool:
        return self._alloc_stream is compute

    def _settle_arrival(self) -> None:
        assert self._in is not None
        if self._in.failed:
            self._in = None
            return
        if self._context.transfer.cancel_in(self._in):
            self._context.metrics.totals.bytes_swapped_in -= self.transfer_bytes
            self._in = None
            return
        arrived = self._read = self._context.transfer.issue_in(self._in)
        if not arrived.query():
            # Note [Reclaim]: the copy must be done before the block is reused
            self._context.metrics.wait(self._alloc_stream, arrived, "in")

    # --- the end

    def retire(self) -> None:
        """Release the block and drop the device copy, once the last handle is gone.

        A copy out that still reads the device buffer keeps it: `state` stays SWAPPING_OUT and the reclaim queue ends it.
        """
        if self.state is State.RETIRED:
            return
        try:
            if self.state is State.SWAPPING_OUT and not self.cancel_swap_out():
                assert self._out is not None
                self._context.metrics.totals.bytes_swapped_out -= self._context.transfer.truncate_out(self._out)
                self._release_block()
                return
            if self.state is State.SWAPPING_IN:
                self._remainder = Remainder(0, self._context.streams)  # all of it goes
                self.drop_restored()
        except BaseException:
            # The device did not take an order that what follows rests on: the host waits instead.
            self._context.transfer.synchronize()
            self._retired()
            raise
        self._retired()

    def _retired(self) -> None:
        if self.group is not None:
            self.group.remove(self)
        self._release_block()
        self._remainder.drop()
        self.device = self._encoded = None
        self._to(State.RETIRED)

    def _release_block(self) -> None:
        if self._block is None:
            return
        # Note [Host block]: the next owner's copy out waits for our last copy, on its stream. A copy back comes after the
        # copy out, so its event covers both.
        after = self._read if self._read is not None else self._out.done if self._out is not None else None
        self._block.release(after=after)
        self._block = None
