"""Conj and neg bits inside of operators, which torch forgets while a dispatch mode runs one.

    with lazy_bits_resolved():  func(*args)      # inside __torch_dispatch__, as eager runs it

A complex tensor's `conj()`, `mH` and `imag` may be views with a bit set, which dispatch keys resolve before a kernel reads
them. For the length of a mode's handler torch excludes all keys above the mode's, these among them: an operator that makes such
a view inside itself then computes with numbers that are not conjugated. `linalg.pinv` of a complex matrix is wrong in its first
digit under any dispatch mode that does nothing at all.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_Key = torch._C.DispatchKey
_RESOLVE = (_Key.Conjugate, _Key.Negative, _Key.ZeroTensor)


def lazy_bits_resolved() -> torch._C._ForceDispatchKeyGuard:
    """A context in which operators resolve the bits of what they make, as they do outside of dispatch modes."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _RESOLVE:
        excluded = excluded.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def may_have_lazy_bits(tensors: Iterable[Tensor]) -> bool:
    """Whether an operator that is given `tensors` may make views with such a bit: they begin with complex numbers."""
    return any(t.is_complex() or t.is_neg() for t in tensors)
