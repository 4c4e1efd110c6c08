"""The table that tells one launch where the bytes of many tensors lie: in device memory, one int64 word after the other.

    row    address | place in the staging buffer | units | bytes of a unit | dims | first item | (size, stride) per dim
    item   row                                            a block of a row's bytes: what a program moves in one go

    table = PackTable(tensors)              # once per batch layout: Python per distinct layout, numpy for the rest
    table.refresh(tensors)                  # other tensors of the same layouts: new addresses, no more
    table.place(words_on_device)            # where a caller put table.words by a copy of its own

A tensor has one row, two where its size is odd, none where it is empty. Every tensor's place is a multiple of 128 bytes: a
packed tensor can be viewed in place as any dtype, all 16-byte accesses to it are legal, and no two tensors share a cache
line, so that a warp's 512 bytes are whole lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from chameleon_mm.kernels.arguments import UNIT_BYTES, check_aligned, check_flat
from chameleon_mm.kernels.memory_layout import MemoryLayout
from chameleon_mm.kernels.pack_destinations import check_apart

PLACE_BYTES = 128
"""Every tensor's place in the staging buffer is a multiple of it: a cache line of every GPU since Volta."""

BLOCK_BYTES = 16384
"""Bytes of an item: four 16-byte accesses in flight for each of 256 threads."""

_ADDRESS, _PLACE, _FIRST_ITEM, _FIXED_WORDS = 0, 1, 5, 6

_Words = NDArray[np.int64]


class PackedLayout(NamedTuple):
    """Where tensors lie once they are packed."""

    offsets: list[int]
    """Bytes from the start of the staging buffer to each tensor, multiples of 128."""
    total_bytes: int
    """What the staging buffer must hold: the last offset and the bytes behind it."""


def packed_layout(tensors: Sequence[Tensor]) -> PackedLayout:
    """Where `pack` puts each of `tensors`, and how large a buffer it needs. Host arithmetic alone.

    Raises `ValueError` for what `pack` would refuse.
    """
    table = PackTable(tensors)
    return PackedLayout(table.offsets.tolist(), table.total_bytes)


class PackTable:
    """The table of one batch, on the host, and where it was put on the device.

    Holds addresses, not tensors: the caller keeps the tensors alive until the kernels that read the table are done.
    """

    device: torch.device
    """Of the tensors."""
    offsets: _Words
    """Of each tensor in the staging buffer, bytes."""
    total_bytes: int
    """What the staging buffer must hold."""
    packed_bytes: int
    """What one launch moves: `total_bytes` without the padding between tensors."""
    num_items: int
    num_rows: int
    row_words: int

    _words: _Words
    _rows: _Words  # (num_rows, row_words), a view of the words
    _placed: Tensor | None
    _destinations_checked: bool
    # Per tensor:
    _addresses: _Words
    _layouts: list[MemoryLayout]
    _packed_bytes: _Words
    _end_bytes: _Words  # from its address
    _nbytes: list[int]  # of all its elements, repetitions included
    _contiguous: list[bool]
    _strided: list[int]  # those that are not contiguous, and their shapes:
    _strided_sizes: list[tuple[int, ...]]
    _strided_strides: list[tuple[int, ...]]
    # Per row:
    _tensor_of_row: _Words
    _source_offsets: _Words  # from the tensor's address

    def __init__(self, tensors: Sequence[Tensor], *, block_bytes: int = BLOCK_BYTES) -> None:
        """Raises `ValueError`, naming the tensor by its index, for several devices, for layouts other than strided, for
        quantized tensors, tensors without memory, and more than 8 dimensions that cannot be joined."""
        if block_bytes < 64 or block_bytes & (block_bytes - 1):
            raise ValueError(f"PackTable: expected block_bytes as a power of two >= 64, got {block_bytes}; try {BLOCK_BYTES}")
        self.block_bytes = block_bytes
        self._build(tensors)

    @property
    def words(self) -> Tensor:
        """The table: (n,) int64 on the host. Changed in place by `refresh`, so copy it before or wait for its copy."""
        return torch.from_numpy(self._words)

    @property
    def placed(self) -> Tensor | None:
        """The table on the device; None until it was put there, and again after a `refresh` that changed it."""
        return self._placed

    def place(self, words: Tensor) -> None:
        """Use `words`, a copy of `self.words` that the device can read, for what is launched from now on.

        The copy must come before the launch in stream order. Raises `ValueError` for another size, dtype or device.
        """
        expected = self._words.size
        if words.dtype is not torch.int64 or words.shape != (expected,) or words.device != self.device:
            raise ValueError(
                f"PackTable: expected a copy of .words, {expected} int64 on {self.device}, got {words.dtype} of shape "
                f"{tuple(words.shape)} on {words.device}; copy .words after the last refresh"
            )
        self._placed = words

    def upload(self) -> Tensor:
        """The table on the device: the one that was placed, or else a copy of its own on the current stream."""
        if self._placed is None:
            # torch reuses its pinned memory only after the copy that reads it: the next refresh may write self.words at once.
            words = self.words if self.device.type == "cpu" else self.words.pin_memory()
            self._placed = words.to(self.device, non_blocking=True)
        return self._placed

    def refresh(self, tensors: Sequence[Tensor]) -> bool:
        """Take the addresses of `tensors`, which have the layouts the table was built for; True where a word changed.

        Costs a few attribute reads per tensor. Raises `ValueError`, naming the tensor by its index, for another number, size,
        layout or device; the table is unchanged then.
        """
        if len(tensors) != len(self._nbytes):
            raise ValueError(
                f"PackTable: expected the {len(self._nbytes)} tensors it was built for, got {len(tensors)}; build one"
            )
        index = -1 if self.device.type == "cpu" else self.device.index  # as get_device has it
        same = (
            # The bytes of a contiguous tensor are told by their number; the others are few, and compared whole.
            [t.nbytes for t in tensors] == self._nbytes
            and list(map(Tensor.is_contiguous, tensors)) == self._contiguous
            and list(map(Tensor.get_device, tensors)) == [index] * len(tensors)
            and [tensors[i].shape for i in self._strided] == self._strided_sizes
            and [tensors[i].stride() for i in self._strided] == self._strided_strides
        )
        if not same:
            self._refuse_other_layouts(tensors)
        addresses = _addresses(tensors)
        if np.array_equal(addresses, self._addresses):
            return False
        if ((addresses ^ self._addresses) % UNIT_BYTES).any():
            self._build(tensors)  # another alignment is another width of access
            return True
        _check_memory(addresses, self._packed_bytes)
        self._addresses = addresses
        self._rows[:, _ADDRESS] = addresses[self._tensor_of_row] + self._source_offsets
        self._placed = None
        self._destinations_checked = False
        return True

    def check_staging(self, what: str, buffer: Tensor) -> None:
        """Raise `ValueError` unless `buffer` is flat, aligned, large enough, in reach, and beside all of the tensors."""
        check_flat(what, "the staging buffer", buffer)
        check_aligned(what, "the staging buffer", buffer)
        if buffer.numel() < self.total_bytes:
            ends = self.offsets + self._packed_bytes
            first = int(np.argmax(ends > buffer.numel()))
            raise ValueError(
                f"{what}: expected a staging buffer of {self.total_bytes} bytes or more, got {buffer.numel()}: tensor {first} "
                f"ends at {ends[first]}; pack fewer tensors at once, or give packed_layout(tensors).total_bytes"
            )
        # Pinned host memory has one address for the host and for every GPU.
        if len(self.offsets) and buffer.device != self.device and not (buffer.device.type == "cpu" and buffer.is_pinned()):
            raise ValueError(
                f"{what}: expected the staging buffer on {self.device}, as the tensors, or pinned, got {buffer.device}; "
                f"allocate it on {self.device}"
            )
        begin = buffer.data_ptr()
        inside = (self._addresses < begin + self.total_bytes) & (self._addresses + self._end_bytes > begin)
        if (inside & (self._packed_bytes > 0)).any():
            raise ValueError(
                f"{what}: expected a staging buffer beside the tensors, but tensor {int(np.argmax(inside))} lies in it; "
                f"give another buffer"
            )

    def check_destinations(self, what: str) -> None:
        """Raise `ValueError` where two elements of the tensors share a byte: which one would be written last, nobody knows."""
        if not self._destinations_checked:
            check_apart(what, self._addresses, self._layouts)
            self._destinations_checked = True

    def _build(self, tensors: Sequence[Tensor]) -> None:
        device = _common_device(tensors)
        _check_kinds(tensors)
        addresses = _addresses(tensors)
        alignments = (addresses % UNIT_BYTES).tolist()
        keys = [(*_shape_of(t), alignment) for t, alignment in zip(tensors, alignments, strict=True)]
        distinct: dict[tuple[int, tuple[int, ...], tuple[int, ...], int], MemoryLayout] = {}
        for key in dict.fromkeys(keys):
            try:
                distinct[key] = MemoryLayout.of(*key)
            except ValueError as error:
                raise ValueError(f"PackTable: tensor {keys.index(key)}: {error}; give a contiguous copy of it") from None
        layouts = [distinct[key] for key in keys]
        tensor_bytes = np.array([layout.nbytes for layout in layouts], dtype=np.int64)
        _check_memory(addresses, tensor_bytes)

        spans = -(-tensor_bytes // PLACE_BYTES) * PLACE_BYTES
        offsets = np.cumsum(spans) - spans
        templates, first_template = _templates(distinct.values(), self.block_bytes)
        which = {key: i for i, key in enumerate(distinct)}
        of_tensor = np.array([which[key] for key in keys], dtype=np.int64)
        rows_of_tensor = np.diff(first_template)[of_tensor]
        tensor_of_row = np.repeat(np.arange(len(tensors)), rows_of_tensor)
        within = np.arange(len(tensor_of_row)) - np.repeat(np.cumsum(rows_of_tensor) - rows_of_tensor, rows_of_tensor)
        rows = templates[first_template[of_tensor][tensor_of_row] + within]

        items = rows[:, _FIRST_ITEM].copy()  # a template has the number of its items there
        rows[:, _FIRST_ITEM] = np.cumsum(items) - items
        rows[:, _PLACE] += offsets[tensor_of_row]
        source_offsets = rows[:, _ADDRESS].copy()  # ... and where its piece begins in the tensor
        rows[:, _ADDRESS] += addresses[tensor_of_row]

        self._words = np.concatenate([rows.reshape(-1), np.repeat(np.arange(len(rows)), items)])
        self._rows = self._words[: rows.size].reshape(rows.shape)
        self._placed = None
        self._destinations_checked = False
        self._addresses, self._source_offsets, self._tensor_of_row = addresses, source_offsets, tensor_of_row
        self._packed_bytes, self._layouts = tensor_bytes, layouts
        self._end_bytes = np.array([layout.end_byte for layout in layouts], dtype=np.int64)
        self._nbytes = [t.nbytes for t in tensors]
        self._contiguous = [t.is_contiguous() for t in tensors]
        self._strided = [i for i, contiguous in enumerate(self._contiguous) if not contiguous]
        self._strided_sizes = [tensors[i].shape for i in self._strided]
        self._strided_strides = [tensors[i].stride() for i in self._strided]
        self.device, self.offsets = device, offsets
        self.total_bytes = int(offsets[-1] + tensor_bytes[-1]) if len(tensors) else 0
        self.packed_bytes = int(tensor_bytes.sum())
        self.num_rows, self.row_words = rows.shape
        self.num_items = int(items.sum())

    def _refuse_other_layouts(self, tensors: Sequence[Tensor]) -> None:
        _common_device(tensors, expected=self.device)
        shapes = dict(zip(self._strided, zip(self._strided_sizes, self._strided_strides, strict=True), strict=True))
        for i, t in enumerate(tensors):
            is_same = t.nbytes == self._nbytes[i] and t.is_contiguous() == self._contiguous[i]
            if not is_same or (i in shapes and shapes[i] != (t.shape, t.stride())):
                raise ValueError(
                    f"PackTable: expected tensor {i} as it was when the table was built, got shape {tuple(t.shape)} and "
                    f"strides {t.stride()} of {t.element_size()} bytes each; build another table for this batch"
                )


def _shape_of(t: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    return t.element_size(), t.shape, t.stride()


def _addresses(tensors: Sequence[Tensor]) -> _Words:
    return np.fromiter(map(Tensor.data_ptr, tensors), np.int64, len(tensors))


def _common_device(tensors: Sequence[Tensor], expected: torch.device | None = None) -> torch.device:
    devices = [t.device for t in tensors]
    wanted = expected if expected is not None else devices[0] if devices else torch.device("cpu")
    if devices.count(wanted) != len(devices):
        other = next(i for i, device in enumerate(devices) if device != wanted)
        raise ValueError(
            f"PackTable: expected all tensors on {wanted}, got tensor {other} on {devices[other]}; make a batch per device"
        )
    return wanted


def _check_kinds(tensors: Sequence[Tensor]) -> None:
    odd = [i for i, t in enumerate(tensors) if t.layout is not torch.strided or t.is_quantized]
    if odd:
        t = tensors[odd[0]]
        raise ValueError(
            f"PackTable: expected strided tensors of plain numbers, got tensor {odd[0]} of layout {t.layout} and {t.dtype}; "
            f"pack the tensors that it is made of (indices and values, int_repr())"
        )


def _check_memory(addresses: _Words, tensor_bytes: _Words) -> None:
    without = (addresses == 0) & (tensor_bytes > 0)
    if without.any():
        raise ValueError(
            f"PackTable: expected tensors that have memory, got tensor {int(np.argmax(without))} without (meta, or its storage "
            f"was resized to nothing); leave it out of the batch"
        )


def _templates(layouts: Iterable[MemoryLayout], block_bytes: int) -> tuple[_Words, _Words]:
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
