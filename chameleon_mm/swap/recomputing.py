"""Drop storages that a plan recomputes: watch how they are made, write their recipes, and prove the recipes.

    watch = recomputing.begin(followed, ...)     # entered with the step; None: the step recomputes nothing
    recomputing.note_saved(t, handle)            # at a save: autograd's own copy may be a recipe's source
    recomputing.hold_born(...)                   # at a save: hold unsaved storages that recipes read
    recomputing.drop_all(due)                    # ON_DEVICE -> ON_HOST in `RecomputedForm`; returns the refused ones
    recomputing.waiting                          # storages to drop once only the session holds their sources
    recomputing.prove(saved, restore)            # at the first use of a kept storage: try its recipe

Note [Relied on] says what a recipe may rely on (docs/architecture.md). Its rules are cited by number here.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from chameleon_mm.device import Device
from chameleon_mm.device.operators import running_statistics, without_updates
from chameleon_mm.plan.recipes import COPIED_BYTES
from chameleon_mm.plan.trace import BirthPlace
from chameleon_mm.record.call_notes import AnyWatch, watch_calls
from chameleon_mm.record.calls import Call, Value, has_plain_storage
from chameleon_mm.replayable import base_name
from chameleon_mm.swap.calling_thread import ComputeStreams
from chameleon_mm.swap.claims import Claim
from chameleon_mm.swap.forms import Original, RecomputedForm
from chameleon_mm.swap.handles import NO_HOOK, Handle, KeptTensor, SavedBytes, SwappedView, flat_bytes
from chameleon_mm.swap.host_copy import State
from chameleon_mm.swap.metrics import Metrics
from chameleon_mm.swap.recipe import Proof, Recipe, Refusal, Reliance, Source, build
from chameleon_mm.swap.recipe_runner import RecipeRunner, Restore
from chameleon_mm.swap.saved_storage import SavedStorage

if TYPE_CHECKING:
    from chameleon_mm.swap.director import Director

# --- Parameters that keep their size during a step. A sharded model frees its parameters and fetches them again


class ParameterSizes:
    """Parameters whose storages have the same size when a step ends as in its forward.

    A sharded model frees its parameters after their forward and fetches them again on a stream of its own. No version counter
    shows that, but such a parameter is empty at a later hook or at the step's end. No recipe may read it.
    """

    def __init__(self) -> None:
        self._met: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        """Storages that this step's recipes may read, but that no earlier step saw keep their size: with their sizes, by id."""
        self._stay: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._change: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def note(self, storage: torch.UntypedStorage) -> bool:
        """Note a parameter's storage in a watched or recorded step. Returns True if the storage kept its size in an earlier
        step."""
        stays = self._stay.get(id(storage))
        if stays is not None and stays() is storage:
            return True
        if id(storage) not in self._met:
            self._met[id(storage)] = weakref.ref(storage), storage.nbytes()
        return False

    def look(self) -> None:
        """Mark the storages first met in this step whose size differs now. Called at many hooks: a size must never change."""
        for key, (ref, nbytes) in self._met.items():
            storage = ref()
            if storage is not None and storage.nbytes() != nbytes:
                self._change[key] = ref

    def end_step(self) -> None:
        """Note the storages that kept their sizes during the step. Later steps rely on that."""
        self.look()
        for key, (ref, _) in self._met.items():
            storage, changes = ref(), self._change.get(key)
            if storage is not None and (changes is None or changes() is not storage):
                self._stay[key] = ref
        self._met.clear()


# --- Recomputation part of a plan, with the results of steps that followed it

ATTEMPTS = 4
"""Number of steps that may fail to drop a storage for a temporary reason. After that the storage is not recomputed."""


@dataclass(slots=True, kw_only=True, eq=False)
class RecomputePlan:
    """Recomputation part of a plan."""

    admitted: frozenset[str]
    """Base names of the operators that may run again."""
    held: Mapping[BirthPlace, int]
    """Trace numbers of the unsaved storages to hold, by the place in the step where each is made."""
    proven: set[int] = field(default_factory=set)
    """Trace numbers of the storages whose recipe is proven: it made the same bits in a proof."""
    refused: dict[int, Refusal] = field(default_factory=dict)
    """Trace numbers of the storages that are not recomputed, and why."""
    is_typical: bool = True
    """True if the latest step that follows the plan takes as long as later steps will: it ran no proof, and swapped no storage
    that it should drop."""
    attempts: Counter[int] = field(default_factory=Counter)
    """Number of refusals to drop each storage, by trace number. At ATTEMPTS, a temporary reason counts as lasting."""
    inner_bytes: int = 0
    """Maximum bytes of internal memory of any operator that may run again."""
    banned: set[str] = field(default_factory=set)
    """Names of the operators whose recipes made other bits than the original, for the report."""
    module_of: Callable[[int], str] = field(default=lambda number: "")
    """Function from a storage's number to the path of the module that first saved it; "" if unknown."""

    def refuse(self, call: Call) -> Refusal | None:
        """Return why `call` must not run again, or None if it may."""
        operation = call.operation
        name = base_name(operation.func.name())
        if name not in self.admitted:
            return Refusal("an operator that is not on the list", name)
        if running_statistics(operation.facts, without_updates(operation.facts, call.args)):
            return Refusal("a batch norm that reads running statistics", name)
        if not operation.grad_enabled:
            return Refusal("made without gradients, as in a custom function", name)
        return None

    def ban(self, number: int, operators: Sequence[str]) -> None:
        """Ban the recipe of storage `number`: its `operators` made other bits than the original."""
        self.proven.discard(number)
        self.banned.update(operators)
        self.note_refusal(number, Refusal("other bits than the original", ", ".join(dict.fromkeys(operators))))

    def note_refusal(self, number: int, refusal: Refusal) -> None:
        """Note why storage `number` was not dropped as planned."""
        self.attempts[number] += 1
        if refusal.lasts or self.attempts[number] >= ATTEMPTS:
            self.refused[number] = refusal


# --- recomputing

AT_ITS_USE = Refusal("proved at its use first", lasts=False)
"""Refusal in the step that first proves the recipe. Rule 3."""

WAITS = Refusal("it waits for its sources", lasts=False)
"""Refusal while others than the session hold a source. Rule 1."""

OTHERS_HOLD = Refusal("an input that the model holds", lasts=False)

OTHERS_WRITE = Refusal("an input that others may write to")


ClaimToHold = Callable[[Tensor], tuple[Claim, bool]]
"""Function that returns the claim on a tensor's storage, and True if the claim is new: autograd did not save the storage."""


class Recomputing:
    """Writer of recipes for one executor's storages. Not thread-safe: the executor holds its lock."""

    def __init__(
        self,
        device: Device,
        streams: ComputeStreams,
        metrics: Metrics,
        recipe_runner: RecipeRunner,
        reliance_ended: Callable[[Reliance], None],
    ) -> None:
        """`reliance_ended`: callback `ended` for each `Reliance`."""
        self._device, self._streams, self._metrics = device, streams, metrics
        self._recipe_runner, self._reliance_ended = recipe_runner, reliance_ended
        self._plan: RecomputePlan | None = None
        self._followed: Director | None = None
        self._is_untypical = False
        """True if the step takes another time than any plan predicts."""
        self.watch: AnyWatch | None = None
        """Watch of the running step's forward; None: nothing is recomputed in this step."""
        self._has_recipes = False
        """True if recipes rely on this step's tensors: its writes are watched to the end of forward."""
        self._held: dict[int, tuple[Value, Claim]] = {}
        """Values that recipes of this step may read, each with the claim that keeps its bytes, by the value's id."""
        self._held_sources: dict[int, tuple[Value, Source]] = {}
        self.waiting: list[_Waiting] = []
        """Storages to drop that still wait for rule 1. Other classes only read this."""
        self._parameters = ParameterSizes()
        self._dropping: SavedStorage | None = None
        """Storage whose recipe is being written."""
        self._obstacle: Refusal | None = None
        """Reason why the recipe being written is impossible, other than the operators in it; None: there is none."""

    # --- the step

    def begin(self, followed: Director, before_write: Callable[[Value], None] | None) -> AnyWatch | None:
        """Begin a step. `followed` names the plan at each hook. Returns the watch of the step's forward. Without `before_write`
        it returns None, and the step recomputes nothing."""
        if self._followed is not None:  # the previous step did not end
            self.end()
        self._followed, self._is_untypical, self._has_recipes = followed, False, False
        if before_write is not None:
            self.watch = watch_calls(self._device, before_write)
            self.watch.after_forward = self._held.clear  # recipes hold their own sources
        self.follow()
        return self.watch

    def follow(self) -> None:
        """Read the current plan from `followed`: any hook may show that the step follows another plan."""
        followed, watch = self._followed, self.watch
        plan = None if followed is None else followed.recompute
        if watch is not None and followed is not None and not followed.may_recompute and not self._has_recipes:
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
                self._recipe_runner.inner_bytes = plan.inner_bytes

    def _note_untypical(self) -> None:
        self._is_untypical = True
        if self._plan is not None:
            self._plan.is_typical = False

    def end(self) -> None:
        """End the step and drop all its records."""
        if self.watch is not None:
            self.watch.end()
        self.watch = self._plan = self._followed = None
        self._held.clear()
        self._held_sources.clear()
        self.waiting = []
        self._recipe_runner.comparisons.end_step()
        self._parameters.end_step()

    # --- notes at hooks

    def note_saved(self, t: Tensor, handle: Handle) -> None:
        """Note the handle that keeps the bytes of `t`, which autograd saves now."""
        if self.watch is not None and handle.saved_at[1] != NO_HOOK:
            self.watch.at_hook(handle.saved_at[1] + 1)
        self._parameters.look()
        if not isinstance(handle, (SwappedView, KeptTensor)) or not _is_plain(t):
            return
        if self.watch is None:
            if isinstance(t if t._base is None else t._base, Parameter):
                self._parameters.note(t.untyped_storage())
            return
        value = self.watch.given(t)  # inputs are saved before their operator runs
        holder = handle.claim if isinstance(handle, SwappedView) else handle
        if value.claim is None or value.claim() is None or isinstance(holder, Claim):
            value.claim = weakref.ref(holder)
        relied = value.relied_on()
        relied.handles.append(weakref.ref(handle))
        if isinstance(handle, SwappedView):
            handle.claim.saved.relied = relied
        else:
            handle.relied = relied
        reliance = None if relied.reliance is None else relied.reliance()
        if reliance is not None:
            reliance.watch(handle)

    def hold_born(self, claim_to_hold: ClaimToHold, note_held: Callable[[SavedStorage, int], None]) -> None:
        """Hold storages made since the last hook, as planned. Calls `note_held(saved, number)` for each new claim."""
        self.follow()
        if self.watch is None or not self.watch.births.born:
            return
        for number, value, _ in self.watch.births.take():
            if not value.is_latest:
                continue
            t = None if value.tensor is None else value.tensor()
            if t is None or not _is_plain(t):  # a version counter would not show writes
                continue
            claim = None if value.claim is None else value.claim()
            if not isinstance(claim, Claim):
                claim, is_new = claim_to_hold(t)
                if is_new:
                    self._metrics.totals.bytes_held += claim.saved.nbytes
                    note_held(claim.saved, number)
            value.claim = weakref.ref(claim)
            self._held[id(value)] = value, claim

    # --- recipes

    def drop_all(self, due: Sequence[SavedStorage]) -> list[SavedStorage]:
        """Drop `due` and waiting storages whose recipes are proven and sources secure. Returns those that will never be
        dropped."""
        self._streams.current()  # registers the stream, so that its reads are ordered with the owner
        self.follow()
        return [saved for saved in (*due, *self._ready()) if self._note_refusal(saved, self._drop(saved))]

    def _note_refusal(self, saved: SavedStorage, refusal: Refusal | None) -> bool:
        """Note why `saved` is not dropped. Returns True if it never will be."""
        if refusal is None or refusal is WAITS:
            return False
        self._metrics.totals.not_recomputed_by_reason[refusal.reason] += 1
        self._note_untypical()
        if refusal is not AT_ITS_USE and self.watch is not None and self._plan is not None and saved.number is not None:
            self._plan.note_refusal(saved.number, refusal)
        return True

    def _drop(self, saved: SavedStorage) -> Refusal | None:
        plan, number = self._plan, saved.number
        if self.watch is None or plan is None or number is None:
            return Refusal("nobody watched how it was made")
        if number in plan.refused:
            return plan.refused[number]
        if saved.proof is not None:
            return AT_ITS_USE
        self._dropping = saved
        try:
            recipe = self._recipe(saved)
        finally:
            self._dropping = None
        if isinstance(recipe, Refusal):
            return recipe
        held = [source for source in recipe.sources if not source.is_secure]
        if held:
            self.waiting.append(_Waiting(saved, held))
            return WAITS
        if saved.device is None or saved.state is not State.ON_DEVICE:
            return Refusal("it has moved", lasts=False)  # memory was short for a copy of a source
        self._has_recipes = True
        if number not in plan.proven:
            self._streams.join_all(saved.slot.alloc_stream)  # the checksum must read finished writes
            saved.proof = Proof(recipe, self._original(saved, recipe), partial(plan.note_refusal, number))
            self._count_sources(recipe)
            return AT_ITS_USE
        self._leave(saved, recipe)
        return None

    def _leave(self, saved: SavedStorage, recipe: Recipe) -> None:
        """Drop the device copy of `saved`, whose bytes `recipe` will recompute."""
        assert self.watch is not None and saved.device is not None
        value = self.watch.value_of(saved.device)
        assert value is not None and value.call is not None and value.result is not None
        self._streams.join_all(saved.slot.alloc_stream)  # Note [Reclaim]: the allocating stream owns the memory next
        original = self._original(saved, recipe)
        self._streams.join_all(saved.slot.alloc_stream)  # the memory is reused only after the checksum was read
        self._count_sources(recipe)
        me = weakref.ref(saved)
        for source in recipe.sources:
            self._rely(source, recipe, me)
        value.call.operation.dropped.append((value.result, me))
        saved.leave_in(RecomputedForm(recipe, original))
        self._metrics.totals.recomputed += 1
        self._metrics.totals.bytes_recomputed += saved.nbytes

    def _original(self, saved: SavedStorage, recipe: Recipe) -> Original:
        plan = self._plan
        assert saved.device is not None and saved.number is not None and plan is not None
        number, operators = saved.number, recipe.operators
        return Original(
            checksum=self._recipe_runner.comparisons.begin(flat_bytes(saved.device)),
            nbytes=saved.nbytes,
            dtype=str(saved.slot.saves[0].alias.dtype),
            module=partial(plan.module_of, number),
            operators=operators,
            note_proven=partial(plan.proven.add, number),
            ban=partial(plan.ban, number, operators),
        )

    @staticmethod
    def _count_sources(recipe: Recipe) -> None:
        """Add one use to come to each storage that the recipe reads."""
        for source in recipe.saved_sources:
            source.uses.add_handle()

    def _rely(self, source: Source, recipe: Recipe, dropped: weakref.ref[SavedStorage]) -> None:
        """Register `dropped` to be recomputed before the bytes of `source` may change: before an operator in forward writes to
        them, or once autograd no longer needs them."""
        relied = source.relied
        if relied is None:
            return
        relied.dependents.append(dropped)
        if source.claim is not None:
            source.claim.saved.relied = relied
        if source.is_relied_on:  # rule 2
            reliance = None if relied.reliance is None else relied.reliance()
            if reliance is None:
                reliance = Reliance(source, relied, self._reliance_ended)
                relied.reliance = weakref.ref(reliance)
            recipe.reliances.append(reliance)

    def _ready(self) -> list[SavedStorage]:
        """Remove the storages whose sources are secure now from `waiting`, and return them."""
        ready = [one for one in self.waiting if all(source.is_secure for source in one.sources)]
        if ready:
            self.waiting = [one for one in self.waiting if one not in ready]
        return [one.saved for one in ready]

    def stop_waiting(self) -> list[SavedStorage]:
        """End all waiting, because backward has begun. Returns the storages that were not dropped."""
        stay = self.drop_all(())
        waiting, self.waiting = self.waiting, []
        for one in waiting:
            self._note_refusal(one.saved, OTHERS_HOLD)
        return [*stay, *(one.saved for one in waiting)]

    def _recipe(self, saved: SavedStorage) -> Recipe | Refusal:
        self._obstacle = None
        if saved.device is None or saved.state is not State.ON_DEVICE:
            return Refusal("it has moved", lasts=False)
        value = None if self.watch is None else self.watch.value_of(saved.device)
        if value is None or self._plan is None:
            return Refusal("nobody watched how it was made")
        if not saved.is_copyable or not saved.slot.was_written(value.writes):
            return Refusal("written to where nobody looks")
        recipe = build(value, self._source_of, self._plan.refuse)
        obstacle: Refusal | None = self._obstacle  # set by `_source_of`
        return obstacle if isinstance(recipe, Refusal) and obstacle is not None else recipe

    def _source_of(self, value: Value) -> Source | None:
        """Return the source that has the bytes of `value`, or None if nothing keeps them."""
        if not value.is_latest:
            return None
        source = self._kept(value)
        if source is None and value.call is None:
            source = self._given(value)
        return source

    def _kept(self, value: Value) -> Source | None:
        """Return a source for bytes that autograd saved or that are held for recipes, or None."""
        holder = None if value.claim is None else value.claim()
        if isinstance(holder, KeptTensor):
            is_unwritten = holder.tensor._version == holder.expected
            return self._held_itself(value, holder.tensor, is_saved=True) if is_unwritten else None
        if not isinstance(holder, Claim):
            return None
        saved = holder.saved
        probe = saved.slot.unwritten()
        if probe is None or saved.nbytes != value.nbytes or saved.state is State.RETIRED:
            return None
        return Source(nbytes=value.nbytes, relied=value.relied_on(), claim=holder, probe=probe)

    def _given(self, value: Value) -> Source | None:
        """Return a source for a value that no watched call made, such as a parameter or an input, or None."""
        t = None if value.tensor is None else value.tensor()
        if t is None or t._version != value.version:
            return None
        return self._held_itself(value, t, is_saved=False)

    def _held_itself(self, value: Value, t: Tensor, *, is_saved: bool) -> Source | None:
        """Return a source that the recipe holds itself through `t`, a tensor over it. A small source made before the watch is
        copied, because eager allows later writes to it. It is not copied if autograd saved it and its size stays."""
        storage = value.storage()
        if storage is None or storage.nbytes() != value.nbytes or not storage.resizable():
            return None  # torch did not allocate the memory: its owner may write to it
        if storage.device != self._device.torch_device and value.nbytes > COPIED_BYTES:
            return None  # a host buffer, which the next batch overwrites
        known = self._held_sources.get(id(value))
        if known is not None:
            return known[1]
        stream = self._streams.current()
        root = t if t._base is None else t._base
        stays = value.call is not None or not isinstance(root, Parameter) or self._parameters.note(storage)
        if value.nbytes > COPIED_BYTES and not stays:
            self._obstacle = Refusal("a parameter that no step has seen keep its size", lasts=False)
            return None
        if value.nbytes > COPIED_BYTES and not is_saved:
            self._obstacle = OTHERS_WRITE  # rule 2 fails, and rule 1 always will: the model holds it
            return None
        if value.nbytes <= COPIED_BYTES and value.call is None and not (is_saved and stays):
            copied = self._recipe_runner.copied(storage, self._dropping)
            if copied is None:
                self._obstacle = Refusal("no memory for a copy of a small input", lasts=False)
                return None
            source = Source(nbytes=value.nbytes, relied=None, storage=copied, stream=stream)  # rule 1
        else:
            relied, probe = value.relied_on(), SavedBytes(t)
            source = Source(nbytes=value.nbytes, relied=relied, storage=storage, probe=probe, stream=stream)
        self._held_sources[id(value)] = value, source
        return source

    def prove(self, saved: SavedStorage, restore: Restore) -> None:
        """Try the recipe of `saved` right before its first use. The original was kept for that. Rule 3."""
        proof, saved.proof = saved.proof, None
        assert proof is not None
        refusal = self._recipe_runner.prove(proof, saved, self._streams.current(), restore)
        if refusal is not None:
            self._metrics.totals.not_recomputed_by_reason[refusal.reason] += 1
            proof.refuse(refusal)


class _Waiting(NamedTuple):
    """Storage to drop, and the sources of its recipe that others still hold."""

    saved: SavedStorage
    sources: list[Source]


def _is_plain(t: Tensor) -> bool:
    """True if a watch can see how the bytes of `t` are made: a `Tensor` or `Parameter`, no other class, with a plain
    storage."""
    return type(t) in (Tensor, Parameter) and has_plain_storage(t)
