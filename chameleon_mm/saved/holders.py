"""Who refers to a storage: the one question before its memory goes.

held_alone(storage)                # no tensor lies in it, and the caller alone has its object in Python
held_alone(storage, tensors=3)     # no others than three of our own lie in it

torch counts the references to a storage: one for each tensor over it, and one for its object in Python, if it ever had one.
Python counts the references to that object. Whoever is to get a new one has one already, or asks a hook of ours for a tensor.

    x = f(y); saved = x.detach()     # count 2 + 1: x, our alias, the object in Python
    del x                            # count 1 + 1 = tensors + 1: ours alone, so its memory may go
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import torch

_use_count = torch._C._storage_Use_Count


def held_alone(storage: torch.UntypedStorage, tensors: int = 0) -> bool:
    """True if no more than `tensors` tensors lie in `storage`, and its only references in Python are an attribute and a
    variable of the caller."""
    return _use_count(storage._cdata) == tensors + 1 and sys.getrefcount(storage) <= _LEAST_REFERENCES[tensors > 0]


def _least_references(tensors: int) -> int:
    """References that `held_alone` finds at least. Measured: Pythons differ, and so do torch versions."""
    memory = torch.empty(1) if tensors else None
    holder = SimpleNamespace(storage=torch.UntypedStorage(1) if memory is None else memory.untyped_storage())

    def found(storage: torch.UntypedStorage, tensors: int = 0) -> int:
        return sys.getrefcount(storage)

    def asked() -> int:
        storage = holder.storage
        return found(storage)

    return asked()


with torch._C._DisableTorchDispatch():
    _LEAST_REFERENCES = (_least_references(0), _least_references(1))
"""Without a tensor in it, and with one."""
