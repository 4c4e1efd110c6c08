"""The life of one saved storage: on the device, on its way out, on the host, on its way back. `State` has the states.

A saved storage orders the copies of its own buffers, and nothing else: the executor decides which storage moves when. Its
`form` says how the bytes are kept off the device, its base classes which saves share one copy (`SaveRecord`) and who holds
what is on the device (`DeviceCopy`).
"""

from __future__ import annotations

import logging
import weakref

import torch
from torch import Tensor

from chameleon_mm.device import Event, Stream
from chameleon_mm.errors import TransferFailed
from chameleon_mm.saved.calling_thread import annotation, call_site, current_operator, sequence_nr, this_thread
from chameleon_mm.saved.device_copy import DeviceCopy
from chameleon_mm.saved.form import WHOLE, Form
from chameleon_mm.saved.handles import flat_bytes
from chameleon_mm.saved.state import NEXT, State, SwapContext
from chameleon_mm.saved.verify import StorageChecksum
from chameleon_mm.saved.version import SavedBytes
from chameleon_mm.transfer import Move

_log = logging.getLogger(__name__)


class SavedStorage(DeviceCopy):
    """A storage that autograd saved, with the state machine that copies it out and back.

    A `PackedGroup` is one that stands for several small ones, a `SavedPart` one of which only a view was saved.
    """

    __slots__ = ("_arrived_on", "_checksum", "_in", "_read", "dtype")

    def __init__(
        self, t: Tensor, saved: SavedBytes, alloc_stream: Stream, context: SwapContext, *, epoch: int, index: int
    ) -> None:
        storage = t.untyped_storage()
        super().__init__(storage, saved, alloc_stream, epoch, index)
        self._device, self._context, self.form = storage, context, WHOLE
        self._lent = self._out = self._block = None
        self.latest = self.first
        self.dtype = t.dtype if t.numel() * t.element_size() == self.nbytes else None
        """dtype of all its elements, where the first view of it covers it; else None."""
        self._checksum = None if context.checksums is None else StorageChecksum(t, epoch, context.checksums)
        self._in: Move | None = None
        self._read: Event | None = None
        """Event after the latest copy back that was handed over: until then the block is being read."""
        self._arrived_on: Stream | None = None

    def _to(self, state: State) -> None:
        """Go from one state to the next. Every change of `state` is made here."""
        if state not in NEXT[self.state]:
            raise RuntimeError(f"a saved storage of {self.nbytes} bytes that is {self.state.value} cannot become {state.value}")
        self.state = state

    # --- out

    @property
    def is_copyable(self) -> bool:
        """Whether the storage still has its size and at least one of the saves has not been written to since. The use of one
        that was written to raises anyway. What only recipes need is not copied while the model holds it."""
        if self._device is None or self._device.nbytes() != self.nbytes:
            return False
        if self.is_held_for_recipes and not self.is_private:
            return False  # a copy has the bytes that recipes rely on once the model cannot write to them: Note [Relied on]
        for saved in self._saved_bytes:  # noqa: SIM110 - a generator is one more call at every hook, and so would `moved` be
            if saved.probe.alias._version == saved.probe.expected:
                return True
        return False

    @property
    def transfer_bytes(self) -> int:
        """Bytes that cross the link."""
        return self.nbytes - self.form.device_bytes

    def swap_out(self, form: Form = WHOLE, *, pageable: bool = False) -> None:
        """Queue the copy out, in that form. `pageable`: to ordinary memory, beyond the pool's limit.

        Raises `HostMemoryExhausted` or `TransferFailed` with nothing changed.
        """
        assert self.state is State.ON_DEVICE and self._device is not None
        context = self._context
        first_bytes, host_bytes = form.device_bytes, self.nbytes - form.device_bytes
        block = (context.pool.allocate_pageable if pageable else context.pool.allocate)(host_bytes)
        source = flat_bytes(self._device)[first_bytes:] if first_bytes else flat_bytes(self._device)
        # Note [Swap-out]: the source was written by compute; Note [Host block]: the block's last use may still be running.
        after = [self.alloc_stream.record(), *block.pending_events]
        first = self._saved_bytes[0]
        versions: list[tuple[Tensor, int]] = []
        for saved in self._saved_bytes:
            versions.append((saved.probe.alias, saved.probe.expected))  # noqa: PERF401 - a comprehension is one more call
        is_all = first.is_dense and first.begin == 0 and first.end >= self.nbytes  # as a rule
        at_once = not is_all and self._reads_uncovered()
        if at_once:
            self._checksum = None  # of the other bytes anything may arrive
        if self._checksum is not None:
            # The checksum is taken on the current stream, which need not be the allocating one.
            context.streams.join_all(self.alloc_stream)
            self._checksum.close(flat_bytes(self._device))
        with annotation("chameleon::swap_out"):
            written, timed = (versions, context.streams.record_each), context.metrics.timed
            out = context.transfer.swap_out(block.buffer, source, after, timed=timed, written=written, at_once=at_once)
        if out.failed:
            block.release()
            raise TransferFailed(f"a saved tensor of {self.nbytes} bytes could not be swapped out; it stays on the device")
        self.form, self._block, self._out = form, block, out
        context.metrics.moved(out, "out", host_bytes)
        context.metrics.totals.pageable_swap_outs += pageable
        self._began_in = (this_thread.number, sequence_nr()), call_site()  # as `current_operator` has it
        self._to(State.SWAPPING_OUT)

    def leave_in(self, form: Form, content: Tensor) -> None:
        """Drop the device copy, in stream order, without a copy of its own: `form` has the bytes.

        `content` is a flat tensor over the device copy, which is freed here. Whoever read it ran on a stream that the
        allocating stream has joined since.
        """
        assert self.state is State.ON_DEVICE and self._device is not None
        if self._checksum is not None:
            self._checksum.close(content)
        self.alloc_stream.free(content)
        self._began_in = current_operator(), call_site()
        self._device, self.form = None, form
        self._to(State.ON_HOST)

    def restored_in(self, storage: torch.UntypedStorage, compute: Stream) -> None:
        """Note that its form has put its bytes into `storage`, on `compute`, the current stream."""
        assert self.state is State.ON_HOST and self._block is None
        if self._checksum is not None:
            self._checksum.check(flat_bytes(storage))
        self._device, self.alloc_stream, self.latest = storage, compute, weakref.ref(storage)
        self.note_swap_in()
        self._to(State.RESTORED)

    # --- reclaim

    @property
    def reclaimed(self) -> bool:
        """Whether nothing is left to reclaim: it was reclaimed, or its copy out was cancelled."""
        return self.state is not State.SWAPPING_OUT

    def reclaim_if_copied(self) -> bool:
        """Reclaim without a wait if the host sees the copy out complete. Returns whether it did."""
        assert self._out is not None
        if self._out.failed:
            self._undo_swap_out()
            return False
        if self._out.done is None or not self._out.done.query():
            return False
        if self._lent is not None:
            self.take_back()
            if self.state is not State.SWAPPING_OUT:
                return True
        # The host saw the copy complete, so whatever it launches next is ordered after it: no wait is needed.
        if self.form.device_bytes and not self._copy_stationary_part():
            return False
        self._drop_device()
        return True

    def reclaim(self, *, in_plan_order: bool = False) -> None:
        """Order compute after the copy out and drop the device copy. `in_plan_order`: copies cross the link in the order of the
        plan."""
        assert self._out is not None
        if self._lent is not None:
            self.take_back()
            if self.state is not State.SWAPPING_OUT:
                return
        issue = self._context.transfer.issue_out_in_order if in_plan_order else self._context.transfer.issue_out
        try:
            done = issue(self._out)
        except RuntimeError as error:  # the copy was refused, so the tensor stays: a use finds it on the device
            _log.warning("chameleon_mm: %d bytes stay on the device, their copy out was refused: %s", self.nbytes, str(error))
            self._undo_swap_out()
            return
        can_drop = not self.form.device_bytes or self._copy_stationary_part()
        with annotation("chameleon::reclaim"):
            # Note [Reclaim]: the next owner of the device memory comes after the copy. Where the storage stays, its copy out
            # was handed over all the same, and what compute writes to it next comes after that.
            self._context.metrics.wait(self.alloc_stream, done, "out", None if self.planned is None else self.planned.tensor)
            if can_drop:
                self._drop_device()

    def _copy_stationary_part(self) -> bool:
        """Copy what is to stay on the device into a buffer of its own. Returns whether there was memory for it; else all of the
        storage stays."""
        assert self._device is not None
        if self._block is None:  # nobody wants it any more
            return True
        try:
            self.form.keep(self._device, self.alloc_stream)
        except torch.OutOfMemoryError:
            self._undo_swap_out()
            return False
        return True

    def cancel_swap_out(self) -> bool:
        """Cancel a copy out of which nothing was handed over: it is about to be used. Returns whether it was cancelled."""
        assert self._out is not None
        if self._lent is not None:
            self.take_back()
        if self.state is not State.SWAPPING_OUT or not (self._out.failed or self._context.transfer.cancel_out(self._out)):
            return False
        self._undo_swap_out()
        return True

    def _undo_swap_out(self) -> None:
        self._context.metrics.totals.bytes_swapped_out -= self.transfer_bytes
        self._release_block()
        self.form.drop()
        self.form, self._out = WHOLE, None
        self._to(State.ON_DEVICE)

    def _drop_device(self) -> None:
        assert self._device is not None
        self._context.streams.join_all(self.alloc_stream)  # Note [Reclaim]: its next owner is whichever stream allocated it
        self.alloc_stream.free(flat_bytes(self._device))
        self._device = None
        self._context.metrics.totals.bytes_reclaimed += self.nbytes - self.form.device_bytes
        self._to(State.RETIRED if self._block is None else State.ON_HOST)

    # --- back

    def swap_in(self, compute: Stream) -> torch.UntypedStorage:
        """Allocate on `compute` and queue the copy back, into the storage returned. Raises `torch.OutOfMemoryError` or
        `TransferFailed` with nothing changed."""
        assert self.state is State.ON_HOST and self._block is not None and self._out is not None
        done_out = self._out.done
        assert done_out is not None, "device memory was reclaimed before its copy out was issued"
        whole = compute.alloc(self.nbytes)
        destination = whole[self.form.device_bytes :] if self.form.device_bytes else whole
        # Note [Swap-in]: an earlier owner of the device memory may still be running on compute; and the copy out must be
        # complete before the host copy is read.
        after = [compute.record(), done_out]
        with annotation("chameleon::swap_in"):
            back = self._context.transfer.swap_in(destination, self._block.buffer, after, timed=self._context.metrics.timed)
        if back.failed:
            raise TransferFailed(f"a saved tensor of {self.nbytes} bytes could not be swapped in")
        self.form.put_back(whole, compute)
        self._in = back
        self._context.metrics.moved(back, "in", self.transfer_bytes)
        self._device = whole.untyped_storage()
        self.latest = weakref.ref(self._device)
        self.alloc_stream = compute
        self._arrived_on = None
        self.note_swap_in()
        self._to(State.SWAPPING_IN)
        return self._device

    def arrive(self, compute: Stream, *, prefetched: bool = False) -> torch.UntypedStorage:
        """Order `compute` after the copy back; the storage may then be used there. `prefetched`: the copy began before this
        use."""
        assert self._device is not None
        if self._block is None:
            return self._device  # its form put it there, on the stream that allocated it
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
        if self._checksum is not None and self.state is State.SWAPPING_IN:
            self._checksum.check(flat_bytes(self._device))
        self._to(State.RESTORED)
        return self._device

    def drop_restored(self) -> None:
        """Drop a device copy that the host still has: nothing has to be copied. Raises `torch.OutOfMemoryError` with nothing
        changed where there is no memory for what of it stays."""
        assert self.state in (State.SWAPPING_IN, State.RESTORED) and self._device is not None
        self.form.keep(self._device, self.alloc_stream)
        self._drop_restored()

    def _drop_restored(self) -> None:
        assert self._device is not None
        if self.state is State.SWAPPING_IN:
            self._settle_arrival()
        self.alloc_stream.free(flat_bytes(self._device))
        self._device = None
        self._to(State.ON_HOST)

    @property
    def swap_in_failed(self) -> bool:
        """Whether its copy back was refused after it was queued: it is still on the host."""
        return self.state is State.SWAPPING_IN and self._in is not None and self._in.failed

    def usable_elsewhere(self, compute: Stream) -> torch.UntypedStorage | None:
        """The device copy if somebody else still holds it, whole, and `compute` may use it without a wait."""
        storage = self.latest()
        if storage is None or storage.nbytes() != self.nbytes or not self.is_allocated_on(compute):
            return None
        return storage

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
            # Note [Reclaim]: the copy must be done before the device memory is reused
            self._context.metrics.wait(self.alloc_stream, arrived, "in")

    # --- the end

    def retire(self) -> None:
        """Release the block and drop the device copy, once the last handle is gone.

        A copy out that still reads the device buffer keeps it: `state` stays SWAPPING_OUT and the reclaim queue ends it.
        """
        if self._lent is not None:
            self.take_back()
        if self.state is State.RETIRED:
            return
        try:
            if self.state is State.SWAPPING_OUT and not self.cancel_swap_out():
                assert self._out is not None
                self._context.metrics.totals.bytes_swapped_out -= self._context.transfer.truncate_out(self._out)
                self._release_block()
                return
            if self.state is State.SWAPPING_IN:
                self._drop_restored()
        except BaseException:
            # The device did not take an order that what follows rests on: the host waits instead.
            self._context.transfer.synchronize()
            self._retired()
            raise
        self._retired()

    def _retired(self) -> None:
        self.proof = None
        self._release_block()
        self.form.drop()
        self._device, self.form = None, WHOLE
        self._to(State.RETIRED)

    def _release_block(self) -> None:
        if self._block is None:
            return
        # Note [Host block]: the next owner's copy out waits for our last copy, on its stream. A copy back comes after the
        # copy out, so its event covers both.
        after = self._read if self._read is not None else self._out.done if self._out is not None else None
        self._block.release(after=after)
        self._block = None
