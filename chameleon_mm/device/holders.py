"""Tell whether anybody else refers to a storage: the one question before its memory goes.

held_alone(holder)                # no tensor lies in `holder.storage`, and that attribute alone has its object in Python
held_alone(holder, tensors=3)     # no others than three of our own lie in it

torch counts the references to a storage: one for each tensor over it, and one for its object in Python, if it ever had one.
Python counts the references to that object. A new reference comes from an old one, or from a tensor that our hook returns.

    x = f(y); saved = x.detach()     # count 2 + 1: x, our alias, the object in Python
    del x                            # count 1 + 1 = tensors + 1: ours alone, so its memory may go

The count is read through the attribute, without a variable or an argument: a call holds references to its arguments, and one
more of them once dynamo has installed its evaluator of frames.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch

_use_count = torch._C._storage_Use_Count


def held_alone(holder: Any, tensors: int = 0, *, more_attributes: int = 0) -> bool:
    """True if no more than `tensors` tensors lie in `holder.storage`, and its only references in Python are that attribute and
    so many more."""
    if _use_count(holder.storage._cdata) != tensors + 1:
        return False
    return sys.getrefcount(holder.storage) <= _AT_REST[tensors > 0] + more_attributes


def _at_rest(*, has_tensor: bool) -> int:
    """Return what `sys.getrefcount` says of a storage that one attribute has. Measured: torch versions differ."""
    memory = torch.empty(1) if has_tensor else None
    holder = SimpleNamespace(storage=torch.UntypedStorage(1) if memory is None else memory.untyped_storage())
    return sys.getrefcount(holder.storage)


with torch._C._DisableTorchDispatch():
    _AT_REST = (_at_rest(has_tensor=False), _at_rest(has_tensor=True))
    """Without a tensor in it, and with one."""
REFERENCES_AT_REST = _AT_REST[True] - 1
"""References to the object in Python of a storage that tensors lie in, while one attribute has it and nobody looks."""
