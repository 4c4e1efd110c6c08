"""The life of one saved storage: on the device, on its way out, on the host, on its way back. `State` has the states.

    saved.slot        the storage, the saved tensors over it, and which of them one copy has
    saved.uses        how many uses are to come
    saved.copy        its copy on the host, once a copy out was queued: block, moves, events

A saved storage orders the copies of its own bytes, and nothing else: the executor decides which storage moves when. Its `form`
says how the bytes are kept off the device. The storage object stays; its memory alone goes: Note [In place].
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from chameleon_mm.device import Event, Stream
from chameleon_mm.device.allocator_hook import AllocatorHook, HeldStorage
from chameleon_mm.errors import TransferFailed
from chameleon_mm.policy import StorageAction
from chameleon_mm.saved.calling_thread import (
    CallSite,
    OperatorNumber,
    annotation,
    call_site,
    current_operator,
    made_before,
    sequence_nr,
    this_thread,
)
from chameleon_mm.saved.form import WHOLE, Form
from chameleon_mm.saved.handles import flat_bytes
from chameleon_mm.saved.host_copy import HostCopy
from chameleon_mm.saved.slot import Slot
from chameleon_mm.saved.state import NEXT, State, SwapContext
from chameleon_mm.saved.uses import Uses
from chameleon_mm.saved.verify import StorageChecksum
from chameleon_mm.saved.version import SavedBytes, cover_all

if TYPE_CHECKING:
    from chameleon_mm.pinned import PinnedBlock
    from chameleon_mm.profiler.calls import Relied
    from chameleon_mm.profiler.storages import TracedStorage
    from chameleon_mm.saved.recipe import Proof
    from chameleon_mm.saved.saved_part import Part
    from chameleon_mm.transfer import Move

_log = logging.getLogger(__name__)


class SavedStorage:
    """A storage that autograd saved, with the state machine that copies it out and back.

    A `PackedGroup` is one that stands for several small ones, a `SavedPart` one of which only a view was saved.
    """

    __slots__ = (
        "__weakref__", "_began_in", "_checksum", "_context", "_lent", "alloc_stream", "came_back", "copies", "copy", "dtype",
        "epoch", "form", "index", "is_held_for_recipes", "nbytes", "noted_in", "op_is_over", "planned", "proof", "relied",
        "slot", "state", "traced", "uses",
    )  # fmt: skip

    part: Part | None = None
    """Bytes of the storage that were saved; None: all of them."""
    gathered = False
    """Whether only the bytes of `part` are held, side by side: on the device as on the host."""
    may_be_lent = True

    def __init__(
        self, t: Tensor, saved: SavedBytes, alloc_stream: Stream, context: SwapContext, *, epoch: int, index: int
    ) -> None:
        storage = t.untyped_storage()
        self.slot = Slot(storage, saved)
        self.uses = Uses()
        self.copy: HostCopy | None = None
        """The copy on the host. None: not yet, or its form has the bytes without one."""
        self.state = State.ON_DEVICE
        self.form: Form = WHOLE
        """The form in which its bytes are off the device, from the copy out on."""
        self.epoch = epoch
        """The step in which it was saved, and the `index` of the save within it."""
        self.index = index
        self.alloc_stream = alloc_stream
        """The stream whose allocator the device memory belongs to."""
        self.came_back = False
        """Whether what is on the device was put there by swapping, ordered on `alloc_stream`, and never by the model."""
        self.nbytes = storage.nbytes()
        """Bytes that are held and moved: those of the saved storage, until it is gathered."""
        self.dtype = t.dtype if t.numel() * t.element_size() == self.nbytes else None
        """dtype of all its elements, where the first view of it covers it; else None."""
        self._context = context
        self._checksum = None if context.checksums is None else StorageChecksum(t, epoch, context.checksums)
        self._lent: HeldStorage | None = None
        self._began_in: tuple[OperatorNumber, CallSite | None] | None = None
        """The operator at one of whose hooks the copy out was begun."""
        self.copies = 1
        """Number of copies of all of the storage so far."""
        self.op_is_over = False
        """Whether the ops that saved it have ended, so that it may be copied."""
        # What others note.
        self.traced: TracedStorage | None = None
        """Its record in the trace, where the step that saved it is recorded."""
        self.planned: StorageAction | None = None
        """Its action in the plan; None: no plan knows it."""
        self.noted_in = -1
        """The last step in which the profiler saw a save of it."""
        self.relied: Relied | None = None
        """What rests on its bytes, in a step that recomputes."""
        self.proof: Proof | None = None
        """The recipe that is to be compared with it at its first use."""
        self.is_held_for_recipes = False
        """Whether autograd saved none of it: it is there for what is recomputed from it."""

    def _to(self, state: State) -> None:
        """Go from one state to the next. Every change of `state` is made here."""
        if state not in NEXT[self.state]:
            raise RuntimeError(f"a saved storage of {self.nbytes} bytes that is {self.state.value} cannot become {state.value}")
        self.state = state

    @property
    def device(self) -> torch.UntypedStorage | None:
        """The storage, taken back from the allocator, where it has memory or is about to; else None."""
        if self._lent is not None:
            self.take_back()
        return None if self.state is State.ON_HOST else self.slot.storage

    # --- saves

    def op_began(self) -> None:
        """Note that an operator that has not ended saves it."""
        self.op_is_over = False

    def op_ended(self) -> None:
        """Note that every operator that has saved it is over."""
        self.op_is_over = True

    def add_view(self, saved: SavedBytes) -> None:
        """Note one more handle, of these bytes."""
        self.add_alias(saved)
        self.uses.add_handle()

    def add_alias(self, saved: SavedBytes) -> None:
        """Note one more alias of ours over the storage."""
        if self._lent is not None:
            self.take_back()  # the allocator knows of one less
        if self.gathered:
            saved.move_to(None)
        self.slot.views.append(saved)
        if self.traced is not None:
            self.traced.aliases += 1

    def note_traced(self, traced: TracedStorage) -> None:
        """Note its record in the trace of this step."""
        self.traced = traced
        traced.aliases += len(self.slot.views)

    def hold_for_recipes(self) -> None:
        """Note that autograd saved none of it: there is no handle."""
        self.is_held_for_recipes = True
        self.uses.forget_handle()

    def assign(self, action: StorageAction | None) -> None:
        """Note its action in the plan that the step follows now; None: that has none for it."""
        self.planned = action

    def note_save(self, epoch: int, hook: int) -> tuple[bool, int | None]:
        """It is saved at that hook of a step. Returns whether that is the first time in the step for this record, and how many
        hooks ago its storage was saved last in it, under any record; None: it was not."""
        first, self.noted_in = self.noted_in != epoch, epoch
        last = self.slot.last_save
        hooks_ago = hook - last.hook if last.epoch == epoch else None
        last.epoch, last.hook = epoch, hook
        return first, hooks_ago

    def is_allocated_on(self, compute: Stream) -> bool:
        return self.alloc_stream is compute

    def try_include(self, saved: SavedBytes, t: Tensor, compute: Stream) -> bool:
        """Include these bytes, written on `compute`, in its copy out, if that begins later than now. Returns whether it does.

        A copy that began at another hook of the operator that saves `t` is not too early for what that operator was given.
        """
        if not self.is_allocated_on(compute) or self.gathered:
            return False
        if self.state is not State.ON_DEVICE and not self._was_given(saved, t):
            return False
        self.slot.include(saved)
        return True

    def _was_given(self, saved: SavedBytes, t: Tensor) -> bool:
        """Whether the operator that saves `t` was given it, and began the copy out.

        Who made `t` does not tell: operators that write in place save what they were given (`a.hypot_(b)`), and a function of
        one's own writes between operators that it calls. So a counter that has not moved since before the copy must say so.
        """
        if self._began_in is None:
            return False
        operator, site = self._began_in
        if operator != current_operator() or not self.slot.includes(saved, same_bytes=True) or not made_before(t, operator):
            return False
        return site == call_site()

    def begin_again(self, saved: SavedBytes, compute: Stream) -> None:
        """Have its copy begin anew, as the one that there is, or that runs, lacks these bytes, saved now on `compute`.

        The storage has them all: it is on the device, as somebody else refers to it.
        """
        self.copies += 1
        if self.state is State.SWAPPING_OUT and not self.cancel_swap_out() and self.state is State.SWAPPING_OUT:
            assert self.copy is not None
            self._wait_for_copy_out(self._context.transfer.issue_out(self.copy.out))
            self._stay()
        if self.state is State.SWAPPING_IN:
            self.arrive(compute)
        if self.state is State.RESTORED:
            self._stay()
        assert self.state is State.ON_DEVICE
        if self.alloc_stream is not compute:
            compute.wait(self.alloc_stream.record())  # what was saved there -> what is copied behind `compute`
            self.alloc_stream = compute
        self.slot.include(saved)

    # --- who holds it

    @property
    def is_private(self) -> bool:
        """True if only the session can reach its bytes: nobody else refers to the storage, or they are on the host alone."""
        return self.device is None or self.slot.is_alone()

    @property
    def is_lent(self) -> bool:
        return self._lent is not None

    @property
    def copy_is_handed_over(self) -> bool:
        """Whether no part of the copy out waits any more to be handed to the device."""
        return self.copy is None or self.copy.out.ended

    def lend(self, hook: AllocatorHook) -> None:
        """Lend the device memory to the allocator, if its copy out is handed over and all of it is to go. The allocator takes
        it where nobody else refers to the storage by then."""
        copy = self.copy
        if self.state is not State.SWAPPING_OUT or self.form is not WHOLE or not self.may_be_lent or copy is None:
            return
        if copy.out.done is None or copy.out.failed or copy.block is None or self.gathered:
            return
        storage = self.slot.storage
        if storage is not None and storage.resizable():
            self._lent = hook.hold(storage, copy.out.done, self.alloc_stream, len(self.slot.views))

    def settle(self) -> None:
        """Note it if the allocator has reclaimed the device memory."""
        if self._lent is not None and self._lent.reclaimed:
            self.take_back()

    def take_back(self) -> None:
        """Take the device memory back if the allocator has not reclaimed it, else note that it has."""
        if self._lent is None:
            return
        lent, self._lent = self._lent, None
        if not lent.withdraw():
            totals = self._context.metrics.totals
            totals.bytes_reclaimed += self.nbytes
            totals.bytes_reclaimed_by_allocator += self.nbytes
            self._emptied()

    # --- out

    @property
    def is_copyable(self) -> bool:
        """Whether the storage still has its size and at least one of the saves has not been written to since. The use of one
        that was written to raises anyway. What only recipes need is not copied while the model holds it."""
        storage = self.slot.storage if self._lent is None else self.device
        if storage is None or storage.nbytes() != self.nbytes:
            return False
        if self.is_held_for_recipes and not self.is_private:
            return False  # a copy has the bytes that recipes rely on once the model cannot write to them: Note [Relied on]
        for saved in self.slot.saves:  # noqa: SIM110 - a generator is one more call at every hook, and so would `moved` be
            if saved.alias._version == saved.expected:
                return True
        return False

    @property
    def transfer_bytes(self) -> int:
        """Bytes that cross the link."""
        return self.nbytes - self.form.device_bytes

    def _reads_uncovered(self) -> bool:
        """Whether a copy reads bytes of the storage that no save covers. Note [Uncovered]. What was gathered, we alone
        write."""
        return not self.gathered and not cover_all(self.slot.saves, self.nbytes)

    def swap_out(self, form: Form = WHOLE, *, pageable: bool = False) -> None:
        """Queue the copy out, in that form. `pageable`: to ordinary memory, beyond the pool's limit.

        Raises `HostMemoryExhausted` or `TransferFailed` with nothing changed.
        """
        storage, saves = self.slot.storage, self.slot.saves
        assert self.state is State.ON_DEVICE and storage is not None
        context = self._context
        first_bytes, host_bytes = form.device_bytes, self.nbytes - form.device_bytes
        block = (context.pool.allocate_pageable if pageable else context.pool.allocate)(host_bytes)
        source = flat_bytes(storage)[first_bytes:] if first_bytes else flat_bytes(storage)
        # Note [Swap-out]: the source was written by compute; Note [Host block]: the block's last use may still be running.
        after = [self.alloc_stream.record(), *block.pending_events]
        first = saves[0]
        versions: list[tuple[Tensor, int]] = []
        for saved in saves:
            versions.append((saved.alias, saved.expected))  # noqa: PERF401 - a comprehension is one more call
        is_all = first.is_dense and first.begin == 0 and first.end >= self.nbytes  # as a rule
        at_once = not is_all and self._reads_uncovered()
        if at_once:
            self._checksum = None  # of the other bytes anything may arrive
        if self._checksum is not None:
            # The checksum is taken on the current stream, which need not be the allocating one.
            context.streams.join_all(self.alloc_stream)
            self._checksum.close(flat_bytes(storage))
        with annotation("chameleon::swap_out"):
            written, timed = (versions, context.streams.record_each), context.metrics.timed
            out = context.transfer.swap_out(block.buffer, source, after, timed=timed, written=written, at_once=at_once)
        if out.failed:
            block.release()
            raise TransferFailed(f"a saved tensor of {self.nbytes} bytes could not be swapped out; it stays on the device")
        self.form, self.copy = form, HostCopy()
        self.copy.block, self.copy.out = block, out
        context.metrics.moved(out, "out", host_bytes)
        context.metrics.totals.pageable_swap_outs += pageable
        self._began_in = (this_thread.number, sequence_nr()), call_site()  # as `current_operator` has it
        self._to(State.SWAPPING_OUT)

    def leaves_by(self, block: PinnedBlock, out: Move) -> None:
        """Note that `out`, which was handed to the device, takes all of it to `block`."""
        copy = self.copy = HostCopy()
        copy.block, copy.out = block, out
        self._began_in = None
        self._context.metrics.moved(out, "out", self.nbytes)
        self._to(State.SWAPPING_OUT)

    def leave_in(self, form: Form) -> None:
        """Let the device memory go, in stream order, without a copy of its own: `form` has the bytes.

        Whoever read it ran on a stream that the allocating stream has joined since.
        """
        storage = self.slot.storage
        assert self.state is State.ON_DEVICE and storage is not None
        if self._checksum is not None:
            self._checksum.close(flat_bytes(storage))
        del storage
        self._began_in = current_operator(), call_site()
        self.form = form
        self._let_go()

    # --- reclaim

    def _let_go(self) -> None:
        """Let the device memory go, as its bytes are elsewhere: now if we alone refer to the storage, else at a later hook."""
        if self.slot.is_alone():
            self._empty()
            return
        self._to(State.RESTORED)
        self._context.held[self] = None

    def _empty(self) -> None:
        storage = self.slot.storage
        assert storage is not None
        self._context.streams.join_all(self.alloc_stream)  # Note [Reclaim]: its next owner is whichever stream allocated it
        self.alloc_stream.resize(storage, 0)
        self._emptied()

    def _emptied(self) -> None:
        self._context.held.pop(self, None)
        if not self.gathered:
            self.slot.last_save.emptied = True
        if self.traced is not None:
            self.traced.emptied(self.traced)
        self._to(State.ON_HOST)

    @property
    def reclaimed(self) -> bool:
        """Whether nothing is left to reclaim: it was reclaimed, or its copy out was cancelled."""
        return self.state is not State.SWAPPING_OUT

    def reclaim_if_copied(self) -> bool:
        """Reclaim without a wait if the host sees the copy out complete. Returns whether it did."""
        assert self.copy is not None
        if self.copy.out.failed:
            self._undo_swap_out()
            return False
        if self.copy.out.done is None or not self.copy.out.done.query():
            return False
        if self._lent is not None:
            self.take_back()
            if self.state is not State.SWAPPING_OUT:
                return True
        # The host saw the copy complete, so whatever it launches next is ordered after it: no wait is needed.
        return self._reclaim()

    def reclaim(self, *, in_plan_order: bool = False) -> None:
        """Order compute after the copy out and let the device memory go. `in_plan_order`: copies cross the link in the order of
        the plan."""
        assert self.copy is not None
        if self._lent is not None:
            self.take_back()
            if self.state is not State.SWAPPING_OUT:
                return
        issue = self._context.transfer.issue_out_in_order if in_plan_order else self._context.transfer.issue_out
        try:
            done = issue(self.copy.out)
        except RuntimeError as error:  # the copy was refused, so the tensor stays: a use finds it on the device
            _log.warning("chameleon_mm: %d bytes stay on the device, their copy out was refused: %s", self.nbytes, str(error))
            self._undo_swap_out()
            return
        with annotation("chameleon::reclaim"):
            self._wait_for_copy_out(done)
            self._reclaim()

    def _wait_for_copy_out(self, done: Event) -> None:
        # Note [Reclaim]: the next owner of the device memory comes after the copy. Where the storage stays, its copy out was
        # handed over all the same, and what compute writes to it next comes after that.
        self._context.metrics.wait(self.alloc_stream, done, "out", None if self.planned is None else self.planned.tensor)

    def _reclaim(self) -> bool:
        """Let the device memory go, behind the copy out. Returns whether all went well: else there was no memory for what stays
        of it, and all of it stays."""
        copy, storage = self.copy, self.slot.storage
        assert copy is not None and storage is not None
        if copy.block is None:  # nobody wants it any more
            self._context.streams.join_all(self.alloc_stream)  # Note [Reclaim]
            self.alloc_stream.free(flat_bytes(storage))
            self._context.metrics.totals.bytes_reclaimed += self.nbytes
            self._clear()
            self._to(State.RETIRED)
            return True
        del storage
        if self.form.device_bytes and self.slot.is_alone() and not self._keep_stationary_part():
            self._undo_swap_out()
            return False
        self._context.metrics.totals.bytes_reclaimed += self.nbytes - self.form.device_bytes
        self._let_go()
        return True

    def _keep_stationary_part(self) -> bool:
        """Copy what is to stay on the device into a buffer of its own. Returns whether there was memory for it."""
        assert self.slot.storage is not None
        try:
            self.form.keep(self.slot.storage, self.alloc_stream)
        except torch.OutOfMemoryError:
            return False
        return True

    def cancel_swap_out(self) -> bool:
        """Cancel a copy out of which nothing was handed over: it is about to be used. Returns whether it was cancelled."""
        assert self.copy is not None
        if self._lent is not None:
            self.take_back()
        if self.state is not State.SWAPPING_OUT:
            return False
        if not (self.copy.out.failed or self._context.transfer.cancel_out(self.copy.out)):
            return False
        self._undo_swap_out()
        return True

    def _undo_swap_out(self) -> None:
        self._context.metrics.totals.bytes_swapped_out -= self.transfer_bytes
        self._stay()

    def stay_on_device(self) -> None:
        """Note that it is on the device alone: its form lets go of what it needed to put its bytes there."""
        self._stay()

    def _stay(self) -> None:
        if self.copy is not None:
            self.copy.release()
        self.form.drop()
        self.form, self.copy = WHOLE, None
        self._context.held.pop(self, None)
        self._to(State.ON_DEVICE)

    # --- back

    def swap_in(self, compute: Stream) -> torch.UntypedStorage:
        """Take memory on `compute` and queue the copy back, into the storage returned. Raises `torch.OutOfMemoryError` or
        `TransferFailed` with nothing changed."""
        copy, storage = self.copy, self.slot.storage
        assert self.state is State.ON_HOST and copy is not None and copy.block is not None and storage is not None
        done_out = copy.out.done
        assert done_out is not None, "device memory was reclaimed before its copy out was issued"
        compute.resize(storage, self.nbytes)
        whole = flat_bytes(storage)
        destination = whole[self.form.device_bytes :] if self.form.device_bytes else whole
        # Note [Swap-in]: an earlier owner of the device memory may still be running on compute; and the copy out must be
        # complete before the host copy is read.
        after = [compute.record(), done_out]
        with annotation("chameleon::swap_in"):
            back = self._context.transfer.swap_in(destination, copy.block.buffer, after, timed=self._context.metrics.timed)
        if back.failed:
            compute.resize(storage, 0)
            raise TransferFailed(f"a saved tensor of {self.nbytes} bytes could not be swapped in")
        self.form.put_back(whole, compute)
        copy.back, copy.arrived_on = back, None
        self._context.metrics.moved(back, "in", self.transfer_bytes)
        self.alloc_stream, self.came_back = compute, True
        self.uses.note_swap_in()
        self._to(State.SWAPPING_IN)
        return storage

    def restored(self, compute: Stream) -> None:
        """Note that its form has put its bytes into the storage, on `compute`, the current stream."""
        storage = self.slot.storage
        assert self.state is State.ON_HOST and self.copy is None and storage is not None
        if self._checksum is not None:
            self._checksum.check(flat_bytes(storage))
        self.alloc_stream, self.came_back = compute, True
        self.uses.note_swap_in()
        self._to(State.RESTORED)

    def arrive(self, compute: Stream, *, prefetched: bool = False) -> torch.UntypedStorage:
        """Order `compute` after the copy back; the storage may then be used there. `prefetched`: the copy began before this
        use."""
        copy, storage = self.copy, self.slot.storage
        assert storage is not None
        if copy is None or copy.back is None:
            return storage  # its form put it there, on the stream that allocated it; or it never left
        arrived = copy.read = self._context.transfer.issue_in(copy.back)
        if copy.arrived_on is not compute:
            if not arrived.query():
                tensor = None if self.planned is None else self.planned.tensor
                with annotation("chameleon::wait"):  # Note [Swap-in]: use after the bytes are there
                    self._context.metrics.wait(compute, arrived, "in", tensor, prefetched=prefetched)
            elif prefetched:
                self._context.metrics.on_time()
            copy.arrived_on = compute
        if self._checksum is not None and self.state is State.SWAPPING_IN:
            self._checksum.check(flat_bytes(storage))
        self._to(State.RESTORED)
        return storage

    @property
    def may_be_prefetched(self) -> bool:
        """Whether a copy of its own is to be brought back, and may be, before its use."""
        return self.state is State.ON_HOST and self.form.has_copy

    @property
    def swap_in_failed(self) -> bool:
        """Whether its copy back was refused after it was queued: it is still on the host."""
        copy = self.copy
        return self.state is State.SWAPPING_IN and copy is not None and copy.back is not None and copy.back.failed

    def needs_another_stream(self, compute: Stream) -> bool:
        """Whether swapping brought it back for another stream than `compute`, whose pool the memory belongs to."""
        return self.came_back and self.alloc_stream is not compute and self.state in (State.SWAPPING_IN, State.RESTORED)

    def copied_on(self, compute: Stream) -> torch.UntypedStorage:
        """A copy of its bytes, which came back on another stream, in memory of `compute`'s own. Raises
        `torch.OutOfMemoryError`."""
        storage = self.arrive(compute)
        compute.wait(self.alloc_stream.record())
        whole = compute.alloc(self.nbytes)
        compute.copy(whole, flat_bytes(storage))
        self._context.streams.join_all(self.alloc_stream)  # Note [Reclaim]: its next owner comes after that read
        return whole.untyped_storage()

    def drop_restored(self) -> bool:
        """Let the device memory go, whose bytes are elsewhere too: nothing has to be copied. Returns whether it went: else it
        does at a later hook, once nobody else refers to it. Raises `torch.OutOfMemoryError` with nothing changed where there is
        no memory for what of it stays."""
        assert self.state in (State.SWAPPING_IN, State.RESTORED) and self.slot.storage is not None
        if self.state is State.SWAPPING_IN:
            self._settle_arrival()
        if not self.slot.is_alone():
            self._context.held[self] = None
            return False
        self.form.keep(self.slot.storage, self.alloc_stream)
        self._empty()
        return True

    def drop_used(self) -> None:
        """Let the device memory go at the next hook, as all views were used: autograd's tensors hold it until then. A partial
        form keeps it: its first bytes are nowhere else."""
        if not self.form.device_bytes:
            self._context.held[self] = None

    def try_to_go(self) -> None:
        """Let go of the device memory that others held at the last hook, if they do no more."""
        if self.state is not State.RESTORED:
            self._context.held.pop(self, None)
        elif self.slot.is_alone() and (not self.form.device_bytes or self._keep_stationary_part()):
            self._empty()

    def _settle_arrival(self) -> None:
        copy = self.copy
        assert copy is not None and copy.back is not None
        if copy.back.failed:
            copy.back = None
            return
        if self._context.transfer.cancel_in(copy.back):
            self._context.metrics.totals.bytes_swapped_in -= self.transfer_bytes
            copy.back = None
            return
        arrived = copy.read = self._context.transfer.issue_in(copy.back)
        if not arrived.query():
            # Note [Reclaim]: the copy must be done before the device memory is reused
            self._context.metrics.wait(self.alloc_stream, arrived, "in")

    # --- the end

    def retire(self) -> None:
        """Release the block and let go of the storage, once the last handle is gone.

        A copy out that still reads the device memory keeps it: `state` stays SWAPPING_OUT and the reclaim queue ends it.
        """
        if self._lent is not None:
            self.take_back()
        if self.state is State.RETIRED:
            return
        try:
            if self.state is State.SWAPPING_OUT and not self.cancel_swap_out():
                assert self.copy is not None
                self._context.metrics.totals.bytes_swapped_out -= self._context.transfer.truncate_out(self.copy.out)
                self.copy.release()
                return
            if self.state is State.SWAPPING_IN:
                self._settle_arrival()
                assert self.slot.storage is not None
                self.alloc_stream.free(flat_bytes(self.slot.storage))
        except BaseException:
            # The device did not take an order that what follows rests on: the host waits instead.
            self._context.transfer.synchronize()
            self._retired()
            raise
        self._retired()

    def _retired(self) -> None:
        self.proof = None
        if self.copy is not None:
            self.copy.release()
        self.form.drop()
        self.form = WHOLE
        self._context.held.pop(self, None)
        self._clear()
        self._to(State.RETIRED)

    def _clear(self) -> None:
        if self.traced is not None:
            self.traced.aliases -= len(self.slot.views)
        self.slot.clear()
