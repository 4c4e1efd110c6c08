"""Real text that every Python has: the sources of its standard library.

text = read_text()                                             # one bytes object, the same on every call
rows = draw_batches(text, steps=8, batch=4, context=128, seed=0)
for ids, targets in rows: ...                                  # int64 [4, 128] each; targets are ids one byte later
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from chameleon_mm.errors import ChameleonError
from chameleon_mm.units import MIB

TEXT_BYTES = 2 * MIB
"""Bytes of text that are read: a few epochs' worth for a demo, and no wait for the disk."""


class NoTextFound(ChameleonError, ValueError):
    """A folder has no text to train on, or less than one row of it."""


def read_text(folder: Path | None = None, *, limit_bytes: int = TEXT_BYTES) -> bytes:
    """The `*.py` files of `folder` in the order of their names, joined and cut at `limit_bytes`.

    `folder` None means the standard library of the running Python. Raises `NoTextFound` (a `ValueError`) where there is
    none, as in a Python that keeps its library in a zip file.
    """
    folder = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    parts: list[bytes] = []
    size = 0
    for path in sorted(folder.glob("*.py")):
        if size >= limit_bytes:
            break
        parts.append(path.read_bytes())
        size += len(parts[-1])
    if size == 0:
        raise NoTextFound(f"text: expected *.py files with text in {folder}, found none; name another with --text")
    return b"".join(parts)[:limit_bytes]


def draw_batches(text: bytes, *, steps: int, batch: int, context: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """`steps` pairs of ids and targets, int64 [batch, context] on the CPU, cut from `text` at random places.

    The places come from a generator of their own, so that drawing them moves no other random state. Raises `NoTextFound`
    for a text shorter than one row.
    """
    if len(text) <= context:
        raise NoTextFound(
            f"text: expected more than {context} bytes (a row of --context), got {len(text)}; name another --text"
        )
    source = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(context + 1)
    rows = []
    for _ in range(steps):
        starts = torch.randint(len(text) - context, (batch, 1), generator=generator)
        row = source[starts + offsets].long()
        rows.append((row[:, :-1].contiguous(), row[:, 1:].contiguous()))
    return rows
