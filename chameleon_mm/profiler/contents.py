"""Hashes what an operator is asked to do, as 64 bits that are the same in every process.

    content = blake2b(name, each tensor's shape, strides and dtype, each plain argument)      # looked up by signature

Addresses, numbers of objects and Python's own hashes are no part of it: traces of two processes can be compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_PLAIN = (int, bool, str, type(None), torch.dtype, torch.layout, torch.memory_format, torch.device, torch.Size)
"""Types whose `repr` says all there is, and nothing of this process."""


class ContentHashes:
    """Hashes of calls, each signature's computed once. Grows with the distinct calls it is shown: make one per step."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def of(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        """Hash of one call of operator `name`."""
        signature = f"{name}({_describe(args)}, {_describe(kwargs)})"
        content = self._known.get(signature)
        if content is None:
            content = self._known[signature] = content_of(signature)
        return content


def content_of(text: str) -> int:
    """Hash of a text, 64 bits that are the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def describe_tensor(t: Tensor) -> str:
    """Text of shape, strides and dtype; a nested tensor's shape is not one, a sparse one has no strides."""
    if t.is_nested:
        return f"nested {t.dtype}"
    if t.layout is not torch.strided:
        return f"{tuple(t.shape)} {t.layout} {t.dtype}"
    return f"{tuple(t.shape)} {t.stride()} {t.dtype}"


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return describe_tensor(value)
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_describe, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_describe(value[key])}' for key in sorted(value))}}}"
    if isinstance(value, (float, complex, *_PLAIN)):
        return repr(value)
    return type(value).__name__  # a generator, a function: its repr would name an address
