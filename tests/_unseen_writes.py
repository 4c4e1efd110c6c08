"""Find the writes of a random program that change a saved tensor, unseen by autograd, before backward uses it.

    left_out = unseen_writes(program, device)     # numbers of instructions; without them no such write matters

Autograd does not notice a write through `.data`, or through another tensor with its own version counter. Plain PyTorch
continues with the new bytes; a copy taken before has the old ones. This documented limit is the only difference that programs
may have. Three kinds of writes do not count: writes before a tensor is saved (whatever was saved of that storage earlier),
writes to a tensor that is never used, and writes to a leaf, which stays on the device.

The search runs on plain tensors, with hooks that return their argument and make autograd's own check of version counters, which
hooks disable.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from tests._random_programs import WRITING, Instruction, bits, run


class Saved:
    """Saved tensor as autograd holds it: the tensor itself, without its node, and its bytes when saved."""

    def __init__(self, t: Tensor) -> None:
        self.t = t.detach()  # same storage, same version counter
        self.version = t._version
        self.stays = t.is_leaf and t.requires_grad
        self.raw: bytes | None = None
        """Bytes once the saving instruction is over: its operator may fill the tensor after saving it."""
        self.written_by: int | None = None
        """The first instruction that changed its bytes, and not its version counter."""

    @property
    def changed(self) -> bool:
        """True if its bytes changed and its version counter did not."""
        return self.raw is not None and self.t._version == self.version and bits(self.t) != self.raw


class Watch:
    """Reusable hooks that record changes of saved tensors between instructions."""

    def __init__(self) -> None:
        self.harmful: int | None = None
        """The write that the first use of changed bytes goes back to."""
        self._harmed_now = False
        self._saved: weakref.WeakSet[Saved] = weakref.WeakSet()
        self._new: list[Saved] = []
        self._hooks: list[torch.autograd.graph.saved_tensors_hooks] = []

    def __enter__(self) -> None:
        hooks = torch.autograd.graph.saved_tensors_hooks(self._save, self._use)
        hooks.__enter__()
        self._hooks.append(hooks)

    def __exit__(self, *error: object) -> None:
        self._hooks.pop().__exit__(*error)

    def after(self, number: int, name: str) -> None:
        if name in WRITING:
            for saved in list(self._saved):
                if saved.written_by is None and saved.changed:
                    saved.written_by = number
        for saved in self._new:
            saved.raw = bits(saved.t)
        self._new.clear()
        if self._harmed_now and self.harmful is None:
            self.harmful = number

    def _save(self, t: Tensor) -> Saved:
        saved = Saved(t)
        if not saved.stays:
            self._saved.add(saved)
            self._new.append(saved)
        return saved

    def _use(self, saved: Saved) -> Tensor:
        if saved.t._version != saved.version:
            raise RuntimeError("modified by an inplace operation")
        if self.harmful is None and not self._harmed_now:
            self.harmful = saved.written_by
            self._harmed_now = saved.written_by is None and saved.changed  # by the instruction that uses it
        return saved.t


def unseen_writes(program: list[Instruction], device: torch.device) -> frozenset[int]:
    """Find the writes one at a time: each one left out changes what the others do."""
    left_out: frozenset[int] = frozenset()
    while True:
        watch = Watch()
        run(program, device, watch, left_out=left_out, after=watch.after)
        if watch.harmful is None:
            return left_out
        assert watch.harmful not in left_out
        left_out |= {watch.harmful}
