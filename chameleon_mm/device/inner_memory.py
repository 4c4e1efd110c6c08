"""Device memory that operators take for themselves and give back before they end, by formula, for where none can be measured.

    inner_bytes(call)      # besides its inputs and results; 0 for an operator that has no formula here, or odd tensors

On a GPU the recorder measures it for every operator. On the simulator, whose kernels are a CPU's, and under fake tensors there
is nothing to measure: what a CPU kernel takes says nothing of a GPU's. So this is data, read in torch's sources, of operators
that take so much of it that it decides peaks. Not here: convolutions and matrix products, whose libraries choose a workspace
when they run; sorting and scanning, whose scratch memory is cub's; and whatever takes a few KiB.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from chameleon_mm.device.op_call import OpCall
from chameleon_mm.units import allocated_size, round_up

_FOREACH_CHUNK = 65_536
"""Elements that a block of a `_foreach` kernel takes: kChunkSize of aten/src/ATen/native/cuda/MultiTensorApply.cuh."""

_UNSORTED_INDICES = 3072
"""Number of indices up to which an embedding's backward adds up without sorting them."""

_ROWS_PER_PARTIAL_SUM = 10
"""NROWS_PER_THREAD of aten/src/ATen/native/cuda/EmbeddingBackwardKernel.cu."""


def inner_bytes(call: OpCall) -> int:
    """Bytes that a GPU's allocator counts at most while `call` runs, its inputs and results left out."""
    formula = _FORMULAS.get(call.facts.name)
    if formula is None or call.func.namespace != "aten":
        return 0
    return call.ask(lambda *args, **kwargs: sum(allocated_size(int(nbytes)) for nbytes in formula(*args, **kwargs)))


def _safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> list[int]:
    """Bytes of a bool for each element, whether it is -inf; a bool for each row, whether all are; the 0 that fills such rows.
    From aten/src/ATen/native/transformers/attention.cpp; the CUDA build's allocator counts the same."""
    size = x.size(dim) if x.dim() else 1
    return [x.numel(), x.numel() // size if size else 0, (x.dtype if dtype is None else dtype).itemsize]


def _foreach_norm(tensors: list[Tensor], *_: object, **__: object) -> list[int]:
    """Bytes of a partial norm for each chunk of the longest tensor, and as many for every other. From
    aten/src/ATen/native/cuda/ForeachReduceOp.cu."""
    chunks = max(-(-t.numel() // _FOREACH_CHUNK) for t in tensors)
    return [len(tensors) * chunks * _summing_dtype(tensors[0].dtype).itemsize]


def _embedding_dense_backward(
    grad: Tensor, indices: Tensor, num_weights: int, _padding_idx: int, scale_grad_by_freq: bool, **_: object
) -> list[int]:
    """Bytes of the sorted indices and where they come from, with what sorting takes; their segments; and a row of the gradient,
    in the dtype of sums, for each partial sum. From aten/src/ATen/native/cuda/Embedding.cu and EmbeddingBackwardKernel.cu."""
    n = indices.numel()
    if n <= _UNSORTED_INDICES and not scale_grad_by_freq:
        return []
    segments = min(n, num_weights)
    partial_sums = n // _ROWS_PER_PARTIAL_SUM + segments
    of_indices = [*[n] * (6 if scale_grad_by_freq else 5), n, segments, segments, partial_sums]
    rows = partial_sums * grad.size(-1) * _summing_dtype(grad.dtype).itemsize
    return [*(count * indices.dtype.itemsize for count in of_indices), rows]


def _flash_attention_backward(
    _grad: Tensor, query: Tensor, key: Tensor, *_: object, attn_mask: Tensor | None = None, **__: object
) -> list[int]:
    """Bytes of the query's gradient in float32 and a number for each row, the rows rounded up to 128 and their length to 32 or
    64; where keys have fewer heads, their gradients for every head. Only in half precision and without a mask: others run
    another kernel. From `mha_bwd` in aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp."""
    if query.dtype not in (torch.float16, torch.bfloat16) or attn_mask is not None:
        return []
    batch, heads, rows, width = query.shape
    rows, rounded_width = round_up(rows, 128), round_up(width, 32 if width <= 128 else 64)
    expanded = batch * heads * key.size(2) * width * key.dtype.itemsize if key.size(1) != heads else 0
    return [batch * heads * rows * rounded_width * 4, batch * heads * rows * 4, expanded, expanded]


def _summing_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


_FORMULAS: dict[str, Callable[..., list[int]]] = {
    "_safe_softmax": _safe_softmax,
    "_foreach_norm": _foreach_norm,
    "embedding_dense_backward": _embedding_dense_backward,
    # Attention by its name on a CPU; the sizes are the GPU's.
    "_scaled_dot_product_flash_attention_for_cpu_backward": _flash_attention_backward,
}
"""Sizes in bytes of what each operator allocates inside, by its name; called with the operator's own arguments."""
