"""Finds tensors that an optimizer keeps beside `optimizer.state`, which therefore stay on the device.

for name, nbytes in kept_elsewhere(optimizer, device): ...      # attributes, with the bytes of device memory that they hold
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from chameleon_mm.device import Device

_DEPTH = 4
"""Containers in containers that are looked into."""

_KNOWN = ("state", "param_groups")


def kept_elsewhere(optimizer: torch.optim.Optimizer, device: Device, *, min_bytes: int) -> dict[str, int]:
    """Bytes of device memory by attribute of `optimizer`, for attributes that hold storages of `min_bytes` or more: parameters,
    gradients and what lies in `optimizer.state` do not count."""
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    ours = {id(value) for state in optimizer.state.values() if isinstance(state, dict) for value in dict.values(state)}
    found = {}
    for name, value in vars(optimizer).items():
        if name in _KNOWN:
            continue
        storages: dict[int, int] = {}
        for t in _tensors(value, _DEPTH):
            if id(t) in known or id(t) in ours or t.layout is not torch.strided or not device.owns(t):
                continue
            storage = t.untyped_storage()
            if storage.nbytes() >= min_bytes:
                storages[id(storage)] = storage.nbytes()
        if storages:
            found[name] = sum(storages.values())
    return found


def _tensors(value: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, dict):
        for one in dict.values(value):
            yield from _tensors(one, depth - 1)
    elif depth and isinstance(value, (list, tuple, set)):
        for one in value:
            yield from _tensors(one, depth - 1)
    elif depth and isinstance(value, torch.optim.Optimizer):  # one that wraps another
        yield from _tensors(value.state, depth - 1)
