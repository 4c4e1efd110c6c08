"""Operators that run as the operators that they are made of: torch's own rule, asked of its table of kernels.

    composite_on("aten::matmul", "cpu")           no dense kernel of the CPU's own: torch runs the composite one
    composite_on("aten::silu_backward", "cpu")    has one, and a composite kernel beside it: runs as it is
    own_kernel_for("aten::matmul", tensors)       nested tensors have a kernel of their own where dense ones have none

Below autograd torch runs the first kernel that there is of: the device's own, CompositeExplicitAutogradNonFunctional,
CompositeExplicitAutograd, CompositeImplicitAutograd. Only the last is made of operators that autograd sees, too. Above, at
autograd's keys, it is taken if no kernel of the device and no CompositeExplicitAutograd is there, so that a dispatch mode sees
a composite operator whole in inference mode alone, and any other always. (c10's `OperatorEntry::computeDispatchTableEntry`.)
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

GPU = "cuda"
"""Type of device that a step of fake tensors is recorded for."""

CUDA_KERNELS = frozenset({"aten::_fused_rms_norm", "aten::mish_backward", "aten::silu_backward"})
"""Operators that have a composite kernel and one of CUDA's: what a build of torch without CUDA cannot say.

From torch's CUDA build: all names of `torch._C._dispatch_get_all_op_names()` that `_dispatch_has_kernel_for_dispatch_key` has a
kernel of for both "CompositeImplicitAutograd" and "CUDA". 2.11 has these, and the declarations of 2.13 say the same
(torchgen/packaged/ATen/native/native_functions.yaml). `tests/test_composite.py` compares with both.
"""

_IMPLICIT = "CompositeImplicitAutograd"
_BEFORE_IMPLICIT = ("CompositeExplicitAutogradNonFunctional", "CompositeExplicitAutograd")


def composite_on(name: str, device_type: str) -> bool:
    """Whether dense tensors on a device of this type run the operator's composite kernel. name: with namespace and overload."""
    return (
        _has(name, _IMPLICIT)
        and not any(_has(name, key) for key in _BEFORE_IMPLICIT)
        and not _has(name, torch._C._dispatch_key_for_device(device_type))
        and not (device_type == GPU and name in CUDA_KERNELS and not torch.backends.cuda.is_built())
    )


def own_kernel_for(name: str, tensors: Iterable[Tensor]) -> bool:
    """Whether one of `tensors` is nested, sparse or in another layout that has a kernel of its own for the operator."""
    return any(_has(name, key) for t in tensors for key in _keys_beside_dense(t))


def _keys_beside_dense(t: Tensor) -> tuple[str, ...]:
    backend = torch._C._dispatch_key_for_device(t.device.type)
    if t.is_nested:
        return f"NestedTensor{backend}", "CompositeImplicitAutogradNestedTensor"
    if t.is_quantized:
        return (f"Quantized{backend}",)
    if t.is_mkldnn:
        return (f"Mkldnn{backend}",)
    if t.layout is torch.sparse_coo:
        return (f"Sparse{backend}",)
    return () if t.layout is torch.strided else (f"SparseCsr{backend}",)


def _has(name: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
