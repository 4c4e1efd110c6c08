"""Single bf16 patterns through the codec that may refuse them: each is exact, or raw, by what it is and not by its neighbours.

The case with the parameter "interpreter" exists only where Triton's interpreter is on; the last test runs it there.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from chameleon_mm.kernels.codec import EncodeStatus
from chameleon_mm.kernels.codec_narrow import FP32_AS_FP16

ROOT = Path(__file__).resolve().parents[1]
PLACES = [pytest.param("cuda", marks=pytest.mark.gpu)]
if os.environ.get("TRITON_INTERPRET") == "1":
    PLACES.insert(0, pytest.param("cpu", id="interpreter"))

# Every sign and exponent, with the lowest bit of the mantissa alone, which a small number may lose, and with all of them; zeros
# and infinities.
PATTERNS = [(sign << 15) | (exponent << 7) | m for sign in (0, 1) for exponent in range(256) for m in (1, 0x7F)]
PATTERNS += [0, 0x8000, 0x7F80, 0xFF80]


def is_a_half(pattern: int) -> bool:
    """Whether the fp32 upcast of a bf16 pattern is that of an fp16 one, by arithmetic on its value. NaNs by their bits."""
    exponent, mantissa = (pattern >> 7) & 0xFF, pattern & 0x7F
    if exponent == 255:
        return True  # an infinity, or a payload of 7 bits where fp16 has 10
    value = (mantissa + (128 if exponent else 0)) * 2.0 ** (max(exponent, 1) - 134)
    return value <= 65504 and (value * 2.0**24).is_integer()  # 8 bits always fit fp16's 11


@pytest.mark.parametrize("place", PLACES)
def test_upcasts_of_bf16_are_exact_as_fp16_or_raw_one_by_one(place: str) -> None:
    words = (torch.tensor(PATTERNS, dtype=torch.int64) << 16).to(torch.int32).to(place)
    raw = torch.zeros(len(PATTERNS), 4, dtype=torch.int32, device=place)  # a row each: every source on a 16-byte boundary
    raw[:, 0] = words
    encoded = torch.empty(2, dtype=torch.uint8, device=place)
    back = torch.empty(4, dtype=torch.uint8, device=place)
    status = torch.empty(1, dtype=torch.int32, device=place)
    wrong = []
    for pattern, row in zip(PATTERNS, raw, strict=True):
        src = row[:1].view(torch.uint8)
        FP32_AS_FP16.encode(src, encoded, status, num_programs=1)
        is_exact = int(status) == EncodeStatus.EXACT
        if is_exact:
            FP32_AS_FP16.decode(encoded, back, num_programs=1)
        if is_exact != is_a_half(pattern) or (is_exact and not torch.equal(back, src)):
            wrong.append(hex(pattern))
    assert wrong == []


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="is what runs this process")
def test_single_patterns_under_the_interpreter() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/test_kernels_patterns.py",
        "-k",
        "interpreter",
    ]
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\b1 passed\b", done.stdout)
