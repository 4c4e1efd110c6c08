"""The table that tells one launch where the bytes of many tensors lie: in device memory, one int64 word after the other.

    row    address | place in the staging buffer | units | bytes of a unit | dims | first item | (size, stride) per dim
    item   row                                            a block of a row's bytes: what a program moves in one go

    table = PackTable(tensors)              # once per batch layout: Python per distinct layout, numpy for the rest
    table.refresh(tensors)                  # other tensors of the same layouts: new addresses, no more
    table.move(addresses)                   # ... whose layouts the caller has looked at, and whose addresses it has

A tensor has one row, two where its size is odd, none where it is empty. Every tensor's place is a multiple of 128 bytes: a
packed tensor can be viewed in place as any dtype, all 16-byte accesses to it are legal, and no two tensors share a cache
line, so that a warp's 512 bytes are whole lines.

A `LayoutGuard` tells by one call whether many tensors are laid out as others were. From Python the five attributes of a layout
take 40-60 ns each. torch.compile asks as much of all inputs of a graph before each run of it, in C++, at 50 ns a tensor. The
class that does so is private to torch: its verdict is tried out before it is believed; where it is not there, no guard passes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from chameleon_mm.kernels.launch_checks import UNIT_BYTES, check_aligned, check_flat
from chameleon_mm.kernels.memory_layout import MemoryLayout, are_apart, check_apart

BLOCK_BYTES = 16384
"""Bytes of an item: four 16-byte accesses in flight for each of 256 threads."""

PLACE_BYTES = 128
"""Every tensor's place in the staging buffer is a multiple of it: a cache line of every GPU since Volta."""

ADDRESS = 0
"""The word of a row that says where its bytes begin in the tensor's memory."""

_PLACE, _FIRST_ITEM, _FIXED_WORDS = 1, 5, 6

Words = NDArray[np.int64]
_Shape = tuple[int, tuple[int, ...], tuple[int, ...]]  # bytes of an element, sizes, strides


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


class PackedLayout(NamedTuple):
    """Offsets of tensors once they are packed."""

    offsets: list[int]
    """Bytes from the start of the staging buffer to each tensor, multiples of 128."""
    total_bytes: int
    """Size of a staging buffer that holds all: the last offset and the bytes behind it."""


def packed_layout(tensors: Sequence[Tensor]) -> PackedLayout:
    """Offsets at which `pack` puts each of `tensors`, and the size of the buffer it needs. Host arithmetic alone."""
    table = PackTable(tensors)
    return PackedLayout(table.offsets.tolist(), table.total_bytes)


class PackTable:
    """The table of one batch, on the host, and where it was put on the device.

    Holds addresses, not tensors: the caller keeps the tensors alive until the kernels that read the table are done.
    """

    device: torch.device
    """Device of the tensors."""
    offsets: Words
    """Offset in bytes of each tensor in the staging buffer."""
    total_bytes: int
    """Size of a staging buffer that holds all."""
    packed_bytes: int
    """Bytes that one launch moves: `total_bytes` without the padding between tensors."""
    num_items: int
    num_rows: int
    row_words: int

    words: Tensor
    """The table: (n,) int64 on the host. Changed in place by `refresh`, so copy it before or wait for its copy."""
    device_copy: Tensor | None
    """The table on the device; None until it was uploaded, and again after a `refresh` that changed it."""

    _row_addresses: Words  # (num_rows,), a view of the words
    _addresses: list[int]
    _alignments: bytes
    _packed_bytes: Words  # of each tensor
    _guard: LayoutGuard | None  # once other tensors were seen to have these layouts

    def __init__(self, tensors: Sequence[Tensor], *, block_bytes: int = BLOCK_BYTES) -> None:
        """Raises `ValueError`, naming the tensor by its index, for several devices, for layouts other than strided, for
        quantized tensors, tensors without memory, and more than 8 dimensions that cannot be joined."""
        if block_bytes < 64 or block_bytes & (block_bytes - 1):
            raise ValueError(f"PackTable: expected block_bytes as a power of two >= 64, got {block_bytes}; try {BLOCK_BYTES}")
        self.block_bytes = block_bytes
        self.device = _common_device(tensors)
        _check_kinds(tensors)
        self._guard = None
        self._shapes = [(t.element_size(), t.shape, t.stride()) for t in tensors]
        self._nbytes = [t.nbytes for t in tensors]  # of all elements, repetitions included
        self._contiguous = [t.is_contiguous() for t in tensors]
        self._build(_addresses_of(tensors))

    def upload(self) -> Tensor:
        """The table on the device: the one that is there, or else a copy on the current stream."""
        if self.device_copy is None:
            # torch reuses its pinned memory only after the copy that reads it: the next refresh may write self.words at once.
            on_host = self.device.type == "cpu"  # under the interpreter
            self.device_copy = self.words if on_host else self.words.pin_memory().to(self.device, non_blocking=True)
        return self.device_copy

    def refresh(self, tensors: Sequence[Tensor]) -> bool:
        """Take the addresses of `tensors`, which have the layouts the table was built for; True where a word changed.

        Costs about 0.2 us per tensor. Raises `ValueError`, naming the tensor by its index, for another number, size, layout or
        device; the table is unchanged then.
        """
        if len(tensors) != len(self._nbytes):
            raise ValueError(
                f"PackTable: expected the {len(self._nbytes)} tensors it was built for, got {len(tensors)}; build one"
            )
        if self._guard is None or not self._guard.passes(tensors):
            self._check_layouts(tensors)
            self._guard = self._guard or LayoutGuard(tensors)
        return self.move(_addresses_of(tensors))

    def move(self, addresses: list[int]) -> bool:
        """Do what `refresh` does for tensors at `addresses` whose device and layouts are those of the table's: the caller saw
        to that, and leaves the list as it is."""
        if addresses == self._addresses:
            return False
        words = np.fromiter(addresses, np.int64, len(addresses))
        if not all(addresses):
            _check_memory(words, self._packed_bytes)
        if _alignments(words) != self._alignments:
            self._build(addresses)  # another alignment is another width of access
            return True
        self._addresses, self._address_words = addresses, words
        self._row_addresses[...] = words if self._is_row_each else words[self._tensor_of_row] + self._source_offsets
        self.device_copy = None
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
        # One that begins beyond the buffer's end, or farther before it than any reaches, is beside it: nearly always all are.
        ahead = (self._address_words - (begin - self._farthest_end)).view(np.uint64)
        if len(ahead) and int(ahead[ahead.argmin()]) < self._farthest_end + self.total_bytes:
            inside = (
                (self._address_words < begin + self.total_bytes)
                & (self._address_words + self._end_bytes > begin)
                & (self._packed_bytes > 0)
            )
            if inside.any():
                raise ValueError(
                    f"{what}: expected a staging buffer beside the tensors, but tensor {int(np.argmax(inside))} lies in it; "
                    f"give another buffer"
                )

    def check_destinations(self, what: str) -> None:
        """Raise `ValueError` where two elements of the tensors share a byte: which one would be written last, nobody knows."""
        if not self._destinations_checked:
            if self._overlaps_itself or not are_apart(self._address_words, self._end_bytes):
                check_apart(what, self._address_words, self._layouts)
            self._destinations_checked = True

    def _build(self, addresses: list[int]) -> None:
        """Make the table anew for tensors of `self._shapes` at `addresses`."""
        words = np.array(addresses, dtype=np.int64)
        keys = [(*shape, alignment) for shape, alignment in zip(self._shapes, (words % UNIT_BYTES).tolist(), strict=True)]
        distinct: dict[tuple[int, tuple[int, ...], tuple[int, ...], int], MemoryLayout] = {}
        for key in dict.fromkeys(keys):
            try:
                distinct[key] = MemoryLayout.of(*key)
            except ValueError as error:
                raise ValueError(f"PackTable: tensor {keys.index(key)}: {error}; give a contiguous copy of it") from None
        layouts = [distinct[key] for key in keys]
        packed_bytes = np.array([layout.nbytes for layout in layouts], dtype=np.int64)
        _check_memory(words, packed_bytes)

        which = {key: i for i, key in enumerate(distinct)}
        of_tensor = np.array([which[key] for key in keys], dtype=np.int64)
        rows = TableRows.of(list(distinct.values()), of_tensor, self.block_bytes)
        rows.words[:, ADDRESS] += words[rows.tensor]
        all_words = np.concatenate([rows.words.reshape(-1), np.repeat(np.arange(len(rows.words)), rows.items)])
        self.words = torch.from_numpy(all_words)
        self._row_addresses = all_words[: rows.words.size].reshape(rows.words.shape)[:, ADDRESS]
        # Whether every tensor has one row, of all its bytes.
        self._is_row_each = np.array_equal(rows.tensor, np.arange(len(addresses))) and not rows.source_offset.any()
        self._tensor_of_row, self._source_offsets = (
            rows.tensor,
            rows.source_offset,
        )  # ... of each row, from its tensor's address
        self.device_copy = None
        self._destinations_checked = False
        self._addresses, self._address_words, self._alignments = addresses, words, _alignments(words)  # the words: the same
        self._layouts, self._packed_bytes = layouts, packed_bytes
        self._end_bytes = np.array([layout.end_byte for layout in layouts], dtype=np.int64)
        self._farthest_end = max((layout.end_byte for layout in distinct.values()), default=0)
        self._overlaps_itself = any(layout.overlaps for layout in distinct.values())
        self.offsets = rows.places
        self.total_bytes = int(rows.places[-1] + packed_bytes[-1]) if addresses else 0
        self.packed_bytes = int(packed_bytes.sum())
        self.num_rows, self.row_words = rows.words.shape
        self.num_items = int(rows.items.sum())

    def _check_layouts(self, tensors: Sequence[Tensor]) -> None:
        """Raise `ValueError` for a tensor of another device or layout; of a contiguous one the number of bytes tells all."""
        _common_device(tensors, expected=self.device)
        for i, t in enumerate(tensors):
            is_same = t.nbytes == self._nbytes[i] and t.is_contiguous() == self._contiguous[i]
            if not is_same or (not self._contiguous[i] and self._shapes[i] != (t.element_size(), t.shape, t.stride())):
                raise ValueError(
                    f"PackTable: expected tensor {i} as it was when the table was built, got shape {tuple(t.shape)} and "
                    f"strides {t.stride()} of {t.element_size()} bytes each; build another table for this batch"
                )


def _addresses_of(tensors: Sequence[Tensor]) -> list[int]:
    return [t.data_ptr() for t in tensors]


def _alignments(addresses: Words) -> bytes:
    """Alignment of addresses, which decides how wide accesses are; in a form that compares fast."""
    return (addresses & (UNIT_BYTES - 1)).tobytes()


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


def _check_memory(addresses: Words, tensor_bytes: Words) -> None:
    without = (addresses == 0) & (tensor_bytes > 0)
    if without.any():
        raise ValueError(
            f"PackTable: expected tensors that have memory, got tensor {int(np.argmax(without))} without (meta, or its storage "
            f"was resized to nothing); leave it out of the batch"
        )


class LayoutGuard:
    """Recognises batches of the layouts of one batch of strided tensors. Holds none of them."""

    __slots__ = ("_check", "_count")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        guards = _tensor_guards()
        self._count = len(tensors)
        self._check = None if guards is None else _check_of(guards, tensors)

    def passes(self, tensors: Sequence[Tensor]) -> bool:
        """Whether `tensors` surely have the layouts. One call for all of them.

        False also for what changes nothing of a layout: a tensor that is there twice or requires a gradient, a subclass,
        inference mode. The caller then looks at each.
        """
        return self._check is not None and len(tensors) == self._count and self._check(*tensors)


def _check_of(guards: Any, tensors: Sequence[Tensor]) -> Callable[..., bool]:
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    check: Callable[..., bool] = guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return check


@functools.cache  # what the installed torch is does not change
def _tensor_guards() -> Any:
    """torch's class, where it is there and tells layouts apart, else None."""
    try:
        from torch._C._dynamo.guards import TensorGuards  # in torch 2.11 to 2.13

        with torch._C._DisableTorchDispatch():  # a mode of the caller's is not asked
            return TensorGuards if _tells_apart(TensorGuards) else None
    except (ImportError, AttributeError, TypeError, RuntimeError):  # another torch than those: attributes tell the same
        return None


def _tells_apart(guards: Any) -> bool:
    """Whether `guards` know a flat buffer from what differs in one thing, and from its like."""

    def buffer(*sizes: int, dtype: torch.dtype = torch.uint8, device: str = "cpu") -> Tensor:
        return torch.empty(sizes, dtype=dtype, device=device)

    others = (buffer(3), buffer(5), buffer(2, 2), buffer(1, 4), buffer(8)[::2], buffer(4, dtype=torch.int8))
    flat, second = _check_of(guards, [buffer(4)]), _check_of(guards, [buffer(4), buffer(4)])
    return (
        flat(buffer(4))
        and second(buffer(4), buffer(4))
        and not any(map(flat, (*others, buffer(4, device="meta"))))
        and not any(second(buffer(4), other) for other in others)
    )
