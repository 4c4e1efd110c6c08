"""Structures of steps. Steps that differ only in sizes have the same structure: two recorded steps predict the others.

    structure = structures.note(record, trace)       # after a recorded step
    structures.of(record)                            # structure of a step; None: no step of it was recorded
    structure.predict(features)                      # record of the step that begins with `features`; sizes are computed
    structure.trace_of(record)                       # the trace that a recorder would make of that step

A new sequence length needs no recording: shapes, storage bytes and operator times are computed from two recorded steps. A
storage below `min_bytes` never moves, so fewer storages may move in a short step than in a long step.

If many sizes change and the step's beginning does not determine them, they are open. An example is the number of tokens per
expert. A step agrees with any value of an open size, and is planned for the largest recorded value.
"""

from __future__ import annotations

import dataclasses
import weakref
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

from chameleon_mm.plan.trace import FIXED_STORAGE, Bools, Float64s, Int64s, Trace, with_extra, with_gradients_kept, with_spikes
from chameleon_mm.record.light_profiler import Feature, StepRecord, outline, resized, sizes_of
from chameleon_mm.swap.recipe import Refusal
from chameleon_mm.units import allocated_size

# --- Forms: the sizes of a step as functions of a few variables, found from steps that differ only in sizes.
#
# A form is a constant, a constant times up to two factors, or a multiplied and shifted variable. A factor is a variable or a
# shifted variable, such as the number of predicted tokens: the length less 1. Each form is exact for all steps from which it
# was found. With more steps, fewer forms fit by chance.

Sizes = tuple[int, ...]
"""Values of one size, one per step."""

_FACTORS = 8
"""Maximum number of factors whose products are tried: twice the maximum number of variables. With as many shifted factors,
there are 136 products of two, all tried for each size that differs."""
_SHIFTS = (-1, 1)
"""Shifts of a variable that are tried in products. -1: the tokens after the first; 1: one more token for the whole text."""


@dataclass(frozen=True, slots=True)
class Form:
    """Formula of a size: `scale` times the product of `factors`, plus `shift`."""

    scale: Fraction
    shift: Fraction
    factors: tuple[Form | int, ...]
    """Forms, or numbers of variables."""

    def at(self, values: Mapping[int, int]) -> int | None:
        """Return the size for these `values` of the variables. None: a variable is missing, or the result is no whole number >=
        0."""
        product = self.scale
        for factor in self.factors:
            value = values.get(factor) if isinstance(factor, int) else factor.at(values)
            if value is None:
                return None
            product *= value
        size = product + self.shift
        return int(size) if size.denominator == 1 and size >= 0 else None


class SizeForms:
    """Forms of the sizes of `num_steps` steps, found one after another."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._known: dict[Sizes, Form] = {}
        self._factors: list[tuple[Sizes, Form | int]] = []
        """Variables and shifted variables, with their values."""
        self._shifted_factors: list[tuple[Sizes, Form | int]] = []
        self.num_variables = 0

    def of(self, sizes: Sizes) -> Form:
        """Return the form of `sizes`, or a new variable if it has none. Raises `ValueError` for another number of steps."""
        form = self.find(sizes)
        if form is None:
            form = Form(Fraction(1), Fraction(0), (self.num_variables,))
            self._factors.append((sizes, self.num_variables))
            self._known[sizes] = form
            for shift in _SHIFTS:  # a shifted variable may be a factor, even if no size equals it
                shifted = Form(Fraction(1), Fraction(shift), (self.num_variables,))
                self._shifted_factors.append((tuple(size + shift for size in sizes), shifted))
            self.num_variables += 1
        return form

    def find(self, sizes: Sizes) -> Form | None:
        """Return the form of `sizes` in the known variables, or None."""
        if len(sizes) != self._num_steps:
            raise ValueError(f"size forms: expected the size in each of {self._num_steps} steps, got {len(sizes)} sizes")
        form = self._known.get(sizes)
        if form is None:
            constant = Form(Fraction(0), Fraction(sizes[0]), ()) if len(set(sizes)) == 1 else None
            form = constant or self._product(sizes) or self._shifted(sizes)
            if form is not None:
                self._known[sizes] = form
                if form.shift and len(form.factors) == 1 and len(self._factors) < _FACTORS:
                    self._factors.append((sizes, form))
        return form

    def _product(self, sizes: Sizes) -> Form | None:
        factors = self._factors[:_FACTORS]
        # A shifted variable that no size equals fits too easily by chance, so its scale must be a whole number.
        searches = (1, factors, False), (2, factors, False), (2, factors + self._shifted_factors[:_FACTORS], True)
        for degree, among, must_be_whole in searches:
            for chosen in combinations_with_replacement(among, degree):
                products = [prod(step) for step in zip(*(values for values, _ in chosen), strict=True)]
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
            # A line fits any two points: only a whole slope is evidence.
            if scale is None or scale <= 0 or scale.denominator != 1:
                continue
            shift = sizes[0] - scale * values[0]
            if all(scale * value + shift == size for value, size in zip(values, sizes, strict=True)):
                return Form(scale, shift, (factor,))
        return None


class SizeColumn:
    """Sizes in one column of a trace, as functions of the variables."""

    def __init__(self, forms: SizeForms, columns: Sequence[Int64s]) -> None:
        rows, row = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
        self._row = row.reshape(-1)
        self._forms = [forms.find(tuple(sizes)) for sizes in rows.tolist()]
        self._recorded = rows

    def at(self, values: Mapping[int, int], proportions: Sequence[float]) -> Int64s:
        """Return the sizes in the step. A size without a form is the largest of its recordings, each scaled by its entry of
        `proportions`: the step's size / the recorded step's size."""
        sizes = [form.at(values) if form is not None else None for form in self._forms]
        largest = self._scaled(proportions).max(axis=1, initial=0).tolist()
        known = [most if size is None else size for size, most in zip(sizes, largest, strict=True)]
        return np.array(known, np.int64)[self._row]

    def spread_bytes(self, proportions: Sequence[float]) -> int:
        """Return the largest difference between scaled recordings of a size without a form."""
        has_no_form = [form is None for form in self._forms]
        spread = np.ptp(self._scaled(proportions)[has_no_form], axis=1)
        return int(spread.max(initial=0))

    def _scaled(self, proportions: Sequence[float]) -> Int64s:
        scaled: Int64s = np.ceil(self._recorded * np.array(proportions)).astype(np.int64)
        return scaled


def _slope(values: Sizes, sizes: Sizes) -> Fraction | None:
    """Return the slope of `sizes` over `values`, from the first step and one that differs in `values`. None: none differs."""
    for value, size in zip(values[1:], sizes[1:], strict=True):
        if value != values[0]:
            return Fraction(size - sizes[0], value - values[0])
    return None


# --- Memory that a step takes in addition to its trace, found at its first hook or between two checks of memory

RECENT_STEPS = 16
"""Number of steps that must take less memory before plans assume less: a rare step, such as an evaluation, may need more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraMemory:
    """Bytes that steps allocate beyond their trace. `spikes`: bytes by tick; they are allocated there, and freed before the
    next check of memory. `keeps_gradients`: gradients that the trace makes exist before the step; `extra_bytes` lacks them."""

    extra_bytes: int = 0
    keeps_gradients: bool = False
    spikes: Mapping[int, int] = field(default_factory=dict)

    def __or__(self, other: ExtraMemory) -> ExtraMemory:
        ticks = {*self.spikes, *other.spikes}
        spikes = {tick: max(self.spikes.get(tick, 0), other.spikes.get(tick, 0)) for tick in sorted(ticks)}
        keeps_gradients = self.keeps_gradients or other.keeps_gradients
        return ExtraMemory(extra_bytes=max(self.extra_bytes, other.extra_bytes), keeps_gradients=keeps_gradients, spikes=spikes)

    @classmethod
    def most_of(cls, taken: Iterable[ExtraMemory]) -> ExtraMemory:
        """Return the maximum of `taken`, for `extra_bytes` and for each tick."""
        return reduce(or_, taken, cls())

    @classmethod
    def room_for(cls, taken: Iterable[ExtraMemory], above_bytes: int) -> ExtraMemory:
        """Return the maximum of `taken`, plus a margin at each place: the difference among those that took more than
        `above_bytes` there. Memory that depends on data, such as a sparse gradient's, may grow again by that difference."""
        taken = list(taken)
        most = cls.most_of(taken)

        def room(nbytes: int, taken_bytes: Iterable[int]) -> int:
            return 2 * nbytes - min((some for some in taken_bytes if some > above_bytes), default=nbytes)

        spikes = {tick: room(nbytes, (one.spikes.get(tick, 0) for one in taken)) for tick, nbytes in most.spikes.items()}
        return dataclasses.replace(most, extra_bytes=room(most.extra_bytes, (one.extra_bytes for one in taken)), spikes=spikes)

    def exceeds(self, other: ExtraMemory, by_bytes: int) -> bool:
        """True if `extra_bytes` or a spike exceeds that of `other` by more than `by_bytes`, or only this one keeps
        gradients."""
        if self.extra_bytes - other.extra_bytes > by_bytes or self.keeps_gradients > other.keeps_gradients:
            return True
        return any(nbytes - other.spikes.get(tick, 0) > by_bytes for tick, nbytes in self.spikes.items())

    def added_to(self, trace: Trace) -> Trace:
        if self.keeps_gradients:
            trace = with_gradients_kept(trace)
        if self.extra_bytes:
            trace = with_extra(trace, self.extra_bytes)
        return with_spikes(trace, self.spikes) if self.spikes else trace


# --- structure

STRUCTURES = 16
"""Maximum number of structures; the latest are kept. Each has traces of at most `RECORDED` steps, some MiB each."""

RECORDED = 6
"""Maximum number of recorded steps of one structure. A mixture of experts, or rows with lengths, needs two to four."""

_ALIGNED = ("op_phase", "op_tick", "read_offsets", "write_offsets", "hook_tick", "hook_use")
"""Columns in which traces of one structure agree, besides the operators' names and storages."""

MOST_VARIABLES = 4
"""Maximum number of independent sizes of a structure: rows, one or two lengths, a padded length. If there are more, the sizes
that the first save does not determine are open."""

OPEN_MARGIN = 2
"""Factor for the bytes kept free for open sizes. It multiplies the largest difference between recordings of a storage, or the
largest excess of a step over its plan. A factor of 1 would leave room only for a step that exceeds the largest recording by
that difference."""

TIMES_OFF = 0.05
"""Relative error of operator times above which they are corrected. A recorded step loads kernels, and so takes longer. After
corrections, times wrong by a factor of five cost at most 3 % of a step (`tests/test_plan_feedback.py`)."""


class _Recorded(NamedTuple):
    record: StepRecord
    trace: Trace
    work_bytes: int
    """Bytes of all storages that the step makes. Operator times are interpolated over this."""


class Structure:
    """Recorded steps of one structure, from which other steps are predicted. Not thread-safe."""

    def __init__(self, outlines: tuple[Hashable, ...], min_bytes: int) -> None:
        """`outlines`: feature of each hook without its sizes. `min_bytes`: size below which no storage moves."""
        self.outlines = outlines
        self.refused: dict[int, Refusal] = {}
        self._min_bytes = min_bytes
        self._proven: dict[int, set[int]] = {}
        self._recorded: list[_Recorded] = []
        """Recordings that agree in all columns except sizes and times, smallest first."""
        self._recordings = 0
        self.trained: Sequence[weakref.ref[torch.Tensor]] = ()
        """Parameters whose gradients the latest recorded step made and kept."""
        self.was_wrong = False
        """True after a wrong prediction. Then nothing is predicted until another step is recorded."""
        self.has_open_sizes = False
        """True if the beginning of a step does not determine some of its sizes."""
        self._growths = deque([0], maxlen=RECENT_STEPS)
        """Maximum bytes above the plan that each of the latest steps with open sizes allocated between two hooks."""
        self.recent_extra: deque[ExtraMemory] = deque(maxlen=RECENT_STEPS)
        """Memory that each of the latest steps took in addition to the prediction."""
        self._slowdowns: dict[int, deque[float]] = {}

    @property
    def predicts(self) -> bool:
        """True if steps with other sizes can be predicted from the recorded steps."""
        return len(self._recorded) > 1 and not self.was_wrong

    @property
    def wants_trace(self) -> bool:
        return not self.predicts and self._recordings < RECORDED

    def note(self, record: StepRecord, trace: Trace) -> None:
        """Note a recorded step."""
        self._recordings += 1
        self.was_wrong = False
        recorded = _Recorded(record, trace, _work_bytes(trace, trace.tensor_bytes))
        if self._recorded and not _are_aligned(self._recorded[0].trace, trace):
            # The first step makes the optimizer's state, and is unlike all others.
            self._recorded, self.refused, self._proven = [], {}, {}
            self.recent_extra.clear()
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
        self._passed_bytes = SizeColumn(self._forms, [trace.op_passed_bytes for trace in traces])
        self._out_bytes = SizeColumn(self._forms, [trace.op_out_bytes for trace in traces])
        self._back_bytes = SizeColumn(self._forms, [trace.op_back_bytes for trace in traces])
        self._times = np.stack([trace.op_us for trace in traces])
        self._works = np.array([one.work_bytes for one in self._recorded], np.float64)

    def _find_shapes(self) -> None:
        self._forms = SizeForms(len(self._recorded))
        self._observed: list[tuple[int, int]] = []
        """Hook and dimension at which each variable first occurs."""
        self._shapes: dict[tuple[int, ...], tuple[Form | None, ...]] = {}
        """Forms of sizes, by key; None: an open size."""
        self._shape_at: list[tuple[int, ...] | None] = []
        """Key in `_shapes` of the sizes of each hook, by hook; None: the feature stays as recorded."""
        for hook, features in enumerate(zip(*(one.record.features for one in self._recorded), strict=True)):
            sizes = [sizes_of(cast("Feature", feature)) for feature in features]
            if None in sizes:
                self._shape_at.append(None)  # a use, or a nested tensor, whose sizes differ in each batch
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

    # --- prediction of steps with other sizes

    def predict(self, features: Sequence[Feature]) -> StepRecord | None:
        """Predict the record of the step that begins with `features`. None: no prediction, or `features` contradict it."""
        values = self._values(features)
        predicted = self._features(values)
        if predicted is not None and self.has_open_sizes and self._open(predicted, features):
            predicted = self._features(values)
        if predicted is None or predicted[: len(features)] != list(features):
            self.was_wrong = True
            return None
        base = self._base.record
        return StepRecord.of(predicted, base.save_of, base.boundaries)

    def _open(self, predicted: Sequence[Feature], features: Sequence[Feature]) -> bool:
        """Mark sizes as open that were predicted wrong in the hooks so far. Returns True if there are any."""
        wrong = {key for key, one, other in zip(self._shape_at, predicted, features, strict=False) if one != other}
        for key in wrong:
            if key is not None:
                self._shapes[key] = (None,) * len(self._shapes[key])
        return bool(wrong)

    def _values(self, features: Sequence[Hashable]) -> dict[int, int]:
        """Return the values of the variables. A later one has its recorded value, scaled by the others' ratios."""
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
        """Return the ratio of the size of a step with these `values` to the size of each recorded step."""
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
            return resized(save, sizes, _ANY)  # it may or may not be too small to move
        if is_small:
            return resized(save, sizes, FIXED_STORAGE)
        dtype, since = cast("torch.dtype", save[2]), save[4]
        before_bytes, nbytes = (prod(cast("Sizes", some)) * dtype.itemsize for some in (sizes_of(save) or (), sizes))
        if since == FIXED_STORAGE and before_bytes < self._min_bytes <= nbytes:
            return resized(save, sizes, _ANY)  # too small to move: its earlier saves were not looked up
        return resized(save, sizes, since)

    def margin_bytes(self, record: StepRecord) -> int:
        """Return the bytes to keep free in a plan for a step with this record, as open sizes may exceed all recorded ones."""
        if not self.has_open_sizes:
            return 0
        spread_bytes = self._tensor_bytes.spread_bytes(self._proportions(self._values(record.features)))
        return OPEN_MARGIN * max(spread_bytes, *self._growths)

    def note_growth(self, more_bytes: int) -> int:
        """Note that a step allocated `more_bytes` above its plan between two hooks. Returns the bytes to keep free."""
        self._growths[-1] = max(self._growths[-1], more_bytes)
        return OPEN_MARGIN * self._growths[-1]

    def trace_of(self, record: StepRecord) -> Trace:
        """Predict the trace of a step of this structure with this record."""
        values, base = self._values(record.features), self._base.trace
        proportions = self._proportions(values)
        tensor_bytes = self._tensor_bytes.at(values, proportions)
        work_bytes = _work_bytes(base, tensor_bytes)
        before = base.tensor_born < 0
        more_bytes = int((allocated_size(tensor_bytes[before]) - allocated_size(base.tensor_bytes[before])).sum())
        moves: Bools = np.append(tensor_bytes >= self._min_bytes, False)
        return dataclasses.replace(
            base,
            fingerprint=record.fingerprint,
            start_bytes=max(0, base.start_bytes + more_bytes),
            tensor_bytes=tensor_bytes,
            op_inner_bytes=self._inner_bytes.at(values, proportions),
            op_passed_bytes=self._passed_bytes.at(values, proportions),
            op_out_bytes=self._out_bytes.at(values, proportions),
            op_back_bytes=self._back_bytes.at(values, proportions),
            op_us=_interpolated(self._works, self._times, work_bytes) * self._slowdown(work_bytes),
            hook_tensor=np.where(moves[base.hook_tensor], base.hook_tensor, np.int32(-1)).astype(np.int32),
        )

    # --- lessons of one step for others

    def proven(self, trace: Trace) -> set[int]:
        """Return the numbers of the storages that were recomputed bit for bit in steps of about this size. Other sizes may run
        other kernels, so recipes are proven anew for each power of two of the size."""
        return self._proven.setdefault(_octave(_work_bytes(trace, trace.tensor_bytes)), set())

    def note_extra(self, extra: ExtraMemory) -> None:
        """Note, at the end of a step, the memory that it took in addition to its predicted trace."""
        self.recent_extra.append(extra)
        self._growths.append(0)

    def note_slowdown(self, trace: Trace, slowdown: float) -> None:
        """Note that operators of a step took `slowdown` times as long as in its predicted `trace`."""
        work_bytes = _work_bytes(trace, trace.tensor_bytes)
        known = self._slowdowns.setdefault(_octave(work_bytes), deque(maxlen=RECENT_STEPS))
        known.append(slowdown * self._slowdown(work_bytes))

    def _slowdown(self, work_bytes: int) -> float:
        known = self._slowdowns.get(_octave(work_bytes))
        slowdown = median(known) if known else 1.0
        return slowdown if abs(slowdown - 1) > TIMES_OFF else 1.0


class Structures:
    """Structures of the recorded steps."""

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
        """Return the structure of a step; None: no step of it was recorded."""
        if record.fingerprint not in self._by_fingerprint:
            self._by_fingerprint[record.fingerprint] = self._known.get(outlines_of(record.features))
            while len(self._by_fingerprint) > 8 * STRUCTURES:
                self._by_fingerprint.popitem(last=False)
        return self._by_fingerprint[record.fingerprint]

    def beginning_with(self, features: Sequence[Feature]) -> list[Structure]:
        """Return the structures that can predict and that begin with the outlines of `features`, latest first."""
        outlines = outlines_of(features)
        n = len(outlines)
        return [one for one in reversed(self._known.values()) if one.predicts and one.outlines[:n] == outlines]


def outlines_of(features: Sequence[Hashable]) -> tuple[Hashable, ...]:
    made = {id(feature): outline(cast("Feature", feature)) for feature in features}
    return tuple(made[id(feature)] for feature in features)


class _Any:
    """Wildcard for a size, or for the distance to a storage's last save. It equals every int."""

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
    """True if two steps ran the same operators on the same storages."""
    if len(one.tensor_bytes) != len(other.tensor_bytes) or len(one.op_us) != len(other.op_us):
        return False
    if not all(np.array_equal(getattr(one, column), getattr(other, column)) for column in _ALIGNED):
        return False
    for tensors, op in (("read_tensors", one.op_of_read()), ("write_tensors", one.op_of_write())):
        mine, theirs = (column[np.lexsort((column, op))] for column in (getattr(one, tensors), getattr(other, tensors)))
        if not np.array_equal(mine, theirs):  # the order of one operator's storages does not matter
            return False
    names, others = np.array(one.op_names), np.array(other.op_names)
    return bool((names[one.op_name] == others[other.op_name]).all())


def _work_bytes(trace: Trace, tensor_bytes: Int64s) -> int:
    return int(tensor_bytes[trace.tensor_born >= 0].sum())


def _octave(nbytes: int) -> int:
    return int(log2(max(1, nbytes)))


def _interpolated(works: Float64s, times: Float64s, work: float) -> Float64s:
    """Interpolate or extrapolate times at `work` from the two nearest of the ascending `works`, as a power (0 to 2) of work."""
    above = int(np.clip(np.searchsorted(works, work), 1, len(works) - 1))
    low, high = times[above - 1], times[above]
    span = np.log(max(works[above], 1.0) / max(works[above - 1], 1.0))
    part = np.log(max(work, 1.0) / max(works[above - 1], 1.0)) / span if span > 0 else 0.0
    with np.errstate(divide="ignore", invalid="ignore"):
        growth = np.clip(np.log(high / low), 0.0, 2.0 * span)
    times_us: Float64s = np.where((low > 0) & (high > 0), low * np.exp(growth * part), np.maximum(low, high))
    return times_us
