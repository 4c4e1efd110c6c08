"""Copies of tensors in host memory. Each is taken from, and written back to, the tensor's place: the device or the host.

    copy = copier.copy(t)              # queued on compute, or done by the host
    copier.put_back(copy, t)           # in place
    t = copier.made_from(copy)         # as a new tensor
    copy.host_tensor()                 # for a checkpoint

Note [Snapshot]: copies between the device and a snapshot run on the compute stream, after the tensor's last write and before
its next. Any code may write a parameter between two steps unseen, so compute must not run during such a copy. The host
continues, and waits for the copy only before it reads the block.
"""

from __future__ import annotations

import copy as copying
from collections.abc import Iterable
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from chameleon_mm.pool.block import BlockView, PinnedBlock, as_tensor
from chameleon_mm.pool.pool import host_block
from chameleon_mm.record.calls import has_plain_storage
from chameleon_mm.state.hosted import Home, HostedStorage

if TYPE_CHECKING:
    from chameleon_mm.state.optimizer_swap import OptimizerSwap
    from chameleon_mm.state.parameter_swap import ParameterSwap

# --- Contiguous bytes of a tensor, for copies and comparisons


def dense_bytes(t: Tensor) -> Tensor | None:
    """Return a flat uint8 tensor over the bytes of `t`, with its own version counter.

    None if `t` is not just those bytes: it has gaps or overlaps, wraps other tensors, is lazily conjugated, or is not strided.
    """
    # A parameter's `.grad` and registered buffers may be of any subclass.
    if type(t) is not Tensor or not is_plain(t) or not is_dense(t.shape, t.stride()):
        return None
    size = t.element_size()
    with torch.no_grad():
        flat = torch.empty(0, dtype=torch.uint8, device=t.device)
        return flat.set_(t.untyped_storage(), t.storage_offset() * size, (t.numel() * size,), (1,))


def is_plain(t: Tensor) -> bool:
    """True if the storage of `t` has exactly its elements, by its strides."""
    return has_plain_storage(t) and not (t.is_conj() or t.is_neg())


def is_dense(shape: Iterable[int], strides: Iterable[int]) -> bool:
    """True if each element has its own memory, without gaps. Also true without elements."""
    shape = tuple(shape)
    if 0 in shape:
        return True
    expected = 1
    for stride, length in sorted((stride, length) for length, stride in zip(shape, strides, strict=True) if length != 1):
        if stride != expected:
            return False
        expected *= length
    return True


class Form(NamedTuple):
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.shape} of {str(self.dtype).removeprefix('torch.')} with strides {self.stride}"


def form_of(t: Tensor) -> Form:
    return Form(tuple(t.shape), tuple(t.stride()), t.dtype)


def is_copyable(t: object) -> TypeGuard[Tensor]:
    """True if `t` is just elements in memory, so that a `TensorCopy` can represent it."""
    return isinstance(t, Tensor) and type(t) in (Tensor, nn.Parameter) and not t.is_meta and is_plain(t)


class TensorCopy:
    def __init__(self, form: Form, device: torch.device, block: PinnedBlock) -> None:
        self.form, self.device, self.block = form, device, block
        self.nbytes = block.nbytes
        is_like_it = is_dense(form.shape, form.stride)
        self.stride = form.stride if is_like_it else torch.empty(form.shape, device="meta").stride()
        """Strides in the block: the tensor's own strides if it has no gaps."""

    def is_like(self, t: object) -> TypeGuard[Tensor]:
        """True if the copy may be written to `t`, a tensor of the same form and device."""
        return is_copyable(t) and form_of(t) == self.form and t.device == self.device

    def host_tensor(self) -> Tensor:
        """Return the complete copy as a tensor with its own storage over the block's memory. Release the block only after all
        readers are done. The tensor's lifetime does not show that, because saving leaves reference cycles."""
        if not self.nbytes:
            return torch.empty_strided(self.form.shape, self.stride, dtype=self.form.dtype)
        view = BlockView(self.block, self.block.buffer.data_ptr(), self.nbytes)
        return as_tensor(view, (self.nbytes // self.form.dtype.itemsize,), self.form.dtype).as_strided(
            self.form.shape, self.stride
        )


class _OddTensor(NamedTuple):
    """Copy in pageable host memory of a tensor of another kind, such as a sparse one, or of a tensor inside other values."""

    copy: Tensor
    device: torch.device


def value_to_host(value: Any) -> Any:
    """Copy any value, with its tensors in pageable host memory. The host waits for their copies."""

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return _OddTensor(leaf.detach().to("cpu", copy=True), leaf.device)
        return copying.deepcopy(leaf)

    return tree_map(copied, value)


def value_for_checkpoint(value: Any) -> Any:
    """Convert a result of `value_to_host` to the form for a checkpoint."""
    return _map_odd(lambda odd: odd.copy, value)


def value_from_host(value: Any, current: Any = None) -> Any:
    """Convert a result of `value_to_host` back, as a new value. If `current` is a tensor of equal form, write to it instead."""
    if isinstance(value, _OddTensor):
        odd, t = value.copy, current
        alike = isinstance(t, Tensor) and t.device == value.device and t.layout is odd.layout is torch.strided
        if alike and form_of(t) == form_of(odd):
            return t.copy_(odd)
    return _map_odd(lambda odd: odd.copy.to(odd.device, copy=True), value)


def _map_odd(change: Any, value: Any) -> Any:
    return tree_map(
        lambda leaf: change(leaf) if isinstance(leaf, _OddTensor) else copying.deepcopy(leaf),
        value,
        is_leaf=lambda leaf: isinstance(leaf, _OddTensor),
    )


class Copier:
    """Copies the tensors of one session to the host and back, one at a time.

    Use it inside `torch._C.DisableTorchFunction()`, so that torch function modes do not bring its arguments to the device, and
    inside `torch.no_grad()`.
    """

    def __init__(self, home: Home, parameters: ParameterSwap | None, state: OptimizerSwap | None) -> None:
        """`parameters`, `state`: what swaps those of the model and the optimizer; None: they stay."""
        self._home, self._pool, self._parameters, self._state = home, home.context.pool, parameters, state

    def copy_value(self, value: Any, copies: list[TensorCopy]) -> Any:
        """Copy a tensor, and add the copy to `copies`. For any other value, return the result of `value_to_host`. Raises as
        `copy` does."""
        if not is_copyable(value):
            return value_to_host(value)
        copies.append(copy := self.copy(value))
        return copy

    def copy(self, t: Tensor) -> TensorCopy:
        """Copy `t`. Raises `HostMemoryExhausted` if there is no host memory, pinned or pageable."""
        form = form_of(t)
        nbytes = form.dtype.itemsize * prod(form.shape)
        hosted, start = self._place(t)
        with self._home.entered() as compute:
            copy = TensorCopy(form, t.device, host_block(self._pool, nbytes, compute))
            if not nbytes:
                return copy
            if hosted is not None:
                hosted.copy_to(copy.block, start, compute)
                return copy
            source = dense_bytes(t.detach())
            if source is not None and self._home.device.owns(t):
                compute.copy(copy.block.buffer, source)
            else:
                copy.block.synchronize()  # Note [Host block]: the host itself may write the block
                _typed(copy).copy_(t.detach())
            return copy

    def put_back(self, copy: TensorCopy, t: Tensor) -> None:
        """Write the contents of `copy` to `t`, a tensor of equal form. The host must have seen the copy complete."""
        self.fill(copy, t)
        if not t.is_inference():
            torch.autograd.graph.increment_version(t)  # a graph that saved `t` must raise eager's error

    def fill(self, copy: TensorCopy, t: Tensor) -> None:
        """Write as `put_back` does, without increasing the version counter of `t`."""
        hosted, start = self._place(t)
        with self._home.entered() as compute:
            if not copy.nbytes:
                return
            if hosted is not None:
                hosted.copy_from(copy.block, start, compute)
                return
            destination = dense_bytes(t.detach())
            if destination is not None and self._home.device.owns(t):
                compute.copy(destination, copy.block.buffer)
            elif 0 not in t.stride():  # one that repeats its elements cannot be written
                t.detach().copy_(_typed(copy))

    def made_from(self, copy: TensorCopy) -> Tensor:
        """Return a new tensor with the form and contents of `copy`. Raises `torch.OutOfMemoryError`."""
        form, stride = copy.form, copy.stride
        t = self._home.budget.retry(lambda: torch.empty_strided(form.shape, stride, dtype=form.dtype, device=copy.device))
        self.put_back(copy, t)
        return t

    def _place(self, t: Tensor) -> tuple[HostedStorage | None, int]:
        """Return the hosted storage of `t`, and the byte in it at which `t` begins; None: `t` is not hosted."""
        hosted = None if self._parameters is None else self._parameters.find(t)
        if hosted is not None and self._parameters is not None and not is_dense(t.shape, t.stride()):
            self._parameters.use([hosted], "a snapshot")
            hosted = None
        elif hosted is None and self._state is not None and is_plain(t):
            hosted = self._state.home.find(t.untyped_storage())
        return hosted, int(t.storage_offset()) * t.dtype.itemsize


def _typed(copy: TensorCopy) -> Tensor:
    """Return the block as a tensor of the copy's form. The tensor does not hold the block."""
    return copy.block.buffer.view(copy.form.dtype).as_strided(copy.form.shape, copy.stride)
