"""Check that no other code refers to a storage, the condition for freeing its memory.

held_alone(holder)                # no tensor uses `holder.storage`, and only that attribute refers to the Python object
held_alone(holder, tensors=3)     # only three of our own tensors use it

torch counts the references to a storage: one for each tensor over it, and one for its Python object, if it ever had one.
Python counts the references to that object. A new reference comes from an old one, or from a tensor that our hook returns.

    x = f(y); saved = x.detach()     # count 2 + 1: x, our alias, the Python object
    del x                            # count 1 + 1 = tensors + 1: only ours, so the memory may be freed

The count is read through the attribute, without a variable or an argument. A call holds references to its arguments, and one
reference more after dynamo has installed its frame evaluator.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch

_use_count = torch._C._storage_Use_Count


def held_alone(holder: Any, tensors: int = 0, *, more_attributes: int = 0) -> bool:
    """True if at most `tensors` tensors use `holder.storage`, and its only Python references are that attribute and at most
    `more_attributes` others."""
    if _use_count(holder.storage._cdata) != tensors + 1:
        return False
    return sys.getrefcount(holder.storage) <= _AT_REST[tensors > 0] + more_attributes


def _at_rest(*, has_tensor: bool) -> int:
    """Return `sys.getrefcount` of a storage that one attribute refers to. Measured, because torch versions differ."""
    memory = torch.empty(1) if has_tensor else None
    holder = SimpleNamespace(storage=torch.UntypedStorage(1) if memory is None else memory.untyped_storage())
    return sys.getrefcount(holder.storage)


with torch._C._DisableTorchDispatch():
    _AT_REST = (_at_rest(has_tensor=False), _at_rest(has_tensor=True))
    """Reference counts of a storage without a tensor over it, and with one."""
REFERENCES_AT_REST = _AT_REST[True] - 1
"""References to the Python object of a storage with tensors over it, if one attribute refers to it and no call reads it."""
