"""Sparse and nested tensors: their operators run the CPU's kernels on the indices and values where they are.

Operators that only look at a tensor's parts, or put parts together, stay torch's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

KEYS = {"SparseCUDA": "SparseCPU", "SparseCsrCUDA": "SparseCsrCPU"}
"""Key of the CPU for each of the device."""

_STAYS = {
    "_coalesced_", "_dimI", "_dimV", "_indices", "_nnz", "_sparse_coo_tensor_with_dims",
    "_sparse_coo_tensor_with_dims_and_tensors", "_values", "ccol_indices", "clone", "col_indices", "copy_",
    "copy_sparse_to_sparse_", "crow_indices", "dense_dim", "empty", "empty_like", "indices", "is_coalesced", "resize_",
    "resize_as_sparse_", "row_indices", "select", "sparse_dim", "sparse_resize_", "sparse_resize_and_clear_", "values",
}  # fmt: skip

_NESTED = (
    "_native_multi_head_attention", "_nested_from_padded_and_nested_example", "_nested_tensor_softmax_with_shape",
    "_transform_bias_rescale_qkv", "_transformer_encoder_layer_fwd", "native_layer_norm", "to_padded_tensor",
)  # fmt: skip
"""Operators on nested tensors that have a kernel of their own. The others run others on the buffer."""


def operators() -> Iterable[tuple[Any, str]]:
    """Operators on such tensors that a CPU has, too, each with the key that it is registered for."""
    for key, of_cpu in KEYS.items():
        known = set(torch._C._dispatch_get_registrations_for_dispatch_key(of_cpu))
        for name in torch._C._dispatch_get_registrations_for_dispatch_key(key):
            packet, _, overload = name.removeprefix("aten::").partition(".")
            if name.startswith("aten::") and name in known and packet not in _STAYS:
                op = getattr(getattr(torch.ops.aten, packet), overload or "default")
                if not op._schema.is_mutable:  # operators that write stay torch's own: they consist of others
                    yield op, key
    for packet in _NESTED:
        yield getattr(torch.ops.aten, packet).default, "NestedTensorCUDA"
