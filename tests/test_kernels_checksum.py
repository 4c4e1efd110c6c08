"""The checksum kernel: the same number as torch's operators and as Python's integers give, and no change of bytes unseen.

Tests with the parameter "interpreter" exist only where Triton's interpreter is on: test_kernels_compiled runs them.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from chameleon_mm.device import Device
from chameleon_mm.kernels.checksum import BLOCK_WORDS, add_checksum, checksum_reference

PLACES = [pytest.param("cuda", marks=pytest.mark.gpu)]
if os.environ.get("TRITON_INTERPRET") == "1":
    PLACES.insert(0, pytest.param("cpu", id="interpreter"))

SIZES = (0, 1, 7, 8, 9, 4096, 8 * BLOCK_WORDS - 1, 8 * BLOCK_WORDS, 8 * BLOCK_WORDS + 5, 24 * BLOCK_WORDS + 13)

_ALL = (1 << 64) - 1


def by_integers(data: bytes) -> int:
    """The checksum by Python's integers, from splitmix64's definition."""
    data += bytes(-len(data) % 8)
    total = 0
    for number in range(len(data) // 8):
        x = int.from_bytes(data[8 * number : 8 * number + 8], "little") ^ ((number + 1) * 0x9E3779B97F4A7C15 & _ALL)
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _ALL
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _ALL
        total += x ^ (x >> 31)
    total &= _ALL
    return total - (1 << 64) if total >> 63 else total


def reference(data: Tensor) -> int:
    return int(checksum_reference(data))


@pytest.mark.parametrize("nbytes", SIZES)
def test_operators_give_what_integers_give(nbytes: int) -> None:
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    assert reference(data) == by_integers(bytes(data.tolist()))
    beside = torch.cat((torch.zeros(3, dtype=torch.uint8), data))[3:]  # off the alignment
    assert reference(beside) == reference(data)


@pytest.mark.parametrize("num_programs", [1, 2, 5])
@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("place", PLACES)
def test_the_kernel_gives_what_operators_give(place: str, nbytes: int, num_programs: int) -> None:
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    out = torch.tensor([17], device=place)
    add_checksum(out, data.to(place), num_programs=num_programs)
    assert int(out) == (reference(data) + 17 + (1 << 63)) % (1 << 64) - (1 << 63)


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "negated": Tensor.neg,
    "two signs at odd positions": lambda t: (
        t * torch.where((torch.arange(t.numel()) == 3) | (torch.arange(t.numel()) == 9), -1, 1)
    ),
    "halves exchanged": lambda t: t.roll(t.numel() // 2),
    "neighbours exchanged": lambda t: t.view(-1, 2).flip(1).flatten(),
    "reversed": lambda t: t.flip(0),
    "shifted by a word": lambda t: t.roll(2),
    "one last bit": lambda t: torch.cat((t[:-1].view(torch.int32), t[-1:].view(torch.int32) ^ 1)).view(torch.float32),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_a_weighted_sum_would_not_see(change: Callable[[Tensor], Tensor]) -> None:
    before = torch.randn(1024)
    after = change(before).contiguous()
    assert reference(before.view(torch.uint8)) != reference(after.view(torch.uint8))


@pytest.mark.parametrize("offset", [0, 1])
def test_a_stream_adds_checksums_in_its_order(device: Device, offset: int) -> None:
    compute = device.current_stream()
    with device.compute():
        out = compute.alloc(8)
        out.zero_()
        data = torch.randint(0, 256, (1000 + offset,), dtype=torch.uint8, device=device.torch_device)[offset:]
        compute.add_checksum(out, data)
        expected = reference(data.cpu())
        assert int(out.view(torch.int64)) == expected
        with pytest.raises(ValueError, match="expected 8 bytes as out"):
            compute.add_checksum(out[:4], data)
        with pytest.raises(ValueError, match="flat"):
            compute.add_checksum(out, data.view(2, -1))
