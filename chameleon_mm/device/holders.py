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


def held_alone(storage: torch.UntypedStorage, tensors: int = 0, *, attributes: int = 1) -> bool:
    """True if no more than `tensors` tensors lie in `storage`, and its only references in Python are so many `attributes` and
    a variable of the caller."""
    references = _LEAST_REFERENCES[tensors > 0] + attributes - 1
    return _use_count(storage._cdata) == tensors + 1 and sys.getrefcount(storage) <= references


def _least_references(tensors: int) -> int:
    """References that `held_alone` finds at least. Measured: Pythons differ, and so do torch versions."""
    memory = torch.empty(1) if tensors else None
    holder = SimpleNamespace(storage=torch.UntypedStorage(1) if memory is None else memory.untyped_storage())

    def found(storage: torch.UntypedStorage, tensors: int = 0, *, attributes: int = 1) -> int:
        references = attributes
        return sys.getrefcount(storage) if references else 0

    def asked() -> int:
        storage = holder.storage
        return found(storage)

    return asked()


def _references_at_rest() -> int:
    memory = torch.empty(1)
    holder = SimpleNamespace(storage=memory.untyped_storage())
    return sys.getrefcount(holder.storage) - 1


with torch._C._DisableTorchDispatch():
    _LEAST_REFERENCES = (_least_references(0), _least_references(1))
    """Without a tensor in it, and with one."""
    REFERENCES_AT_REST = _references_at_rest()
    """References to the object in Python of a storage that tensors lie in, while one attribute has it and nobody looks."""
