"""Compares what recipes made with the originals: rule 3 of Note [Relied on], `saved/source.py`.

    slot = comparisons.begin(buffer)              # as an original is dropped, or a proof of its recipe is due: its checksum
    comparisons.add(original, buffer)             # as it was recomputed: the checksum of that
    comparisons.add(original, buffer, is_proof=True)    # the same for a proof: the original is used
    comparisons.at_the_end(settle)                # at a use: before this `backward` returns,
    errors = comparisons.settle(task)             # the host compares all of it

No kernel waits for the host: it reads checksums once at the end of each backward, after the last of them was taken.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from chameleon_mm.errors import RecomputeMismatch
from chameleon_mm.saved.checksums import Checksums, ChecksumSlot
from chameleon_mm.saved.metrics import Totals
from chameleon_mm.saved.recomputed_form import Original

_log = logging.getLogger(__name__)


class _Pair(NamedTuple):
    original: Original
    recomputed: ChecksumSlot
    task: int
    """Number of the backward in which it was made; -1: in none."""
    is_proof: bool
    """True if the original was used, and not what was recomputed."""


class Comparisons:
    """Comparisons of one executor. Not thread-safe: the executor holds its lock."""

    def __init__(self, checksums: Checksums, totals: Totals) -> None:
        self._checksums = checksums
        self._totals = totals
        self.pending: list[_Pair] = []
        """Pairs that the host has not compared. Others only read it."""
        self._failed = False
        self._ends: set[int] = set()
        """Backwards, by autograd's number of each, at whose end the pairs are compared."""

    def begin(self, buffer: Tensor) -> ChecksumSlot:
        """Take the checksum of an original, a flat uint8 tensor, on the current stream. Raises `torch.OutOfMemoryError`."""
        return self._checksums.start(buffer)

    def add(self, original: Original, buffer: Tensor, *, is_proof: bool = False) -> None:
        """Take the checksum of what was made in place of an original, on the current stream, and note the pair."""
        self.pending.append(_Pair(original, self._checksums.start(buffer), torch._C._current_graph_task_id(), is_proof))

    def settle(self, task: int | None) -> list[RecomputeMismatch]:
        """Compare the pairs of that backward, and those of none; all pairs for None. The host waits until the latest checksum
        was taken. All recipes that made other bits are banned. Returns the error of the first of them whose result was used."""
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
        """Have `settle` called with the number of the backward that runs on this thread, before that returns; outside of one,
        now. Not under the lock.

        It is called behind the callbacks of others, such as DDP's: an error of one leaves those behind it out.
        """
        task: int = torch._C._current_graph_task_id()
        if task < 0:
            settle(task)
        elif task not in self._ends:
            self._ends.add(task)
            queue = torch.autograd.Variable._execution_engine.queue_callback
            queue(lambda: queue(partial(settle, task)))

    def end_step(self) -> None:
        """Free the device memory of checksums that are not held: a later step may follow a plan without any."""
        if not self.pending:
            self._checksums.release_unused()

    def begin_step(self) -> bool:
        """Forget the pairs of a step that failed. Returns whether a recipe was banned since the last step began."""
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
