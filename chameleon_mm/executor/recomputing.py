"""Drops what a plan has made again: watches how storages are made, writes their recipes, proves and audits these.

    watch = recomputing.begin(followed, ...)     # entered with the step; None: nothing is recomputed in it
    recomputing.note_saved(t, claim)             # at a save: autograd's own copy may be a recipe's source
    recomputing.hold_born(...)                   # at a save: storages that nobody saved, held for recipes
    recomputing.drop(saved)                      # ON_DEVICE -> ON_HOST in `RecomputedForm`; or why not
    recomputing.audit(finished)                  # now and then a recipe, run beside what it is to make, and compared

A recipe is relied on only where the same place of a step like this one has made its storage bit for bit, beside the original.
What differs is refused from then on, and so is what any later audit finds.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from chameleon_mm.device import Device, Stream
from chameleon_mm.executor.audits import Audits
from chameleon_mm.executor.rebuilds import Rebuilds, Restore
from chameleon_mm.executor.recompute_plan import Followed, RecomputePlan
from chameleon_mm.profiler.call_watch import CallWatch
from chameleon_mm.profiler.calls import Value, has_plain_storage
from chameleon_mm.saved.calling_thread import ComputeStreams
from chameleon_mm.saved.claims import NOT_FOUND, Claim, Found
from chameleon_mm.saved.handles import Handle, KeptTensor, flat_bytes
from chameleon_mm.saved.metrics import Metrics
from chameleon_mm.saved.recipe import Recipe, Refusal, Source, build
from chameleon_mm.saved.recomputed_form import RecomputedForm
from chameleon_mm.saved.saved_storage import SavedStorage
from chameleon_mm.saved.state import State
from chameleon_mm.saved.version import SavedBytes, VersionProbe
from chameleon_mm.units import KIB

SNAPSHOT_BYTES = 64 * KIB
"""Size up to which a recipe keeps a copy of a parameter or an input instead of its version: biases, which autograd does not
save, may be written to after forward."""


NewClaim = Callable[[Tensor, SavedBytes, Stream, Found], Claim]
"""Makes a claim on the storage of a tensor."""


class ParameterSizes:
    """Parameters whose storages are as large when a step ends as they were in its forward.

    What shards a model frees its parameters after their forward and fetches them again on a stream of its own, which no counter
    tells of: such a parameter is empty at a later hook, or at the end, and no recipe may need it.
    """

    def __init__(self) -> None:
        self._met: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        """Storages that this step's recipes would need, and that no earlier step has settled, by id, with their sizes."""
        self._stay: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._change: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def keeps_its_size(self, value: Value) -> bool:
        """Whether an earlier step has seen the storage of `value`, a parameter's, keep its size."""
        storage = value.storage()
        if storage is None:
            return False
        return self.note(storage)

    def note(self, storage: torch.UntypedStorage) -> bool:
        """Note a parameter's storage in a step that is watched or recorded. Returns whether an earlier one has seen it keep its
        size."""
        stays = self._stay.get(id(storage))
        if stays is not None and stays() is storage:
            return True
        if id(storage) not in self._met:
            self._met[id(storage)] = weakref.ref(storage), storage.nbytes()
        return False

    def look(self) -> None:
        """Look at what this step has met and no other has: it must keep its size all the time."""
        for key, (ref, nbytes) in self._met.items():
            storage = ref()
            if storage is not None and storage.nbytes() != nbytes:
                self._change[key] = ref

    def end_step(self) -> None:
        """What has kept its size up to now is taken to do so in later steps."""
        self.look()
        for key, (ref, _) in self._met.items():
            storage, changes = ref(), self._change.get(key)
            if storage is not None and (changes is None or changes() is not storage):
                self._stay[key] = ref
        self._met.clear()


class Recomputing:
    """Writes recipes for one executor's storages. Not thread-safe: the executor holds its lock."""

    def __init__(self, device: Device, streams: ComputeStreams, metrics: Metrics, rebuilds: Rebuilds) -> None:
        self._device = device
        self._streams = streams
        self._metrics = metrics
        self._rebuilds = rebuilds
        self._plan: RecomputePlan | None = None
        self._followed: Followed | None = None
        self._is_untypical = False
        """Whether the step takes another time than its plan says, whichever plan it is."""
        self.watch: CallWatch | None = None
        """What watches the running step's forward; None: nothing is recomputed in this step."""
        self._held: dict[int, tuple[Value, Claim]] = {}
        """Values that recipes of this step may need, each with what keeps its bytes, by the value's id."""
        self._snapshots: dict[int, tuple[Value, Source]] = {}
        self._source_values: list[Value] = []
        """Values that the recipe that is being written takes from sources."""
        self._parameters = ParameterSizes()
        self._dropping: SavedStorage | None = None
        """The storage whose recipe is being written so that it can be dropped; None: for an audit."""
        self._waits_for = ""
        """Why the recipe that is being written cannot be, this time."""
        self.audits = Audits(rebuilds, streams, metrics.totals)

    # --- the step

    def begin(self, followed: Followed, before_write: Callable[[Value], None] | None) -> CallWatch | None:
        """Begin a step, which follows what `followed` says at each hook. Returns what watches its forward; None without
        `before_write`: nothing is recomputed in it."""
        if self._followed is not None:  # the step before did not end
            self.end()
        self._followed, self._is_untypical = followed, False
        if before_write is not None:
            self.watch = CallWatch(self._device, before_write)
            self.watch.after_forward = self._held.clear  # recipes hold what they need
            self.audits.begin_step(is_measured=self._metrics.timing is not None)
        self._follow()
        return self.watch

    def _follow(self) -> None:
        """Follow the plan of now: at any hook the step may turn out to be another one."""
        followed, watch = self._followed, self.watch
        plan = None if followed is None else followed.recompute
        if watch is not None and followed is not None and not followed.may_recompute:
            watch.is_over = True
            self._held.clear()
        if plan is not self._plan:
            self._plan = plan
            if watch is not None:
                watch.hold({} if plan is None else plan.held)
            if plan is None:
                self._held.clear()
            else:
                plan.is_typical = watch is not None and not self._is_untypical
                self._rebuilds.inner_bytes = plan.inner_bytes
                self.audits.is_on_trial = plan.is_on_trial

    def _note_untypical(self) -> None:
        """Note that the step takes another time than others under its plan will."""
        self._is_untypical = True
        if self._plan is not None:
            self._plan.is_typical = False

    def end(self) -> None:
        """End the step: forget all that was noted of it, and read what its audits found."""
        if self.watch is not None:
            self.watch.end()
        self.watch = self._plan = self._followed = None
        self._held.clear()
        self._snapshots.clear()
        self._source_values = []
        self._parameters.end_step()

    # --- what the hooks tell

    def note_saved(self, t: Tensor, holder: Claim | Handle) -> None:
        """Note what keeps the bytes of `t`, which autograd saves now."""
        self._parameters.look()
        if not isinstance(holder, (Claim, KeptTensor)) or not _is_plain(t):
            return
        if self.watch is None:
            if isinstance(t if t._base is None else t._base, Parameter):
                self._parameters.note(t.untyped_storage())
        else:
            value = self.watch.given(t)  # inputs are saved before their operator runs
            if value.claim is None or value.claim() is None or isinstance(holder, Claim):
                value.claim = weakref.ref(holder)

    def hold_born(self, new_claim: NewClaim, note_held: Callable[[SavedStorage, int], None]) -> None:
        """Hold the storages to be held that were made since the last hook. `note_held(saved, number)` is told of each."""
        self._follow()
        if self.watch is None or not self.watch.born:
            return
        born, self.watch.born = self.watch.born, []
        for number, value, _ in born:
            if not value.is_latest:
                continue
            t = None if value.tensor is None else value.tensor()
            if t is None or not _is_plain(t):  # no counter would tell of writes
                continue
            claim = None if value.claim is None else value.claim()
            if not isinstance(claim, Claim):
                claim = new_claim(t, SavedBytes(t), self._streams.current(), NOT_FOUND)
                claim.saved.hold_for_recipes()
                self._metrics.totals.bytes_held += claim.saved.nbytes
                note_held(claim.saved, number)
            value.claim = weakref.ref(claim)
            self._held[id(value)] = value, claim

    # --- recipes

    def drop(self, saved: SavedStorage, restore: Restore) -> Refusal | None:
        """Drop a storage that the plan has made again, if its recipe is proven now or was before. Returns why it stays."""
        self._follow()
        refusal = self._drop(saved, restore)
        if refusal is not None:
            self._metrics.totals.not_recomputed_by_reason[refusal.reason] += 1
            self._note_untypical()
            if self.watch is not None and self._plan is not None and saved.planned is not None:
                self._plan.note_refusal(saved.planned.tensor, refusal)
        return refusal

    def _drop(self, saved: SavedStorage, restore: Restore) -> Refusal | None:
        plan, number = self._plan, None if saved.planned is None else saved.planned.tensor
        if self.watch is None or plan is None or number is None:
            return Refusal("nobody watched how it was made")
        if number in plan.refused:
            return plan.refused[number]
        self._dropping = saved
        try:
            recipe = self._recipe(saved)
        finally:
            self._dropping = None
        refusal = recipe if isinstance(recipe, Refusal) else None
        sources = self._source_values
        if not isinstance(recipe, Refusal) and number not in plan.proven:
            self._note_untypical()
            refusal = self._disproof(recipe, saved, restore)
        if isinstance(recipe, Refusal) or refusal is not None:
            return refusal
        plan.proven.add(number)
        if saved.device is None or saved.state is not State.ON_DEVICE:
            return Refusal("it has moved", lasts=False)  # memory was short for the proof
        value = self.watch.value_of(saved.device)
        assert value is not None and value.call is not None and value.result is not None
        for source in recipe.saved_sources:
            source.add_view()
        me = weakref.ref(saved)
        for one in sources:
            one.dependents.append(me)
        value.call.operation.dropped.append((value.result, me))
        self._streams.join_all(saved.alloc_stream)  # Note [Reclaim]: its next owner is whichever stream allocated it
        saved.leave_in(RecomputedForm(recipe), flat_bytes(saved.device))
        self._metrics.totals.recomputed += 1
        self._metrics.totals.bytes_recomputed += saved.nbytes
        return None

    def _recipe(self, saved: SavedStorage) -> Recipe | Refusal:
        """Recipe of what `saved` holds now; `_source_values` are then those that it is made from."""
        self._source_values = []
        self._waits_for = ""
        if saved.device is None or saved.part is not None or saved.state is not State.ON_DEVICE:
            return Refusal("it has moved", lasts=False)
        value = None if self.watch is None else self.watch.value_of(saved.device)
        if value is None or self._plan is None:
            return Refusal("nobody watched how it was made")
        if not saved.is_copyable or not saved.was_written(value.writes):
            return Refusal("written to where nobody looks")
        recipe = build(value, self._source_of, self._plan.refuse)
        if isinstance(recipe, Refusal) and self._waits_for:
            return Refusal(self._waits_for, lasts=False)
        return recipe

    def _source_of(self, value: Value) -> Source | None:
        """The source with the bytes of `value`, if anything keeps them."""
        if not value.is_latest:
            return None
        source = self._kept(value)
        if source is None and value.call is None:
            source = self._given(value)
        if source is not None:
            self._source_values.append(value)
        return source

    def _kept(self, value: Value) -> Source | None:
        """What autograd saved of it, or what is held."""
        holder = None if value.claim is None else value.claim()
        if isinstance(holder, KeptTensor):
            t = holder.tensor
            return None if t is None or not holder.is_as_saved else self._held_itself(value, t, is_saved=True)
        if not isinstance(holder, Claim):
            return None
        saved = holder.saved
        probe = saved.whole_probe()
        if probe is None or saved.part is not None or saved.nbytes != value.nbytes or saved.state is State.RETIRED:
            return None
        return Source(nbytes=value.nbytes, claim=holder, probe=probe)

    def _given(self, value: Value) -> Source | None:
        """What was there before anybody watched: a parameter, an input."""
        t = None if value.tensor is None else value.tensor()
        if t is None or t._version != value.version:
            return None
        return self._held_itself(value, t, is_saved=False)

    def _held_itself(self, value: Value, t: Tensor, *, is_saved: bool) -> Source | None:
        """A source that the recipe holds, by the tensor `t` over it; as a copy where it is small and autograd has not saved it:
        eager does not mind whether it is written to later."""
        storage = value.storage()
        if storage is None or storage.nbytes() != value.nbytes or not storage.resizable():
            return None  # what torch did not allocate may be written to by whoever did
        if storage.device != self._device.torch_device and value.nbytes > SNAPSHOT_BYTES:
            return None  # a host buffer, which the next batch goes into
        known = self._snapshots.get(id(value))
        if known is not None:
            return known[1]
        stream = self._streams.current()
        root = t if t._base is None else t._base
        stays = value.call is not None or not isinstance(root, Parameter) or self._parameters.keeps_its_size(value)
        if value.nbytes > SNAPSHOT_BYTES and not stays:
            self._waits_for = "a parameter that no step has seen keep its size"
            return None
        if value.nbytes <= SNAPSHOT_BYTES and value.call is None and not (is_saved and stays):
            copied = self._rebuilds.copied(storage, self._dropping)
            if copied is None:
                self._waits_for = "no memory for a copy of a small input"
                return None
            source = Source(nbytes=value.nbytes, storage=copied, stream=stream)
        else:
            source = Source(nbytes=value.nbytes, storage=storage, probe=VersionProbe(t), stream=stream)
        self._snapshots[id(value)] = value, source
        return source

    # --- proofs

    def _disproof(self, recipe: Recipe, saved: SavedStorage, restore: Restore) -> Refusal | None:
        """Why the recipe does not stand for `saved`; None: it makes its bits."""
        differs = self._rebuilds.differs(recipe, saved, self._streams.current(), restore)
        if isinstance(differs, Refusal):
            return differs
        self._metrics.totals.proofs += 1
        return Refusal("other bits than the original", ", ".join(recipe.operators)) if bool(differs.item()) else None

    def audit(self, finished: Sequence[SavedStorage], restore: Restore) -> None:
        """Compare what a recipe of one of `finished` makes with it, where the step has an audit to do."""
        self._follow()
        for saved in finished:
            if self.audits.next_is_due() and self._plan is not None:
                known = set(self._snapshots)
                recipe = self._recipe(saved)
                if isinstance(recipe, Recipe) and self.audits.compare(recipe, saved, restore):
                    self._note_untypical()
                for key in self._snapshots.keys() - known:  # a plan has no room for them
                    del self._snapshots[key]


def _is_plain(t: Tensor) -> bool:
    """Whether a watch can tell how the bytes of `t` are made: no subclass has a say in it."""
    return type(t) in (Tensor, Parameter) and has_plain_storage(t)
