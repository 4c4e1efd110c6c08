"""What autograd holds instead of a saved tensor, and how the tensor is rebuilt from it.

    handle = KeptTensor(t)  |  SwappedView(claim, t)         # on_save; its life is the saved tensor's life: Note [Life]
    handle.check_version()                                    # on_use: eager's "modified by an inplace operation"
    SwappedView.rebuild(storage)                              # the same strides, offset, dtype, conj and neg bits

Note [Version]: installing hooks switches eager's in-place check off, so every handle makes it again. A detached alias whose
data was replaced by nothing keeps sharing the version counter of `t` and of all its views, and holds none of its memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from chameleon_mm.executor.stored import Claim


class VersionProbe:
    """The version counter of a tensor, without its memory, and what eager would say if it moved."""

    __slots__ = ("_alias", "_origin", "_shape", "_type", "expected")

    def __init__(self, t: Tensor) -> None:
        self.expected = t._version
        self._alias = t.detach()
        self._alias.data = _nothing(t)
        self._shape = list(t.shape)
        self._type = t.type()
        # The node itself would close a cycle (node -> saved tensor -> handle -> node), so only its words are kept.
        node = t.grad_fn
        self._origin = "" if node is None else f", which is output {t.output_nr} of {node.name()},"

    @property
    def moved(self) -> bool:
        return self._alias._version != self.expected

    def check(self) -> None:
        """Raise what eager raises when a saved tensor was written to since it was saved."""
        if self.moved:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self._type} {self._shape}]{self._origin} is at version {self._alias._version}; expected version "
                f"{self.expected} instead. {_hint()}"
            )


class KeptTensor:
    """A saved tensor that stays where it is. Leaves by reference; others detached, for their node must not keep itself."""

    __slots__ = ("_expected", "_origin", "tensor")

    def __init__(self, t: Tensor, *, by_reference: bool) -> None:
        self.tensor = t if by_reference or t.is_leaf else t.detach()
        self._expected = t._version
        node = t.grad_fn
        self._origin = "" if node is None else f", which is output {t.output_nr} of {node.name()},"

    def check_version(self) -> None:
        if self.tensor._version != self._expected:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.tensor.type()} {list(self.tensor.shape)}]{self._origin} is at version {self.tensor._version}; "
                f"expected version {self._expected} instead. {_hint()}"
            )


class SwappedView:
    """One saved tensor whose storage moves: the storage's record, the geometry of this view, its version."""

    __slots__ = ("_conj", "_dtype", "_neg", "_offset", "_shape", "_stride", "claim", "probe", "round")

    def __init__(self, claim: Claim, t: Tensor) -> None:
        self.claim = claim
        self._dtype = t.dtype
        self._shape = t.shape
        self._stride = t.stride()
        self._offset = t.storage_offset()
        self._conj = t.is_conj()
        self._neg = t.is_neg()
        self.probe = VersionProbe(t)
        self.round = -1
        """The storage's `round` in which this view was last used; the storage counts down who is still to come."""

    def check_version(self) -> None:
        self.probe.check()

    def rebuild(self, storage: torch.UntypedStorage) -> Tensor:
        """The view over `storage`, exactly as it was saved."""
        flat = torch.empty(0, dtype=self._dtype, device=storage.device)
        view = flat.set_(storage, self._offset, self._shape, self._stride)
        if self._conj:
            view = view.conj()
        return view._neg_view() if self._neg else view


def flat_bytes(storage: torch.UntypedStorage) -> Tensor:
    """A flat uint8 tensor over all of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _nothing(t: Tensor) -> Tensor:
    return torch.empty(0, dtype=t.dtype, device=t.device)


def _hint() -> str:
    if torch.is_anomaly_enabled():
        return (
            "Hint: the backtrace further above shows the operation that failed to compute its gradient. The variable in "
            "question was changed in there or anywhere later. Good luck!"
        )
    return (
        "Hint: enable anomaly detection to find the operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True)."
    )
