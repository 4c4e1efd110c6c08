"""Hand hooks of planned steps to the loop, and take them back with all that the loop has by then.

hand_over = HandOver(executor)               # its loop: the C++ helper `loop` if that is built, else `StepLoop`
save, use = hand_over.hooks(save, use)       # what autograd calls: the executor's hooks wherever the loop does not follow
hand_over.follow(way, director)              # after a hook of the executor's: the loop takes the next ones, if it can
hand_over.give_back()                        # first of all in `HookLock.run`: all is the executor's again

The loop does the common rows: it keeps tensors, copies whole storages out and back, and checks memory. It gives all back for
all else. The records that are made then have the storages, aliases and host memory that the loop had. Their copies end at
events that are recorded now, which is later: whoever waits for one waits long enough.

While a watch or a dispatch mode may be on, the executor's hooks pause it, and call a loop of their own. There each storage that
may leave has a record, as a recipe may read it: the loop keeps tensors, matches rows and checks memory.
"""

from __future__ import annotations

import os
import weakref
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from operator import itemgetter
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from chameleon_mm.device import Event, Stream
from chameleon_mm.device.process import ThisProcess
from chameleon_mm.device.uncompiled import uncompiled
from chameleon_mm.errors import HostMemoryExhausted
from chameleon_mm.plan.step_program import AGAIN, DROP, END, FIRST, RELEASE, USE, Op, Row, StepProgram
from chameleon_mm.pool.arena import Arena
from chameleon_mm.record.dispatch_state import num_modes, tracer_is_on
from chameleon_mm.record.light_profiler import LatestHook
from chameleon_mm.swap import step_loop
from chameleon_mm.swap.calling_thread import profiler_is_on, this_thread
from chameleon_mm.swap.copy_queue import CopyQueue
from chameleon_mm.swap.director import Director
from chameleon_mm.swap.handles import Handle, KeptTensor, Origin, SavedBytes, SwappedView
from chameleon_mm.swap.hook_lock import call_if_alive
from chameleon_mm.swap.host_copy import HostCopy, State
from chameleon_mm.swap.saved_storage import SavedStorage
from chameleon_mm.swap.step_loop import StepLoop
from chameleon_mm.swap.step_ops import StepOps
from chameleon_mm.swap.way import Way
from chameleon_mm.units import MIB, allocated_size

if TYPE_CHECKING:
    from chameleon_mm.swap.executor import Executor

ARENA_BYTES = 16 * MIB
"""Bytes of host memory that are taken at once, for storages that are copied out one after the other."""

MOST_ENTRIES, WORTH_HOOKS = 4, 12
"""Times that the loop takes the hooks of one step and does fewer than so many: entering and giving back cost as much."""

_NOTHING = nullcontext()
_STATES = (State.ON_DEVICE, State.SWAPPING_OUT, State.ON_HOST, State.SWAPPING_IN, State.RESTORED)
_TOTALS = ("bytes_swapped_out", "bytes_swapped_in", "bytes_reclaimed", "prefetches", "swap_ins_on_demand", "fallbacks")


class _Compiled(NamedTuple):
    """A program as the loop has it, and what is known of it here."""

    program: Any
    in_part: list[bool]
    """By storage: whether only a part of it leaves, or it is dropped."""
    group: list[int]
    offset: list[int]
    group_bytes: list[int]
    """Places on the host, as of `_places`."""
    saves: defaultdict[int, list[int]]
    """Hooks of its saves, by storage."""
    firsts: list[int]


class HandOver:
    """Hands hooks of planned steps to an executor's loop, and takes them back. Not thread-safe: the executor holds its lock."""

    def __init__(self, executor: Executor, ops: StepOps) -> None:
        self._executor, self._ops = weakref.ref(executor), ops
        self._context, self._budget, self._outs = executor.context, executor.budget, executor.outs
        self._ins, self._registry = executor.ins, executor.registry
        self._order, self._claims = executor.order, executor.claims
        self._protected, self._device = executor.protected, executor.device
        self._is_called = False
        """True if autograd calls the loop's hooks."""
        self._programs = defaultdict[Any, weakref.WeakKeyDictionary[StepProgram, _Compiled]](weakref.WeakKeyDictionary)
        """Compiled programs by the module of their loop."""
        self._compiled: Any = None
        """The program that the loop has."""
        self._arenas: dict[int, Arena] = {}
        """Host memory of the copies that the loop has, by group."""
        self._compute: Any = None
        self._entries = (-1, 0)
        """The latest step, and how often the loop took its hooks for a few of them."""
        self._entered: tuple[Way, Director, LatestHook] | None = None
        self._since, self._next_index, self._is_record = -1, 0, list[bool]()
        """Latest hook before the loop took over, and number of the next storage at that time. By storage: True if it has, or
        gets, a record."""
        self._home = -1
        """Number of the thread whose saves the loop does; -1: it does none."""
        self._kind: Any = step_loop
        """Module with the program and the handles of autograd's loop."""
        self._of_autograd, self._of_executor = self._make_loops(executor)
        self.loop: Any = self._of_autograd
        """The one that follows, or followed last."""
        by_itself = executor.save_without_loop, executor.use_without_loop
        save, use = (partial(call_if_alive, weakref.WeakMethod(method)) for method in by_itself)
        self.save_watched, self.use_watched = self._of_executor.hook_of(True, save), self._of_executor.hook_of(False, use)
        """Functions that the executor's hooks call while a watch or a mode may be on."""
        _all.add(self)

    def _make_loops(self, executor: Executor) -> tuple[Any, StepLoop]:
        """Make the loop whose hooks autograd calls, and that whose hooks the executor's call. The first is in C++ if that is
        built and no window of parameters changes the device's readings."""
        device, context, min_bytes = self._device, self._context, executor.min_bytes
        streams = context.out_queue.stream, context.back_queue.stream
        helper = device.native_loop(streams) if device is context.pool.device else None
        works = self.take, self.grown, self.do_ops, self.fetch, self.save_record, self.use_record, self.hold_born, self.hand_out
        common = {
            "safe": executor.protected.refs, "claimed": self._claims.by_storage, "held": context.held,
            "come_back": partial(uncompiled(call_if_alive), weakref.WeakMethod(self.come_back)),
        }  # fmt: skip
        python = common | {work.__name__: _asked(work, in_lock=True) for work in works}
        python["note_saved"] = executor.recomputing.note_saved
        loop, watched = (
            StepLoop(device, context, executor.protected, min_bytes, executor.hook_lock, python | {"held": held})
            for held in (context.held, self._ops)
        )
        if helper is None:
            return loop, watched
        self._kind, index, of_streams = helper
        python = common | {work.__name__: _asked(work, in_lock=False) for work in works}
        return self._kind.Loop(index, *of_streams, min_bytes, python), watched

    def hooks(self, save: Any, use: Any) -> tuple[Any, Any]:
        """Autograd's two hooks, which call `save` and `use` for what the loop does not do."""
        executor = self._executor()
        assert executor is not None
        self._is_called, executor.hook_lock.first = True, weakref.WeakMethod(self.give_back)
        return self._of_autograd.hook_of(True, save), self._of_autograd.hook_of(False, use)

    def _may_enter(self, way: Way, loop: Any) -> bool:
        """True if `loop` may take the next hooks: autograd calls it, and no pending work is unknown to it."""
        if not self._is_called:
            return False
        context, budget, outs = self._context, self._budget, self._outs
        epoch, entries = self._entries
        if not isinstance(loop, StepLoop) and (context.metrics.timed or num_modes()):
            return False  # the helper times nothing, and knows no simulator
        if not budget.has_room_ahead or (epoch == way.epoch and entries >= MOST_ENTRIES):
            return False
        if context.held or way.late or budget.reclaim.entries or context.out_queue.queued or context.back_queue.queued:
            return False
        if outs.waiting_bytes or profiler_is_on():
            return False
        # The plan knows what was just saved, and it is of this step.
        just_saved = *outs.fresh, *outs.in_part
        return all(saved.number is not None and way.storages.get(saved.number) is saved for saved in just_saved)

    def follow(self, way: Way, director: Director) -> None:
        """Have the loop take the hooks after the latest, if it may."""
        growth, thread, budget, compute = None, get_ident(), self._budget, self._device.current_stream()
        executor, cumulative = self._executor(), budget.cumulative_bytes
        if executor is None or cumulative is None or director.light is None:
            return
        is_watched = not executor.recording.is_over
        loop = self._of_executor if is_watched else self._of_autograd
        if self._may_enter(way, loop) and self._context.streams.is_only(compute) and compute.is_current():
            growth = director.growth()
        if growth is None:
            return
        checked_at, growth_bytes, until = growth
        latest = director.light.latest()
        if latest.thread != thread:
            return  # a save that stays may be on any stream
        saves_here = thread in latest.numbers  # not on autograd's own thread: its saves are the executor's
        if budget.lending is not None:
            budget.lending.take_back()  # the loop lends nothing
        epoch, entries = self._entries
        self._entries = way.epoch, entries + 1 if epoch == way.epoch else 1
        kind: Any = step_loop if isinstance(loop, StepLoop) else self._kind
        programs = self._programs[kind]
        if way.program not in programs:
            programs[way.program] = _compiled(kind, way.program, until)
        self.loop, self._compiled = loop, programs[way.program]
        self._since, self._next_index = way.hook, self._registry.next_index
        self._is_record = [True] * len(self._compiled.in_part) if is_watched else self._compiled.in_part.copy()
        for number, saved in way.storages.items():
            self._is_record[number] |= saved.state is not State.RETIRED
        numbers = dict.fromkeys(_TOTALS, 0) | {
            "hook": self._since, "home": thread if saves_here else 0, "operators": latest.numbers.get(thread, 0),
            "since": checked_at, "growth": growth_bytes,
            "limit": budget.hbm_budget_bytes - way.margin_bytes, "now": budget.last_allocated_bytes - budget.taken_bytes,
            "taken": budget.taken_bytes, "cumulative": cumulative - self._device.cumulative_offset(),
            "peak": budget.peak_watch.last_bytes, "seen": 0,
        }  # fmt: skip
        for name, value in numbers.items():
            setattr(self.loop, name, value)
        self._entered, self._compute = (way, director, latest), compute
        self._home = this_thread.number if saves_here else -1
        if is_watched:
            executor.recomputing.follow()
        if isinstance(loop, StepLoop):
            loop.enter(self._compiled.program, compute, self._is_record, way.epoch, executor.recording.watch)
        else:
            loop.enter(self._compiled.program, self._compute.handle, self._is_record)

    def has_used(self) -> bool:
        """True if the loop has done a hook of a use since it took over: they are counted as it gives back."""
        entered = self._entered
        return entered is not None and any(
            row.kind == USE for row in entered[0].program.rows[self._since + 1 : self.loop.hook + 1]
        )

    def note_taken(self, nbytes: int) -> None:
        """Count memory that the executor took while the loop may follow as no growth of the model."""
        if self.loop.follows:
            self.loop.taken += nbytes
            if not self._budget.has_room_ahead:
                self.loop.limit = -1  # the executor makes room at the next check

    def forget(self) -> None:
        """Forget the step that has ended."""
        self.loop.hook = -1
        if isinstance(self._of_autograd, StepLoop):
            self._of_autograd.settle(self._device.current_stream())

    # --- what the loop has the executor's parts do of a hook that it goes on with; None: it cannot go on

    def take(self, way: Way, group: int, empty: Sequence[int]) -> Tensor | None:
        """Give the memory of `empty` groups back, and take that of another. Returns it; None: the host has none."""
        for other in empty:
            self._arenas.pop(other).release_if_empty()
        out, back = self._context.out_queue.stream, self._context.back_queue.stream
        with suppress(HostMemoryExhausted):
            # Note [Host block]: its last use -> the copies into it
            block = self._context.pool.allocate(self._compiled.group_bytes[group], out)
            self._arenas[group] = Arena(block, lambda: (out.record(), back.record()))
            return block.buffer
        return None

    def grown(self, way: Way, since: int, nbytes: int, hook: int) -> bool:
        """Compare what the model allocated since the hook `since`, which is not what the cached step did. Returns whether the
        plan goes on."""
        assert self._entered is not None
        director = self._entered[1]
        director.note_checked(since, nbytes)
        director.note_growth(0, at_hook=True, hook=hook)
        return self._budget.way is way

    def do_ops(self, way: Way, ops: Sequence[Op], hook: int, latest: int) -> tuple[int, list[Op]]:
        """Execute `ops` on records, and do what is pending. Returns the bytes of device memory that they took, and those that
        are late."""
        before = self._budget.taken_bytes
        way.at(hook)
        if self._home >= 0:
            self._outs.latest_operator = self._home, latest
        is_watched = self.loop is self._of_executor
        self._ops.advance(way, ops, self._outs.finished() if is_watched else ())
        late, way.late = way.late, []
        if not is_watched:
            self._context.out_queue.hand_over_all()  # no hook would
        return self._budget.taken_bytes - before, late

    def fetch(self, way: Way, number: int) -> int:
        """Start the copy back of a record. Returns the bytes of device memory that it took."""
        before, saved = self._budget.taken_bytes, way.storages.get(number)
        self._ins.prefetch_planned(() if saved is None else (saved,), self._compute)
        return self._budget.taken_bytes - before

    def save_record(self, way: Way, t: Tensor, hook: int) -> Handle | None:
        """Save a tensor of a record, old or new. Note [Identity]."""
        self._registry.next_index = self._index_at(way, hook)
        executor, compute, row = self._executor(), self._compute, way.program.rows[hook]
        if executor is None:
            return None
        claim, saved_bytes = self._claims.find(t), SavedBytes(t)
        if row.kind == FIRST:
            claim = executor.new_claim(t, saved_bytes, compute)
            way.number(claim.saved, row.number)
            way.first_saves[hook] = claim.saved
        elif claim is None or claim.saved is not way.storages.get(row.number):
            return None
        elif executor.include(claim.saved, saved_bytes, compute, may_begin_again=False):
            claim.saved.add_view(saved_bytes)
        else:
            return None
        claim.saved.slot.note_save(way.epoch, hook)
        handle = SwappedView(claim, saved_bytes)
        handle.saved_at = way.epoch, hook
        return handle

    def use_record(self, way: Way, handle: Handle, hook: int) -> Tensor | None:
        """Use what `hook` saved, by a handle of the executor's."""
        executor = self._executor()
        if executor is None or handle.saved_at != (way.epoch, hook):
            return None
        if type(handle) is KeptTensor:
            relies = handle.relied is not None and handle.relied.dependents
            return handle.tensor if handle.tensor._version == handle.expected and not relies else None
        if type(handle) is not SwappedView or handle.saved.moved:
            return None
        saved, before = handle.claim.saved, self._budget.taken_bytes
        if self.loop is not self._of_executor:  # no room can be made for a storage: others have no records
            is_away = saved.state is State.ON_HOST or saved.swap_in_failed or saved.proof is not None
            relies = saved.relied is not None and saved.relied.dependents  # of an earlier step, which recomputed
            return None if is_away or relies else executor.restored(handle, self._compute)
        way.at(self.loop.hook + 1)
        executor.stop_waiting()
        if saved.state is State.ON_HOST or saved.swap_in_failed:
            self._budget.allocated_bytes()  # read it
        try:
            return executor.restored(handle, self._compute, way.coming(way.program.rows[way.hook]))
        finally:
            self.note_taken(self._budget.taken_bytes - before)

    def hand_out(self, way: Way, handle: Any) -> bool:
        """Recompute what relies on the bytes that a node gets now, before memory is checked. False: it is not done here."""
        executor, before = self._executor(), self._budget.taken_bytes
        if executor is None or self.loop is not self._of_executor or not executor.hook_lock.may_ask_device():
            return False
        saved = None if type(handle) is KeptTensor else handle.claim.saved
        executor.rescue.hand_out((handle if saved is None else saved).relied, handle, saved)
        self.note_taken(self._budget.taken_bytes - before)
        return True

    def hold_born(self, way: Way) -> None:
        """Hold storages for recipes, from their birth on."""
        executor, before = self._executor(), self._budget.taken_bytes
        assert executor is not None and self._entered is not None
        executor.recomputing.hold_born(executor.claim_to_hold, self._entered[1].note_held)
        self.note_taken(self._budget.taken_bytes - before)

    # --- back

    def come_back(self, *, wait: bool = True) -> None:
        """Have all given back, from outside of the executor's lock. `wait`: for that lock."""
        executor = self._executor()
        if executor is None or ThisProcess.pid != executor.hook_lock.pid:  # a child may have lost the lock's thread
            return
        if not executor.hook_lock.lock.acquire(blocking=wait):  # another thread may be giving back
            return
        try:
            with _disable_current_modes() if tracer_is_on() else _NOTHING:  # the records are of real tensors
                self.give_back()
        finally:
            executor.hook_lock.lock.release()

    def give_back(self) -> None:
        """Make all that the loop has the executor's, if it follows."""
        if not self.loop.follows:
            return
        given, numbers = self.loop.give_back(), self.loop
        executor, entered = self._executor(), self._entered
        assert executor is not None and entered is not None
        way, director, latest = entered
        self._entered = None
        if numbers.hook - self._since >= WORTH_HOOKS:
            self._entries = way.epoch, self._entries[1] - 1
        way.at(numbers.hook)
        way.late = [tuple(op) for op in given["late"]]
        if self._home >= 0:
            latest.numbers[latest.thread] = numbers.operators
        director.note_checked(numbers.since, numbers.growth)
        self._budget.note_checks(
            given["growths"], allocated=numbers.now + numbers.taken, taken=numbers.taken,
            cumulative=numbers.cumulative + self._device.cumulative_offset(), peak=numbers.peak, seen=numbers.seen,
        )  # fmt: skip
        by_number: defaultdict[int, list[Any]] = defaultdict(list)
        for number, *told in sorted(given["all_saves"], key=itemgetter(2)):  # by their hooks
            by_number[number].append(told)
        try:
            self._count(executor, way, latest, given["kept"])
            self._adopt(executor, way, given["slots"], by_number)
            for handle, hook, _, t, version, *known in by_number[-1]:
                kept = KeptTensor.known(t, version, Origin.known(*known[1:]) if known else None, (way.epoch, hook))
                self._kind.delegate(handle, kept)
        except BaseException:  # such as an interrupt: no record waits for the copies of slots that have none
            self._context.out_queue.synchronize()
            raise
        finally:
            for arena in self._arenas.values():
                arena.release_if_empty()
            self._arenas.clear()
            director.rejoin(numbers.hook, latest)
        for storage in given["outlived"]:
            self._protected.add(storage)

    def _index_at(self, way: Way, hook: int) -> int:
        """Number in the step of a storage that is first saved at `hook`."""
        firsts = self._compiled.firsts
        return self._next_index + bisect_left(firsts, hook) - bisect_right(firsts, self._since)

    def _count(self, executor: Executor, way: Way, latest: LatestHook, kept: dict[str, int]) -> None:
        """Count what the loop's hooks did."""
        totals, hook, saves = self._context.metrics.totals, self.loop.hook, self._compiled.saves
        for name in _TOTALS:
            setattr(totals, name, getattr(totals, name) + getattr(self.loop, name))
        totals.kept_by_reason += Counter(kept)  # those above 0
        uses: list[Any] = [row for row in way.program.rows[self._since + 1 : hook + 1] if row.kind == USE]
        moved = (saves[row.number][0] for row in uses if row.number >= 0 and not self._is_record[row.number])
        firsts = [first for first in moved if first > self._since]
        for first in firsts:
            self._order.used(self._index_at(way, first))
        executor.hook_counts.saves += hook - self._since - len(uses)
        executor.hook_counts.uses += len(uses)
        for row in uses[-1:]:
            latest.last_used = row.key
        self._registry.next_index = self._index_at(way, hook + 1)
        executor.note_any(saved=self._registry.next_index > self._next_index, used=bool(firsts))
        if self._home >= 0:
            self._outs.latest_operator = self._home, self.loop.operators

    def _adopt(self, executor: Executor, way: Way, slots: Sequence[Any], by_number: dict[int, list[Any]]) -> None:
        """Make records of the slots, and handles of their saves."""
        ends: dict[Stream, Event] = {}
        compute, context, compiled = self._compute, self._context, self._compiled
        released = {number for code, number, _ in way.late if code == RELEASE}

        def after(queue: CopyQueue) -> Event:
            if queue.stream not in ends:
                ends[queue.stream] = queue.stream.record()  # after all copies that the loop has handed to it
            return ends[queue.stream]

        for number, state, operators, is_over, emptied in slots:
            nbytes, copy, told, hooks = way.program.nbytes[number], None, by_number[number], compiled.saves[number]
            saves = [
                SavedBytes.known(alias, version, Origin.known(*origin), counter)
                for _, _, _, alias, version, counter, *origin in told
            ]
            if _STATES[state] is not State.ON_DEVICE:
                block = self._arenas[compiled.group[number]].part(compiled.offset[number], nbytes)
                arrived_on = compute if _STATES[state] is State.RESTORED else None
                copy = HostCopy.known(
                    block, after(context.out_queue), after(context.back_queue) if emptied else None, arrived_on, context
                )
            saved = SavedStorage.known(
                saves, compute, context, epoch=way.epoch, index=self._index_at(way, hooks[0]), nbytes=nbytes,
                state=_STATES[state], left=sum(not is_used for _, _, is_used, *_ in told), copy=copy,
            )  # fmt: skip
            saved.op_is_over, saved.saved_by = is_over, (self._home, operators)
            claim = executor.claim_on(saved)
            saved.slot.note_save(way.epoch, hooks[bisect_right(hooks, self.loop.hook) - 1])
            way.number(saved, number)
            way.first_saves[hooks[0]] = saved
            if not is_over:
                self._outs.fresh.append(saved)
            if saved.state is State.RESTORED and number in released:
                context.held[saved] = None
            if saved.state is State.SWAPPING_OUT:
                self._outs.note_planned(saved)
            for (handle, hook, is_used, *_), saved_bytes in zip(told, saves, strict=True):
                view = SwappedView(claim, saved_bytes)
                view.swap_in_number = saved.uses.swap_in_number if is_used else -1
                view.saved_at = way.epoch, hook
                self._kind.delegate(handle, view)
        firsts = (row.number for row in way.program.rows[self._since + 1 : self.loop.hook + 1] if row.kind == FIRST)
        if not all(number in way.storages for number in firsts):
            way.first_saves[-1] = _ended()  # of those that are gone by now: the step is not as if nothing had moved


def _asked(method: Any, *, in_lock: bool) -> Callable[..., Any]:
    """The method, called in the executor's lock, where nothing is given back, without keeping its object. `in_lock`: the caller
    holds that lock. Returns None if all was given back before."""
    weak, work = weakref.ref(method.__self__), method.__func__

    def call(*arguments: Any) -> Any:
        hand_over = weak()
        executor = None if hand_over is None else hand_over._executor()
        if hand_over is None or executor is None:
            return None
        with _NOTHING if in_lock else executor.hook_lock.lock:
            entered = hand_over._entered
            return None if entered is None else work(hand_over, entered[0], *arguments)

    return uncompiled(call)


def _compiled(kind: Any, program: StepProgram, until: list[int]) -> _Compiled:
    rows, grew, before = [_followed(row) for row in program.rows], list[int](), 0
    in_part, saves = [False] * len(program.nbytes), defaultdict[int, list[int]](list)
    for hook, row in enumerate(program.rows):
        compared = row.is_checked and row.number >= 0
        grew.append(until[hook] - before if compared else 0)
        before = until[hook] if compared else before
        if row.kind in (FIRST, AGAIN):
            saves[row.number].append(hook)
        for code, number, nbytes in row.ops:
            in_part[number] |= code == DROP or nbytes < program.nbytes[number]
    group, offset, group_bytes = _places(program)
    if kind is step_loop:
        compiled = step_loop.Program(rows, grew, program.nbytes, [*map(allocated_size, program.nbytes)], group, offset)
    else:
        compiled = kind.Program([kind.Row(*_told(*row)) for row in zip(rows, grew, strict=True)], program.nbytes, group, offset)
    return _Compiled(compiled, in_part, group, offset, group_bytes, saves, sorted(hooks[0] for hooks in saves.values()))


def _followed(row: Row) -> Row:
    """The row as the loop has it: an `END` if no key tells the hook, or with what the loop does not do."""
    key: Any = row.key
    is_done = row.kind == USE or (row.kind < USE and key is not None and all(type(size) is int for size in key[1]))
    return row if key is not None and is_done else row._replace(kind=END)


def _told(row: Row, grew: int) -> tuple[Any, ...]:
    """The row as the helper has it: its key is a class, sizes, dtype and a number."""
    key: Any = row.key if row.kind < USE else (None, (), torch.uint8, row.key if row.kind == USE else -1)
    return row.kind, row.number, row.is_checked, row.growth, grew, row.ops, row.ins, *key


def _places(program: StepProgram) -> tuple[list[int], list[int], list[int]]:
    """Group of each storage (-1: none), its offset there, and the bytes of each group.

    A group is what is copied out one after the other with no use in between, up to `ARENA_BYTES`, or one storage that is
    larger: as a rule its members are used one after the other, too, and its memory is free soon after the first of them is."""
    group, offset = [-1] * len(program.nbytes), [0] * len(program.nbytes)
    group_bytes, was_used = list[int](), False
    for row in program.rows:
        was_used |= row.kind == USE
        for code, number, nbytes in row.ops:
            if code == DROP or group[number] >= 0 or nbytes < program.nbytes[number]:
                continue
            rounded = allocated_size(nbytes)
            if not group_bytes or was_used or group_bytes[-1] + rounded > ARENA_BYTES:
                group_bytes.append(0)
            was_used = False
            group[number], offset[number] = len(group_bytes) - 1, group_bytes[-1]
            group_bytes[-1] += rounded
    return group, offset, group_bytes


def _ended() -> SavedStorage:
    """Record of a storage that is gone."""
    saved = SavedStorage.__new__(SavedStorage)
    saved.state, saved.number = State.RETIRED, None
    return saved


_all: weakref.WeakSet[HandOver] = weakref.WeakSet()


def _before_fork() -> None:
    """Have Python's records tell a forked child what it may not use: the loop knows no processes."""
    for hand_over in list(_all):
        hand_over.come_back(wait=False)


def _in_child() -> None:
    for hand_over in list(_all):
        hand_over.loop.follows = False


os.register_at_fork(before=_before_fork, after_in_child=_in_child)
