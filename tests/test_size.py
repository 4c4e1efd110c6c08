"""Lines of the repository, by part: each at most the number given here.

A change that deletes lowers its number. A raised number needs a reason, which CONTRIBUTING.md asks for under "Size".
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

MOST_LIBRARY_LINES = 35_350
"""Python of `chameleon_mm`, without `bench` and `kernels`."""

MOST_BENCH_AND_KERNELS_LINES = 5_897
"""Python of `bench` and `kernels`."""

MOST_TEST_LINES = 58_379
"""Python and C++ of `tests`, the CUDA stand-in included."""

ROOT = Path(__file__).resolve().parents[1]


def lines_of(*folders: str, suffixes: tuple[str, ...] = (".py",)) -> int:
    """Lines of the sources below these folders. Links are not followed: `bench` and `kernels` count where they are."""
    paths = [Path(where, name) for folder in folders for where, _, names in os.walk(ROOT / folder) for name in names]
    return sum(path.read_bytes().count(b"\n") for path in paths if path.suffix in suffixes)


@pytest.mark.parametrize(
    ("lines", "most"),
    [
        (lines_of("chameleon_mm"), MOST_LIBRARY_LINES),
        (lines_of("bench", "kernels"), MOST_BENCH_AND_KERNELS_LINES),
        (lines_of("tests", suffixes=(".py", ".cpp", ".h")), MOST_TEST_LINES),
    ],
    ids=["library", "bench and kernels", "tests"],
)
def test_no_part_grows_without_a_reason(lines: int, most: int) -> None:
    assert lines <= most, f"expected at most {most} lines, got {lines}; delete some, or see Size in CONTRIBUTING.md"
