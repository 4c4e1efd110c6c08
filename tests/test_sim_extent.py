"""Byte extents of tensors against the bytes that torch itself reaches through them."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.observed.shadow import covers, extent_of, share_bytes

STORAGE_BYTES = 256


@st.composite
def views(draw: st.DrawFn) -> Tensor:
    """Any strided view of 256 bytes: with gaps, overlapping itself, expanded, transposed, empty; 1 or 4 bytes an element."""
    dtype = draw(st.sampled_from([torch.uint8, torch.int32]))
    whole = torch.zeros(STORAGE_BYTES, dtype=torch.uint8).view(dtype)
    offset = draw(st.integers(0, whole.numel() - 1))
    shape, strides, left = [], [], whole.numel() - 1 - offset
    for _ in range(draw(st.integers(0, 3))):
        size, stride = draw(st.integers(0, 5)), draw(st.integers(0, 16))
        if size > 1 and (size - 1) * stride > left:
            stride = left // (size - 1)
        left -= max(0, size - 1) * stride
        shape.append(size)
        strides.append(stride)
    return whole.as_strided(shape, strides, offset)


def reached(t: Tensor) -> set[int]:
    """The bytes that `t` reaches: a view of its geometry over numbered elements says which."""
    item = t.element_size()
    numbers = torch.arange(STORAGE_BYTES // item).as_strided(t.shape, t.stride(), t.storage_offset())
    return {number * item + byte for number in numbers.flatten().tolist() for byte in range(item)}


@given(a=views(), b=views())
def test_extents_share_bytes_exactly_where_both_reach(a: Tensor, b: Tensor) -> None:
    one, two = reached(a), reached(b)
    assert share_bytes(extent_of(a), extent_of(b)) == bool(one & two)
    if covers(extent_of(a), extent_of(b)):
        assert two <= one


@given(t=views())
def test_an_extent_ends_where_the_view_does_and_is_dense_where_it_has_no_gap(t: Tensor) -> None:
    extent, there = extent_of(t), reached(t)
    if not there:
        assert extent.start == extent.end
        return
    assert (extent.start, extent.end) == (min(there), max(there) + 1)
    assert (extent.pattern is None) == (len(there) == extent.end - extent.start)
