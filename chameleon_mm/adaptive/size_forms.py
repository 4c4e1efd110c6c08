"""Finds how the sizes of a step depend on the few that its data decides, from steps that differ in nothing else.

    forms = SizeForms(num_steps=2)
    length = forms.of((128, 512))          # the first sizes that differ: a variable
    forms.of((127, 511))                   # the length less 1
    forms.of((32768, 131072))              # 256 times the length
    forms.of((65536, 1048576))             # 4 times its square
    form.at({variable: 300})               # what it is in another step; None: one of its variables is not known there

A form is a constant, a product of a constant and up to two factors, or a variable, multiplied and shifted. Factors are
variables, and sizes that are a shifted variable, such as the tokens that are predicted: the length less 1. Each form holds
exactly in all the steps that it was found from; the more steps there are, the fewer forms hold by chance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations_with_replacement

import numpy as np

from chameleon_mm.trace.trace import Int64s

Sizes = tuple[int, ...]
"""Values of one size, one for each step."""

_FACTORS = 8
"""Number of factors at most of which products are looked for: twice the variables that a structure may have. Of these and as
many shifted ones there are 136 products of two, all tried for each size that differs."""
_SHIFTS = (-1, 1)
"""Shifts of a variable that are looked for in products: the tokens behind the first one, one more for the whole text."""


@dataclass(frozen=True, slots=True)
class Form:
    """A size: `scale` times the product of `factors`, and `shift`."""

    scale: Fraction
    shift: Fraction
    factors: tuple[Form | int, ...]
    """Forms, or numbers of variables."""

    def at(self, values: Mapping[int, int]) -> int | None:
        """The size where the variables have `values`; None: one that it depends on is missing, or it is no whole number of 0 or
        more."""
        product = self.scale
        for factor in self.factors:
            value = values.get(factor) if isinstance(factor, int) else factor.at(values)
            if value is None:
                return None
            product *= value
        size = product + self.shift
        return int(size) if size.denominator == 1 and size >= 0 else None


class SizeForms:
    """Forms of the sizes of `num_steps` steps, found one after the other."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._known: dict[Sizes, Form] = {}
        self._factors: list[tuple[Sizes, Form | int]] = []
        """Variables and shifted ones, with their values."""
        self._shifted_factors: list[tuple[Sizes, Form | int]] = []
        self.num_variables = 0

    def of(self, sizes: Sizes) -> Form:
        """Form of `sizes`, a new variable where none is known. Raises `ValueError` for another number of steps."""
        form = self.find(sizes)
        if form is None:
            form = Form(Fraction(1), Fraction(0), (self.num_variables,))
            self._factors.append((sizes, self.num_variables))
            self._known[sizes] = form
            for shift in _SHIFTS:  # before anything has such a size of its own, it may be a factor of one
                shifted = Form(Fraction(1), Fraction(shift), (self.num_variables,))
                self._shifted_factors.append((tuple(size + shift for size in sizes), shifted))
            self.num_variables += 1
        return form

    def find(self, sizes: Sizes) -> Form | None:
        """Form of `sizes` by the variables that are known; None: there is none."""
        if len(sizes) != self._num_steps:
            raise ValueError(f"size forms: expected the size in each of {self._num_steps} steps, got {len(sizes)} sizes")
        form = self._known.get(sizes)
        if form is None:
            form = self._constant(sizes) or self._product(sizes) or self._shifted(sizes)
            if form is not None:
                self._known[sizes] = form
                if form.shift and len(form.factors) == 1 and len(self._factors) < _FACTORS:
                    self._factors.append((sizes, form))
        return form

    @staticmethod
    def _constant(sizes: Sizes) -> Form | None:
        return Form(Fraction(0), Fraction(sizes[0]), ()) if len(set(sizes)) == 1 else None

    def _product(self, sizes: Sizes) -> Form | None:
        factors = self._factors[:_FACTORS]
        # What nothing has alone agrees by chance too easily: then the scale must be a whole number.
        searches = (1, factors, False), (2, factors, False), (2, factors + self._shifted_factors[:_FACTORS], True)
        for degree, among, must_be_whole in searches:
            for chosen in combinations_with_replacement(among, degree):
                products = _products([values for values, _ in chosen])
                if 0 in products or 0 in sizes:
                    continue
                scale = Fraction(sizes[0], products[0])
                if must_be_whole and scale.denominator != 1:
                    continue
                if all(scale * product == size for size, product in zip(sizes, products, strict=True)):
                    return Form(scale, Fraction(0), tuple(factor for _, factor in chosen))
        return None

    def _shifted(self, sizes: Sizes) -> Form | None:
        for values, factor in self._factors:
            if not isinstance(factor, int):
                continue
            scale = _slope(values, sizes)
            # A line goes through any two points: only one that keeps whole numbers whole says anything.
            if scale is None or scale <= 0 or scale.denominator != 1:
                continue
            shift = sizes[0] - scale * values[0]
            if all(scale * value + shift == size for value, size in zip(values, sizes, strict=True)):
                return Form(scale, shift, (factor,))
        return None


class SizeColumn:
    """Sizes of a trace's column, by the variables."""

    def __init__(self, forms: SizeForms, columns: Sequence[Int64s]) -> None:
        rows, row = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
        self._row = row.reshape(-1)
        self._forms = [forms.find(tuple(sizes)) for sizes in rows.tolist()]
        self._recorded = rows

    def at(self, values: Mapping[int, int], proportions: Sequence[float]) -> Int64s:
        """The sizes; those that have no form are the largest of the recorded ones, in proportion to how much larger the step is
        than each of these."""
        sizes = [form.at(values) if form is not None else None for form in self._forms]
        largest = self._scaled(proportions).max(axis=1, initial=0).tolist()
        known = [most if size is None else size for size, most in zip(sizes, largest, strict=True)]
        return np.array(known, np.int64)[self._row]

    def spread_bytes(self, proportions: Sequence[float]) -> int:
        """The most by which recordings of a size that has no form differ."""
        has_no_form = [form is None for form in self._forms]
        spread = np.ptp(self._scaled(proportions)[has_no_form], axis=1)
        return int(spread.max(initial=0))

    def _scaled(self, proportions: Sequence[float]) -> Int64s:
        scaled: Int64s = np.ceil(self._recorded * np.array(proportions)).astype(np.int64)
        return scaled


def _products(columns: Sequence[Sizes]) -> list[int]:
    products = [1] * len(columns[0])
    for column in columns:
        products = [product * value for product, value in zip(products, column, strict=True)]
    return products


def _slope(values: Sizes, sizes: Sizes) -> Fraction | None:
    """Growth of `sizes` by `values` between two steps that differ in these."""
    for value, size in zip(values[1:], sizes[1:], strict=True):
        if value != values[0]:
            return Fraction(size - sizes[0], value - values[0])
    return None
