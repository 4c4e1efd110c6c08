"""Device memory as the host sees it: CPU tensors on the same bytes, and which bytes a tensor covers.

view = HostView(); low = view.of(cuda_tensor)      no copy; tensors that share a storage share it here, too
spans(cuda_tensor)                                 [(address, bytes), ...], exact
on_device(cpu_result, device, stream)              a new CUDA tensor in the same layout
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from tests.cuda_stand_in import control, library

CPU = torch.device("cpu")

MOST_ROWS = 64
"""Maximum number of pieces reported to the runtime for a tensor with gaps. One with more is counted, not reported."""

HIDES_WRITES = control.mode() != "threads"
"""True if other streams read 0xff from an operator's output until they wait for its stream."""

unchecked = 0
"""Number of operator arguments that were not reported."""


def in_place(storage: torch.UntypedStorage) -> Any:
    """Return a CPU storage on the same bytes. It does not keep them."""
    size = storage.nbytes()
    address = storage.data_ptr()
    if not size or not address:
        return torch.UntypedStorage(0)
    return torch._C._construct_storage_from_data_pointer(address, CPU, size)


class HostView:
    """CPU tensors that stand for the CUDA tensors of one operator."""

    def __init__(self, storage_of: Callable[[torch.UntypedStorage], torch.UntypedStorage] = in_place) -> None:
        self.storage_of = storage_of
        self.storages: dict[int, torch.UntypedStorage] = {}

    def of(self, tensor: Tensor) -> Tensor:
        if not tensor.is_cuda:
            return tensor
        if tensor.layout is not torch.strided or tensor.is_nested:
            return assembled(tensor, [self.of(part) for part in parts(tensor)])
        own = tensor.untyped_storage()
        storage = self.storages.get(own._cdata)
        if storage is None:
            storage = self.storages[own._cdata] = self.storage_of(own)
        low = torch.empty(0, dtype=tensor.dtype, device="cpu")  # independent of the default device
        low = low.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
        if tensor.is_conj():
            low = low.conj()
        return torch._neg_view(low) if tensor.is_neg() else low


def on_device(result: Tensor, device: torch.device, stream: int, what: bytes) -> Tensor:
    """Return a new tensor of the device with the values and layout of `result`."""
    if result.layout is not torch.strided or result.is_nested:
        return assembled(result, [on_device(part, device, stream, what) for part in parts(result)])
    made = torch.empty_strided(result.size(), result.stride(), dtype=result.dtype, device=device)
    if result.numel():
        # The block's earlier owner may be another host thread's tensor, freed after a wait that this stream got just now.
        library.begin(stream)
        report(stream, made, library.WRITE, what)
        HostView().of(made).copy_(result)
    return made


def spans(tensor: Tensor) -> list[tuple[int, int]] | None:
    """Address and size of each run of bytes that the tensor covers; None if there are more than `MOST_ROWS`."""
    count = tensor.numel()
    if not count:
        return []
    start, size = tensor.data_ptr(), tensor.element_size()
    if tensor.is_contiguous():
        return [(start, count * size)]
    # From the innermost dimension out: dimensions that continue the run make it longer, the others repeat it.
    run = 1
    repeats: list[tuple[int, int]] = []
    for n, stride in sorted(zip(tensor.size(), tensor.stride(), strict=True), key=lambda dimension: dimension[1]):
        if n == 1 or stride == 0:
            continue
        if stride <= run and not repeats:
            run += (n - 1) * stride
        else:
            repeats.append((n, stride))
    starts = [0]
    for n, stride in repeats:
        if n * len(starts) > MOST_ROWS:
            return None
        starts = [at + i * stride for i in range(n) for at in starts]
    return [(start + at * size, run * size) for at in starts]


def report(stream: int, tensor: Tensor, kind: int, what: bytes) -> None:
    """Report to the runtime that an operator on `stream` reads or writes the tensor; `kind` as in `library`."""
    global unchecked  # noqa: PLW0603 - a statistic of the process
    if tensor.layout is not torch.strided or tensor.is_nested:
        for part in parts(tensor):
            report(stream, part, kind, what)
        return
    if tensor.is_contiguous():  # nearly all are
        if size := tensor.numel() * tensor.element_size():
            library.access(stream, tensor.data_ptr(), size, kind, what)
        return
    covered = spans(tensor)
    if covered is None:
        unchecked += 1
        return
    for address, size in covered:
        library.access(stream, address, size, kind, what)


def parts(tensor: Tensor) -> list[Tensor]:
    """Strided tensors that a sparse or nested one consists of."""
    if tensor.is_nested:
        return [tensor.values()]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]


def assembled(like: Tensor, of: list[Tensor]) -> Tensor:
    """A sparse or nested tensor of these parts, in the layout of another."""
    made: Tensor
    if like.is_nested:
        sizes, strides, offsets = (
            like._nested_tensor_size(),
            like._nested_tensor_strides(),
            like._nested_tensor_storage_offsets(),
        )
        made = torch._nested_view_from_buffer(of[0], sizes, strides, offsets)
        return made
    if like.layout is torch.sparse_coo:
        made = torch.ops.aten._sparse_coo_tensor_unsafe(*of, like.size())
        return made._coalesced_(like.is_coalesced())
    made = torch.ops.aten._sparse_compressed_tensor_unsafe(
        *of, like.size(), dtype=like.dtype, layout=like.layout, device=of[-1].device
    )
    return made


def hide(stream: int, written: Iterable[Tensor]) -> None:
    """Hide the output of an operator of `stream` from other streams until they are ordered after it."""
    if not HIDES_WRITES:
        return
    for tensor in written:
        for part in parts(tensor):
            for address, size in spans(part) or ():
                library.wrote(stream, address, size)
