"""Life of one saved storage: on the device, on its way out, on the host, on its way back. `State` lists the states.

    saved.slot        the storage, the saved tensors that view it, and the saves that one copy includes
    saved.uses        number of uses to come
    saved.copy        its copy on the host, once a copy out was queued: block, moves, events

A saved storage orders only the copies of its own bytes: the executor decides which storage moves when. Its `form` says how the
bytes are kept off the device. Only the memory of the storage is freed; the storage object stays: Note [In place].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from chameleon_mm.device import Event, Stream
from chameleon_mm.errors import TransferFailed
from chameleon_mm.swap.calling_thread import OperatorNumber, annotation
from chameleon_mm.swap.forms import WHOLE, Form
from chameleon_mm.swap.handles import SavedBytes
from chameleon_mm.swap.host_copy import NEXT, HostCopy, State, SwapContext
from chameleon_mm.swap.slot import Slot

if TYPE_CHECKING:
    from chameleon_mm.record.calls import Relied
    from chameleon_mm.swap.recipe import Proof

# --- Uses to come of a saved storage: one per handle, counted anew after each swap-in


class Uses:
    """Counter of uses to come. A second use of a handle counts only if the storage was swapped out and in since the first."""

    # No `__init__`: an instance is made at every save.
    handles = 1
    """Number of handles made for the storage. The save that claimed the storage made the first."""
    left = 1
    """Number of handles not used since the latest swap-in, whose number is `swap_in_number`."""
    swap_in_number = 0

    def add_handle(self) -> None:
        """Note one more handle."""
        self.handles += 1
        self.left += 1

    def count(self, last_swap_in: int) -> int:
        """Count a use of a handle last used after swap-in number `last_swap_in`. Returns the number of the latest swap-in."""
        if last_swap_in != self.swap_in_number:
            self.left -= 1
        return self.swap_in_number

    def note_swap_in(self) -> None:
        """Note a swap-in: each handle has a use to come again."""
        self.swap_in_number += 1
        self.left = self.handles

    def forget_handle(self) -> None:
        """Remove the first handle, for a storage of which autograd saved nothing."""
        self.handles = self.left = 0


# --- saved storage


class SavedStorage:
    """Storage that autograd saved, with the state machine that copies it out and back."""

    __slots__ = (
        "__weakref__", "_context", "copies", "copy", "epoch", "form", "index",
        "is_held_for_recipes", "nbytes", "number", "op_is_over", "proof", "relied", "saved_by", "slot", "state",
        "stays", "uses",
    )  # fmt: skip

    def __init__(
        self, t: Tensor, saved: SavedBytes, alloc_stream: Stream, context: SwapContext, *, epoch: int, index: int
    ) -> None:
        storage = t.untyped_storage()
        self.slot = Slot(storage, saved, alloc_stream)
        self.uses = Uses()
        self.copy: HostCopy | None = None
        """Copy on the host; None: no copy began yet, or the form needs no copy."""
        self.state = State.ON_DEVICE
        self.form: Form = WHOLE
        """Form in which the bytes are kept off the device. It is set when the copy out begins."""
        self.epoch = epoch
        """Step in which it was saved. `index`: number of the save within that step."""
        self.index = index
        self.nbytes = storage.nbytes()
        self._context = context
        self.copies = 1
        """Number of copies out of the whole storage so far. The first counts before it begins."""
        self.op_is_over = False
        """True if the operators that saved the storage have ended. Only then may it be copied."""
        # Set by other classes.
        self.saved_by: OperatorNumber = (-1, 0)
        self.number: int | None = None
        """Number in the plan's trace; None: no plan knows it."""
        self.relied: Relied | None = None
        self.proof: Proof | None = None
        """Proof of a recipe: at the first use, its result is compared with these bytes."""
        self.is_held_for_recipes = False
        """True if autograd did not save the storage, and it is held for recipes that read it."""
        self.stays = False
        """True if the storage must stay on the device, because a module named in `keep` saved it."""

    @classmethod
    def known(
        cls, saves: Sequence[SavedBytes], alloc_stream: Stream, context: SwapContext, *, epoch: int, index: int, nbytes: int,
        state: State, left: int, copy: HostCopy | None,
    ) -> SavedStorage:  # fmt: skip
        """Make the record of a storage of `nbytes` that the loop of planned steps has saved and may have moved. `saves`: at
        least one, in order. `left`: number of saves with a use to come."""
        record = cls(saves[0].alias, saves[0], alloc_stream, context, epoch=epoch, index=index)
        for saved in saves[1:]:
            record.slot.add_alias(saved)
            record.slot.include(saved)
        record.nbytes = record.slot.saved_nbytes = nbytes  # the storage itself has none while it is away
        record.state, record.copy = state, copy
        record.uses.handles, record.uses.left = len(saves), left
        record.slot.came_back = copy is not None and copy.back is not None
        return record

    def _to(self, state: State) -> None:
        """Change the state. Raises `RuntimeError` if the change is not in `NEXT`."""
        if state not in NEXT[self.state]:
            raise RuntimeError(f"a saved storage of {self.nbytes} bytes that is {self.state.value} cannot become {state.value}")
        self.state = state

    @property
    def device(self) -> torch.UntypedStorage | None:
        """Storage with memory on the device, taken back from the allocator if it was lent; None: the host has the bytes."""
        if self.slot.lent is not None:
            self.take_back()
        return None if self.state is State.ON_HOST else self.slot.storage

    def add_view(self, saved: SavedBytes) -> None:
        """Count one more handle, and add its alias."""
        self.add_alias(saved)
        self.uses.add_handle()

    def add_alias(self, saved: SavedBytes) -> None:
        """Add one more alias of the session over the storage."""
        if self.slot.lent is not None:
            self.take_back()  # the allocator expects one alias fewer
        self.slot.add_alias(saved)

    def try_include(self, saved: SavedBytes, compute: Stream) -> bool:
        """Let this storage's copy out serve `saved` too, if it has not begun. Returns True if it does. The bytes were written
        on `compute`."""
        if self.slot.alloc_stream is not compute or self.state is not State.ON_DEVICE:
            return False
        self.slot.include(saved)
        return True

    @property
    def is_private(self) -> bool:
        """True if only the session can reach the bytes: nothing else refers to the storage, or only the host has them."""
        return self.device is None or self.slot.is_alone()

    def take_back(self) -> None:
        """Take lent device memory back, or note that the allocator has reclaimed it."""
        if not self.slot.is_back():
            totals = self._context.metrics.totals
            totals.bytes_reclaimed += self.nbytes
            totals.bytes_reclaimed_by_allocator += self.nbytes
            self._emptied()

    # --- out

    @property
    def is_copyable(self) -> bool:
        """True if the storage still has its size and at least one save was not written to since. (A use of a written save
        raises anyway.) Never true if it `stays`, nor for a storage held only for recipes while the model holds it."""
        if self.stays:
            return False
        storage = self.slot.storage if self.slot.lent is None else self.device
        if storage is None or storage.nbytes() != self.nbytes:
            return False
        if self.is_held_for_recipes and not self.is_private:
            return False  # Note [Relied on]: recipes read only bytes that the model cannot write to
        return self.slot.unwritten() is not None

    @property
    def transfer_bytes(self) -> int:
        """Number of bytes that cross the link."""
        return self.nbytes - self.form.device_bytes

    def swap_out(self, form: Form = WHOLE, *, pageable: bool = False, at_once: bool = False) -> None:
        """Queue the copy out, in the given form. `pageable`: copy to pageable memory, beyond the pool's limit. `at_once`: as in
        `CopyQueue.submit`.

        Raises `HostMemoryExhausted` or `TransferFailed`, and then changes nothing.
        """
        slot, context, storage, first_bytes = self.slot, self._context, self.slot.storage, form.device_bytes
        assert self.state is State.ON_DEVICE and storage is not None
        block = (context.pool.allocate_pageable if pageable else context.pool.allocate)(self.nbytes - first_bytes)
        # Note [Swap-out]: compute wrote the source. Note [Host block]: the block's last use may still be running.
        after = [slot.alloc_stream.record(), *block.pending_events]
        at_once |= slot.has_uncovered()
        self.copy = HostCopy.begin(block, storage, first_bytes, slot.saves, after, context, at_once=at_once)
        self.form = form
        context.metrics.totals.pageable_swap_outs += pageable
        self._to(State.SWAPPING_OUT)

    def leave_in(self, form: Form) -> None:
        """Free the device memory, in stream order, without a copy out: `form` has the bytes.

        The allocating stream must have joined every stream that read the memory.
        """
        assert self.state is State.ON_DEVICE and self.slot.storage is not None
        self.form = form
        self._let_go()

    def _let_go(self) -> None:
        """Free the device memory, whose bytes also exist elsewhere. If others refer to the storage, a later hook frees it."""
        if self.slot.is_alone():
            self.empty()
            return
        self._to(State.RESTORED)
        self._context.held[self] = None

    def empty(self) -> None:
        """Free the device memory. Its bytes must exist elsewhere, and nothing else may refer to the storage."""
        self.slot.empty(self._context.streams)
        self._emptied()

    def _emptied(self) -> None:
        self._context.held.pop(self, None)
        self.slot.note_emptied()
        self._to(State.ON_HOST)

    @property
    def reclaimed(self) -> bool:
        """True if the storage was reclaimed or its copy out was cancelled: nothing is left to reclaim."""
        return self.state is not State.SWAPPING_OUT

    def reclaim_if_copied(self) -> bool:
        """Reclaim without a wait if the host sees the copy out complete. Returns True if it did."""
        assert self.copy is not None
        if self.copy.out.failed:
            self._undo_swap_out()
            return False
        if not self.copy.is_complete:
            return False
        self.take_back()
        if self.state is not State.SWAPPING_OUT:
            return True
        # The host saw the copy complete. Work launched from now on comes after it, so no wait is needed.
        stays = self.form.device_bytes and self.copy.block is not None and self.slot.is_alone()
        return self._reclaim(has_room=not stays or self.form.kept(self.slot))

    def reclaim(self) -> None:
        """Order compute after the copy out, then free the device memory."""
        assert self.copy is not None
        if self.slot.lent is not None:
            self.take_back()
        if self.state is not State.SWAPPING_OUT:
            return
        done = self.copy.issue_out(self.nbytes)
        if done is None:
            self._undo_swap_out()
            return
        with annotation("chameleon::reclaim"):
            stays = self.form.device_bytes and self.copy.block is not None and self.slot.is_alone()
            has_room = not stays or self.form.kept(self.slot)  # before the wait: beside the copy out, as both read
            self.wait_for_copy_out(done)
            self._reclaim(has_room=has_room)

    def wait_for_copy_out(self, done: Event) -> None:
        """Order compute after the copy out, which was handed to the device and ends at `done`."""
        # Note [Reclaim]: the next owner of the device memory must come after the copy. If the storage stays, compute's next
        # writes to it must come after the copy, too.
        self._context.metrics.wait(self.slot.alloc_stream, done, "out")

    def _reclaim(self, *, has_room: bool) -> bool:
        """Free the device memory, after the copy out. `has_room`: False if there was no memory for the part that stays; then
        the whole storage stays. Returns `has_room`."""
        assert self.copy is not None
        if self.copy.block is None:  # the last handle is gone
            self._context.streams.join_all(self.slot.alloc_stream)  # Note [Reclaim]
            self.slot.free()
            self._context.metrics.totals.bytes_reclaimed += self.nbytes
            self.slot.clear()
            self._to(State.RETIRED)
            return True
        if not has_room:
            self._undo_swap_out()
            return False
        self._context.metrics.totals.bytes_reclaimed += self.nbytes - self.form.device_bytes
        self._let_go()
        return True

    def cancel_swap_out(self) -> bool:
        """Cancel the copy out before a use, if no piece was handed to the device yet. Returns True if it was cancelled."""
        assert self.copy is not None
        self.take_back()
        out, queue = self.copy.out, self._context.out_queue
        if self.state is not State.SWAPPING_OUT or not (out.failed or queue.cancel(out)):
            return False
        self._undo_swap_out()
        return True

    def _undo_swap_out(self) -> None:
        self._context.metrics.totals.bytes_swapped_out -= self.transfer_bytes
        self.stay_on_device()

    def stay_on_device(self) -> None:
        """Note that the bytes are only on the device. The copy and the form release the memory that they hold."""
        if self.copy is not None:
            self.copy.release()
        self.form.drop()
        self.form, self.copy = WHOLE, None
        self._context.held.pop(self, None)
        self._to(State.ON_DEVICE)

    # --- back

    def swap_in(self, compute: Stream, *, at_once: bool = False) -> torch.UntypedStorage:
        """Allocate memory on `compute`, queue the copy back into the storage, and return the storage. `at_once`: as in
        `CopyQueue.submit`. Raises `torch.OutOfMemoryError` or `TransferFailed`, and then changes nothing."""
        copy, storage = self.copy, self.slot.storage
        assert self.state is State.ON_HOST and copy is not None and storage is not None
        compute.resize(storage, self.nbytes)
        if not copy.begin_back(storage, self.form.device_bytes, compute, at_once=at_once):
            compute.resize(storage, 0)
            raise TransferFailed(f"a saved tensor of {self.nbytes} bytes could not be swapped in")
        self.form.put_back(storage, compute)
        self._came_back(State.SWAPPING_IN, compute)
        return storage

    def _came_back(self, state: State, compute: Stream) -> None:
        """Note that a swap-in fills the memory, on `compute` or on a stream that `compute` waits for."""
        self.slot.alloc_stream, self.slot.came_back = compute, True
        self.uses.note_swap_in()
        self._to(state)

    def restored(self, compute: Stream) -> None:
        """Note that the form wrote the bytes into the storage, on `compute`, the current stream."""
        assert self.state is State.ON_HOST and self.copy is None
        self._came_back(State.RESTORED, compute)

    def arrive(self, compute: Stream) -> torch.UntypedStorage:
        """Order `compute` after the copy back; the storage may then be used there."""
        copy, storage = self.copy, self.slot.storage
        assert storage is not None
        if copy is None or copy.back is None:
            return storage  # the form filled it on the allocating stream, or it was never freed
        copy.arrive(compute)
        self._to(State.RESTORED)
        return storage

    @property
    def may_be_prefetched(self) -> bool:
        """True if the storage has a copy of its own on the host that a later use will need back on the device."""
        return self.state is State.ON_HOST and self.form.has_copy

    @property
    def swap_in_failed(self) -> bool:
        """True if its copy back was refused after it was queued: it is still on the host."""
        copy = self.copy
        return self.state is State.SWAPPING_IN and copy is not None and copy.back is not None and copy.back.failed

    def drop_restored(self) -> bool:
        """Free the device memory without a copy, as the host still has the bytes. Returns True if it was freed; otherwise a
        later hook frees it, once nothing else refers to it. Raises `torch.OutOfMemoryError`, and then changes nothing, if there
        is no memory for the part that stays."""
        assert self.state in (State.SWAPPING_IN, State.RESTORED) and self.slot.storage is not None
        if self.state is State.SWAPPING_IN:
            assert self.copy is not None
            self.copy.settle_back(self.slot.alloc_stream, self.transfer_bytes)
        if not self.slot.is_alone():
            self._context.held[self] = None
            return False
        self.form.keep(self.slot.storage, self.slot.alloc_stream)
        self.empty()
        return True

    def drop_used(self) -> None:
        """Free the device memory at the next hook, as all views were used. Until then autograd's tensors hold it. A partial
        form keeps the memory, because the host lacks its first bytes."""
        if not self.form.device_bytes:
            self._context.held[self] = None

    def retire(self) -> None:
        """Release the block and the storage, once the last handle is gone.

        If a copy out still reads the device memory, `state` stays SWAPPING_OUT, and the reclaim queue frees that memory later.
        """
        self.take_back()
        if self.state is State.RETIRED:
            return
        try:
            if self.state is State.SWAPPING_OUT and not self.cancel_swap_out():
                assert self.copy is not None
                # Pieces that were not handed over are dropped: the bytes are not needed any more.
                self._context.metrics.totals.bytes_swapped_out -= self._context.out_queue.truncate(self.copy.out)
                self.copy.release()
                return
            if self.state is State.SWAPPING_IN:
                assert self.copy is not None
                self.copy.settle_back(self.slot.alloc_stream, self.transfer_bytes)
                self.slot.free()
        except BaseException:
            # The device refused to order the streams, so the host waits instead.
            self._context.out_queue.synchronize()
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
        self.slot.clear()
        self._to(State.RETIRED)
