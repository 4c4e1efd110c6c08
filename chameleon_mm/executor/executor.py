"""Carries the rule out: swap out after the saving op is over, reclaim under pressure, prefetch in order, restore on demand.

    save(t):   advance(); keep it | claim its storage -> SwappedView      # its copy out is queued at a later hook
    use(h):    advance(); check the version; take, wait for or swap in the storage; prefetch the next ones; rebuild the view
    advance(): queue copies of saves whose op is over; hand over pieces; drop what is copied; keep within the budget

Correctness never depends on an order, a rule or a budget: a use restores its storage from wherever it is.
Note [No plan, no harm].
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from chameleon_mm.device import Device, Stream
from chameleon_mm.errors import HostMemoryExhausted, TransferFailed
from chameleon_mm.executor.budget import BudgetGuard
from chameleon_mm.executor.carrier import Carrier
from chameleon_mm.executor.classify import ProtectedStorages, facts_of, taken_apart
from chameleon_mm.executor.encoding import Encoding
from chameleon_mm.executor.gather import Part
from chameleon_mm.executor.handles import Handle, KeptTensor, SwappedView, TakenApart
from chameleon_mm.executor.meter import Meter
from chameleon_mm.executor.stored import Claim, Place, SavedStorage, Tools, claim_key
from chameleon_mm.executor.streams import ComputeStreams
from chameleon_mm.kernels.arguments import UNIT_BYTES
from chameleon_mm.pinned import PinnedPool
from chameleon_mm.policy import CodecRule, DefaultRule, Limits, SaveFacts, UseOrder
from chameleon_mm.transfer import Path, Thresholds, Transfer
from chameleon_mm.units import MIB

if TYPE_CHECKING:
    from chameleon_mm.kernels.codec import Codec

_log = logging.getLogger(__name__)

_Made = TypeVar("_Made")

PREFETCH_LOOK = 32
"""How many of the coming uses are looked at for a prefetch at each use."""

LONGEST_UNNAMED_STEP = 16_384
"""Storages saved outside of any step before it is cut: a graph that is kept for ever must not make one step of all the rest."""

CARRIER_BYTES = 4 * MIB
"""Small storages wait for each other up to this, while the link has other work: it is at 96 % of its rate from there on."""

_sequence_nr = torch._C._autograd._get_sequence_nr
"""The number of the thread's next differentiable op. It moves between one op's saves and the next op's: Note [Swap-out]."""


_TRACERS = (
    torch._C._TorchDispatchModeKey.FAKE,
    torch._C._TorchDispatchModeKey.PROXY,
    torch._C._TorchDispatchModeKey.FUNCTIONAL,
)


def _tracing() -> bool:
    """Whether a tracer runs on this thread: what we would make under it would be fake, or part of its graph."""
    return torch._C._len_torch_dispatch_stack() > 0 and any(torch._C._get_dispatch_mode(key) is not None for key in _TRACERS)


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
        self.meter = Meter()
        self._rule = rule
        self._thresholds = thresholds or Thresholds()
        self._codecs = codecs
        self._codec_rule = CodecRule(names=tuple(codec.name for codec in codecs))
        self._protected = protected
        self._transfer = Transfer(device, batch_below_bytes=self._thresholds.batch_below_bytes)
        self._streams = ComputeStreams()
        self._streams.note(device.current_stream())
        self._tools = Tools(pool, self._transfer, self.meter, verify, self._streams)
        self._order = UseOrder()
        # Weak: in a cycle with its guard, a dropped executor would keep its pool until the collector runs.
        me = weakref.ref(self)
        self._guard = BudgetGuard(
            device,
            limits,
            self._order,
            self.meter,
            live=lambda: executor._all_live() if (executor := me()) is not None else (),
            pack_small=lambda: executor._pack_small() if (executor := me()) is not None else None,
        )
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._dropped: deque[SavedStorage] = deque()
        self._fresh: deque[tuple[SavedStorage, int, int]] = deque()
        self._claims: dict[Hashable, weakref.ref[Claim]] = {}
        self._parts: dict[int, list[Part]] = {}
        """By the storage's id: the parts of it that are claimed alone. An id that recurs costs a gather, nothing else."""
        self._live: dict[tuple[int, int], SavedStorage] = {}
        self._small: list[SavedStorage] = []
        """Too small to travel alone: waiting until there are enough of them for a carrier."""
        self._small_bytes = 0
        """Of all of them: kept, because every hook asks."""
        self._carriers: set[Carrier] = set()
        self._epoch = 0
        self._next_index = 0
        self._live_of_epoch = 0
        self._in_step = False
        self._saved_any = self._used_any = False

    # --- autograd's two hooks

    def save(self, t: Tensor) -> Handle:
        """on_save: what autograd holds instead of `t`. A tensor that is not understood stays as it is."""
        if self._forked:
            return KeptTensor(t, by_reference=False)
        if self.device.capturing():
            return self._keep(t, "capturing")
        if _tracing():
            return self._keep(t, "tracing")
        facts = facts_of(t, self.device, self._protected)
        if facts.kind == "subclass":
            handle = self._save_inner(t)
            if handle is not None:
                return handle
        reason = self._rule.reason_to_keep(facts)
        with self._entered():
            self._advance(look=reason is None)
            if reason is None:
                return SwappedView(self._claim(t, facts), t)
        return self._keep(t, reason)

    def use(self, handle: Handle) -> Tensor:
        """on_use: the saved tensor, bit for bit. Raises eager's error if it was written to since it was saved."""
        handle.check_version()
        if isinstance(handle, KeptTensor):
            return handle.tensor
        if isinstance(handle, TakenApart):
            return handle.rebuild({name: self.use(part) for name, part in handle.parts.items()})
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
        with _disable_current_modes() if _tracing() else nullcontext(), self._entered():
            self._advance(look=True)
            compute = self._compute()
            storage = self._bring(saved, compute)
            self._count_use(handle, saved)
            self._prefetch_after(saved, compute)
            return handle.rebuild(storage)

    def _keep(self, t: Tensor, reason: str) -> KeptTensor:
        with self._lock:
            self.meter.totals.kept_by_reason[reason] += 1
        return KeptTensor(t, by_reference=reason == "parameter")

    def _save_inner(self, t: Tensor) -> TakenApart | None:
        """A wrapper by what it wraps; None if it cannot be taken apart or nothing of it would move."""
        apart = taken_apart(t)
        if apart is None:
            return None
        inner, context = apart
        # A jagged tensor's symbolic size is known by the identity of its offsets, so all but its values stays as it is.
        stays = set(inner) - {"_values"} if t.is_nested else set()
        parts = {name: self.save(part) for name, part in inner.items() if isinstance(part, Tensor) and name not in stays}
        if all(isinstance(part, KeptTensor) for part in parts.values()):
            return None
        rest = {name: part for name, part in inner.items() if name not in parts}
        return TakenApart(t, parts, rest, context)

    # --- steps

    def begin_step(self, *, timed: bool) -> None:
        """A new step: saves are numbered from 0 again. Inside a capture or a forked child nothing is asked of the device."""
        if self._forked or self.device.capturing():
            self._in_step = True
            return
        with self._entered():
            self._in_step = True
            self._begin_epoch()
            self.meter.begin_step(self.device.current_stream(), timed=timed)

    def end_step(self, *, completed: bool) -> None:
        """Give back what is still on its way out; learn from the step if it `completed`."""
        if self._forked or self.device.capturing():
            self._in_step = False
            return
        with self._entered():
            self._advance(look=False)
            self._guard.reclaim.flush(lambda: False)
            self._small = [saved for saved in self._small if saved.place is Place.RESIDENT]
            self._small_bytes = sum(saved.nbytes for saved in self._small)
            self._in_step = False
            self._learn(completed=completed)
            self.meter.end_step()

    @property
    def peak_seen_bytes(self) -> int:
        """The most device memory that any hook saw allocated."""
        return self._guard.peak_seen_bytes

    def _all_live(self) -> list[SavedStorage]:
        return [*self._live.values(), *self._carriers]

    @property
    def live_storages(self) -> int:
        """Saved storages that some handle still claims."""
        with self._entered():
            return len(self._live)

    # --- entering, and what autograd lets go of

    @contextmanager
    def _entered(self) -> Iterator[None]:
        """One thread at a time. What was dropped meanwhile is retired before, after, and once the lock is free again."""
        with self._lock:
            self._retire_dropped()
            try:
                yield
            finally:
                self._retire_dropped()
        self._retire_if_idle()

    def _on_claim_end(self, saved: SavedStorage) -> None:
        """Runs wherever the last handle dies: another thread, the collector, the middle of a hook of ours."""
        if self._forked:  # the parent's blocks and its device: neither is the child's to give back
            return
        self._dropped.append(saved)
        self._retire_if_idle()

    @property
    def _forked(self) -> bool:
        """Whether this is a forked child of the process that made it. Asked before any lock: a thread may have held it."""
        return os.getpid() != self._pid

    def _retire_if_idle(self) -> None:
        # Whoever holds the lock retires what is queued when it leaves; not waiting here is what rules a deadlock out.
        # While a graph is captured nothing may be asked of the device: whoever enters after it retires them.
        while self._dropped and not self.device.capturing() and self._lock.acquire(blocking=False):
            try:
                self._retire_dropped()
            finally:
                self._lock.release()

    def _retire_dropped(self) -> None:
        retired = False
        errors: list[BaseException] = []
        while self._dropped:
            saved = self._dropped.popleft()
            retired = True
            self._live.pop((saved.epoch, saved.index), None)
            self._live_of_epoch -= saved.epoch == self._epoch
            claim = self._claims.get(saved.key)
            if claim is not None and claim() is None:
                del self._claims[saved.key]
            if saved.part is not None:
                self._forget_part(saved.storage_id, saved.part)
            carrier = saved.carrier
            try:
                saved.retire()
                if carrier is not None and not carrier.riders:
                    self._carriers.discard(carrier)
                    carrier.retire()
            except BaseException as error:  # noqa: BLE001 - raised below, once the others are retired too
                errors.append(error)
            kept_alive = saved.first()
            if saved.place is Place.RETIRED and kept_alive is not None and saved.part is None:
                self._protected.add(kept_alive)  # it outlived its saves: a buffer or an input, which moving frees nothing of
        if retired and not self._live_of_epoch:
            self._guard.reclaim.flush(lambda: False)
            if not self._in_step and (self._saved_any or self._used_any):
                self._end_unnamed_step()
        if errors:
            raise errors[0]

    def _end_unnamed_step(self) -> None:
        """Outside of `begin_step` and `end_step`, a step is over when nothing that was saved in it is claimed any more."""
        self._begin_epoch()
        self._learn(completed=self._used_any)

    def _begin_epoch(self) -> None:
        self._epoch += 1
        self._next_index = 0
        self._live_of_epoch = 0

    def _learn(self, *, completed: bool) -> None:
        self._saved_any = self._used_any = False
        self._guard.end_step(completed=completed)
        if completed:
            self._order.end_step()
        else:
            self._order.forget()

    # --- what happens at every hook

    def _advance(self, *, look: bool) -> None:
        self._swap_out_finished()
        if self._small and (self._small_bytes >= CARRIER_BYTES or self._transfer.out_is_idle()):
            self._pack_small()
        self._transfer.pump()
        self._guard.reclaim.sweep()
        if look:
            self._guard.look()

    def _swap_out_finished(self) -> None:
        """Queue the copies of saves whose op is over: an op may write what it saved until its end. Note [Swap-out]."""
        if not self._fresh:
            return
        thread, now = threading.get_ident(), _sequence_nr()
        waiting = [entry for entry in self._fresh if entry[1] != thread or entry[2] >= now]
        over = [saved for saved, on_thread, number in self._fresh if on_thread == thread and number < now]
        self._fresh = deque(entry for entry in waiting if entry[0].place is Place.RESIDENT)
        for saved in over:
            saved.op_is_over = True
        for saved in over:
            if saved.place is not Place.RESIDENT or not saved.worth_a_copy:
                continue
            if saved.part is not None:
                self._gather(saved)
            if saved.nbytes < self._rule.min_bytes:
                continue
            if self._thresholds.path(saved.nbytes) in (Path.BATCH, Path.DIRECT):
                self._send_out(saved)
            else:  # also where STAY is advised: the rule was told to move it
                self._small.append(saved)
                self._small_bytes += saved.nbytes

    def _send_out(self, saved: SavedStorage) -> None:
        """Queue its copy out, and what follows it; where the host takes no more it stays."""
        try:
            self._swap_out(saved)
        except (HostMemoryExhausted, TransferFailed) as refusal:
            _log.info("kept on the device: %s", str(refusal))
            self.meter.totals.fallbacks += 1
        else:
            self._guard.reclaim.add(saved)

    def _swap_out(self, saved: SavedStorage) -> None:
        encoding = self._encoding_for(saved)
        if encoding is not None:
            with suppress(torch.OutOfMemoryError, HostMemoryExhausted):  # then as it is, if that can be
                saved.swap_out_encoded(encoding, self._compute())
                self._guard.took(encoding.nbytes)
                return
        try:
            saved.swap_out()
        except HostMemoryExhausted:
            if not self._guard.tight_and_unknown:
                raise
            saved.swap_out(pageable=True)

    def _encoding_for(self, saved: SavedStorage) -> Encoding | None:
        """In which shorter form it should cross, if the rule asks for one."""
        if not self._codecs or saved.dtype is None or saved.gathered or saved.device is None:
            return None
        if saved.device.data_ptr() % UNIT_BYTES:
            return None
        dtype, totals = str(saved.dtype), self.meter.totals
        candidates = {codec.name: codec for codec in self._codecs if codec.applies_to(saved.dtype)}
        name = self._codec_rule.choose(
            candidates,
            encoded={name: totals.encoded[name, dtype] for name in candidates},
            refused={name: totals.refused_by_codec[name, dtype] for name in candidates},
        )
        return None if name is None else Encoding(candidates[name], saved.nbytes, saved.dtype)

    def _pack_small(self) -> None:
        """One kernel packs the small storages that wait for it; their memory goes at once, one copy takes them out."""
        waiting, self._small, self._small_bytes = self._small, [], 0
        members = [saved for saved in waiting if saved.place is Place.RESIDENT and saved.worth_a_copy]
        if len(members) == 1:  # nothing to share a launch with
            self._send_out(members[0])
        if len(members) < 2:
            return
        with suppress(torch.OutOfMemoryError):  # they stay, one by one within reach of the budget's guard
            carrier = Carrier(members, self._compute(), self._tools, epoch=self._epoch)
            self._guard.took(carrier.nbytes)
            self._carriers.add(carrier)
            self.meter.totals.carriers += 1
            self._send_out(carrier)

    def _gather(self, saved: SavedStorage) -> None:
        """Leave the rest of its storage behind; where there is no memory for that, all of it moves."""
        with suppress(torch.OutOfMemoryError):
            saved.gather(self._compute())
            self.meter.totals.gathers += 1
            self._guard.took(saved.nbytes)

    def _compute(self) -> Stream:
        """The calling thread's compute stream."""
        stream = self.device.current_stream()
        self._streams.note(stream)
        return stream

    def _claim(self, t: Tensor, facts: SaveFacts) -> Claim:
        """The claim on `t`'s storage: one copy per storage and version, whatever number of views. Note [Identity].

        Unless `t` covers little of a storage that was not saved whole: then a claim on that part, which views of it share.
        """
        storage, compute, part = t.untyped_storage(), self._compute(), None
        claim = self._claim_on(storage, None, t._version)
        if claim is None and self._rule.gathers(facts, views=0, view_bytes=0):
            part = Part.of(t)
            claim = None if part is None else self._claim_on(storage, part, t._version)
            others = self._parts.get(id(storage), ())
            if not self._rule.gathers(facts, views=len(others), view_bytes=sum(other.nbytes for other in others)):
                part = None
        if claim is None:
            claim = self._new_claim(t, compute, part)
        claim.saved.views += 1
        claim.saved.to_come += 1
        return claim

    def _claim_on(self, storage: torch.UntypedStorage, part: Part | None, version: int) -> Claim | None:
        ref = self._claims.get(claim_key(storage, part))
        claim = None if ref is None else ref()
        return claim if claim is not None and claim.saved.holds(storage, version) else None

    def _new_claim(self, t: Tensor, compute: Stream, part: Part | None) -> Claim:
        if self._next_index >= LONGEST_UNNAMED_STEP and not self._in_step:
            self._end_unnamed_step()
        saved = SavedStorage(t, compute, self._tools, epoch=self._epoch, index=self._next_index, part=part)
        self._next_index += 1
        self._live_of_epoch += 1
        self._saved_any = True
        self._live[saved.epoch, saved.index] = saved
        self._fresh.append((saved, threading.get_ident(), _sequence_nr()))
        claim = Claim(saved, self._on_claim_end)
        self._claims[saved.key] = weakref.ref(claim)
        if part is not None:
            self._parts.setdefault(saved.storage_id, []).append(part)
        return claim

    def _forget_part(self, storage_id: int, part: Part) -> None:
        parts = self._parts[storage_id]
        parts.remove(part)
        if not parts:
            del self._parts[storage_id]

    def _bring(self, saved: SavedStorage, compute: Stream) -> torch.UntypedStorage:
        """The storage, on the device, its bytes in place, ready for `compute`."""
        if not saved.gathered:
            return self._bring_held(saved, compute)
        storage = saved.unpacked_elsewhere(compute)
        if storage is not None:
            self.meter.totals.uses_on_device += 1
            return storage
        assert saved.part is not None
        packed = self._bring_held(saved, compute)
        return self._allocate(saved.part.end_byte, lambda: saved.unpack(packed, compute), keep=saved)

    def _bring_held(self, saved: SavedStorage, compute: Stream) -> torch.UntypedStorage:
        """What is held of it, on the device, ready for `compute`."""
        if saved.place in (Place.ARRIVING, Place.RESTORED) and (saved.lost_on_the_way or not saved.home_is(compute)):
            saved.drop_restored()  # its block belongs to another stream's pool, or never got its bytes: ours gets its own
        if saved.carrier is not None and saved.place is Place.ON_HOST and saved.alive_elsewhere(compute) is None:
            self._unpack(saved.carrier, compute)
        if saved.place is Place.LEAVING:
            saved.take_back()
        if saved.place is Place.ON_HOST:
            elsewhere = saved.alive_elsewhere(compute)
            if elsewhere is not None:
                self.meter.totals.uses_on_device += 1
                return elsewhere
            self._allocate(saved.arrival_bytes, lambda: saved.swap_in(compute), keep=saved)
            self.meter.totals.swap_ins_on_demand += 1
            return saved.arrive(compute)
        self.meter.totals.uses_on_device += 1
        if saved.place in (Place.ARRIVING, Place.RESTORED):
            return saved.arrive(compute)
        assert saved.device is not None
        return saved.device

    def _allocate(self, nbytes: int, allocate: Callable[[], _Made], *, keep: SavedStorage) -> _Made:
        """What `allocate` takes of the device for a use, room made for it; `keep` is not given back for that."""
        self._guard.make_room(nbytes, keep=keep)
        made = None
        with suppress(torch.OutOfMemoryError):  # retried outside: the exception's traceback would keep tensors alive
            made = allocate()
        if made is None:
            self.meter.totals.oom_retries += 1
            self._guard.give_back_all(keep=keep)
            made = allocate()
        self._guard.took(nbytes)
        return made

    def _unpack(self, carrier: Carrier, compute: Stream) -> None:
        """All that waits in the carrier, by one kernel: what was saved together is used together."""
        packed = self._bring_held(carrier, compute)
        members = carrier.waiting()
        self._allocate(
            sum(member.nbytes for member, _ in members), lambda: carrier.unpack_members(members, packed, compute), keep=carrier
        )
        if carrier.place is Place.RESTORED:
            carrier.let_go()

    def _count_use(self, handle: SwappedView, saved: SavedStorage) -> None:
        if saved.epoch == self._epoch:
            self._used_any = True
            self._order.used(saved.index)
        if handle.round != saved.round:
            handle.round = saved.round
            saved.to_come -= 1
        if saved.place is Place.RESTORED and saved.to_come <= 0:
            saved.let_go()

    def _prefetch_after(self, saved: SavedStorage, compute: Stream) -> None:
        """Swap in what is used next, as far as the budget allows."""
        if saved.epoch != self._epoch:
            return
        for index in self._order.upcoming(saved.index, PREFETCH_LOOK):
            coming = self._live.get((self._epoch, index))
            if coming is not None and coming.carrier is not None and coming.place is Place.ON_HOST:
                coming = coming.carrier
            if coming is None or coming.place is not Place.ON_HOST or coming.first() is not None:
                continue
            if not self._guard.room_for(coming.arrival_bytes):
                return
            try:
                coming.swap_in(compute)
            except (torch.OutOfMemoryError, TransferFailed):
                return  # nobody needs it yet
            self._guard.took(coming.arrival_bytes)
            self.meter.totals.prefetches += 1
