"""The codecs: exact, or raw by their own status word. Kernels agree with their references byte for byte.

Tests with the parameter "interpreter" exist only where Triton's interpreter is on: test_kernels_interpreted runs them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from chameleon_mm.kernels.codec import Codec, EncodeStatus, launch_metadata
from chameleon_mm.kernels.codec_bool import BOOL_AS_BITS
from chameleon_mm.kernels.codec_narrow import FP32_AS_BF16, FP32_AS_FP16, INT64_AS_INT16, INT64_AS_INT32
from chameleon_mm.kernels.codec_pack12 import BLOCK_ELEMENTS, MAX_EXCEPTIONS, PACK12, RECORD_BYTES
from chameleon_mm.kernels.codecs import CODECS

PLACES = [pytest.param("cuda", marks=pytest.mark.gpu)]
if os.environ.get("TRITON_INTERPRET") == "1":
    PLACES.insert(0, pytest.param("cpu", id="interpreter"))

CANARY_BYTES = 64
# With small steps, so that a few hundred elements take several of several programs.
SMALL_STEPS: dict[str, Codec] = {
    "bool": replace(BOOL_AS_BITS, block_words=32),
    "int16": replace(INT64_AS_INT16, block_elements=64),
    "int32": replace(INT64_AS_INT32, block_elements=64),
    "bf16": replace(FP32_AS_BF16, block_elements=64),
    "fp16": replace(FP32_AS_FP16, block_elements=64),
    "pack12": replace(PACK12, blocks_at_once=2),
}
ALL_HALVES = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
EXACT = EncodeStatus.EXACT


def as_bytes(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8).view(-1)


def upcast_of_bf16(words: Tensor) -> Tensor:
    return words.to(torch.int32) << 16


def upcast_of_fp16(words: Tensor) -> Tensor:
    """fp32 words of fp16 words: by the library's own conversion, but for NaNs, which it may quiet."""
    exact = words.view(torch.float16).to(torch.float32).view(torch.int32)
    half = words.to(torch.int32)
    by_bits = ((half & 0x8000) << 16) | 0x7F800000 | ((half & 0x3FF) << 13)
    return torch.where((half & 0x7C00) == 0x7C00, by_bits, exact)


def amid_canaries(nbytes: int, place: str) -> tuple[Tensor, Tensor]:
    memory = torch.randint(0, 256, (nbytes + 2 * CANARY_BYTES + 16,), dtype=torch.uint8).to(place)
    begin = -memory.data_ptr() % 16 + CANARY_BYTES
    return memory, memory[begin : begin + nbytes]


def beside_is_untouched(memory: Tensor, before: Tensor, part: Tensor) -> bool:
    begin, end = part.storage_offset(), part.storage_offset() + part.numel()
    return torch.equal(memory[:begin], before[:begin]) and torch.equal(memory[end:], before[end:])


def status_of(codec: Codec, raw: Tensor, place: str, num_programs: int = 2) -> EncodeStatus:
    """Encode and, where that is exact, decode `raw` by kernel and by reference, and compare everything."""
    raw = as_bytes(raw)
    src_memory, src = amid_canaries(raw.numel(), place)
    src.copy_(raw)
    src_before = src_memory.clone()
    dst_memory, dst = amid_canaries(codec.encoded_bytes(raw.numel()), place)
    dst_before = dst_memory.clone()
    words = torch.full((3,), 77, dtype=torch.int32, device=place)
    codec.encode(src, dst, words[1:2], num_programs=num_programs)
    assert torch.equal(src_memory, src_before)
    assert beside_is_untouched(dst_memory, dst_before, dst)
    assert words[0] == words[2] == 77
    expected, expected_status = torch.empty_like(dst), torch.empty(1, dtype=torch.int32, device=place)
    codec.encode_reference(src, expected, expected_status)
    assert words[1] == expected_status
    status = EncodeStatus(int(words[1]))
    if status is EXACT:
        assert torch.equal(dst, expected)
        back_memory, back = amid_canaries(raw.numel(), place)
        back_before = back_memory.clone()
        encoded = dst.clone()
        codec.decode(dst, back, num_programs=num_programs)
        assert torch.equal(back, src)
        assert beside_is_untouched(back_memory, back_before, back)
        assert torch.equal(dst, encoded)
        codec.decode_reference(dst, back.zero_())
        assert torch.equal(back, src)
    return status


def values_for(name: str, count: int) -> Tensor:
    """`count` elements that the codec holds."""
    halves = torch.randint(-(1 << 15), 1 << 15, (count,), dtype=torch.int16)
    return {
        "bool": lambda: torch.randint(0, 2, (count,), dtype=torch.uint8),
        "int16": lambda: halves.to(torch.int64),
        "int32": lambda: torch.randint(-(1 << 31), 1 << 31, (count,)),
        "bf16": lambda: upcast_of_bf16(halves),
        "fp16": lambda: upcast_of_fp16(halves),
        "pack12": lambda: torch.randn(count).to(torch.bfloat16),
    }[name]()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", SMALL_STEPS)
def test_every_length_around_units_and_blocks(name: str, place: str) -> None:
    blocks = (1023, 1024, 1025, 2048, 2049, 5120 + 17) if name == "pack12" else (63, 64, 65, 127, 128, 129, 255, 256, 257, 1000)
    for count in (0, 1, 7, 8, 15, 16, 17, *blocks):
        for num_programs in (1, 3):
            assert status_of(SMALL_STEPS[name], values_for(name, count), place, num_programs) is EXACT


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_as_they_are_used(codec: Codec, place: str) -> None:
    name = next(name for name, small in SMALL_STEPS.items() if small.name == codec.name)
    assert status_of(codec, values_for(name, 20_000), place) is EXACT


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("codec", [FP32_AS_BF16, FP32_AS_FP16, PACK12], ids=lambda codec: codec.name)
def test_all_patterns_of_16_bits(codec: Codec, place: str) -> None:
    upcast: dict[str, Callable[[Tensor], Tensor]] = {"fp32_as_bf16": upcast_of_bf16, "fp32_as_fp16": upcast_of_fp16}
    assert status_of(codec, upcast.get(codec.name, Tensor.clone)(ALL_HALVES), place) is EXACT


@pytest.mark.parametrize("place", PLACES)
def test_all_bf16_patterns_in_any_order_are_exact_or_raw(place: str) -> None:
    shuffled = ALL_HALVES[torch.randperm(len(ALL_HALVES))]
    assert status_of(PACK12, shuffled, place) is EncodeStatus.TOO_MANY_EXCEPTIONS  # 256 exponents in every block
    strided = ALL_HALVES.view(64, 1024).t()  # every block: a few mantissas of every exponent
    assert status_of(PACK12, strided, place) is EncodeStatus.TOO_MANY_EXCEPTIONS


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("at", [0, 63, 64, 127, 128, 130])
def test_one_element_that_does_not_fit_is_seen_anywhere(place: str, at: int) -> None:
    odd = {
        "bool": (torch.tensor([2, 255], dtype=torch.uint8), EncodeStatus.NOT_BOOL),
        "int16": (torch.tensor([1 << 15, -(1 << 15) - 1, 1 << 16, (1 << 63) - 1, -(1 << 63)]), EncodeStatus.OUT_OF_RANGE),
        "int32": (torch.tensor([1 << 31, -(1 << 31) - 1, 1 << 32, -(1 << 63)]), EncodeStatus.OUT_OF_RANGE),
        "bf16": (torch.tensor([1, 0x8000, 0x3F800001, 0x7F800001], dtype=torch.int32), EncodeStatus.NOT_AN_UPCAST),
        "fp16": (
            # One bit too many; 65536 and 2**-25, beyond the range; a NaN with too low a payload; a denormal; 1.5 * 2**-24.
            torch.tensor([0x3F801000, 0x47800000, 0x33000000, 0x7F800001, 0x10000, 0x33C00000], dtype=torch.int32),
            EncodeStatus.NOT_AN_UPCAST,
        ),
    }
    for name, (bad, reason) in odd.items():
        for value in bad:
            raw = values_for(name, 131)
            raw[at] = value
            assert status_of(SMALL_STEPS[name], raw, place) is reason


@pytest.mark.parametrize("place", PLACES)
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(
    words=st.lists(st.integers(-(1 << 31), (1 << 31) - 1) | st.sampled_from((0, -1, 0x38800000, 0x33800000)), max_size=40),
    cut=st.sampled_from((0, 13, 16)),
)
def test_any_fp32_words_are_exact_or_raw(place: str, words: list[int], cut: int) -> None:
    raw = (torch.tensor(words, dtype=torch.int32) >> cut) << cut
    is_bf16 = not bool((raw & 0xFFFF).any())
    assert (status_of(SMALL_STEPS["bf16"], raw, place) is EXACT) == is_bf16
    is_fp16 = bool(torch.isin(raw, upcast_of_fp16(ALL_HALVES)).all())
    assert (status_of(SMALL_STEPS["fp16"], raw, place) is EXACT) == is_fp16


def block_with_exceptions(exceptions: int, where: str) -> Tensor:
    """A block of ones, some of which are huge, tiny, infinite or NaN by turns."""
    block = torch.ones(BLOCK_ELEMENTS, dtype=torch.bfloat16).view(torch.int16)
    odd = torch.tensor([0x7F80, 0x7FC1, 0x0080, 0x7F00, -0x80], dtype=torch.int16).repeat(BLOCK_ELEMENTS)[:exceptions]
    at = {
        "front": torch.arange(exceptions),
        "end": torch.arange(BLOCK_ELEMENTS - exceptions, BLOCK_ELEMENTS),
        "anywhere": torch.randperm(BLOCK_ELEMENTS)[:exceptions],
    }[where]
    block[at] = odd
    return block


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("where", ["front", "end", "anywhere"])
def test_pack12_holds_as_many_exceptions_as_it_says(place: str, where: str) -> None:
    fitting = [block_with_exceptions(n, where) for n in (0, 1, MAX_EXCEPTIONS - 1, MAX_EXCEPTIONS)]
    assert status_of(PACK12, torch.cat(fitting), place) is EXACT
    one_more = block_with_exceptions(MAX_EXCEPTIONS + 1, where)
    for blocks in ([one_more], [*fitting, one_more], [one_more, *fitting]):
        assert status_of(PACK12, torch.cat(blocks), place) is EncodeStatus.TOO_MANY_EXCEPTIONS


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("word", [0, -0x8000, 1, 0x7F, 0x80, 0x7F80, -0x80, 0x7FC0, 0x7F81, 0x3F80, 0x7F7F])
def test_pack12_of_one_word_everywhere(place: str, word: int) -> None:
    """Zeros of both signs, denormals, the smallest number, infinities, NaNs quiet and signalling, the largest number."""
    assert status_of(PACK12, torch.full((BLOCK_ELEMENTS + 3,), word, dtype=torch.int16), place) is EXACT


@pytest.mark.parametrize("place", PLACES)
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 1 << 20),
    center=st.integers(0, 255),
    octaves=st.integers(1, 24),
    zeros=st.sampled_from((0.0, 0.5, 0.999)),
)
def test_pack12_of_any_exponents_is_exact_or_raw(place: str, seed: int, center: int, octaves: int, zeros: float) -> None:
    random = torch.Generator().manual_seed(seed)
    count = 2 * BLOCK_ELEMENTS + 5
    exponent = torch.randint(center - octaves, center + octaves + 1, (count,), generator=random).clamp(0, 255)
    exponent[torch.rand(count, generator=random) < zeros] = 0
    rest = torch.randint(0, 256, (count,), generator=random)
    words = ((rest & 0x80) << 8) | (exponent << 7) | (rest & 0x7F)
    status = status_of(PACK12, words.to(torch.int16), place)
    if octaves <= 3:
        assert status is EXACT  # seven octaves around the mean


def exceptions_of(raw: Tensor) -> Tensor:
    """Of each block, from the records that the reference writes."""
    raw = as_bytes(raw.to(torch.bfloat16))
    dst = torch.empty(PACK12.encoded_bytes(raw.numel()), dtype=torch.uint8)
    status = torch.empty(1, dtype=torch.int32)
    PACK12.encode_reference(raw, dst, status)
    assert int(status) == EXACT
    back = torch.empty_like(raw)
    PACK12.decode_reference(dst, back)
    assert torch.equal(back, raw)
    return dst.view(-1, RECORD_BYTES)[:, 1].to(torch.int64)


def test_exceptions_of_activations_are_as_rare_as_the_format_says() -> None:
    random = torch.Generator().manual_seed(1)
    gate, value = torch.randn((2, 1 << 20), generator=random)
    normal = exceptions_of(value)
    swiglu = exceptions_of(torch.nn.functional.silu(gate) * value)
    assert 1500 < int(normal.sum()) < 1850  # 0.16 % of 1 Mi
    assert 5200 < int(swiglu.sum()) < 5700  # 0.52 %
    assert int(normal.max()) <= 10 and int(swiglu.max()) <= 20  # of 30
    # ReLU's zeros have a code; outliers of 2**17 times the rest and infinities are exceptions one by one.
    assert int(exceptions_of(value.relu()).max()) <= 10
    outliers = value * 0.02
    outliers[::4096], outliers[7::4096] = 5000.0, float("inf")
    assert int(exceptions_of(outliers).max()) <= 12


@pytest.mark.parametrize(
    ("codec", "nbytes", "encoded"),
    [
        (BOOL_AS_BITS, 0, 0),
        (BOOL_AS_BITS, 17, 3),
        (INT64_AS_INT32, 80, 40),
        (INT64_AS_INT16, 80, 20),
        (FP32_AS_BF16, 80, 40),
        (FP32_AS_FP16, 80, 40),
        (PACK12, 2048 * 8 + 6, 1568 * 8 + 6),
    ],
)
def test_the_host_knows_the_size(codec: Codec, nbytes: int, encoded: int) -> None:
    assert codec.encoded_bytes(nbytes) == encoded


def test_the_rate_of_pack12() -> None:
    assert RECORD_BYTES * 8 / BLOCK_ELEMENTS == 12.25
    assert 1.306 < PACK12.encoded_bytes(1 << 30) ** -1 * (1 << 30) < 1.3062


def test_each_dtype_has_its_codecs() -> None:
    def names(dtype: torch.dtype) -> list[str]:
        return [codec.name for codec in CODECS if codec.applies_to(dtype)]

    assert names(torch.bool) == ["bool_as_bits"]
    assert names(torch.int64) == ["int64_as_int16", "int64_as_int32"]
    assert names(torch.float32) == ["fp32_as_bf16", "fp32_as_fp16"]
    assert names(torch.bfloat16) == ["pack12"]
    assert names(torch.float16) == names(torch.float8_e4m3fn) == names(torch.int32) == []


def buffer(nbytes: int, shift: int = 0) -> Tensor:
    return torch.zeros(nbytes + 16, dtype=torch.uint8)[shift : shift + nbytes]


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_bad_arguments_are_refused(codec: Codec) -> None:
    size = codec.encoded_bytes(64)
    status = torch.full((1,), 77, dtype=torch.int32)
    shared = torch.zeros(256, dtype=torch.uint8)
    for src, dst, word, num_programs, message in (
        (torch.zeros(16), buffer(size), status, 1, "the raw buffer as a flat, contiguous uint8"),
        (buffer(64, 1), buffer(size), status, 1, "the raw buffer on a 16-byte boundary"),
        (buffer(64), buffer(size, 8), status, 1, "the encoded buffer on a 16-byte boundary"),
        (buffer(64), buffer(size + 1), status, 1, f"expected {size} encoded bytes for 64 raw ones, got {size + 1}"),
        (buffer(64), torch.empty(size, dtype=torch.uint8, device="meta"), status, 1, "on one device"),
        (shared[:64], shared[48 : 48 + size], status, 1, "do not overlap"),
        (buffer(64), buffer(size), status.to(torch.int64), 1, "status as one int32"),
        (buffer(64), buffer(size), torch.zeros(2, dtype=torch.int32), 1, "status as one int32"),
        (buffer(64), buffer(size), status, 0, "num_programs >= 1"),
    ):
        with pytest.raises(ValueError, match=message):
            codec.encode(src, dst, word, num_programs=num_programs)
    with pytest.raises(ValueError, match="encoded bytes"):
        codec.decode(buffer(size + 2), buffer(64), num_programs=1)
    assert status.item() == 77


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec is not BOOL_AS_BITS], ids=lambda codec: codec.name)
def test_parts_of_elements_are_refused(codec: Codec) -> None:
    with pytest.raises(ValueError, match="whole elements"):
        codec.encoded_bytes(33)


def test_no_bytes_are_encoded_exactly_without_a_launch() -> None:
    for codec in CODECS:
        status = torch.full((1,), 77, dtype=torch.int32)
        codec.encode(buffer(0), buffer(0), status, num_programs=1)
        codec.decode(buffer(0), buffer(0), num_programs=1)
        assert status.item() == EXACT


def guarded(nbytes: int, at_end: bool) -> Tensor:
    """(nbytes,) uint8 at the very front or end of its pages, before or behind which nothing can be touched."""
    page = mmap.PAGESIZE
    inner = -(-nbytes // page) * page
    memory = torch.frombuffer(mmap.mmap(-1, inner + 2 * page), dtype=torch.uint8)
    for offset in (0, page + inner):
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(memory.data_ptr() + offset), page, 0) == 0
    begin = page + inner - nbytes if at_end else page
    return memory[begin : begin + nbytes]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="reads the host's pages; needs Triton's interpreter")
@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("name", SMALL_STEPS)
def test_interpreter_touches_nothing_beside_the_buffers(name: str, at_end: bool) -> None:
    codec = SMALL_STEPS[name]
    raw = as_bytes(values_for(name, 3 * BLOCK_ELEMENTS + 128))  # all sizes are multiples of 16: ends lie on a boundary
    src, back = guarded(raw.numel(), at_end), guarded(raw.numel(), at_end)
    dst = guarded(codec.encoded_bytes(raw.numel()), at_end)
    src.copy_(raw)
    status = torch.zeros(1, dtype=torch.int32)
    codec.encode(src, dst, status, num_programs=2)
    codec.decode(dst, back, num_programs=2)
    assert status.item() == EXACT
    assert torch.equal(back, raw)


def test_launch_metadata_carries_the_size() -> None:
    from types import SimpleNamespace

    assert launch_metadata((4,), SimpleNamespace(name="narrow_kernel"), {"count": 97}) == {"name": "narrow_kernel_97"}
