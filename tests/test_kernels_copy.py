"""The copy kernel: exact under Triton's interpreter and on a GPU.

Tests with the parameter "interpreter" exist only where Triton's interpreter is on: test_kernels_interpreted runs them.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

SIZES = (0, 1, 15, 16, 17, 4095, 4096, 4097)
OFFSETS = ((0, 0), (3, 3), (0, 5), (9, 2))  # of source and destination from a 16-byte boundary
CANARY_BYTES = 64

State = Callable[[Tensor], Tensor]
ENDS: list[object] = [
    pytest.param(Tensor.pin_memory, Tensor.cuda, id="h2d", marks=pytest.mark.gpu),
    pytest.param(Tensor.cuda, Tensor.pin_memory, id="d2h", marks=pytest.mark.gpu),
    pytest.param(Tensor.cuda, Tensor.cuda, id="d2d", marks=pytest.mark.gpu),
]
if os.environ.get("TRITON_INTERPRET") == "1":
    ENDS.insert(0, pytest.param(Tensor.clone, Tensor.clone, id="interpreter"))


def copied_exactly(
    nbytes: int,
    src_offset: int,
    dst_offset: int,
    num_programs: int,
    copy: Callable[..., None],
    place_src: State = Tensor.clone,
    place_dst: State = Tensor.clone,
) -> bool:
    """Whether `copy` moved exactly the bytes asked for: none of the canaries around them, and none of the source."""
    source, before = torch.randint(0, 256, (2, nbytes + 2 * CANARY_BYTES), dtype=torch.uint8)
    src, dst = place_src(source), place_dst(before)
    s, d = -src.data_ptr() % 16 + src_offset, -dst.data_ptr() % 16 + dst_offset
    expected = before.clone()
    expected[d : d + nbytes] = source[s : s + nbytes]
    copy(dst[d : d + nbytes], src[s : s + nbytes], num_programs=num_programs, block_bytes=1024)
    return torch.equal(dst.cpu(), expected) and torch.equal(src.cpu(), source)


def cases() -> list[tuple[int, int, int, int]]:
    return [(n, src, dst, programs) for n in SIZES for src, dst in OFFSETS for programs in (1, 3)]


def test_a_copy_that_touches_a_canary_is_noticed() -> None:
    def one_byte_more(dst: Tensor, src: Tensor, **_: int) -> None:
        dst.copy_(src)
        torch.as_strided(dst, (1,), (1,), dst.storage_offset() + dst.numel()).add_(1)

    def one_byte_less(dst: Tensor, src: Tensor, **_: int) -> None:
        dst[:-1] = src[:-1]
        dst[-1] = src[-1] + 1

    assert not copied_exactly(17, 0, 0, 1, one_byte_more)
    assert not copied_exactly(17, 0, 0, 1, one_byte_less)


@pytest.mark.parametrize(("place_src", "place_dst"), ENDS)
def test_copies_are_exact(place_src: State, place_dst: State) -> None:
    from chameleon_mm.bench._copy_kernel import copy_bytes

    def copy_and_wait(dst: Tensor, src: Tensor, **options: int) -> None:
        copy_bytes(dst, src, **options)
        if dst.device != src.device or dst.device.type != "cpu":
            torch.cuda.synchronize()

    wanted = cases() if place_src is Tensor.clone else [*cases(), (1 << 20, 5, 5, 8)]
    assert [case for case in wanted if not copied_exactly(*case, copy_and_wait, place_src, place_dst)] == []


@pytest.mark.parametrize(
    ("dst", "src", "options", "message"),
    [
        (torch.zeros(4), torch.zeros(4), {}, "flat, contiguous uint8"),
        (torch.zeros(8, dtype=torch.uint8)[::2], torch.zeros(4, dtype=torch.uint8), {}, "flat, contiguous uint8"),
        (torch.zeros(4, dtype=torch.uint8), torch.zeros(5, dtype=torch.uint8), {}, "equal sizes, got 5 bytes into 4"),
        (torch.zeros(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8), {"num_programs": 0}, "num_programs >= 1"),
        (torch.zeros(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8), {"block_bytes": 100}, "power of two"),
    ],
)
def test_bad_arguments_are_refused(dst: Tensor, src: Tensor, options: dict[str, int], message: str) -> None:
    from chameleon_mm.bench._copy_kernel import copy_bytes

    with pytest.raises(ValueError, match=message):
        copy_bytes(dst, src, **{"num_programs": 1, **options})


def test_launch_metadata_carries_the_bytes_read_and_written() -> None:
    from types import SimpleNamespace

    from chameleon_mm.bench._copy_kernel import copy_kernel

    told = copy_kernel.launch_metadata((4, 1, 1), SimpleNamespace(name="copy_kernel"), {"head": 3, "nbytes": 97})
    assert told == {"name": "copy_kernel_100B", "bytes": 200}


def test_reference_copies() -> None:
    from chameleon_mm.bench._copy_kernel import copy_bytes_reference

    assert copied_exactly(17, 1, 2, 1, lambda dst, src, **_: copy_bytes_reference(dst, src))
