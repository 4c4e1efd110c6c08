"""Parse and format sizes: `parse_size("20GiB") -> 21474836480`. Units as name suffixes: `_bytes`, `_us`, `_gbps` (1e9 B/s).

parse_size(format_size_up(nbytes)) >= nbytes        # a printed size is large enough as a budget
parse_budget("90%", lambda: device.capacity)        # also 0.9, and all that parse_size takes
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from math import floor, inf, isfinite
from numbers import Integral, Real
from operator import index
from typing import TYPE_CHECKING, TypeVar, cast

from chameleon_mm.errors import describe

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_Bytes = TypeVar("_Bytes", int, "NDArray[np.int64]")

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40

ALLOCATION_UNIT_BYTES = 512
"""Unit to which the caching allocator and the simulator round sizes up."""

CHECKSUM_BYTES = 8

_FACTORS = {
    "": 1, "B": 1,
    "KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": TIB,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip
_SHOWN = ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_SHARE = re.compile(r"\s*(\d+\.\d+|\d+(?=\s*%))\s*(%?)\s*")


def parse_size(size: int | str, *, what: str = "size", otherwise: str = "") -> int:
    """Bytes of `size`: an integer of bytes, or text such as "20GiB", "1.5 MiB", "8GB" (KiB.. are 1024-based, KB.. 1000-based).

    Fractions of a byte are rounded down, so that a budget is never exceeded: "112.3GiB" is 120581206835 bytes. `what`: name of
    the argument in the error. `otherwise`: what else the argument may be.

    Raises `TypeError` for another type. Raises `ValueError` for text that is not a size, for a negative size, for 8 EiB or
    more, and for a fraction of a byte ("1.5"), where a unit was probably left out.
    """
    try:
        if isinstance(size, bool):
            raise TypeError
        nbytes = _parse_text(size, what, otherwise) if isinstance(size, str) else index(size)  # NumPy's integers, too
    except TypeError:
        raise TypeError(f'{what}: expected an int of bytes or text such as "20GiB", got {describe(size)}') from None
    if not 0 <= nbytes < 1 << 63:
        raise ValueError(f"{what}: expected {'0 bytes or more' if nbytes < 0 else 'less than 8 EiB'}, got {size}")
    return nbytes


def _parse_text(size: str, what: str, otherwise: str) -> int:
    match = _SIZE.fullmatch(size)
    if match is None or match[2].upper() not in _FACTORS:
        units = "B, KiB, MiB, GiB, TiB, KB, MB, GB or TB"
        raise ValueError(f'{what}: expected a number and {units} ("20GiB"){otherwise}, got {size!r}')
    number, factor = Fraction(match[1]), _FACTORS[match[2].upper()]  # not a float: 1.003 * 1000 is 1002.9999999999999
    if factor == 1 and number.denominator != 1:
        raise ValueError(f'{what}: expected a whole number of bytes, or a unit after it ("1.5GiB"), got {size!r}')
    return floor(number * factor)


AUTO = "auto"
"""Budget that the library determines itself, as for None."""


def is_auto(budget: object) -> bool:
    return isinstance(budget, str) and budget == AUTO


def parse_budget(budget: float | str, whole: Callable[[], int] | None = None, *, what: str) -> int:
    """Bytes of a budget: a size as of `parse_size`, a float of bytes, or a share of `whole()` bytes: 0.9, "0.9" or "90%".

    Its callers take "auto" themselves. Without `whole` it is only checked, and the result of a share is 0. Rounds down.

    Raises `TypeError` and `ValueError` as
    `parse_size` does, and `ValueError` for a share that is not above 0 and at most 1, and if `whole()` is 0, which is unknown.
    """
    share = share_of(budget, what)
    if share is None:
        size = floor(cast("float", budget)) if _is_broken(budget) else cast("int | str", budget)
        return parse_size(size, what=what, otherwise=', a share ("90%") or "auto"')
    nbytes = 0 if whole is None else floor(share * whole())
    if whole is not None and not nbytes:
        found = "got less than a byte" if whole() else "got none that is known"
        raise ValueError(f'{what}: expected memory to take {budget!r} of, {found}; give a size, such as "8GiB"')
    return nbytes


def share_of(budget: float | str, what: str) -> Fraction | None:
    """Return the share of a budget, above 0 and at most 1; None: it is a number of bytes. Raises as `parse_budget` does."""
    share: Fraction | None = None
    if isinstance(budget, str):
        match = _SHARE.fullmatch(budget)
        share = None if match is None else Fraction(match[1]) / (100 if match[2] else 1)
        is_share = "%" in budget or (share is not None and share <= 1)
    else:
        is_share = _is_broken(budget) and not KIB <= budget < inf
        share = Fraction(*budget.as_integer_ratio()) if is_share and isfinite(budget) else None
    if is_share and (share is None or not 0 < share <= 1):
        raise ValueError(
            f'{what}: expected a share above 0 and at most 1 or 100 %, or bytes, got {budget!r}; write 0.9, "90%" or "20GiB"'
        )
    return share if is_share else None


def _is_broken(value: object) -> bool:
    """True for a float and its like, NumPy's too."""
    return isinstance(value, Real) and not isinstance(value, Integral)


def round_up(nbytes: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `nbytes`."""
    return -(-nbytes // multiple) * multiple


def allocated_size(nbytes: _Bytes) -> _Bytes:
    """Bytes of device memory that a storage of `nbytes` takes; elementwise for an array of sizes."""
    return (nbytes + (ALLOCATION_UNIT_BYTES - 1)) & -ALLOCATION_UNIT_BYTES  # a power of two


def format_size(nbytes: float) -> str:
    """Return a readable text of `nbytes`: "1.50 GiB", "12.0 MiB", "512 B"."""
    for factor, unit in _SHOWN:
        if abs(nbytes) >= factor:
            value = nbytes / factor
            return f"{value:.2f} {unit}" if value < 10 else f"{value:.1f} {unit}"
    return f"{nbytes:.0f} B"


def format_apart(sizes: Sequence[int]) -> list[str]:
    """Return texts of different sizes, as by `format_size`; in bytes if two texts would be equal."""
    texts = [format_size(nbytes) for nbytes in sizes]
    return texts if len({*texts}) == len(sizes) else [f"{nbytes} B" for nbytes in sizes]


def printable(text: str) -> str:
    """Return text for any UTF-8 file and terminal: lone surrogates, as in hostile names, are escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


def format_size_up(nbytes: int) -> str:
    """Text like that of `format_size`, with the last digit rounded up, so that the printed size is large enough as a budget.

    `parse_size` returns at least `nbytes` for it, and at most a hundredth more. `nbytes` is 0 or more.
    """
    for factor, unit in _SHOWN:
        if nbytes >= factor:
            digits = 2 if nbytes < 10 * factor else 1
            whole, fraction = divmod(-(-nbytes * 10**digits // factor), 10**digits)
            return f"{whole}.{fraction:0{digits}d} {unit}"
    return f"{nbytes} B"


def format_us(us: float | None) -> str:
    """Return a readable text of a duration: "3.20 s", "12.4 ms", "8.0 us"; "not measured" for None."""
    if us is None:
        return "not measured"
    if us >= 1e6:
        return f"{us / 1e6:.2f} s"
    if us >= 1e3:
        return f"{us / 1e3:.2f} ms"
    return f"{us:.1f} us"
