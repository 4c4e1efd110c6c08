"""Forms of sizes: what is no size, and no number of steps. `test_random_lengths.py` has steps by such forms."""

from __future__ import annotations

import pytest

from chameleon_mm.follow.structure import SizeForms


def test_a_size_below_zero_or_in_parts_is_none() -> None:
    forms = SizeForms(2)
    forms.of((10, 20))
    assert forms.of((5, 10)).at({0: 7}) is None
    assert forms.of((2, 12)).at({0: 3}) is None


def test_the_number_of_steps_is_checked() -> None:
    with pytest.raises(ValueError, match="2 steps, got 3"):
        SizeForms(2).of((1, 2, 3))
