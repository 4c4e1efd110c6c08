"""Run a compiled plan: at each hook of a step, execute the next row's ops.

    save, use = loop.hook_of(True, executor.save), loop.hook_of(False, executor.use)    # what autograd calls
    loop.enter(program, compute, is_record)      # the loop takes the hooks behind `loop.hook`
    state = loop.give_back()                     # ... until here: all that it has, in the form of `hand_over.py`

    hook += 1; the row's key equals this hook's?  ->  run the row's ops, make or use the handle
                                             no  ->  the executor does this hook: first of all it has all given back

`device/loop.cpp` is the same loop in C++, and this one is its reference: same rows, same slots, same hand-over.

A slot is light: the storage, its aliases and versions, and where the bytes are. The hook's place in the step, the ops due there
and the storage meant are in the row: nothing is searched. A hook is done here whole, or by the executor. A row that was begun
here begins there again: each op first asks for the state of its storage. A storage that has a record (`SavedStorage`) or gets
one, as it leaves in part, keeps it: the executor's parts do what a row does with that.

A key holds less than the step's features: neither the node of a use nor the distance to a storage's last save. A different step
with the same keys still computes eager's bits: a save finds its slot by the storage object, memory is emptied only if nobody
else refers to it, and a tensor stays on the device only for a reason of its own. Note [No plan, no harm].
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor

from chameleon_mm.device import Stream
from chameleon_mm.device.holders import held_alone
from chameleon_mm.device.protocols import Device
from chameleon_mm.device.uncompiled import uncompiled
from chameleon_mm.plan.step_program import AGAIN, FIRST, KEPT, OUT, RELEASE, USE, Op, Row
from chameleon_mm.record.dispatch_state import num_modes, tracer_is_on
from chameleon_mm.swap.calling_thread import sequence_nr
from chameleon_mm.swap.classify import ProtectedStorages, reason_to_stay
from chameleon_mm.swap.handles import KeptTensor
from chameleon_mm.swap.hook_lock import HookLock
from chameleon_mm.swap.host_copy import SwapContext
from chameleon_mm.swap.metrics import Direction
from chameleon_mm.units import allocated_size

ON_DEVICE, LEAVING, ON_HOST, ARRIVING, RESTORED = range(5)
"""Where the bytes of a slot are, as the states of `host_copy.py` up to RESTORED."""


class RefusedCopy(RuntimeError):
    """The device refused a copy. All that was begun is over."""


class Program(NamedTuple):
    """Rows of a plan. By hook: bytes that the cached step allocated since the last comparison. By storage: bytes, group of host
    memory (-1: none), and place in the group's block."""

    rows: Sequence[Row]
    """The executor does the hook of an `END`."""
    grew: Sequence[int]
    nbytes: Sequence[int]
    group: Sequence[int]
    offset: Sequence[int]


class LoopSlot:
    """A saved storage that the loop moves. Its handles, and a copy under way, hold it; the loop refers to it weakly."""

    __slots__ = (
        "__weakref__", "arrivals", "done", "host", "number", "offset", "operators", "saves", "state", "storage"
    )  # fmt: skip

    def __init__(self, storage: torch.UntypedStorage, number: int) -> None:
        self.storage, self.number = storage, number
        self.state, self.operators = ON_DEVICE, 0
        self.arrivals = 0
        """Times that the bytes came back."""
        self.done: Any = None
        """Event at the end of its latest copy."""
        self.host: Any = None
        """Host memory of its group, and where the bytes lie there; None: it was not copied out yet."""
        self.offset = 0
        self.saves: list[tuple[Tensor, int, weakref.ref[Tensor]]] = []
        """Alias, version and owner of the version counter, of each save."""

    def is_alone(self) -> bool:
        """True if nothing else refers to the storage, and it may be resized: its memory may go."""
        return held_alone(self, len(self.saves)) and self.storage.resizable()

    def has_unwritten(self) -> bool:
        """True if a save was not written to since: the use of one that was raises anyway."""
        for alias, version, _ in self.saves:  # noqa: SIM110  # without the frame of a generator
            if alias._version == version:
                return True
        return False

    def includes(self, t: Tensor) -> bool:
        """True if a copy that began before has the bytes of `t`, saved now: an earlier save has all of them, by the same
        counter at the same version. Note [Identity]."""
        base, now = t._base, t._version
        owner = t if base is None else base
        return any(
            alias._version == version == now and counter() is owner and alias.is_contiguous()
            and alias.numel() * alias.element_size() == self.storage.nbytes()
            for alias, version, counter in self.saves
        )  # fmt: skip


class Saved:
    """Handle of a saved tensor that moves. Has what `SavedBytes` and `Origin` need, if the executor gets it."""

    __slots__ = (
        "__weakref__", "alias", "counter", "hook", "name", "node_number", "output_nr", "python", "slot", "tensor", "used_in",
        "version",
    )  # fmt: skip

    def __init__(self, t: Tensor, slot: LoopSlot, hook: int) -> None:
        self.alias, self.version, self.hook, self.slot = t.detach(), t._version, hook, slot
        self.tensor = weakref.ref(t)
        self.counter = self.tensor if (base := t._base) is None else weakref.ref(base)
        slot.saves.append((self.alias, self.version, self.counter))
        node = t.grad_fn
        self.name, self.node_number = ("", -1) if node is None else (node.name(), node._sequence_nr())
        self.output_nr = t.output_nr
        self.used_in = -1
        """`LoopSlot.arrivals` at its last use."""
        self.python: Any = None
        """The executor's handle, once it has it."""

    def told(self) -> tuple[Any, ...]:
        """Return the facts about it that the executor needs."""
        is_used = self.used_in == self.slot.arrivals
        origin = self.tensor(), self.name, self.node_number, self.output_nr
        return self.slot.number, self, self.hook, is_used, self.alias, self.version, self.counter(), *origin


def delegate(saved: Saved, python: Any) -> None:
    """Have a handle that was given back lead to one of the executor's."""
    saved.python = python
    del saved.slot, saved.alias


def _python_of(saved: Saved) -> Any:
    """The executor's handle of one that was given back. Raises `RuntimeError` if there is none."""
    if saved.python is None:
        raise RuntimeError(
            f"a saved tensor of {list(saved.alias.shape)}: expected the session's record of it, got none, as this is a forked "
            f"child, or an error came up as the step was handed over; run forward again, in the process that trains"
        )
    return saved.python


class StepLoop:
    """Loop over the rows of a program. A hook takes the executor's lock."""

    def __init__(
        self, device: Device, context: SwapContext, protected: ProtectedStorages, min_bytes: int, hook_lock: HookLock,
        python: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """`python`: what the executor's parts do for the loop, by name, in the lock."""
        self._device, self._protected, self._min_bytes = device, protected, min_bytes
        self._hook_lock = weakref.ref(hook_lock)
        self._context, self._out, self._back = context, context.out_queue.stream, context.back_queue.stream
        self._python, self._claimed, self._held = python, python["claimed"], context.held
        self._metrics, self._kept = context.metrics, context.metrics.totals.kept_by_reason
        self.follows = False
        """True if the loop takes the next hook."""
        # Numbers of a step: set as the loop takes the hooks, and read afterwards.
        self.hook = -1
        """Latest hook that was done, here or by the executor."""
        self.operators = self.limit = self.now = self.cumulative = self.taken = self.since = self.growth = 0
        self.peak = self.seen = 0
        self.bytes_swapped_out = self.bytes_swapped_in = self.bytes_reclaimed = self.prefetches = self.fallbacks = 0
        self._read_memory = device.memory_reader()
        self._abandoned: list[LoopSlot] = []
        """Slots without a handle whose copy was under way as a capture began."""
        self._begin()

    def _begin(self, num_storages: int = 0) -> None:
        self._slots: list[Callable[[], LoopSlot | None] | None] = [None] * num_storages
        self._by_storage: dict[int, Callable[[], LoopSlot | None]] = {}
        """By the id of the storage."""
        self._under_copy: dict[int, LoopSlot] = {}
        """Slots with a copy under way that compute does not wait for yet."""
        self._saves: list[weakref.ref[Saved]] = []
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        """Storages that never left, by number."""
        self._arenas: dict[int, tuple[Tensor, list[weakref.ref[LoopSlot]]]] = {}
        """By group: host memory, and the slots with a copy there."""
        self._late: list[Op] = []
        """Ops of earlier hooks: their storages' saving operators were not over. `_later`: those of this hook."""
        self._later: list[Op] = []
        self._growths: list[int] = []

    # --- what autograd calls

    def hook_of(self, saves: bool, python: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a hook, for saves or for uses. `python`: does what the loop does not."""
        hook_lock, do, come_back = self._hook_lock(), self._save if saves else self._use, self._python["come_back"]
        assert hook_lock is not None
        lock, ended, errors = hook_lock.lock, hook_lock.ended, hook_lock.errors

        def hook(argument: Any) -> Any:
            done = None
            of_loop = type(argument) is Saved
            if of_loop and argument.python is not None:
                argument, of_loop = argument.python, False
            if self.follows and not (num_modes() and tracer_is_on()):
                with lock:
                    is_given_back = of_loop and argument.python is not None  # while this waited
                    if not is_given_back and self.follows:
                        hook_lock.thread = get_ident()
                        try:
                            done = do(argument)
                        except RefusedCopy:
                            pass  # the executor does it
                        finally:
                            hook_lock.thread = None
                if ended or errors:
                    hook_lock.settle()
            if done is not None:
                return done
            if of_loop:
                if argument.python is None:
                    come_back()
                argument = _python_of(argument)
            return python(argument)

        return uncompiled(hook)

    # --- the two hooks, in the lock. None: the executor does it

    def _save(self, t: Tensor) -> KeptTensor | Saved | None:
        hook, now = self.hook + 1, sequence_nr()
        row = self._rows[hook]
        kind = row.kind
        if kind >= USE or get_ident() != self._home:
            return None
        try:
            if row.key != (type(t), t.shape, t.dtype, now - self.operators):
                return None
        except RuntimeError:  # a nested tensor has no shape
            return None
        reason = reason_to_stay(t, self._device, self._protected, self._min_bytes)
        if kind == KEPT:
            if not reason or reason == "subclass" or not self._run(row, hook, moves=False):
                return None
            handle: KeptTensor | Saved | None = KeptTensor(t, (self._epoch, hook), by_reference=reason == "parameter")
            self._kept[reason] += 1
        else:
            if reason or t.untyped_storage().nbytes() != self._nbytes[row.number] or not self._run(row, hook, moves=True):
                return None
            handle = self._move(t, row, hook, now)
            if handle is None:
                return None
        self.hook, self.operators = hook, now
        if row.ins:
            self._prefetch(row)
        return handle

    def _move(self, t: Tensor, row: Row, hook: int, now: int) -> Any:
        """Return the handle of a tensor that the plan may move. Note [Identity]."""
        storage, number, is_first = t.untyped_storage(), row.number, row.kind == FIRST
        key, slot = id(storage), None if (ref := self._slots[number]) is None else ref()
        if is_first and (
            slot is not None or key in self._claimed or (key in self._by_storage and self._by_storage[key]() is not None)
        ):
            return None  # the storage may have a claim: the executor finds out
        if self._is_record[number]:
            return self._python["save_record"](t, hook)
        if is_first:
            slot = LoopSlot(storage, number)
            self._slots[number] = self._by_storage[key] = weakref.ref(slot)
            self._storages[number] = weakref.ref(storage)
        if slot is None or slot.storage is not storage or (slot.state != ON_DEVICE and not slot.includes(t)):
            return None  # a copy may lack these bytes
        slot.operators = now
        saved = Saved(t, slot, hook)
        self._saves.append(weakref.ref(saved))
        return saved

    def _use(self, handle: Any) -> Tensor | None:
        """`handle`: of the loop, or the executor's."""
        hook = self.hook + 1
        row = self._rows[hook]
        if row.kind != USE:
            return None
        if type(handle) is Saved:
            slot, alias = handle.slot, handle.alias
            if handle.hook != row.key or alias._version != handle.version or not self._run(row, hook, moves=True):
                return None
            if slot.state == ON_HOST:
                return None  # room has to be made
            if slot.state == ARRIVING:
                self._wait(slot, "in")  # Note [Swap-in]: the copy back -> the node that reads it
                slot.state = RESTORED
            handle.used_in = slot.arrivals
            t: Tensor | None = alias.detach()  # a new reference for each user: the use count then shows every holder
        elif type(handle) is KeptTensor:
            t = handle.tensor  # as `HandOver.use_record`, without a call
            if handle.saved_at != (self._epoch, row.key) or t._version != handle.expected:
                return None
            if not self._run(row, hook, moves=False):
                return None
        else:
            t = self._python["use_record"](handle, row.key) if self._run(row, hook, moves=True) else None
            if t is None:
                return None
        self.hook = hook
        if row.ins:
            self._prefetch(row)
        return t

    # --- the ops

    def _run(self, row: Row, hook: int, *, moves: bool) -> bool:
        """Do what is due before the hook's own storage is used. Returns False if the executor must do this hook."""
        late, held = self._late, self._held
        if not (moves or row.is_checked or row.ops or row.ins or late or held):
            return True
        if not self._compute.is_current():
            return False  # another stream or device, or a capture
        if (row.ops or late or held) and not self._carry_out(row, hook):
            return False
        return not row.is_checked or self._check(row, hook)

    def _carry_out(self, row: Row, hook: int) -> bool:
        """Execute the late ops, then the row's. An op waits until the operator that saved its storage is over, and that of this
        hook, if that saves it again. Returns False if the host has no memory for a copy."""
        of_records: list[Op] = []
        slots, self._later = self._slots, []
        for op in (*self._late, *row.ops) if self._late else row.ops:
            code, number, nbytes = op
            if self._is_record[number]:
                of_records.append(op)
                continue
            if of_records:
                self._do(of_records, hook)
                of_records = []
            slot = None if (ref := slots[number]) is None else ref()
            if slot is None:
                continue
            if slot.state == ON_DEVICE:
                if (number == row.number and row.kind == AGAIN) or not self._is_over(slot):
                    self._later.append((OUT, number, nbytes))
                elif not self._out_of(slot, nbytes):
                    return False
            if code != OUT and slot.state == LEAVING:
                self._wait(slot, "out")  # Note [Reclaim]: its copy -> the next owner of its memory
                self.bytes_reclaimed += nbytes
                self._let_go(slot)
            elif code == RELEASE and slot.state == RESTORED:
                self._let_go(slot)
        if of_records or self._held:
            self._do(of_records, hook)
        self._late, self._later = self._later, []
        return True

    def _do(self, of_records: list[Op], hook: int) -> None:
        """Let the executor do these ops in their turn, because the link copies in the plan's order."""
        taken, late = self._python["do_ops"](of_records, hook, self.operators)
        self.taken += taken
        self._later += late

    def _is_over(self, slot: LoopSlot) -> bool:
        """True if the operator that saved it last is over, as `SwapOuts.is_over`. Note [Swap-out]."""
        return slot.operators < (sequence_nr() if get_ident() == self._home else self.operators)

    def _out_of(self, slot: LoopSlot, nbytes: int) -> bool:
        """Begin the copy out, unless it would be of no use. Returns False if the host has no memory for it."""
        if slot.storage.nbytes() != nbytes or not slot.has_unwritten():
            return True
        if slot.host is None and not self._has_place(slot):
            return False
        self._copy(slot, out=True)
        slot.state = LEAVING
        self.bytes_swapped_out += nbytes
        return True

    def _has_place(self, slot: LoopSlot) -> bool:
        """Have host memory for the copy. Returns False if there is none."""
        group, arenas = self._group[slot.number], self._arenas
        if group not in arenas:
            empty = [other for other, (_, slots) in arenas.items() if all(ref() is None for ref in slots)]
            for other in empty:
                del arenas[other]
            buffer = self._python["take"](group, empty)
            if buffer is None:
                return False
            arenas[group] = buffer, []
        slot.host, users = arenas[group]
        slot.offset = self._offset[slot.number]
        users.append(weakref.ref(slot))
        return True

    def _copy(self, slot: LoopSlot, *, out: bool) -> None:
        """Hand over the copy out or back, behind all work of compute. Raises `RefusedCopy`."""
        # Note [Swap-out], [Swap-in]: what wrote or used the memory last -> the copy
        stream, compute, storage = self._out if out else self._back, self._compute, slot.storage
        host, offset = slot.host, slot.offset
        try:
            if not self._timed:
                slot.done = stream.copy_behind(compute, storage, host, offset, out=out, again=slot.done)
            else:
                stream.wait(compute.record())
                start, nbytes = stream.record(timed=True), storage.nbytes()
                stream.copy_storage(storage, host, part=slice(offset, offset + nbytes), out=out)
                slot.done = stream.record(timed=True)
                self._metrics.copied(start, slot.done, "out" if out else "in", nbytes)
        except RuntimeError as error:
            self._context.out_queue.synchronize()  # what was begun may run without an event at its end
            raise RefusedCopy(str(error)) from None
        self._under_copy[slot.number] = slot

    def _wait(self, slot: LoopSlot, direction: Direction) -> None:
        """Order compute after the latest copy of a storage."""
        if not self._timed:
            self._compute.wait(slot.done)
        elif direction == "out" or not slot.done.query():
            self._metrics.wait(self._compute, slot.done, direction)
        del self._under_copy[slot.number]

    def _let_go(self, slot: LoopSlot) -> None:
        """Let the memory go, as the host has the bytes. If others refer to the storage, each hook tries again."""
        if slot.is_alone():
            self._empty(slot)
        else:
            slot.state = RESTORED
            self._later.append((RELEASE, slot.number, self._nbytes[slot.number]))

    def _empty(self, slot: LoopSlot) -> None:
        self._compute.resize(slot.storage, 0)
        slot.state = ON_HOST
        self._storages.pop(slot.number, None)

    def _prefetch(self, row: Row) -> None:
        """Begin the row's copies back."""
        for number in row.ins:
            if self._is_record[number]:
                self.taken += self._python["fetch"](number)
            elif (ref := self._slots[number]) is not None and (slot := ref()) is not None and slot.state == ON_HOST:
                self._copy_back(slot, self._nbytes[number])

    def _copy_back(self, slot: LoopSlot, nbytes: int) -> None:
        try:
            self._compute.resize(slot.storage, nbytes)
        except torch.OutOfMemoryError:
            return  # its use brings it back
        try:
            self._back.wait(slot.done)  # Note [Swap-in]: the copy out -> the copy back
            self._copy(slot, out=False)
        except RefusedCopy:
            self._empty(slot)
            self.fallbacks += 1
            return
        slot.state = ARRIVING
        slot.arrivals += 1
        self.taken += allocated_size(nbytes)
        self.bytes_swapped_in += nbytes
        self.prefetches += 1

    def _check(self, row: Row, hook: int) -> bool:
        """Read memory. Returns False if room has to be made, somebody has reset the readings, or the plan is given up."""
        now, cumulative, peak, *unused = self._read_memory()
        if now + row.growth > self.limit or cumulative < self.cumulative or peak < self.peak:
            return False
        grew, seen = max(0, cumulative - self.cumulative - self.taken), now - unused[0] if unused else now
        self._growths.append(grew)
        self.growth += grew
        self.cumulative, self.taken, self.now, self.peak, self.seen = cumulative, 0, now, peak, max(self.seen, seen)
        if self._timed:
            self._metrics.memory.append((self._device.host_us, seen))
        if row.number < 0 or hook == self.since:
            return True
        since, self.since, growth, self.growth = self.since, hook, self.growth, 0
        return growth == self._grew[hook] or bool(self._python["grown"](since, growth, hook))

    # --- between the executor's state and this one

    def enter(self, program: Program, compute: Stream, is_record: list[bool], epoch: int) -> None:
        """Take the hooks behind `hook`. `is_record`: by storage, whether the executor has it, or will. `epoch`: the step."""
        self._rows, self._grew, self._nbytes, self._group, self._offset = program
        self._compute, self._is_record, self._epoch, self._home = compute, is_record, epoch, get_ident()
        self._timed = self._metrics.timed
        self._begin(len(self._nbytes))
        self.follows = True

    def settle(self, compute: Stream) -> None:
        """Order `compute` after the copies of abandoned slots, and let go of them."""
        for slot in self._abandoned:
            compute.wait(slot.done)  # Note [Reclaim]: its copy -> the memory's next owner
        self._abandoned.clear()

    def give_back(self) -> dict[str, Any]:
        """Return all that the loop has, and follow no more: slots, saves in order, late ops, growths, and storages whose saves
        are gone and that others still hold."""
        self.follows = False
        saves = [saved for ref in self._saves if (saved := ref()) is not None]
        slots = {saved.slot.number: saved.slot for saved in saves}
        self._abandoned += [slot for number, slot in self._under_copy.items() if number not in slots]
        if not self._device.capturing():  # a capture may not wait for what began before it
            self.settle(self._compute)
        told = {
            "slots": [(n, s.state, s.operators, self._is_over(s), n not in self._storages) for n, s in sorted(slots.items())],
            "all_saves": [saved.told() for saved in saves],
            "outlived": [storage for n, ref in self._storages.items() if n not in slots and (storage := ref()) is not None],
            "late": [*self._late, *self._later], "growths": self._growths, "kept": [],
        }  # fmt: skip
        self._begin()
        return told
