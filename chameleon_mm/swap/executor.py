"""Run autograd's two hooks: swap out once the saving operator is over, reclaim under pressure, prefetch, restore at a use.

    save(t):   keep t | claim its storage -> SwappedView; advance()       # a later hook queues the copy out
    use(h):    check the version; advance(); take, wait for or swap in the storage; prefetch the next storages
    advance(): queue copies of saves whose operator is over; hand over pieces; reclaim copied storages; keep the budget

Correctness never depends on an order, a rule or a budget: a use restores its storage from any state.
Note [No plan, no harm].
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from chameleon_mm.device import Device, Stream
from chameleon_mm.device.process import ThisProcess
from chameleon_mm.device.uncompiled import uncompiled
from chameleon_mm.plan.rule import Limits, UseOrder
from chameleon_mm.pool.pool import PinnedPool
from chameleon_mm.record.call_notes import AnyWatch
from chameleon_mm.record.calls import Value
from chameleon_mm.record.dispatch_state import num_modes, tracer_is_on
from chameleon_mm.record.recorder import ModuleNames, Recorder
from chameleon_mm.swap.budget import Budget
from chameleon_mm.swap.calling_thread import ComputeStreams, let_go_at_exit
from chameleon_mm.swap.checksums import Checksums
from chameleon_mm.swap.claims import Claim, Claims, StorageRegistry
from chameleon_mm.swap.classify import ProtectedStorages, reason_to_stay, save_parts
from chameleon_mm.swap.copy_queue import CopyQueue
from chameleon_mm.swap.director import Director
from chameleon_mm.swap.hand_over import HandOver
from chameleon_mm.swap.handles import (
    NO_HOOK,
    Handle,
    KeptTensor,
    SavedBytes,
    SwappedView,
    WrapperHandle,
    used_in_capture,
    used_in_child,
)
from chameleon_mm.swap.hook_counts import HookCounts
from chameleon_mm.swap.hook_lock import Ended, HookLock, call_if_alive
from chameleon_mm.swap.host_copy import State, SwapContext
from chameleon_mm.swap.metrics import Metrics, StepKind
from chameleon_mm.swap.recipe import Reliance
from chameleon_mm.swap.recipe_runner import Comparisons, RecipeRunner
from chameleon_mm.swap.reclaim import Lending
from chameleon_mm.swap.recomputing import Recomputing
from chameleon_mm.swap.recording import Recording
from chameleon_mm.swap.saved_storage import SavedStorage
from chameleon_mm.swap.step_ops import StepOps
from chameleon_mm.swap.swap_ins import Rescue, SwapIns
from chameleon_mm.swap.swap_outs import SwapOuts

LONGEST_UNNAMED_STEP = 16_384
"""Maximum number of storages saved outside of steps before a new step begins, as a user may keep a graph forever."""


class Executor:
    """Swaps the saved tensors of one device. Thread-safe: autograd may save a tensor on one thread and use it on another."""

    def __init__(
        self,
        device: Device,
        pool: PinnedPool,
        *,
        min_bytes: int,
        limits: Limits,
        protected: ProtectedStorages,
        names: ModuleNames | None = None,
    ) -> None:
        """`min_bytes`: minimum size of a storage that moves. `names`: module names, which mark the modules whose saved storages
        stay on the device; None: no module."""
        self.min_bytes, self.names = max(1, min_bytes), names
        self.protected = protected
        self.device, self.recording = device, (recording := Recording())
        self.streams = streams = ComputeStreams(device)
        streams.current()
        self.metrics = metrics = Metrics(host_us=lambda: device.host_us)
        out, back = (CopyQueue(device, name, out=name == "d2h", warn=metrics.warn) for name in ("d2h", "h2d"))
        self.order, self.registry, self.claims = order, registry, claims = UseOrder(), StorageRegistry(), Claims()
        self.context = context = SwapContext(pool, out, back, metrics, streams)
        # Weak: a cycle of swap-outs and budget would keep the pool alive until the garbage collector runs.
        weak_outs: weakref.ref[SwapOuts]
        self.budget = budget = Budget(
            device,
            limits,
            order,
            metrics,
            storages=registry.all,
            swap_outs=lambda: weak_outs(),  # noqa: PLW0108 - it is bound only later
        )
        if (hook := device.allocator_hook()) is not None:
            # Lend nothing in a recording: lending would change the holders and allocations that the recorder counts.
            budget.lending = Lending(hook, may_lend=lambda: recording.recorder is None and streams.is_one())
        self.outs = SwapOuts(context, registry, budget)
        weak_outs = weakref.ref(self.outs)
        self._comparisons = Comparisons(Checksums(device, pool), metrics.totals)
        self.recipe_runner = RecipeRunner(device, context, claims, budget, self._comparisons)
        self.ins = SwapIns(context, registry, budget, order, self.recipe_runner)
        self.rescue = Rescue(self.ins, streams)
        reliance_ended = partial(call_if_alive, weakref.WeakMethod(self.has_ended))  # weak: no part keeps the executor alive
        self.recomputing = Recomputing(device, streams, metrics, self.recipe_runner, reliance_ended)
        self.director = Director()
        self.hook_lock = HookLock(device, weakref.WeakMethod(self._retire))
        self._pid = self.hook_lock.pid
        let_go_at_exit(device.torch_device)
        self.hook_counts = HookCounts()
        self.ops = StepOps(context, budget, self.outs, self.recomputing)
        self.hand_over = HandOver(self, self.ops)
        self._in_step = False
        self._saved_any = self._used_any = False

    def save(self, t: Tensor) -> Handle:
        """Save hook: return the handle that autograd holds instead of `t`. A tensor of an unknown kind is kept as it is."""
        if self.recording.is_over:
            return self.save_without_loop(t)
        with self.recording.paused():
            handle: Handle = self.hand_over.save_watched(t)
        self.recording.leave_if_needed()
        return handle

    def use(self, handle: Handle) -> Tensor:
        """Use hook: return the saved tensor, bit for bit. Raises eager's error if it was written to since it was saved."""
        if self.recording.is_over:
            return self.use_without_loop(handle)
        with self.recording.paused():
            t: Tensor = self.hand_over.use_watched(handle)
            self._compare_at_the_end()
        self.recording.leave_if_needed()
        return t

    def save_without_loop(self, t: Tensor) -> Handle:
        """Do what the loop does not do of a save."""
        self.hook_counts.saves += 1
        return self._save(t, is_hook=True)

    def use_without_loop(self, handle: Handle) -> Tensor:
        """Do what the loop does not do of a use."""
        self.hook_counts.uses += 1
        t = self._use(handle, is_hook=True)
        self._compare_at_the_end()
        return t

    def _save(self, t: Tensor, *, is_hook: bool) -> Handle:
        """Save `t`. `is_hook`: autograd itself called; False: `t` is part of a wrapper, whose own hook handles the finished
        saves."""
        if ThisProcess.pid != self._pid:
            return KeptTensor(t)
        capturing = self.device.capturing()
        if capturing or (num_modes() and tracer_is_on()):  # the device is not called
            with self.hook_lock.lock:
                return self._keep(t, "capturing" if capturing else "tracing")
        reason = reason_to_stay(t, self.device, self.protected, self.min_bytes)
        handle = None
        if reason == "subclass":
            handle = save_parts(t, lambda part: self._save(part, is_hook=False), self.metrics.warn)
        return self.hook_lock.run(self._save_locked, t, reason, handle, is_hook)

    def _save_locked(self, t: Tensor, reason: str, handle: Handle | None, is_hook: bool) -> Handle:
        saved_bytes = SavedBytes(t) if not reason else None
        claim = None if saved_bytes is None else self._find_or_make_claim(t, saved_bytes)
        finished, hook = self.outs.finished() if is_hook and self.outs.fresh else (), NO_HOOK
        if is_hook:
            at_hook = handle.claim if isinstance(handle, WrapperHandle) else claim
            hook = self.director.on_save(t, None if at_hook is None else at_hook.saved, finished)
        if claim is not None and self.names is not None and self.names.keeps_some and self._is_kept(claim.saved, self.names):
            self.outs.call_off(claim.saved, self.streams.current())
            claim.saved.stays = True
        watch = self.recording.watch
        if watch is not None:
            self.recomputing.hold_born(self.claim_to_hold, self.director.note_held)
        prefetches = self._advance(finished, check_memory=claim is not None, at_hook=is_hook)
        if prefetches:
            self.ins.prefetch_planned(prefetches, self.streams.current())
        if claim is not None and saved_bytes is not None:
            handle = SwappedView(claim, saved_bytes)
        elif handle is None:
            handle = self._keep(t, reason)
        handle.saved_at = (self.registry.epoch, hook)
        if not self.recording.is_over:
            self.recomputing.note_saved(t, handle)
        if is_hook:
            self._enter_loop()
        return handle

    def _use(self, handle: Handle, *, is_hook: bool) -> Tensor:
        handle.check_version()
        if isinstance(handle, SwappedView):
            return self._use_view(handle, is_hook=is_hook)
        if isinstance(handle, KeptTensor) and (on := handle.relied) and on.dependents and self.hook_lock.may_ask_device():
            self.hook_lock.run(self.rescue.hand_out, on, handle, None)
        moved = isinstance(handle, WrapperHandle) and handle.claim is not None
        if is_hook and not moved and self.director.plans and self.hook_lock.may_ask_device() and not tracer_is_on():
            self.hook_lock.run(self._use_unmoved, handle.saved_at)
        if isinstance(handle, KeptTensor):
            return handle.tensor
        return handle.rebuild(lambda part, at_hook: self._use(part, is_hook=is_hook and at_hook))

    def _use_view(self, handle: SwappedView, *, is_hook: bool) -> Tensor:
        saved = handle.claim.saved
        if ThisProcess.pid != self._pid:
            raise used_in_child(saved.nbytes, self._pid)
        if self.device.capturing():
            raise used_in_capture(saved.nbytes)
        # The copies must not be traced: under a tracer, a use of a real tensor returns a real tensor.
        with _disable_current_modes() if tracer_is_on() else nullcontext():
            if saved.relied is not None and saved.relied.dependents:
                self.hook_lock.run(self.rescue.hand_out, saved.relied, handle, saved)
            return self.hook_lock.run(self._use_locked, handle, saved, is_hook)

    def _compare_at_the_end(self) -> None:
        if self._comparisons.pending and self.hook_lock.may_ask_device():
            with _disable_current_modes() if tracer_is_on() else nullcontext():
                self._comparisons.at_the_end(partial(call_if_alive, weakref.WeakMethod(self.settle)))

    def settle(self, task: int | None = None) -> None:
        """Compare the recomputed results of backward `task`; None: of all. Waits for the device. Raises `RecomputeMismatch`."""
        if self._comparisons.pending and (errors := self.hook_lock.run(self._comparisons.settle, task)):
            raise errors.pop()  # `pop`: a local variable would make a cycle with the traceback

    def _use_locked(self, handle: SwappedView, saved: SavedStorage, is_hook: bool) -> Tensor:
        director, finished = self.director, self.outs.finished() if self.outs.fresh else ()
        self.stop_waiting()
        if is_hook:
            director.on_use(handle.saved_at, saved, finished)
        prefetches = self._advance(finished, check_memory=True, at_hook=is_hook)
        compute = self.streams.current()
        t = self.restored(handle, compute, prefetches)
        if is_hook:
            director.note_restored(saved, t.untyped_storage())
        self.ins.prefetch_planned(prefetches, compute)
        if saved.number is None or self.budget.way is None:
            self.ins.prefetch_after(saved, compute)
        if is_hook:
            self._enter_loop()
        return t

    def stop_waiting(self) -> None:
        """Have no storage wait to be dropped any more, as backward has begun."""
        for waiting in self.recomputing.stop_waiting() if self.recomputing.waiting else ():
            self.outs.swap_out(waiting, alone=True)

    def restored(self, handle: SwappedView, compute: Stream, prefetches: Sequence[SavedStorage] = ()) -> Tensor:
        """Bring the tensor of `handle` to the device, ready for `compute`, and count one use. `prefetches`: to swap in then."""
        saved = handle.claim.saved
        if prefetches and saved.form.recipe is not None:
            self.recipe_runner.restore_sources(saved, compute, self.ins.restore)
            self.ins.prefetch_planned(prefetches, compute)  # queued before the recomputation, which they overlap
        if saved.proof is not None:
            self.recomputing.prove(saved, self.ins.restore)
        storage = self.ins.restore(saved, compute)
        if saved.epoch == self.registry.epoch:
            self._used_any = True
            self.order.used(saved.index)
        handle.swap_in_number = saved.uses.count(handle.swap_in_number)
        if saved.state is State.RESTORED and saved.uses.left <= 0 and self.budget.way is None:
            saved.drop_used()  # slightly before autograd does; a plan needs autograd's own moment, as traced
        if storage is saved.slot.storage:
            return handle.saved.alias.detach()  # a new alias per use, so that the use count shows each holder
        return handle.saved.over(storage)

    def _use_unmoved(self, saved_at: tuple[int, int]) -> None:
        """Do the work of a use hook whose tensor never moved, except for the tensor itself."""
        finished = self.outs.finished() if self.outs.fresh else ()
        self.director.on_use(saved_at, None, finished)
        if prefetches := self._advance(finished, check_memory=False):
            self.ins.prefetch_planned(prefetches, self.streams.current())
        self._enter_loop()

    def _keep(self, t: Tensor, reason: str) -> KeptTensor:
        self.metrics.totals.kept_by_reason[reason] += 1
        return KeptTensor(t, by_reference=reason == "parameter")

    def reclaim_some(self, nbytes: int, busy: Sequence[torch.UntypedStorage]) -> bool:
        """Reclaim memory after an operator found none: storages being copied out, or else one of about `nbytes` not in `busy`.
        Returns True if anything was reclaimed. Must not be called inside a hook."""
        return self.hook_lock.run(self.budget.reclaim_some, nbytes, busy)

    # --- steps

    def change_budget(self, hbm_bytes: int | None = None, host_bytes: int | None = None, *, must_fit: bool = False) -> None:
        """Set other budgets as `Director.change_budget` does. Called between steps, before the pool has its new limit."""
        with self.hook_lock.entered():
            hbm_bytes = self.budget.hbm_budget_bytes if hbm_bytes is None else hbm_bytes
            self.director.change_budget(hbm_bytes, host_bytes, must_fit=must_fit)
            self.budget.change_budget(hbm_bytes)

    @uncompiled
    def begin_step(self, *, timed: bool, pack_hook: object = None) -> None:
        """Begin a step, with its saves numbered from 0. In a capture or a forked child the device is not called. `pack_hook`:
        pack hook that autograd should call in the step; None: unknown."""
        self.hook_counts.begin_step(pack_hook)
        self._in_step = True
        if self.hook_lock.may_ask_device():
            self.recording.begin(*self.hook_lock.run(self._begin_step, timed))

    def _begin_step(self, timed: bool) -> tuple[Recorder | None, AnyWatch | None]:
        self.hand_over.forget()
        self.registry.begin_epoch()
        if self.director.plans:
            self.budget.begin_step()
        compute = self.device.current_stream()
        self.metrics.begin_step(compute, timed=timed)
        if self._comparisons.begin_step():
            self.director.replan()
        recorder = self.director.begin_step(self.registry.epoch, self.budget, compute)
        watches = recorder is None and self.director.may_recompute
        before_write = partial(call_if_alive, weakref.WeakMethod(self.before_write)) if watches else None
        return recorder, self.recomputing.begin(self.director, before_write)

    @uncompiled
    def end_step(self, *, completed: bool) -> StepKind | None:
        """End a step: reclaim storages being copied out, and learn if it `completed`. Returns the step's kind; None:
        unknown."""
        self.hand_over.come_back()
        recorder = self.recording.end()
        self.hook_counts.end_step(completed=completed)
        self.metrics.totals.oom_retries += 0 if recorder is None else recorder.oom_retries
        if not self.hook_lock.may_ask_device():
            self._in_step = False
            return None
        return self.hook_lock.run(self._end_step, recorder, completed)

    def _enter_loop(self) -> None:
        """Let the loop run the next hooks, if the step follows a program and the loop may run."""
        director = self.director
        if director.way is not None and director.may_loop():
            self.hand_over.follow(director.way, director)

    def _end_step(self, recorder: Recorder | None, completed: bool) -> StepKind:
        if self._saved_any or self._used_any or self.outs.have_work:
            self._advance(self.outs.finished(), check_memory=False)
            self.budget.reclaim_pending()
            self.outs.let_go_of_held()
            self.outs.forget_small()
        self.recomputing.end()
        self.context.pool.take_back()
        self._in_step = False
        growth_bytes, compute = self._learn(completed=completed), self.device.current_stream()
        kind = self.director.end_step(recorder, growth_bytes, completed=completed)
        self.metrics.end_step(kind, compute)
        return kind

    # --- storages that autograd has released

    def has_ended(self, ended: Ended) -> None:
        """Retire, now or soon, a storage whose last handle is gone, or a source that autograd no longer needs. Claims refer to
        this method, and so keep the executor alive."""
        self.hook_lock.has_ended(ended)

    def _retire(self, ended: deque[Ended]) -> list[BaseException]:
        """Retire all of `ended`. Returns the errors raised meanwhile."""
        any_ended, errors = bool(ended), list[BaseException]()
        with self.recording.paused():  # autograd releases handles outside of hooks too
            while ended:
                one = ended.popleft()
                try:
                    if isinstance(one, Reliance):
                        before = self.budget.taken_bytes
                        self.rescue.let_go(one)
                        self.hand_over.note_taken(self.budget.taken_bytes - before)
                    else:
                        self._retire_storage(one)
                except BaseException as error:  # noqa: BLE001 - raised after the others are retired
                    errors.append(error)
            if any_ended and not self.registry.of_epoch:
                self.budget.reclaim_pending()
                if not self._in_step and (self._saved_any or self._used_any):
                    self._end_unnamed_step()
        return errors

    def _retire_storage(self, saved: SavedStorage) -> None:
        # A storage that never left and outlives its saves is a buffer or an input: moving it frees nothing.
        storage = saved.slot.first if not saved.slot.came_back else None
        try:
            self.registry.remove(saved)
            self.claims.forget(saved)
            group = saved.form.group
            saved.retire()
            self.recording.retired(saved.slot.traced)
            self.registry.release_group(group)
        finally:
            still_held = None if storage is None or saved.state is not State.RETIRED else storage()
            if still_held is not None:
                self.protected.add(still_held)

    def _end_unnamed_step(self) -> None:
        """End a step outside of `begin_step` and `end_step`. Such a step is over once none of its storages is claimed."""
        self.hook_counts.end_unnamed_step()
        self.registry.begin_epoch()
        self._learn(completed=self._used_any)

    def _learn(self, *, completed: bool) -> int:
        """Learn from the step if it `completed`. Returns the bytes allocated by the model since the last check of memory."""
        self._saved_any = self._used_any = False
        self.order.end_step(completed=completed)
        return self.budget.end_step(completed=completed)

    # --- work at every hook

    def _advance(
        self, finished: Sequence[SavedStorage], *, check_memory: bool, at_hook: bool = False
    ) -> Sequence[SavedStorage]:
        """Do the work common to all hooks. Returns the storages to swap in after the hook's own storage.

        `finished`: storages whose saving operators are over now. `at_hook`: True if autograd itself called this hook.
        """
        director = self.director
        way, rows = director.way, director.due()
        self.ops.advance(way, [op for row in rows for op in row.ops], finished, self.budget.lending)
        if check_memory or any(row.is_checked for row in rows):
            director.note_growth(self.budget.check_memory(), at_hook=check_memory and at_hook)
        return [saved for row in rows for saved in way.coming(row)] if way is not None else ()

    def _find_or_make_claim(self, t: Tensor, saved_bytes: SavedBytes) -> Claim:
        """Find or make the claim on the storage of `t`. Note [Identity]."""
        compute = self.streams.current()
        claim = self.claims.find(t)
        if claim is None:
            return self.new_claim(t, saved_bytes, compute)
        self.include(claim.saved, saved_bytes, compute)
        claim.saved.add_view(saved_bytes)
        return claim

    def _is_kept(self, saved: SavedStorage, names: ModuleNames) -> bool:
        """True if a module named in `keep` saves the storage now, and neither its record nor a plan says so yet."""
        is_known = saved.stays or (saved.number is not None and self.budget.way is not None)
        return not is_known and names.here().keep

    def include(self, saved: SavedStorage, saved_bytes: SavedBytes, compute: Stream, *, may_begin_again: bool = True) -> bool:
        """Have the copy of `saved` include `saved_bytes`, saved now on `compute`. A copy that has begun and lacks them begins
        again. `may_begin_again`: False: return False then, and change nothing."""
        if saved.slot.includes(saved_bytes):
            return True
        if not saved.try_include(saved_bytes, compute):
            if not may_begin_again:
                return False
            self.outs.begin_again(saved, saved_bytes, compute)
        if saved.state is State.ON_DEVICE:
            self.outs.add(saved)  # it waits for the operator that saves them
        return True

    def claim_to_hold(self, t: Tensor) -> tuple[Claim, bool]:
        """Return a claim on the whole storage of `t`, which recipes read. Also return True if the claim is new."""
        saved_bytes, compute = SavedBytes(t), self.streams.current()
        claim = self.claims.find(t)
        if claim is None:
            claim = self.new_claim(t, saved_bytes, compute, next(self.registry.held_indexes))
            claim.saved.is_held_for_recipes = True
            claim.saved.uses.forget_handle()
            return claim, True
        self.include(claim.saved, saved_bytes, compute)
        claim.saved.add_alias(saved_bytes)
        return claim, False

    def new_claim(self, t: Tensor, saved_bytes: SavedBytes, compute: Stream, index: int | None = None) -> Claim:
        """Make a claim on the storage of `t`. The operator that runs on this thread saves it. `index`: None: the next."""
        if self.registry.next_index >= LONGEST_UNNAMED_STEP and not self._in_step:
            self._end_unnamed_step()
        if index is None:
            index, self.registry.next_index = self.registry.next_index, self.registry.next_index + 1
        saved = SavedStorage(t, saved_bytes, compute, self.context, epoch=self.registry.epoch, index=index)
        self._saved_any = True
        self.outs.add(saved)
        return self.claim_on(saved)

    def claim_on(self, saved: SavedStorage) -> Claim:
        """Return a new claim on a storage that this step saves."""
        claim = Claim(saved, self.has_ended)
        self.registry.add(saved)
        self.claims.add(claim)
        return claim

    def before_write(self, value: Value) -> None:
        """Recompute dropped storages made from `value`, before an operator overwrites it. Must not be called inside a hook."""
        with self.recording.paused():
            self.hook_lock.run(self.rescue.run, value.relied_on())

    def note_any(self, *, saved: bool, used: bool) -> None:
        """Note that this step `saved` or `used` a storage that may move."""
        self._saved_any |= saved
        self._used_any |= used


_Save = Callable[[Tensor], Handle]
_Use = Callable[[Handle], Tensor]


def autograd_hooks(executor: Executor) -> tuple[_Save, _Use]:
    """Return both hooks of an executor whose director is set. Dynamo compiles neither them nor what they call."""
    save, use = uncompiled(executor.save), uncompiled(executor.use)
    return executor.hand_over.hooks(save, use) if executor.director.plans else (save, use)
