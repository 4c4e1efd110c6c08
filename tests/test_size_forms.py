"""Forms of sizes: found from a few steps, they hold for others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chameleon_mm.follow.structure import SizeForms

LENGTHS = st.lists(st.integers(20, 4096), min_size=3, max_size=5, unique=True)

SIZES: dict[str, Callable[[int], int]] = {
    "constant": lambda _: 64,
    "length": lambda n: n,
    "multiple": lambda n: 768 * n,
    "square": lambda n: 12 * n * n,
    "shifted": lambda n: n - 1,
    "shifted and multiplied": lambda n: 256 * (n - 1),
    "product with a shifted one": lambda n: 4 * n * (n - 1),
    "one more": lambda n: n + 1,
}


@pytest.mark.parametrize("name", SIZES)
@settings(max_examples=50, deadline=None)
@given(lengths=LENGTHS)
def test_a_size_is_told_from_two_others(name: str, lengths: list[int]) -> None:
    *recorded, new = lengths
    forms = SizeForms(len(recorded))
    forms.of(tuple(recorded))
    forms.of(tuple(n - 1 for n in recorded))
    form = forms.of(tuple(map(SIZES[name], recorded)))
    assert forms.num_variables == 1
    assert form.at({0: new}) == SIZES[name](new)


@settings(max_examples=50, deadline=None)
@given(
    rows=st.lists(st.integers(1, 64), min_size=4, max_size=4, unique=True),
    lengths=st.lists(st.integers(65, 4096), min_size=4, max_size=4, unique=True),
)
def test_two_sizes_that_change_apart_are_two_variables(rows: list[int], lengths: list[int]) -> None:
    forms = SizeForms(3)
    forms.of(tuple(rows[:3]))
    if forms.find(tuple(lengths[:3])) is not None:
        return  # by chance the ones are multiples of the others
    forms.of(tuple(lengths[:3]))
    product = forms.of(tuple(8 * a * b for a, b in zip(rows[:3], lengths[:3], strict=True)))
    assert forms.num_variables == 2
    assert product.at({0: rows[3], 1: lengths[3]}) == 8 * rows[3] * lengths[3]
    assert product.at({0: rows[3]}) is None


def test_what_follows_from_no_other_size_is_a_variable() -> None:
    forms = SizeForms(3)
    forms.of((10, 20, 30))
    assert forms.find((7, 3, 11)) is None
    assert forms.of((7, 3, 11)).at({0: 40, 1: 5}) == 5
    assert forms.num_variables == 2


def test_a_size_below_zero_or_in_parts_is_none() -> None:
    forms = SizeForms(2)
    forms.of((10, 20))
    assert forms.of((5, 10)).at({0: 7}) is None
    assert forms.of((2, 12)).at({0: 3}) is None


def test_the_number_of_steps_is_checked() -> None:
    with pytest.raises(ValueError, match="2 steps, got 3"):
        SizeForms(2).of((1, 2, 3))
