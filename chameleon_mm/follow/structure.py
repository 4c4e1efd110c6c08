"""Steps that agree in everything but sizes are of one structure: what two of them were recorded as tells what others will be.

    structure = structures.note(record, trace)       # after a recorded step
    structures.of(record)                            # the structure of a step that was seen; None: none was recorded
    structure.predict(features)                      # record of a step that begins like this: its sizes follow from these
    structure.trace_of(record)                       # what would have been recorded of it

A length that nobody saw is no reason to record a step: its shapes, its storages' bytes and its operators' times follow from
those of two others (`structure.py`). A storage below `min_bytes` never moves, so in a short step fewer may than in a long one.

Where many sizes change and nothing at the step's beginning tells them, as the tokens that each expert of a mixture gets, they
are left open: a step agrees whatever they are, and is planned for the most that was recorded of each.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import reduce
from itertools import combinations_with_replacement
from math import log2, prod
from operator import or_
from statistics import median
from typing import NamedTuple, cast

import numpy as np
import torch

from chameleon_mm.plan.trace import (
    Bools,
    Float64s,
    Int64s,
    TensorKind,
    Trace,
    outliving_bytes,
    there_before,
    with_extra,
    with_spikes,
)
from chameleon_mm.record.light_profiler import (
    FIXED_STORAGE,
    Feature,
    StepRecord,
    feature_hash,
    outline,
    resized,
    save_parts,
    sizes_of,
)
from chameleon_mm.swap.recipe import Refusal
from chameleon_mm.units import allocated_size

# --- Finds how the sizes of a step depend on the few that its data decides, from steps that differ in nothing else
#
# A form is a constant, a product of a constant and up to two factors, or a variable, multiplied and shifted. Factors are
# variables, and sizes that are a shifted variable, such as the tokens that are predicted: the length less 1. Each form holds
# exactly in all the steps that it was found from; the more steps there are, the fewer forms hold by chance.

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


# --- Memory that a step takes beyond what its trace has: found at the step's first hook, or between two checks of memory

RECENT_STEPS = 16
"""Steps that must do with less memory before plans count on less: one in so many may well take more again, as an evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraMemory:
    """Bytes beyond a trace's. Those of `spikes` are allocated and freed again between two checks of memory, at a tick that is
    known."""

    extra_bytes: int = 0
    spikes: Mapping[int, int] = field(default_factory=dict)

    def __or__(self, other: ExtraMemory) -> ExtraMemory:
        ticks = {*self.spikes, *other.spikes}
        spikes = {tick: max(self.spikes.get(tick, 0), other.spikes.get(tick, 0)) for tick in sorted(ticks)}
        return ExtraMemory(extra_bytes=max(self.extra_bytes, other.extra_bytes), spikes=spikes)

    @classmethod
    def most_of(cls, taken: Iterable[ExtraMemory]) -> ExtraMemory:
        """The most that any of `taken` is, all the time and at each tick."""
        return reduce(or_, taken, cls())

    def exceeds(self, other: ExtraMemory, by_bytes: int) -> bool:
        """Whether it is more than `other`, all the time or at some tick, by more than `by_bytes`."""
        if self.extra_bytes - other.extra_bytes > by_bytes:
            return True
        return any(nbytes - other.spikes.get(tick, 0) > by_bytes for tick, nbytes in self.spikes.items())

    def added_to(self, trace: Trace) -> Trace:
        extra_bytes = self.extra_bytes
        gradients = outliving_bytes(trace, {TensorKind.GRADIENT})
        if 0 < gradients <= extra_bytes:  # they are kept and filled with zeros
            trace, extra_bytes = there_before(trace, {TensorKind.GRADIENT}), extra_bytes - gradients
        if extra_bytes:
            trace = with_extra(trace, extra_bytes)
        return with_spikes(trace, self.spikes) if self.spikes else trace


# --- structure

STRUCTURES = 16
"""Structures that are kept, the latest used: each has the traces of `RECORDED` steps at most, some MiB each."""

RECORDED = 6
"""Steps of one structure that are recorded, at most: a mixture of experts and rows with lengths want two to four."""

_ALIGNED = ("op_phase", "op_tick", "read_offsets", "write_offsets", "hook_tick", "hook_use")
"""Columns in which traces of one structure agree, beside the operators' names and storages."""

MOST_VARIABLES = 4
"""Sizes of a structure that may change apart from each other: rows, a length or two, a padded one. Of more, those that the
first save does not tell are open."""

OPEN_MARGIN = 2
"""Part of what is left free where sizes are open: so many times the most by which recordings of one storage differ, or by which
a step took more than was planned. With one, a step that is as far beyond the largest recording as that is beyond the smallest
would pass the budget."""

TIMES_OFF = 0.05
"""Relative error of operator times above which they are corrected: a recorded step loads kernels, and takes longer. Times that
are wrong by a factor of five cost 3 % of a step at most in the end (`tests/test_plan_feedback.py`)."""


class _Recorded(NamedTuple):
    record: StepRecord
    trace: Trace
    work_bytes: int
    """Bytes of all that the step makes: what its operators' times go by."""


class Structure:
    """Recorded steps of one structure, and what they tell of others. Not thread-safe."""

    def __init__(self, outlines: tuple[Hashable, ...], min_bytes: int) -> None:
        """`outlines`: by hook, the feature without its sizes; `min_bytes`: storages below that never move."""
        self.outlines = outlines
        self.refused: dict[int, Refusal] = {}
        self.modules: Mapping[int, str] = {}
        self._min_bytes = min_bytes
        self._proven: dict[int, set[int]] = {}
        self._recorded: list[_Recorded] = []
        """Recordings that agree in all columns but sizes and times, the smallest first."""
        self._recordings = 0
        self._mispredicted = False
        self.has_open_sizes = False
        """Whether some sizes hang on what nothing at the beginning of a step tells."""
        self._most_growth_bytes = 0
        """The most bytes that a step with open sizes allocated between two hooks beyond what was planned."""
        self._extra: deque[ExtraMemory] = deque(maxlen=RECENT_STEPS)
        self._slowdowns: dict[int, deque[float]] = {}

    @property
    def predicts(self) -> bool:
        """Whether steps of other sizes can be told from those that were recorded."""
        return len(self._recorded) > 1 and not self._mispredicted

    @property
    def wants_trace(self) -> bool:
        return not self.predicts and self._recordings < RECORDED

    def note(self, record: StepRecord, trace: Trace) -> None:
        """Note a recorded step."""
        self._recordings += 1
        self._mispredicted = False
        recorded = _Recorded(record, trace, _work_bytes(trace, trace.tensor_bytes))
        if self._recorded and not _are_aligned(self._recorded[0].trace, trace):
            # The first step makes what the optimizer keeps, and is like no other.
            self._recorded, self.refused, self._proven = [], {}, {}
            self._extra.clear()
        self._recorded = [one for one in self._recorded if one.record.features != record.features] + [recorded]
        if len(self._recorded) > 1:
            self._fit()

    def _fit(self) -> None:
        self._recorded.sort(key=lambda one: one.work_bytes)
        self._base = self._recorded[-1]
        self.has_open_sizes = False
        self._find_shapes()
        if self._forms.num_variables > MOST_VARIABLES:
            self.has_open_sizes = True
            self._find_shapes()
        traces = [one.trace for one in self._recorded]
        self._tensor_bytes = SizeColumn(self._forms, [trace.tensor_bytes for trace in traces])
        self._inner_bytes = SizeColumn(self._forms, [trace.op_inner_bytes for trace in traces])
        self._times = np.stack([trace.op_us for trace in traces])
        self._works = np.array([one.work_bytes for one in self._recorded], np.float64)

    def _find_shapes(self) -> None:
        self._forms = SizeForms(len(self._recorded))
        self._observed: list[tuple[int, int]] = []
        """Hook and dimension at which each variable is seen first."""
        self._shapes: dict[tuple[int, ...], tuple[Form | None, ...]] = {}
        """Forms of sizes; None: an open one."""
        self._shape_at: list[tuple[int, ...] | None] = []
        """By hook: key of its sizes in `_shapes`; None: nothing about it changes."""
        for hook, features in enumerate(zip(*(one.record.features for one in self._recorded), strict=True)):
            sizes = [sizes_of(cast("Feature", feature)) for feature in features]
            if None in sizes:
                self._shape_at.append(None)  # a use, or a nested tensor, whose sizes are every batch's own
                continue
            key = tuple(map(id, features))
            self._shape_at.append(key)
            if key in self._shapes:
                continue
            forms: list[Form | None] = []
            for dimension, of_dimension in enumerate(zip(*cast("list[tuple[int, ...]]", sizes), strict=True)):
                is_open = self.has_open_sizes and hook > 0
                forms.append(self._forms.find(of_dimension) if is_open else self._forms.of(of_dimension))
                if len(self._observed) < self._forms.num_variables:
                    self._observed.append((hook, dimension))
            self._shapes[key] = tuple(forms)

    # --- what steps of other sizes are

    def predict(self, features: Sequence[Feature]) -> StepRecord | None:
        """Record of the step that begins with these; None: they do not tell, or there is none like that."""
        values = self._values(features)
        predicted = self._features(values)
        if predicted is not None and self.has_open_sizes and self._open(predicted, features):
            predicted = self._features(values)
        if predicted is None or predicted[: len(features)] != list(features):
            self._mispredicted = True
            return None
        base = self._base.record
        return StepRecord.of(predicted, base.save_of, base.boundaries)

    def _open(self, predicted: Sequence[Feature], features: Sequence[Feature]) -> bool:
        """Leave the sizes open that were thought to be told and are others now. Returns whether there are any."""
        wrong = {key for key, one, other in zip(self._shape_at, predicted, features, strict=False) if one != other}
        for key in wrong:
            if key is not None:
                self._shapes[key] = (None,) * len(self._shapes[key])
        return bool(wrong)

    def _values(self, features: Sequence[Hashable]) -> dict[int, int]:
        """Values of the variables: of those that are not seen yet, the recorded ones in proportion to those that are."""
        values, proportion = {}, 1.0
        for variable, (hook, dimension) in enumerate(self._observed):
            recorded = _size_at(self._base.record.features[hook], dimension)
            if hook < len(features):
                values[variable] = _size_at(features[hook], dimension)
                proportion *= values[variable] / max(1, recorded)
            else:
                values[variable] = round(recorded * proportion)
        return values

    def _proportions(self, values: Mapping[int, int]) -> list[float]:
        """Ratios of the size of a step with these values of the variables to that of each recorded one."""
        return [
            prod(values[v] / max(1, _size_at(one.record.features[hook], d)) for v, (hook, d) in enumerate(self._observed))
            for one in self._recorded
        ]

    def _features(self, values: Mapping[int, int]) -> list[Feature] | None:
        nbytes = self._tensor_bytes.at(values, self._proportions(values))
        small: list[bool] = np.append(nbytes < self._min_bytes, False)[self._base.trace.hook_tensor].tolist()
        shapes: dict[tuple[int, ...], list[Hashable]] = {
            key: [_ANY if form is None else form.at(values) for form in forms] for key, forms in self._shapes.items()
        }
        if any(size is None for sizes in shapes.values() for size in sizes):
            return None
        made: dict[tuple[bool, tuple[int, ...]], Feature] = {}
        features: list[Feature] = []
        for feature, shape_at, is_small in zip(self._base.record.features, self._shape_at, small, strict=True):
            if shape_at is None:
                features.append(feature)
                continue
            key = (is_small, shape_at)
            if key not in made:
                made[key] = self._resized(feature, tuple(shapes[shape_at]), is_small=is_small)
            features.append(made[key])
        return features

    def _resized(self, save: Feature, sizes: tuple[Hashable, ...], *, is_small: bool) -> Feature:
        if any(size is _ANY for size in sizes):  # by identity: it equals every number
            return resized(save, sizes, _ANY)  # it may be too small to move, or not
        return self._resized_to(save, cast("tuple[int, ...]", sizes), is_small=is_small)

    def _resized_to(self, save: Feature, sizes: tuple[int, ...], *, is_small: bool) -> Feature:
        dtype, since = cast("torch.dtype", save[2]), save_parts(save).since
        before_bytes, nbytes = (prod(some) * dtype.itemsize for some in (sizes_of(save) or (), sizes))
        if is_small:
            return resized(save, sizes, FIXED_STORAGE)
        if since == FIXED_STORAGE and before_bytes < self._min_bytes <= nbytes:
            return resized(save, sizes, _ANY)  # it was too small to move: nobody looked where it was saved before
        return resized(save, sizes, since)

    def margin_bytes(self, record: StepRecord) -> int:
        """Bytes to leave free beside a plan for a step with this record, as open sizes may be larger than any recorded one."""
        if not self.has_open_sizes:
            return 0
        spread_bytes = self._tensor_bytes.spread_bytes(self._proportions(self._values(record.features)))
        return OPEN_MARGIN * max(spread_bytes, self._most_growth_bytes)

    def note_growth(self, more_bytes: int) -> int:
        """Note that a step allocated so much more between two hooks than planned. Returns the bytes to leave free for that."""
        self._most_growth_bytes = max(self._most_growth_bytes, more_bytes)
        return OPEN_MARGIN * self._most_growth_bytes

    def trace_of(self, record: StepRecord) -> Trace:
        """Trace of a step with this record, of this structure."""
        values, base = self._values(record.features), self._base.trace
        proportions = self._proportions(values)
        tensor_bytes = self._tensor_bytes.at(values, proportions)
        work_bytes = _work_bytes(base, tensor_bytes)
        before = base.tensor_born < 0
        more_bytes = int((allocated_size(tensor_bytes[before]) - allocated_size(base.tensor_bytes[before])).sum())
        moves: Bools = np.append(tensor_bytes >= self._min_bytes, False)
        hashes = {id(feature): feature_hash(feature) for feature in record.features}
        return dataclasses.replace(
            base,
            fingerprint=record.fingerprint,
            start_bytes=max(0, base.start_bytes + more_bytes),
            tensor_bytes=tensor_bytes,
            op_inner_bytes=self._inner_bytes.at(values, proportions),
            op_us=_interpolated(self._works, self._times, work_bytes) * self._slowdown(work_bytes),
            hook_tensor=np.where(moves[base.hook_tensor], base.hook_tensor, np.int32(-1)).astype(np.int32),
            hook_feature=np.array([hashes[id(feature)] for feature in record.features], np.uint64),
        )

    # --- what steps have taught that holds for others

    def proven(self, trace: Trace) -> set[int]:
        """Numbers of the storages that were recomputed bit for bit in steps of about this size. Another kernel may run where
        sizes are others: from one power of two to the next recipes are proven anew."""
        return self._proven.setdefault(_octave(_work_bytes(trace, trace.tensor_bytes)), set())

    @property
    def extra(self) -> ExtraMemory:
        """The most memory beyond what is predicted that the latest steps took."""
        return ExtraMemory.most_of(self._extra)

    def note_extra(self, extra: ExtraMemory) -> None:
        """Note what a step took beyond its predicted trace."""
        self._extra.append(extra)

    def note_misprediction(self) -> None:
        """Note that a step was not as predicted: nothing is until another one is recorded."""
        self._mispredicted = True

    def note_slowdown(self, trace: Trace, slowdown: float) -> None:
        """Note that operators of a step with this trace, which was predicted, took that much longer than it says."""
        work_bytes = _work_bytes(trace, trace.tensor_bytes)
        known = self._slowdowns.setdefault(_octave(work_bytes), deque(maxlen=RECENT_STEPS))
        known.append(slowdown * self._slowdown(work_bytes))

    def _slowdown(self, work_bytes: int) -> float:
        known = self._slowdowns.get(_octave(work_bytes))
        slowdown = median(known) if known else 1.0
        return slowdown if abs(slowdown - 1) > TIMES_OFF else 1.0


class Structures:
    """The structures of the steps that were recorded."""

    def __init__(self, min_bytes: int) -> None:
        self._min_bytes = min_bytes
        self._known: OrderedDict[tuple[Hashable, ...], Structure] = OrderedDict()
        self._by_fingerprint: OrderedDict[int, Structure | None] = OrderedDict()

    def note(self, record: StepRecord, trace: Trace) -> Structure:
        """Note a recorded step. Returns its structure."""
        key = outlines_of(record.features)
        structure = self._known.pop(key, None) or Structure(key, self._min_bytes)
        structure.note(record, trace)
        self._known[key] = structure
        self._by_fingerprint.clear()
        while len(self._known) > STRUCTURES:
            self._known.popitem(last=False)
        return structure

    def of(self, record: StepRecord) -> Structure | None:
        """Structure of a step; None: none like it was recorded."""
        if record.fingerprint not in self._by_fingerprint:
            self._by_fingerprint[record.fingerprint] = self._known.get(outlines_of(record.features))
            while len(self._by_fingerprint) > 8 * STRUCTURES:
                self._by_fingerprint.popitem(last=False)
        return self._by_fingerprint[record.fingerprint]

    def beginning_with(self, features: Sequence[Feature]) -> list[Structure]:
        """Structures that predict, the latest first, whose first hooks are like these."""
        outlines = outlines_of(features)
        n = len(outlines)
        return [one for one in reversed(self._known.values()) if one.predicts and one.outlines[:n] == outlines]


def outlines_of(features: Sequence[Hashable]) -> tuple[Hashable, ...]:
    """Outlines of all these hooks."""
    made = {id(feature): outline(cast("Feature", feature)) for feature in features}
    return tuple(made[id(feature)] for feature in features)


class _Any:
    """A size, or the distance to a storage's last save, that may be any number."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int) or other is self

    def __hash__(self) -> int:
        return hash(_Any)


_ANY = _Any()


def _size_at(feature: Hashable, dimension: int) -> int:
    sizes = sizes_of(cast("Feature", feature))
    assert sizes is not None
    return sizes[dimension]


def _are_aligned(one: Trace, other: Trace) -> bool:
    """Whether two steps ran the same operators on the same storages."""
    if len(one.tensor_bytes) != len(other.tensor_bytes) or len(one.op_us) != len(other.op_us):
        return False
    if not all(np.array_equal(getattr(one, column), getattr(other, column)) for column in _ALIGNED):
        return False
    for offsets, tensors in (("read_offsets", "read_tensors"), ("write_offsets", "write_tensors")):
        op = np.repeat(np.arange(len(one.op_us)), np.diff(getattr(one, offsets)))
        mine, theirs = (column[np.lexsort((column, op))] for column in (getattr(one, tensors), getattr(other, tensors)))
        if not np.array_equal(mine, theirs):  # an operator's are in no order
            return False
    names, others = np.array(one.op_names), np.array(other.op_names)
    return bool((names[one.op_name] == others[other.op_name]).all())


def _work_bytes(trace: Trace, tensor_bytes: Int64s) -> int:
    return int(tensor_bytes[trace.tensor_born >= 0].sum())


def _octave(nbytes: int) -> int:
    return int(log2(max(1, nbytes)))


def _interpolated(works: Float64s, times: Float64s, work: float) -> Float64s:
    """Times at `work`, between those at `works`, which rise, or beyond the nearest two: as a power of the work, 0 to 2."""
    above = int(np.clip(np.searchsorted(works, work), 1, len(works) - 1))
    low, high = times[above - 1], times[above]
    span = np.log(max(works[above], 1.0) / max(works[above - 1], 1.0))
    part = np.log(max(work, 1.0) / max(works[above - 1], 1.0)) / span if span > 0 else 0.0
    with np.errstate(divide="ignore", invalid="ignore"):
        growth = np.clip(np.log(high / low), 0.0, 2.0 * span)
    times_us: Float64s = np.where((low > 0) & (high > 0), low * np.exp(growth * part), np.maximum(low, high))
    return times_us
