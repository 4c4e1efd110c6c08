"""The sources of a recipe, and the rule that says what a recipe may rely on: Note [Relied on].

A recipe runs operators of forward again at the first use of a storage that was dropped. Its result has the right bits only if
everything that the operators read has the bytes of the first time. Three rules see to that. A storage is dropped only if rule 1
or rule 2 holds for each source of its recipe. Rule 3 holds for each result.

1. ALONE. Only the session can reach the source, from the drop until the replay.

   True if the use count of the storage says that no tensor but the session's holds it; if its bytes are on the host; or if the
   recipe has a copy of its own, which it makes of inputs of up to 64 KiB. Until then the drop waits.

       h = block(x)              # autograd does not save h: the session holds it, for y
       y = h.float()             # y waits: the model still has h, and may write to it
       x = h + f(y)
       del h                     # y is dropped at the next hook

2. RELIED ON. Autograd has a handle for the source, and checks its version: a write raises eager's error, in both.

   This ends with the last handle, and when a node that is not torch's own is given the tensor, since such a node may write to
   it. If somebody else holds the storage then, what was made from it and dropped is recomputed at that moment.

       feature = encoder(x)                    # made from the encoder's weight, which autograd saves; dropped
       loss, other = f(feature), g(feature.detach())
       loss.backward()                         # lets go of the weight: feature is recomputed now
       optimizer.step()                        # writes the weight
       other.backward()                        # uses feature

3. COMPARED. The result is compared with what was dropped, in the same step, by a checksum of 64 bits (`kernels/checksum.py`).

   The first time at its place in a step nothing is dropped: the original is used, and the recipe is tried beside it (a proof).
   After that the host compares both checksums before `backward` returns. It raises `RecomputeMismatch` if they differ, and that
   recipe is not used again.

       h = block(x); y = h.float(); kernel(h.data_ptr())       # in each step: the proof fails, y is never dropped
       if step % 4 == 3: kernel(h.data_ptr())                  # in some steps: RecomputeMismatch in those

One case is left to eager's error: a write to what autograd relies on, while a node that saved it is still to run, if no
backward comes to that node after all. Eager never checks it there, and the recipe cannot know.

Rules 1 and 2 are decided by counters and use counts, before the drop. So writes by torch's operators, in forward, in backward
or on another thread, change no bit and raise no error. Rule 3 finds what no counter shows: a write through a pointer or
`.data`, an extension with a wrong schema, an operator that is not reproducible. It compares results and not sources, because
such a write may also hit a tensor between two operators of a recipe, or the result itself before autograd saves it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from chameleon_mm.device import Stream
from chameleon_mm.device.holders import held_alone
from chameleon_mm.profiler.calls import Relied
from chameleon_mm.profiler.light import HEAP_TYPE
from chameleon_mm.saved.version import SavedBytes

if TYPE_CHECKING:
    from chameleon_mm.saved.claims import Claim


_NO_NODE: type = type(None)


def node_is_torchs() -> bool:
    """True if the node of autograd that runs on this thread is one of torch's own, which writes to nothing that it saved. False
    outside of a backward, for a function in Python, and for an extension's node in C++."""
    kind: type = type(torch._C._current_autograd_node())  # of None outside of a backward, whatever its stub says
    return kind is not _NO_NODE and not kind.__flags__ & HEAP_TYPE and kind.__name__ != "CppFunction"


class Source:
    """A storage that a recipe is given: a claim's, or one that it holds itself."""

    __slots__ = ("_nbytes", "_probe", "_stream", "claim", "last_swap_in", "relied", "storage")

    def __init__(
        self,
        *,
        nbytes: int,
        relied: Relied | None,
        claim: Claim | None = None,
        storage: torch.UntypedStorage | None = None,
        probe: SavedBytes | None = None,
        stream: Stream | None = None,
    ) -> None:
        """`relied`: what rests on its bytes; None: it is a copy of the recipe's own. `probe`: has its version counter.
        `stream`: the one on which a storage that it holds itself was written."""
        self.claim = claim
        self.storage = storage
        self.relied = relied
        self._stream = stream
        self.last_swap_in = -1
        """Swap-in of the claim's storage for which the recipe used it last."""
        self._nbytes = nbytes
        self._probe = probe

    @property
    def written_on(self) -> Stream | None:
        """The stream that its bytes are ordered on."""
        return self._stream if self.claim is None else self.claim.saved.slot.alloc_stream

    @property
    def is_alone(self) -> bool:
        """Rule 1: only the session can reach its bytes."""
        if self.relied is None:
            return True
        if self.claim is not None:
            return self.claim.saved.is_private
        return self.storage is not None and held_alone(self, 0 if self._probe is None else 1)

    @property
    def is_relied_on(self) -> bool:
        """Rule 2: autograd has a handle for its bytes that it has not used."""
        return self.relied is not None and self.relied.by_autograd

    @property
    def is_secure(self) -> bool:
        """True if no operator of torch's can change its bytes before a replay without an error of eager's."""
        return self.is_relied_on or self.is_alone

    def check(self, storage: torch.UntypedStorage) -> None:
        """Raise what eager raises for a saved tensor that was written to, where `storage`, its bytes now, may have been and
        eager checks them too."""
        saved = None if self.claim is None else self.claim.saved
        if self._probe is not None and self.is_relied_on and (saved is None or saved.slot.storage is storage):
            self._probe.check()
        if storage.nbytes() != self._nbytes:
            raise RuntimeError(
                f"a saved tensor that is recomputed: expected an input of {self._nbytes} bytes, as it was in forward, got one "
                f"of {storage.nbytes()}: it was resized since; make the session SwapSession(recompute=False)"
            )


class Reliance:
    """Watches autograd's handles of one source, for rule 2. `ended(self)` is called once the last of them is gone: on any
    thread, in the middle of anything, so it must raise nothing and wait for nothing.

    The recipes that rest on the source hold it: it ends with them.
    """

    __slots__ = ("__weakref__", "_ended", "_handles", "source")

    def __init__(self, source: Source, relied: Relied, ended: Callable[[Reliance], None]) -> None:
        self.source = source
        self._ended = ended
        self._handles: list[weakref.ref[object]] = []
        for ref in relied.handles:
            if (handle := ref()) is not None:
                self.watch(handle)

    def watch(self, handle: object) -> None:
        """Watch one more handle."""
        me = weakref.ref(self)

        def gone(ref: weakref.ref[object]) -> None:
            it = me()
            if it is not None and not it.source.is_relied_on:
                it._ended(it)

        self._handles.append(weakref.ref(handle, gone))
