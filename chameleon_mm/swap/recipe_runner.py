"""Recompute dropped storages at their first use: run each recipe after the recipes of the storages that it reads.

    runner.recompute(saved, compute, restore)    # ON_HOST -> ON_DEVICE, its bytes on `compute`; RESTORED with several streams

Sources of a recipe are swapped in like any used storage. Other results of its calls are kept for their own uses.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from chameleon_mm.device import Device, Stream
from chameleon_mm.errors import ChameleonError, RecomputeMismatch
from chameleon_mm.swap.budget import Budget
from chameleon_mm.swap.calling_thread import annotation
from chameleon_mm.swap.checksums import Checksums, ChecksumSlot
from chameleon_mm.swap.claims import Claims
from chameleon_mm.swap.forms import Original
from chameleon_mm.swap.handles import flat_bytes
from chameleon_mm.swap.host_copy import State, SwapContext
from chameleon_mm.swap.metrics import Totals
from chameleon_mm.swap.recipe import Proof, Recipe, Recomputed, Refusal
from chameleon_mm.swap.saved_storage import SavedStorage
from chameleon_mm.units import allocated_size

# --- Comparison of recomputed storages with their originals: rule 3 of Note [Relied on]
#
# No kernel waits for the host. The host reads all checksums at the end of each backward, after the last was taken.

_log = logging.getLogger(__name__)


class _Pair(NamedTuple):
    original: Original
    recomputed: ChecksumSlot
    task: int
    """Number of the backward in which the storage was recomputed; -1: outside of a backward."""
    is_proof: bool
    """True if the original was used instead of the recomputed storage."""


class Comparisons:
    """Comparisons of one executor. Not thread-safe: the executor holds its lock."""

    def __init__(self, checksums: Checksums, totals: Totals) -> None:
        self._checksums = checksums
        self._totals = totals
        self.pending: list[_Pair] = []
        """Pairs that the host has not compared yet. Other classes only read it."""
        self._failed = False
        self._ends: set[int] = set()
        """Backwards at whose end the pairs are compared, by autograd's number of each."""

    def begin(self, buffer: Tensor) -> ChecksumSlot:
        """Take the checksum of an original, a flat uint8 tensor, on the current stream. Raises `torch.OutOfMemoryError`."""
        return self._checksums.start(buffer)

    def add(self, original: Original, buffer: Tensor, *, is_proof: bool = False) -> None:
        """Take the checksum of `buffer`, recomputed in place of `original`, on the current stream. Note the pair."""
        self.pending.append(_Pair(original, self._checksums.start(buffer), torch._C._current_graph_task_id(), is_proof))

    def settle(self, task: int | None) -> list[RecomputeMismatch]:
        """Compare the pairs of backward `task` and those outside of any backward; None: all pairs. The host waits for the
        latest checksum. Bans each recipe that made other bits. Returns the error of the first bad pair whose result was
        used."""
        pairs: list[_Pair] = []
        others: list[_Pair] = []
        for pair in self.pending:
            (pairs if task is None or pair.task in (task, -1) else others).append(pair)
        self.pending = others
        self._ends.discard(-1 if task is None else task)
        numbers = self._checksums.read([slot for pair in pairs for slot in (pair.original.checksum, pair.recomputed)])
        errors: list[RecomputeMismatch] = []
        for pair, before, after in zip(pairs, numbers[::2], numbers[1::2], strict=True):
            original = pair.original
            self._totals.proofs += pair.is_proof
            if before == after:
                if pair.is_proof:
                    original.note_proven()
                continue
            self._failed = True
            original.ban()
            _log.info("chameleon_mm: not recomputed any more, as its recipe made other bits: %s", original)
            if not pair.is_proof and not errors:
                errors.append(_mismatch(original, before, after))
        return errors

    def at_the_end(self, settle: Callable[[int], None]) -> None:
        """Call `settle` with the number of the backward that runs on this thread, at its end. Outside of a backward, call it
        now. Not under the lock.

        `settle` runs after other final callbacks, such as DDP's, because an error in one callback skips all later ones.
        """
        task: int = torch._C._current_graph_task_id()
        if task < 0:
            settle(task)
        elif task not in self._ends:
            self._ends.add(task)
            queue = torch.autograd.Variable._execution_engine.queue_callback
            queue(lambda: queue(partial(settle, task)))

    def end_step(self) -> None:
        """Free the device memory of checksums that are not held, because later steps may not need it."""
        if not self.pending:
            self._checksums.release_unused()

    def begin_step(self) -> bool:
        """Remove the pairs of a failed step. Returns True if a recipe was banned since the last step began."""
        failed, self._failed, self.pending = self._failed, False, []
        self._ends.clear()
        return failed


def _mismatch(original: Original, before: int, after: int) -> RecomputeMismatch:
    chain = " -> ".join(original.operators)
    return RecomputeMismatch(
        f"a saved tensor was recomputed with other bits: expected {original} with checksum {before:#x}, got {after:#x} from "
        f"{chain}. A kernel wrote to it or to an input of these operators without autograd knowing (a pointer, `.data`, an "
        f"extension), or one of them is not reproducible. The gradients of this step are wrong: drop them (zero_grad), or run "
        f"steps by `session.run_step`. Later steps keep this tensor; SwapSession(recompute=False) recomputes none"
    )


# --- recipe runner

NO_ROOM = Refusal("no memory for its proof", lasts=False)

Restore = Callable[[SavedStorage, Stream], torch.UntypedStorage]
"""Function that swaps a storage in, ready for a stream."""


class RecipeRunner:
    """Runner of recipes. Not thread-safe: the executor holds its lock."""

    def __init__(self, device: Device, context: SwapContext, claims: Claims, budget: Budget, comparisons: Comparisons) -> None:
        self._device, self._context, self._claims, self._budget = device, context, claims, budget
        self.comparisons = comparisons
        self.inner_bytes = 0
        """Bytes that a proof leaves free for the internal memory of an operator that runs again."""

    def recompute(self, saved: SavedStorage, compute: Stream, restore: Restore) -> None:
        """Recompute `saved` and make it ready for `compute`, the current stream.

        Raises eager's error if a source of its recipe was written to since, and `torch.OutOfMemoryError`.
        """
        for one in _sources_first(saved):
            recipe = one.form.recipe
            if recipe is None or one.state is not State.ON_HOST:
                continue  # the replay of another recipe made it
            recomputed = self.replay(recipe, compute, restore, exclude=one)
            self._count_uses(recipe)
            self._restored(one, recomputed.storage, compute)
            for ref, storage in recomputed.siblings:
                sibling = ref()
                if sibling is None or sibling.form.recipe is None or sibling.state is not State.ON_HOST:
                    continue
                if sibling.nbytes == storage.nbytes():
                    self._restored(sibling, storage, compute)
            self._context.metrics.totals.recomputations += 1

    def restore_sources(self, saved: SavedStorage, compute: Stream, restore: Restore) -> None:
        """Swap in the storages that the recomputation of `saved` reads."""
        for one in _sources_first(saved):
            for source in () if one.form.recipe is None else one.form.recipe.saved_sources:
                if source.form.recipe is None:
                    restore(source, compute)

    def prove(self, proof: Proof, saved: SavedStorage, compute: Stream, restore: Restore) -> Refusal | None:
        """Replay a recipe on `compute` before the original, `saved`, is swapped in for a use. Note both for comparison. Count a
        use of each source. Returns a refusal if the replay failed; its `lasts` is False if a later step may try again."""
        recipe = proof.recipe
        were_away = [source for source in recipe.saved_sources if source.state is State.ON_HOST]
        try:
            return self._prove(proof, saved, compute, restore)
        except torch.OutOfMemoryError:
            return NO_ROOM
        except ChameleonError:
            raise
        except RuntimeError as error:  # an operator failed; the original still exists
            _log.info("chameleon_mm: %s failed to run again, the original stays: %s", ", ".join(recipe.operators), str(error))
            return Refusal("an error when it runs again", ", ".join(recipe.operators))
        finally:
            self._count_uses(recipe)
            for source in were_away:
                if source.state is State.RESTORED:
                    with suppress(torch.OutOfMemoryError):  # a storage that moves in part needs memory for the part that stays
                        source.drop_restored()  # no use needed it yet

    def _prove(self, proof: Proof, saved: SavedStorage, compute: Stream, restore: Restore) -> Refusal | None:
        recipe = proof.recipe
        try:
            storages = self._sources_of(recipe, compute, restore)
        except (torch.OutOfMemoryError, ChameleonError):
            raise
        except RuntimeError as error:  # a use would raise the same error
            _log.info("chameleon_mm: not compared: %s", str(error))
            return Refusal("an input that was written to or resized", lasts=False)
        needed = [saved, *recipe.saved_sources]
        if not self._budget.room_was_made(recipe.peak_bytes + self.inner_bytes, exclude=needed):
            return NO_ROOM
        recomputed = self._run(recipe, storages, compute, exclude=needed).storage
        with self._budget.replaying():
            self.comparisons.add(proof.original, flat_bytes(recomputed), is_proof=True)
        self._context.streams.join_all(compute)  # the memory is reused only after the checksum was read
        return None

    def copied(self, storage: torch.UntypedStorage, dropping: SavedStorage | None) -> torch.UntypedStorage | None:
        """Return a copy of `storage`, made on the current stream, or None if there is no room. To make room, storages other
        than `dropping` are reclaimed; if `dropping` is None, no storage is."""
        nbytes = allocated_size(storage.nbytes()) if storage.device == self._device.torch_device else 0
        fits = not nbytes or self._budget.fits_now(nbytes)
        if not fits and (dropping is None or not self._budget.room_was_made(nbytes, exclude=[dropping])):
            return None
        try:
            with torch.no_grad():
                copy = flat_bytes(storage).clone().untyped_storage()
        except torch.OutOfMemoryError:
            return None
        self._budget.note_allocated(nbytes)
        return copy

    def replay(self, recipe: Recipe, compute: Stream, restore: Restore, *, exclude: SavedStorage) -> Recomputed:
        """Make room for a replay of `recipe`, without reclaiming `exclude`, and run it on `compute`."""
        storages = self._sources_of(recipe, compute, restore)
        needed = [exclude, *recipe.saved_sources]
        self._budget.make_room(recipe.peak_bytes, exclude=needed, is_planned=True)
        with self._context.metrics.timing_recomputation(compute):
            return self._run(recipe, storages, compute, exclude=needed)

    def _sources_of(self, recipe: Recipe, compute: Stream, restore: Restore) -> list[torch.UntypedStorage]:
        """Return the storages that `recipe` reads, on the device, in its order. Raises eager's error if one was written to."""
        self._budget.allocated_bytes()  # the model may have allocated since the last memory check
        storages = []
        for source in recipe.sources:
            storage = source.storage if source.claim is None else _there(source.claim.saved, compute, restore)
            assert storage is not None
            source.check(storage)
            storages.append(storage)
        return storages

    def _run(
        self, recipe: Recipe, storages: Sequence[torch.UntypedStorage], compute: Stream, *, exclude: Collection[SavedStorage]
    ) -> Recomputed:
        written_on = {
            stream for source in recipe.sources if (stream := source.written_on) is not None and stream is not compute
        }
        for stream in written_on:
            compute.wait(stream.record())  # `compute` must read finished writes
        with annotation("chameleon::recompute"), self._operators_of_ours(), self._budget.replaying():
            recomputed = self._budget.retry(partial(recipe.replay, storages), exclude=exclude)
        for stream in written_on:
            self._context.streams.join_all(stream)  # Note [Reclaim]: their memory is reused only after this read
        return recomputed

    def _restored(self, saved: SavedStorage, storage: torch.UntypedStorage, compute: Stream) -> None:
        if saved.form.original is not None:
            with self._budget.replaying():
                self.comparisons.add(saved.form.original, flat_bytes(storage))  # Note [Relied on], rule 3
        self._claims.move(saved, storage)
        saved.restored(compute)
        if self._context.streams.is_only(compute):
            saved.stay_on_device()  # its sources may be freed then; with several streams, a use may run on another

    def _count_uses(self, recipe: Recipe) -> None:
        """Count a use of each source. Drop each source that is held only for recipes and has no use to come."""
        for source in recipe.sources:
            if source.claim is None:
                continue
            saved = source.claim.saved
            source.last_swap_in = saved.uses.count(source.last_swap_in)
            if saved.is_held_for_recipes and saved.uses.left <= 0 and saved.state is State.RESTORED:
                saved.drop_used()

    @contextmanager
    def _operators_of_ours(self) -> Iterator[None]:
        """Context without the user's dispatch modes, which are for the user's operators. Only the device sees our operators."""
        if torch._C._len_torch_dispatch_stack() <= self._device.simulated:
            yield
            return
        with _disable_current_modes(), self._device.compute():
            yield


def _there(saved: SavedStorage, compute: Stream, restore: Restore) -> torch.UntypedStorage:
    """Return the storage of `saved` on the device. A running copy out continues, because the storage is only read."""
    if saved.state is State.SWAPPING_OUT and (storage := saved.device) is not None:
        return storage
    return restore(saved, compute)


def _sources_first(saved: SavedStorage) -> list[SavedStorage]:
    """Return `saved` and the dropped storages from which it is recomputed, each after its own sources."""
    order: list[SavedStorage] = []
    seen: set[int] = set()
    stack: list[tuple[SavedStorage, bool]] = [(saved, False)]
    while stack:
        one, sources_are_done = stack.pop()
        if sources_are_done:
            order.append(one)
            continue
        if id(one) in seen or one.form.recipe is None or one.state is not State.ON_HOST:
            continue
        seen.add(id(one))
        stack.append((one, True))
        stack.extend((source, False) for source in one.form.recipe.saved_sources)
    return order
