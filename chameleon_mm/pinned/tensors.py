"""Views of a block that keep it alive, and tensors that are all there is of one.

    block.tensor(shape, dtype):  BlockView(block) <- array <- tensor <- every view of the tensor      # each holds the next left
    pool.empty(shape, dtype):    the same; nobody else has the block, so it is dropped with the last view

NumPy keeps the object that an array's memory came from, and torch the array that a tensor's storage came from. So the object
at the bottom lives exactly as long as something can reach the bytes, whatever was derived from it: slices, `detach()`, DLPack
capsules. The block knows it by weak reference alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

if TYPE_CHECKING:
    from chameleon_mm.pinned.block import PinnedBlock


class BlockView:
    """A view of a block, which every other view comes down to: `nbytes` at `address`, and the block that they belong to."""

    __slots__ = ("__array_interface__", "__weakref__", "block")

    def __init__(self, block: PinnedBlock, address: int, nbytes: int) -> None:
        self.block = block
        self.__array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": (1,),
        }


def as_tensor(view: BlockView, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """`view` as a contiguous tensor, which holds it."""
    flat = np.asarray(view)
    with torch.inference_mode(mode=False):  # or the view could not be written or saved for backward outside of that mode
        return torch.from_numpy(flat).view(dtype).view(shape)


def as_array(view: BlockView, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """`view` as a contiguous array, which holds it."""
    return np.ndarray(shape, dtype, buffer=np.asarray(view))


def plain_shape(what: str, shape: int | Sequence[int]) -> tuple[int, ...]:
    """Sizes of `shape`, where a number alone is one of one dimension. `what` names the function in the error.

    Raises `TypeError` for what is no shape, `ValueError` for sizes below 0.
    """
    given: Any = shape  # arrays are shapes, too
    try:
        sizes = tuple(map(index, given)) if hasattr(given, "__iter__") else (index(given),)
    except TypeError:
        raise TypeError(
            f"{what}: expected a shape, an int or several such as (3, 4), got {shape!r} ({type(shape).__name__})"
        ) from None
    if any(size < 0 for size in sizes):
        raise ValueError(f"{what}: expected sizes of 0 or more, got shape {sizes}")
    return sizes


def tensor_nbytes(what: str, shape: tuple[int, ...], dtype: torch.dtype, limit: int | None = None) -> int:
    """Bytes of a tensor. Raises `ValueError` for a shape that takes more than `limit`, `TypeError` for no dtype."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(
            f"{what}: expected a torch.dtype such as torch.float32, got {dtype!r} ({type(dtype).__name__}); an array with a "
            f"dtype of NumPy's is allocate(nbytes).numpy(shape, dtype)"
        )
    return nbytes_of(what, shape, dtype, limit)


def plain_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """NumPy's dtype. Raises `TypeError` for what is none, `ValueError` for one of Python objects."""
    try:
        kind = np.dtype(dtype)
    except TypeError:
        raise TypeError(
            f"numpy: expected a dtype of NumPy's such as np.float32, got {dtype!r} ({type(dtype).__name__}); with torch's use "
            f"tensor(shape, dtype)"
        ) from None
    if kind.hasobject:
        raise ValueError(f"numpy: expected a dtype of plain bytes, got {kind}; pinned memory cannot hold Python objects")
    return kind


def nbytes_of(what: str, shape: tuple[int, ...], dtype: torch.dtype | np.dtype[Any], limit: int | None) -> int:
    """Bytes of a tensor or an array. Raises `ValueError` for a shape that takes more than `limit`."""
    nbytes = math.prod(shape) * dtype.itemsize
    if limit is not None and nbytes > limit:
        raise ValueError(
            f"{what}: expected a shape of at most {limit} bytes, got {shape} of {dtype} = {nbytes} bytes; "
            f"allocate a larger block"
        )
    return nbytes
