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

from chameleon_mm.device import Event, Stream
from chameleon_mm.device.holders import held_alone
from chameleon_mm.device.protocols import Device
from chameleon_mm.device.uncompiled import uncompiled
from chameleon_mm.plan.step_program import AGAIN, FIRST, KEPT, OUT, RELEASE, USE, Op, Row
from chameleon_mm.record.call_notes import AnyWatch
from chameleon_mm.record.dispatch_state import num_modes, tracer_is_on
from chameleon_mm.swap.calling_thread import sequence_nr
from chameleon_mm.swap.classify import ProtectedStorages, reason_to_stay
from chameleon_mm.swap.handles import KeptTensor, SwappedView
from chameleon_mm.swap.hook_lock import HookLock
from chameleon_mm.swap.host_copy import SwapContext
from chameleon_mm.swap.metrics import Direction

ON_DEVICE, LEAVING, ON_HOST, ARRIVING, RESTORED = range(5)
"""Where the bytes of a slot are, as the states of `host_copy.py` up to RESTORED."""


class RefusedCopy(RuntimeError):
    """The device refused a copy. All that was begun is over."""


class Program(NamedTuple):
    """Rows of a plan. By hook: bytes that the cached step allocated since the last comparison. By storage: bytes, bytes that
    the allocator takes for them, group of host memory (-1: none), and place in the group's block."""

    rows: Sequence[Row]
    """The executor does the hook of an `END`."""
    grew: Sequence[int]
    nbytes: Sequence[int]
    allocated: Sequence[int]
    group: Sequence[int]
    offset: Sequence[int]


class LoopSlot:
    """A saved storage that the loop moves. Its handles, and a copy under way, hold it; the loop refers to it weakly."""

    __slots__ = ("__weakref__", "arrivals", "number", "operators", "saves", "state", "storage")

    def __init__(self, storage: torch.UntypedStorage, number: int) -> None:
        self.storage, self.number, self.state, self.operators = storage, number, ON_DEVICE, 0
        self.arrivals = 0
        """Times that the bytes came back."""
        self.saves: tuple[tuple[Tensor, int, weakref.ref[Tensor], weakref.ref[Saved]], ...] = ()
        """Alias, version, owner of the version counter and handle, of each save."""

    def includes(self, t: Tensor) -> bool:
        """True if a copy that began before has the bytes of `t`, saved now: an earlier save has all of them, by the same
        counter at the same version. Note [Identity]."""
        base, now = t._base, t._version
        owner = t if base is None else base
        return any(
            alias._version == version == now and counter() is owner and alias.is_contiguous()
            and alias.numel() * alias.element_size() == self.storage.nbytes()
            for alias, version, counter, _ in self.saves
        )  # fmt: skip


class Saved:
    """Handle of a saved tensor that moves. Has what `SavedBytes` and `Origin` need, if the executor gets it."""

    __slots__ = (
        "__weakref__", "alias", "counter", "hook", "name", "node_number", "output_nr", "python", "slot", "tensor", "used_in",
        "version",
    )  # fmt: skip

    def __init__(self, t: Tensor, slot: LoopSlot, hook: int) -> None:
        self.alias, self.version, self.hook, self.slot = t.detach(), t._version, hook, slot
        self.tensor = self.counter = weakref.ref(t)
        if (base := t._base) is not None:
            self.counter = weakref.ref(base)
        slot.saves += ((self.alias, self.version, self.counter, weakref.ref(self)),)
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

    __slots__ = (
        "_abandoned", "_allocated", "_arenas", "_back", "_by_storage", "_claimed", "_compute", "_context", "_device", "_epoch",
        "_events", "_grew", "_group", "_growths", "_held", "_hook_lock", "_is_record", "_kept", "_late", "_later",
        "_metrics", "_min_bytes", "_nbytes", "_offset", "_out", "_protected", "_python", "_read_memory", "_reading", "_rows",
        "_slots", "_storages", "_timed", "_under_copy", "_watch", "bytes_reclaimed", "bytes_swapped_in", "bytes_swapped_out",
        "cumulative", "fallbacks", "follows", "growth", "home", "hook", "limit", "now", "operators", "peak", "prefetches",
        "seen", "since", "swap_ins_on_demand", "taken",
    )  # fmt: skip
    # A dictionary of so many attributes takes a tenth of a hook's time more.

    def __init__(
        self, device: Device, context: SwapContext, protected: ProtectedStorages, min_bytes: int, hook_lock: HookLock,
        python: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """`python`: what the executor's parts do for the loop, by name, in the lock."""
        self._device, self._protected, self._min_bytes = device, protected, min_bytes
        self._hook_lock = weakref.ref(hook_lock)
        self._context, self._out, self._back = context, context.out_queue.stream, context.back_queue.stream
        self._python, self._claimed, self._held = python, python["claimed"], python["held"]
        self._watch: AnyWatch | None = None
        """How the step's storages are made, in a step that may recompute: then each that may leave has a record."""
        self._metrics = context.metrics
        self.follows = self._timed = False
        """`follows`: True if the loop takes the next hook."""
        # Numbers of a step: set as the loop takes the hooks, and read afterwards.
        self.hook = -1
        """Latest hook that was done, here or by the executor. `home`: thread whose saves the loop does."""
        self.home = self.operators = self.limit = self.now = self.cumulative = self.taken = self.since = self.growth = 0
        self.peak = self.seen = 0
        self.bytes_swapped_out = self.bytes_swapped_in = self.bytes_reclaimed = 0
        self.prefetches = self.swap_ins_on_demand = self.fallbacks = 0
        self._read_memory = device.memory_reader()
        self._reading: Sequence[int] = ()
        """The latest: fields of a `MemoryReading`."""
        self._events: list[Any] = []
        """Event at the end of each storage's latest copy, by number. It is recorded again in each step."""
        self._abandoned: list[tuple[LoopSlot, Event]] = []
        """Slots without a handle whose copy was under way as a capture began, and the copy's end."""
        self._begin()

    def _begin(self, num_storages: int = 0) -> None:
        self._slots: list[Callable[[], LoopSlot | None] | None] = [None] * num_storages
        self._by_storage: dict[int, Callable[[], LoopSlot | None]] = {}
        """By the id of the storage."""
        self._under_copy: dict[int, LoopSlot] = {}
        """Slots with a copy under way that compute does not wait for yet."""
        self._storages: list[weakref.ref[torch.UntypedStorage] | None] = [None] * num_storages
        """Storages that were saved and never left, by number."""
        self._arenas: dict[int, Tensor] = {}
        """Host memory by group."""
        self._late: list[Op] = []
        """Ops of earlier hooks: their storages' saving operators were not over. `_later`: those of this hook."""
        self._later: list[Op] = []
        self._growths: list[int] = []
        self._kept: dict[str, int] = {}
        """Tensors that stay, by reason."""

    # --- what autograd calls

    def hook_of(self, saves: bool, python: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a hook, for saves or for uses. `python`: does what the loop does not."""
        hook_lock, do, come_back = self._hook_lock(), self._save if saves else self._use, self._python["come_back"]
        assert hook_lock is not None
        lock, ended, errors = hook_lock.lock, hook_lock.ended, hook_lock.errors

        def hook(argument: Any) -> Any:
            done = None
            if self.follows and not (num_modes() and tracer_is_on()):
                with lock:
                    if self.follows:
                        hook_lock.thread = thread = get_ident()
                        try:
                            done = do(argument, thread)
                        except RefusedCopy:
                            pass  # the executor does it
                        finally:
                            hook_lock.thread = None
                if ended or errors:
                    hook_lock.settle()
            if done is not None:
                return done
            if type(argument) is Saved:
                if argument.python is None:
                    come_back()
                argument = _python_of(argument)
            return python(argument)

        return uncompiled(hook)

    # --- the two hooks, in the lock. None: the executor does it

    def _save(self, t: Tensor, thread: int) -> KeptTensor | Saved | None:
        hook, now = self.hook + 1, sequence_nr()
        key, kind, number, ops, _, is_checked, ins = row = self._rows[hook]
        if kind >= USE or thread != self.home:
            return None
        try:
            if key != (type(t), t.shape, t.dtype, now - self.operators):
                return None
        except RuntimeError:  # a nested tensor has no shape
            return None
        reason = reason_to_stay(t, self._device, self._protected, self._min_bytes)
        if kind == KEPT:
            if not reason or reason == "subclass":
                return None
        elif reason:
            return None
        if (watch := self._watch) is not None and watch.births.born:
            self._python["hold_born"]()
        if (is_checked or ops or ins or self._late or self._held) and not self._run(row, hook, now):
            return None
        if kind == KEPT:
            by_reference = reason == "parameter"
            handle: KeptTensor | Saved | None = KeptTensor(t, (self._epoch, hook), by_reference)
            self._kept[reason] = self._kept.get(reason, 0) + 1
        else:
            handle = self._move(t, number, hook, now, is_first=kind == FIRST)
            if handle is None:
                return None
        self.hook, self.operators = hook, now
        if ins:
            self._prefetch(ins)
        if watch is not None:
            self._python["note_saved"](t, handle)
        return handle

    def _move(self, t: Tensor, number: int, hook: int, now: int, *, is_first: bool) -> Any:
        """Return the handle of a tensor that the plan may move. Note [Identity]."""
        storage, ref = t.untyped_storage(), self._slots[number]
        if storage.nbytes() != self._nbytes[number]:
            return None
        key, slot = id(storage), None if ref is None else ref()
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
        return Saved(t, slot, hook)

    def _use(self, handle: Any, thread: int) -> Tensor | None:
        """`handle`: of the loop, or the executor's."""
        hook = self.hook + 1
        key, kind, _, ops, _, is_checked, ins = row = self._rows[hook]
        if kind != USE:
            return None
        of: Any = type(handle)
        t: Tensor | None = None
        if of is Saved and handle.python is not None:
            handle = handle.python
            of = type(handle)
        if of is KeptTensor:
            t = handle.tensor  # as `HandOver.use_record`, without a call
            if handle.saved_at != (self._epoch, key) or handle.tensor._version != handle.expected:
                return None
        elif of is Saved and (handle.hook != key or handle.alias._version != handle.version):
            return None
        relied = handle.relied if of is KeptTensor else handle.claim.saved.relied if of is SwappedView else None
        if relied is not None and relied.dependents and not self._python["hand_out"](handle):
            return None
        if is_checked or ops or ins or self._late or self._held or of is not KeptTensor:
            # Another thread knows no later operator of the forward than the one that saved last.
            running = sequence_nr() if thread == self.home else self.operators
            if not self._run(row, hook, running):
                return None
        if of is Saved:
            slot = handle.slot
            if slot.state == ON_HOST and ins and ins[0] == slot.number:
                self._prefetch(ins[:1], is_ahead=False)  # as planned: the check left room for it
            if slot.state == ON_HOST:
                return None  # room has to be made
            if slot.state == ARRIVING:
                self._wait(slot.number, "in")  # Note [Swap-in]: the copy back -> the node that reads it
                slot.state = RESTORED
            handle.used_in = slot.arrivals
            t = handle.alias.detach()  # a new reference for each user: the use count then shows every holder
        elif of is not KeptTensor:
            t = self._python["use_record"](handle, key)
        if t is None:
            return None
        self.hook = hook
        if ins:
            self._prefetch(ins)
        return t

    # --- the ops

    def _run(self, row: Row, hook: int, running: int) -> bool:
        """Do what is due before the hook's own storage is used. Returns False if the executor must do this hook.

        An op waits until the operator that saved its storage is over, and that of this hook, if that saves it again.
        `running`: number of the operator that may be running. Earlier ones are over.
        """
        if not self._compute.is_current():
            return False  # another stream or device, or a capture
        _, kind, own, ops, growth, is_checked, _ = row
        of_records: list[Op] = []
        slots = self._slots
        for op in (*self._late, *ops) if self._late else ops:
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
                if (number == own and kind == AGAIN) or slot.operators >= running:  # Note [Swap-out]
                    self._later.append((OUT, number, nbytes))
                elif not self._out_of(slot, nbytes):
                    return False
            if code != OUT and slot.state == LEAVING:
                self._wait(number, "out")  # Note [Reclaim]: its copy -> the next owner of its memory
                self.bytes_reclaimed += nbytes
                self._let_go(slot)
            elif code == RELEASE and slot.state == RESTORED:
                self._let_go(slot)
        if of_records or self._held:
            self._do(of_records, hook)
        if self._late or self._later:
            self._late, self._later = self._later, []
        return not is_checked or self._check(hook, growth, is_compared=own >= 0)

    def _do(self, of_records: list[Op], hook: int) -> None:
        """Let the executor do these ops in their turn, because the link copies in the plan's order."""
        taken, late = self._python["do_ops"](of_records, hook, self.operators)
        self.taken += taken
        self._later += late

    def _out_of(self, slot: LoopSlot, nbytes: int) -> bool:
        """Begin the copy out, unless it would be of no use. Returns False if the host has no memory for it."""
        for alias, version, *_ in slot.saves:
            if alias._version == version:
                break
        else:
            return True  # each was written to since, so that its use will raise
        if slot.storage.nbytes() != nbytes:
            return True
        group = self._group[slot.number]
        if group not in self._arenas and not self._take(group):
            return False
        self._copy(slot, out=True)
        slot.state = LEAVING
        self.bytes_swapped_out += nbytes
        return True

    def _take(self, group: int) -> bool:
        """Take host memory for a group, and give back that of groups without a copy. Returns False if there is none."""
        slots = [slot for ref in self._slots if ref is not None and (slot := ref()) is not None]
        in_use = {self._group[slot.number] for slot in slots if slot.state != ON_DEVICE}
        empty = [other for other in self._arenas if other not in in_use]
        for other in empty:
            del self._arenas[other]
        buffer = self._python["take"](group, empty)
        if buffer is not None:
            self._arenas[group] = buffer
        return buffer is not None

    def _copy(self, slot: LoopSlot, *, out: bool) -> None:
        """Hand over the copy out or back, behind all work of compute. Raises `RefusedCopy`."""
        # Note [Swap-out], [Swap-in]: what wrote or used the memory last -> the copy
        stream, compute, storage, number = self._out if out else self._back, self._compute, slot.storage, slot.number
        host, offset, events = self._arenas[self._group[number]], self._offset[number], self._events
        try:
            if not self._timed:
                events[number] = stream.copy_behind(compute, storage, host, offset, out=out, again=events[number])
            else:
                stream.wait(compute.record())
                start, nbytes = stream.record(timed=True), storage.nbytes()
                stream.copy_storage(storage, host, part=slice(offset, offset + nbytes), out=out)
                events[number] = done = stream.record(timed=True)
                self._metrics.copied(start, done, "out" if out else "in", nbytes)
        except RuntimeError as error:
            self._context.out_queue.synchronize()  # what was begun may run without an event at its end
            raise RefusedCopy(str(error)) from None
        self._under_copy[number] = slot

    def _wait(self, number: int, direction: Direction) -> None:
        """Order compute after the latest copy of a storage."""
        done = self._events[number]
        if not self._timed:
            self._compute.wait(done)
        elif direction == "out" or not done.query():
            self._metrics.wait(self._compute, done, direction)
        del self._under_copy[number]

    def _let_go(self, slot: LoopSlot, *, is_alone: bool = False) -> None:
        """Let the memory go, as the host has the bytes. If others refer to the storage, each hook tries again. `is_alone`: no
        others do."""
        if is_alone or (held_alone(slot, len(slot.saves)) and slot.storage.resizable()):
            self._compute.resize(slot.storage, 0)
            slot.state = ON_HOST
            self._storages[slot.number] = None
        else:
            slot.state = RESTORED
            self._later.append((RELEASE, slot.number, self._nbytes[slot.number]))

    def _prefetch(self, numbers: Sequence[int], *, is_ahead: bool = True) -> None:
        """Begin copies back, as far as there is memory: uses bring the others back. `is_ahead`: of their uses."""
        for number in numbers:
            if self._is_record[number]:
                self.taken += self._python["fetch"](number)
                continue
            slot = None if (ref := self._slots[number]) is None else ref()
            if slot is None or slot.state != ON_HOST:
                continue
            nbytes = self._nbytes[number]
            try:
                self._compute.resize(slot.storage, nbytes)
                self._back.wait(self._events[number])  # Note [Swap-in]: the copy out -> the copy back
                self._copy(slot, out=False)
            except torch.OutOfMemoryError:
                continue
            except RefusedCopy:
                self._let_go(slot, is_alone=True)
                self.fallbacks += 1
                continue
            slot.state = ARRIVING
            slot.arrivals += 1
            self.taken += self._allocated[number]
            self.bytes_swapped_in += nbytes
            self.prefetches += is_ahead
            self.swap_ins_on_demand += not is_ahead

    def _check(self, hook: int, growth: int, *, is_compared: bool) -> bool:
        """Read memory. Returns False if room has to be made, somebody has reset the readings, or the plan is given up.

        `growth`: bytes until the next check. `is_compared`: whether growth so far is compared with the cached step's.
        """
        last, reading = self._reading, self._read_memory()
        now, cumulative, peak, unused = reading
        if now + growth > self.limit or cumulative < last[1] or peak < last[2]:
            return False
        grew = max(0, cumulative - last[1] - self.taken)
        self._reading, self.taken = reading, 0
        self._growths.append(grew)
        grew += self.growth
        self.seen = max(self.seen, now - unused)
        if self._timed:
            self._metrics.memory.append((self._device.host_us, now - unused))
        since = self.since
        if not is_compared or hook == since:
            self.growth = grew
            return True
        self.since, self.growth = hook, 0
        return grew == self._grew[hook] or bool(self._python["grown"](since, grew, hook))

    # --- between the executor's state and this one

    def enter(self, program: Program, compute: Stream, is_record: list[bool], epoch: int, watch: AnyWatch | None) -> None:
        """Take the hooks behind `hook`. `is_record`: by storage, whether the executor has it, or will. `epoch`: the step.
        `watch`: of a step that may recompute: then all have, or will have, a record."""
        self._watch = watch
        self._rows, self._grew, self._nbytes, self._allocated, self._group, self._offset = program
        self._compute, self._is_record, self._epoch = compute, is_record, epoch
        self._reading = self.now, self.cumulative, self.peak, 0
        self.settle(compute)
        if self._timed:
            self._events.clear()  # they are timed
        self._timed = self._metrics.timed
        self._begin(len(self._nbytes))
        self._events += [None] * (len(self._nbytes) - len(self._events))
        self.follows = True

    def settle(self, compute: Stream) -> None:
        """Order `compute` after the copies of abandoned slots, and let go of them."""
        for _, done in self._abandoned:
            compute.wait(done)  # Note [Reclaim]: its copy -> the memory's next owner
        self._abandoned.clear()

    def give_back(self) -> dict[str, Any]:
        """Return all that the loop has, and follow no more: slots, saves in order, late ops, growths, and storages whose saves
        are gone and that others still hold."""
        self.follows, self._watch = False, None
        self.now, self.cumulative, self.peak, _ = self._reading
        of_slots = [slot.saves for ref in self._slots if ref is not None and (slot := ref()) is not None]
        saves = [saved for of_slot in of_slots for *_, ref in of_slot if (saved := ref()) is not None]
        slots = {saved.slot.number: saved.slot for saved in saves}
        self._abandoned += [(slot, self._events[n]) for n, slot in self._under_copy.items() if n not in slots]
        if not self._device.capturing():  # a capture may not wait for what began before it
            self.settle(self._compute)
        running, stays = sequence_nr() if get_ident() == self.home else self.operators, self._storages
        gone = [ref for n, ref in enumerate(stays) if n not in slots and ref is not None]
        told = {
            "slots": [(n, s.state, s.operators, s.operators < running, not stays[n]) for n, s in sorted(slots.items())],
            "all_saves": [saved.told() for saved in saves],
            "outlived": [storage for ref in gone if (storage := ref()) is not None],
            "late": [*self._late, *self._later], "growths": self._growths, "kept": self._kept,
        }  # fmt: skip
        self._begin()
        return told
