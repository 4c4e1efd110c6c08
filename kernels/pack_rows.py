"""The rows of a pack table, as arithmetic: an array of words, and which tensor each row belongs to.

row    address | place in the staging buffer | units | bytes of a unit | dims | first item | (size, stride) per dim

rows = TableRows.of(layouts, of_tensor, block_bytes)      # Python per distinct layout, numpy for the rest
rows.words[:, ADDRESS] = addresses[rows.tensor] + rows.source_offset
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chameleon_mm.kernels.memory_layout import MemoryLayout

PLACE_BYTES = 128
"""Every tensor's place in the staging buffer is a multiple of it: a cache line of every GPU since Volta."""

ADDRESS = 0
"""The word of a row that says where its bytes begin in the tensor's memory."""

_PLACE, _FIRST_ITEM, _FIXED_WORDS = 1, 5, 6

Words = NDArray[np.int64]


class TableRows(NamedTuple):
    """Rows for tensors at address 0, in the tensors' order: one each, two where the size is odd, none where it is empty."""

    words: Words
    """(rows, row words)."""
    items: Words
    """Number of blocks of bytes of each row."""
    tensor: Words
    """Index of each row's tensor."""
    source_offset: Words
    """Offset of each row's first byte from the tensor's address."""
    places: Words
    """Offset of each tensor from the start of the staging buffer."""

    @classmethod
    def of(cls, layouts: Sequence[MemoryLayout], of_tensor: Words, block_bytes: int) -> TableRows:
        """Rows for tensors whose layouts are `layouts[of_tensor]`, in blocks of `block_bytes`."""
        nbytes = np.array([layout.nbytes for layout in layouts], dtype=np.int64)[of_tensor]
        spans = -(-nbytes // PLACE_BYTES) * PLACE_BYTES
        places = np.cumsum(spans) - spans
        templates, first_template = _templates(layouts, block_bytes)
        rows_of_tensor = np.diff(first_template)[of_tensor]
        tensor = np.repeat(np.arange(len(of_tensor)), rows_of_tensor)
        within = np.arange(len(tensor)) - np.repeat(np.cumsum(rows_of_tensor) - rows_of_tensor, rows_of_tensor)
        words = templates[first_template[of_tensor][tensor] + within]
        items = words[:, _FIRST_ITEM].copy()  # a template has the number of its items there
        words[:, _FIRST_ITEM] = np.cumsum(items) - items
        words[:, _PLACE] += places[tensor]
        source_offset = words[:, ADDRESS].copy()  # ... and where its piece begins in the tensor
        return cls(words, items, tensor, source_offset, places)


def _templates(layouts: Sequence[MemoryLayout], block_bytes: int) -> tuple[Words, Words]:
    """Rows of each layout for a tensor at address 0 with place 0, and where the rows of each begin; one more for the end."""
    pieces = [layout.pieces for layout in layouts]
    flat = [piece for of_layout in pieces for piece in of_layout]
    most_dims = max((len(piece.dims) for piece in flat), default=1)
    rows = np.zeros((len(flat), _FIXED_WORDS + 2 * most_dims), dtype=np.int64)
    for row, piece in zip(rows, flat, strict=True):
        items = -(-piece.units * piece.unit_bytes // block_bytes)
        words = [piece.source_offset, piece.packed_offset, piece.units, piece.unit_bytes, len(piece.dims), items]
        words += [word for dim in piece.dims for word in dim]
        row[: len(words)] = words
    return rows, np.cumsum([0, *map(len, pieces)])
