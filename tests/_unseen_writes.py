"""Which writes of a random program change a tensor that is saved, behind autograd's back, before backward uses it.

    left_out = unseen_writes(program, device)     # numbers of instructions; without them no such write matters

A write through `.data`, or through another tensor with a version counter of its own, is not noticed by autograd: plain PyTorch
goes on with the new bytes, and a copy that was taken before has the old ones. That is a documented limit, and the only
difference that programs may not have. Writes BEFORE a tensor is saved are none, whatever was saved of that storage earlier, nor
are writes to what is never used, nor to a leaf, which stays where it is.

Found on plain tensors, with hooks that hand back what they were given and make autograd's own check of version counters, which
hooks switch off.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from tests._random_programs import WRITING, Instruction, bits, run


class Saved:
    """What autograd holds for a saved tensor: the tensor itself, without its node, and what its bytes were."""

    def __init__(self, t: Tensor) -> None:
        self.t = t.detach()  # same storage, same version counter
        self.version = t._version
        self.stays = t.is_leaf and t.requires_grad
        self.raw: bytes | None = None
        """Once the instruction that saved it is over: its operator may fill what it saved after saving it."""
        self.written_by: int | None = None
        """The first instruction that changed its bytes, and not its version counter."""

    @property
    def changed(self) -> bool:
        """Whether its bytes are others, and its version counter is not."""
        return self.raw is not None and self.t._version == self.version and bits(self.t) != self.raw


class Watch:
    """Hooks that can be entered again and again, and see what is done to saved tensors between instructions."""

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
    """One at a time, because what is left out decides what the others do."""
    left_out: frozenset[int] = frozenset()
    while True:
        watch = Watch()
        run(program, device, watch, left_out=left_out, after=watch.after)
        if watch.harmful is None:
            return left_out
        assert watch.harmful not in left_out
        left_out |= {watch.harmful}
