"""Runs autograd's two hooks: swaps out after the saving op is over, reclaims under pressure, prefetches, restores at a use.

    save(t):   advance(); keep it | claim its storage -> SwappedView      # its copy out is queued at a later hook
    use(h):    advance(); check the version; take, wait for or swap in the storage; prefetch the next ones; rebuild the view
    advance(): queue copies of saves whose op is over; hand over pieces; reclaim what is copied; keep within the budget

Correctness never depends on an order, a rule or a budget: a use restores its storage from wherever it is.
Note [No plan, no harm]. All that runs under the one lock begins here, in one file: who enters, and what is retired when.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from chameleon_mm.device import Device, Stream
from chameleon_mm.errors import TransferFailed
from chameleon_mm.executor.budget import Budget
from chameleon_mm.executor.director import Director
from chameleon_mm.executor.hook_counts import HookCounts
from chameleon_mm.executor.late_errors import LateErrors
from chameleon_mm.executor.recording import Recording
from chameleon_mm.executor.small_tensors import SmallTensors
from chameleon_mm.executor.staging import Staging
from chameleon_mm.executor.swap_ins import SwapIns
from chameleon_mm.executor.swap_outs import SwapOuts
from chameleon_mm.pinned import PinnedPool
from chameleon_mm.policy import DefaultRule, Limits, SaveFacts, UseOrder
from chameleon_mm.profiler.dispatch_state import tracer_is_on
from chameleon_mm.saved.claims import Claim, Claims, Found
from chameleon_mm.saved.classify import ProtectedStorages, facts_of
from chameleon_mm.saved.handles import NO_HOOK, Handle, KeptTensor, SwappedView
from chameleon_mm.saved.metrics import Metrics
from chameleon_mm.saved.registry import StorageRegistry
from chameleon_mm.saved.saved_bytes import SavedBytes
from chameleon_mm.saved.saved_part import SavedPart
from chameleon_mm.saved.saved_storage import SavedStorage
from chameleon_mm.saved.state import State, SwapContext
from chameleon_mm.saved.streams import ComputeStreams
from chameleon_mm.saved.verify import Checksums, scratch_bytes
from chameleon_mm.saved.wrappers import save_parts
from chameleon_mm.transfer import Thresholds, Transfer

if TYPE_CHECKING:
    from chameleon_mm.kernels.codec import Codec

LONGEST_UNNAMED_STEP = 16_384
"""Storages that may be saved outside of any step before a new one begins: a graph that is kept for ever must not make one step
of all the rest."""


class Executor:
    """Swaps the saved tensors of one device. Thread-safe: autograd may use on one thread what another saved."""

    def __init__(
        self,
        device: Device,
        pool: PinnedPool,
        *,
        rule: DefaultRule,
        limits: Limits,
        protected: ProtectedStorages,
        thresholds: Thresholds | None = None,
        codecs: Sequence[Codec] = (),
        verify: bool = False,
    ) -> None:
        self.device = device
        self.metrics = Metrics()
        self._rule = rule
        self._protected = protected
        self.thresholds = thresholds = thresholds or Thresholds()
        self._streams = ComputeStreams(device)
        self._streams.current()
        self._transfer = Transfer(device, batch_below_bytes=thresholds.batch_below_bytes)
        self.checksums = checksums = Checksums(device, scratch_bytes(limits.hbm_budget_bytes)) if verify else None
        self._context = context = SwapContext(pool, self._transfer, self.metrics, self._streams, checksums)
        self._order = UseOrder()
        self._registry = registry = StorageRegistry()
        self._claims = Claims()
        me = weakref.ref(self)
        self._small = (
            None if limits.free_share is None else SmallTensors(context, registry, self._claims, partial(_claim_of, me))
        )
        # Weak: in a cycle with its budget, dropped swap-outs would keep their pool until the collector runs.
        outs: weakref.ref[SwapOuts]
        self._budget = Budget(
            device,
            limits,
            self._order,
            self.metrics,
            storages=registry.all,
            swap_outs=lambda: outs(),  # noqa: PLW0108 - it is there only later
            small=self._small,
        )
        staging = Staging(registry, limit_bytes=thresholds.staging_bytes)
        self._outs = SwapOuts(context, registry, self._budget, staging, rule=rule, thresholds=thresholds, codecs=codecs)
        outs = weakref.ref(self._outs)
        self._ins = SwapIns(context, registry, self._budget, staging, self._order)
        self._recording = Recording()
        self.director = Director()
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._to_retire: deque[SavedStorage] = deque()
        self._late_errors = LateErrors()
        self.hook_counts = HookCounts()
        self._in_step = False
        self._saved_any = self._used_any = False

    # --- autograd's two hooks

    def save(self, t: Tensor) -> Handle:
        """on_save: returns the handle that autograd holds instead of `t`. A tensor that is not understood stays as it is."""
        self.hook_counts.saved()
        with self._recording.paused():
            handle = self._save(t, is_hook=True)
        self._recording.leave_if_needed()
        return handle

    def use(self, handle: Handle) -> Tensor:
        """on_use: returns the saved tensor, bit for bit. Raises eager's error if it was written to since it was saved."""
        self.hook_counts.used()
        with self._recording.paused():
            t = self._use(handle, is_hook=True)
        self._recording.leave_if_needed()
        return t

    def _save(self, t: Tensor, *, is_hook: bool) -> Handle:
        """`is_hook`: called by autograd itself; False: for a part of what a hook saves."""
        if self._forked:
            return KeptTensor(t, by_reference=False)
        if self.device.capturing():
            return self._keep_without_device(t, "capturing")
        if tracer_is_on():
            return self._keep_without_device(t, "tracing")
        facts = facts_of(t, self.device, self._protected)
        handle: Handle | None = None
        if facts.kind == "subclass":
            handle = save_parts(t, lambda part: self._save(part, is_hook=False))
        reason = self._rule.reason_to_keep(facts)
        with self._entered():
            saved_bytes = SavedBytes(t) if handle is None and reason is None else None
            claim = None if saved_bytes is None else self._find_or_make_claim(t, saved_bytes, facts)
            finished, hook = self._outs.finished(), NO_HOOK
            if is_hook:
                hook = self.director.on_save(t, None if claim is None else claim.saved, finished)
            self._advance(finished, check_memory=claim is not None, at_hook=is_hook)
            if hook != NO_HOOK and (prefetches := self.director.take_prefetches()):
                self._prefetch(prefetches, self._streams.current())
            if claim is not None and saved_bytes is not None:
                handle = SwappedView(claim, t, saved_bytes.probe)
            elif handle is None:
                handle = self._keep(t, reason or facts.kind)
                if self._small is not None and facts.nbytes:
                    self._small.add(handle, facts.nbytes)
            handle.saved_at = (self._registry.epoch, hook)
        return handle

    def _use(self, handle: Handle, *, is_hook: bool) -> Tensor:
        handle.check_version()
        if isinstance(handle, SwappedView):
            return self._use_view(handle, is_hook=is_hook)
        if is_hook:
            self._use_unmoved(handle)
        if isinstance(handle, KeptTensor):
            t = handle.tensor
            if t is not None:
                return t
            assert handle.moved is not None  # memory was short
            return self._use_view(handle.moved, is_hook=False)
        return handle.rebuild({name: self._use(part, is_hook=False) for name, part in handle.parts.items()})

    def _use_view(self, handle: SwappedView, *, is_hook: bool) -> Tensor:
        saved = handle.claim.saved
        if self._forked:
            raise RuntimeError(
                f"a saved tensor of {saved.nbytes} bytes: expected a use in the process that saved it ({self._pid}), got one "
                f"in a forked child ({os.getpid()}), where its device cannot be used; run backward in the parent"
            )
        if self.device.capturing():
            raise RuntimeError(
                f"a CUDA graph that captures a backward: expected its forward in the capture too, got a tensor of "
                f"{saved.nbytes} bytes that was saved before and may be moved between replays; capture both together"
            )
        # Under a tracer what is real comes back real: the copies are no part of what it traces.
        with _disable_current_modes() if tracer_is_on() else nullcontext(), self._entered():
            director, finished = self.director, self._outs.finished()
            if is_hook:
                director.on_use(handle.saved_at, saved, finished)
            self._advance(finished, check_memory=True, at_hook=is_hook)
            compute = self._streams.current()
            storage = self._ins.restore(saved, compute)
            self._count_use(handle, saved)
            if is_hook:
                director.note_restored(saved, storage)
                if prefetches := director.take_prefetches():
                    self._prefetch(prefetches, compute)
            if saved.planned is None or not self._budget.forecast.follows_plan:
                self._ins.prefetch_after(saved, compute)
            return handle.rebuild(storage)

    def _use_unmoved(self, handle: Handle) -> None:
        """Do what else is due at the hook of a use whose tensor never moved."""
        if not self.director.plans or self._forked or self.device.capturing() or tracer_is_on():
            return
        with self._entered():
            finished = self._outs.finished()
            self.director.on_use(handle.saved_at, None, finished)
            self._advance(finished, check_memory=False)
            if prefetches := self.director.take_prefetches():
                self._prefetch(prefetches, self._streams.current())

    def _keep(self, t: Tensor, reason: str) -> KeptTensor:
        self.metrics.totals.kept_by_reason[reason] += 1
        return KeptTensor(t, by_reference=reason == "parameter")

    def _keep_without_device(self, t: Tensor, reason: str) -> KeptTensor:
        """Keep `t` on the device without asking the device for anything."""
        with self._lock:
            return self._keep(t, reason)

    def reclaim_some(self, nbytes: int, busy: Sequence[torch.UntypedStorage]) -> bool:
        """Reclaim what is on its way out, else a storage of about `nbytes` that is not `busy`, as an operator found no memory.

        Returns whether anything went. Not to be called inside of a hook.
        """
        with self._entered():
            return self._budget.reclaim_some(nbytes, busy)

    # --- steps

    def change_budget(self, hbm_budget_bytes: int) -> None:
        """Set another budget from the next step on. Not to be called in a step."""
        with self._entered():
            self._budget.change_budget(hbm_budget_bytes)
            self.director.change_budget(hbm_budget_bytes)

    def begin_step(self, *, timed: bool, pack_hook: object = None) -> None:
        """Begin a step: saves are numbered from 0 again. Inside a capture or a forked child nothing is asked of the device.

        `pack_hook`: what autograd is to call for what it saves in the step, where that is known.
        """
        self.hook_counts.begin_step(pack_hook)
        if self._forked or self.device.capturing():
            self._in_step = True
            return
        with self._entered():
            self._in_step = True
            if self.checksums is not None:
                self.checksums.prepare()  # before anything of the step is counted
            self._registry.begin_epoch()
            if self.director.plans:
                self._budget.begin_step()
            compute = self.device.current_stream()
            self.metrics.begin_step(compute, timed=timed)
            recorder = self.director.begin_step(self._registry.epoch, self._budget, compute)
        self._recording.begin(recorder)

    def end_step(self, *, completed: bool) -> None:
        """End a step: reclaim what is still on its way out, and learn from the step if it `completed`."""
        recorder = self._recording.end()
        self.hook_counts.end_step(completed=completed)
        if recorder is not None:
            self.metrics.totals.oom_retries += recorder.oom_retries
        if self._forked or self.device.capturing():
            self._in_step = False
            return
        with self._entered():
            self._advance(self._outs.finished(), check_memory=False)
            self._budget.reclaim_pending()
            self._outs.forget_small()
            self._in_step = False
            growth_bytes = self._learn(completed=completed)
            kind = self.director.end_step(recorder, self.device.current_stream(), growth_bytes, completed=completed)
            self.metrics.end_step(kind)

    def leave_recorders(self) -> None:
        """Leave the recorders that autograd has put back after they were left within a backward."""
        self._recording.leave_restored()

    @property
    def hbm_budget_bytes(self) -> int:
        """Budget of device memory; more than any device has where there is none."""
        return self._budget.hbm_budget_bytes

    @property
    def peak_seen_bytes(self) -> int:
        """The most device memory that any hook saw allocated."""
        return self._budget.peak_seen_bytes

    @property
    def live_storages(self) -> int:
        """Number of saved storages that some handle still claims."""
        with self._entered():
            return len(self._registry)

    # --- entering, and what autograd lets go of

    @contextmanager
    def _entered(self) -> Iterator[None]:
        """Let one thread in at a time. Storages whose claims ended meanwhile are retired before, after, and once the lock is
        free again.

        Raises what came up in a finaliser since, last of all: whatever was entered for is done by then.
        """
        with self._lock:
            self._retire_queued()
            try:
                yield
            finally:
                self._retire_queued()
        self._retire_if_idle()
        self._late_errors.raise_oldest()

    def raise_late_error(self) -> None:
        """Raise an error that came up in a finaliser, where nobody could be told, and was not raised since."""
        self._late_errors.raise_oldest()

    def _on_claim_end(self, saved: SavedStorage) -> None:
        """Queue a storage whose last handle died: on another thread, in the collector, in the middle of a hook of ours. Raises
        nothing."""
        if self._forked:  # the parent's blocks and its device: neither is the child's to give back
            return
        self._to_retire.append(saved)
        try:
            self._retire_if_idle()
        except BaseException as error:  # noqa: BLE001 - raised by whoever enters next: a finaliser's own would only be printed
            self._late_errors.add(error)

    @property
    def _forked(self) -> bool:
        """Whether this is a forked child of the process that made it. Asked before any lock: a thread may have held it."""
        return os.getpid() != self._pid

    def _retire_if_idle(self) -> None:
        # Whoever holds the lock retires what is queued when it leaves; not waiting here is what rules a deadlock out.
        # While a graph is captured nothing may be asked of the device: whoever enters after it retires them.
        while self._to_retire and not self.device.capturing() and self._lock.acquire(blocking=False):
            try:
                self._retire_queued()
            finally:
                self._lock.release()

    def _retire_queued(self) -> None:
        retired = False
        errors: list[BaseException] = []
        while self._to_retire:
            saved = self._to_retire.popleft()
            retired = True
            self._registry.remove(saved)
            self._claims.forget(saved)
            group = saved.form.group
            try:
                saved.retire()
                self._recording.retired(saved.traced)
                if group is not None and not group.members_left:
                    self._registry.packed_groups.discard(group)
                    group.retire()
            except BaseException as error:  # noqa: BLE001 - raised below, once the others are retired too
                errors.append(error)
            still_held = saved.first()
            if saved.state is State.RETIRED and still_held is not None and saved.part is None:
                self._protected.add(still_held)  # it outlived its saves: a buffer or an input, which moving frees nothing of
        if retired and not self._registry.of_epoch:
            self._budget.reclaim_pending()
            if not self._in_step and (self._saved_any or self._used_any):
                self._end_unnamed_step()
        if errors:
            self._late_errors.raise_first(errors)

    def _end_unnamed_step(self) -> None:
        """End a step that nobody named: outside of `begin_step` and `end_step`, one is over when nothing that was saved in it
        is claimed."""
        self._registry.begin_epoch()
        self._learn(completed=self._used_any)

    def _learn(self, *, completed: bool) -> int:
        """Learn from the step if it `completed`. Returns the bytes that the model allocated since memory was last checked."""
        self._saved_any = self._used_any = False
        growth_bytes = self._budget.end_step(completed=completed)
        if completed:
            self._order.end_step()
        else:
            self._order.forget()
        return growth_bytes

    # --- what happens at every hook

    def _advance(self, finished: Sequence[SavedStorage], *, check_memory: bool, at_hook: bool = False) -> None:
        """Do what is due at every hook. `finished`: saved by operators that are over now. `at_hook`: in a hook of autograd's
        own."""
        due = self.director.due(finished)
        for saved, nbytes in due.reclaims:  # first: what was given back before is room for what the plan has next
            if saved.state is State.ON_DEVICE:
                self._swap_out_planned(saved, nbytes)
            if saved.state is State.SWAPPING_OUT:
                saved.reclaim(in_plan_order=True)
                self._budget.note_allocated(saved.form.device_bytes)
        for saved, last_bytes in due.swap_outs:
            if last_bytes is None:
                self._outs.swap_out(saved)
            else:
                self._swap_out_planned(saved, last_bytes)
        self._outs.pack_waiting()
        self._transfer.hand_over()
        self._budget.reclaim.reclaim_complete()
        if check_memory or due.check_memory or self._budget.wants_check:
            growth_bytes = self._budget.check_memory()
            self.director.note_growth(growth_bytes, at_hook=check_memory and at_hook)

    def _swap_out_planned(self, saved: SavedStorage, last_bytes: int) -> None:
        if saved.state is State.ON_DEVICE and saved.op_is_over and saved.is_copyable:
            self._outs.swap_out_planned(saved, min(last_bytes, saved.nbytes))

    def _prefetch(self, prefetches: Sequence[SavedStorage], compute: Stream) -> None:
        """Queue the copies back that are due by plan."""
        for saved in prefetches:
            if saved.state is not State.ON_HOST or saved.form.group is not None or saved.first() is not None:
                continue
            if not self._budget.forecast.follows_plan and not self._budget.room_for(saved.swap_in_bytes):
                return
            with suppress(torch.OutOfMemoryError, TransferFailed):  # nobody needs it yet
                self._ins.prefetch(saved, compute)

    def _find_or_make_claim(self, t: Tensor, saved_bytes: SavedBytes, facts: SaveFacts) -> Claim:
        """The claim on `t`'s storage, or on the part of it that `t` covers, found or new. Note [Identity]."""
        compute = self._streams.current()
        # A step that is written down has one tensor for each storage: what is saved of it later is no part of its own.
        found = self._claims.find(t, saved_bytes, facts, self._rule, compute, whole=self._recording.is_on)
        claim = found.claim
        if claim is None:
            claim = self._new_claim(t, saved_bytes, compute, found)
        elif found.extends_copy and claim.saved.state is State.ON_DEVICE:
            self._outs.add(claim.saved)
        claim.saved.add_view()
        return claim

    def _new_claim(self, t: Tensor, saved_bytes: SavedBytes, compute: Stream, found: Found) -> Claim:
        if self._registry.next_index >= LONGEST_UNNAMED_STEP and not self._in_step:
            self._end_unnamed_step()
        make = SavedStorage if found.part is None else partial(SavedPart, part=found.part)
        saved = make(t, saved_bytes, compute, self._context, epoch=self._registry.epoch, index=self._registry.next_index)
        if found.before is not None:
            saved.supersedes(found.before.saved)
        self._registry.add(saved)
        self._saved_any = True
        if self._budget.memory_limit is not None:
            self._budget.memory_limit.note_saved(saved.nbytes)
        self._outs.add(saved)
        claim = Claim(saved, self._on_claim_end)
        self._claims.add(claim)
        return claim

    def _count_use(self, handle: SwappedView, saved: SavedStorage) -> None:
        if saved.epoch == self._registry.epoch:
            self._used_any = True
            self._order.used(saved.index)
        handle.swap_in_number = saved.count_use(handle.swap_in_number)
        if saved.state is State.RESTORED and saved.uses_left <= 0 and not self._budget.forecast.follows_plan:
            saved.drop_if_held_elsewhere()  # a moment before autograd would; a plan counts on that moment, as the trace has it


def _claim_of(executor: weakref.ref[Executor], saved: SavedStorage) -> Claim:
    """A first claim on `saved`. It keeps the executor alive, as each claim does."""
    it = executor()
    assert it is not None  # its lock is held
    return Claim(saved, it._on_claim_end)
