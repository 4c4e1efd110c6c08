"""Matching an edited step with a known one: precision and recall by construction, and each kind of edit alone.

Truth is made: an edited sequence is built from known saves, so each of its saves comes from a known one or from none. An online
matcher has seen only what came before. Known saves that are equal, and whose NEIGHBOURS saves before are equal too, are one
class: in a stack of equal layers nobody can tell which layer was left out, and any of them is a right answer. So

    right(match)   the known save it names is of the class of the one that the observed save was made from
    precision      right matches / matches
    recall         right matches / known saves that are still there; within a class no more than of it are still there

No known save may be named twice at all.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_mm.profiler.matching import STEADY_RUN, Matcher
from chameleon_mm.profiler.step_record import NOT_A_USE, StepRecord

NEIGHBOURS = 4
SEEDS = range(24)
ATTENTION = [
    "x", "mean", "norm", "weight", "h", "wq", "h", "wk", "h", "wv", "cos", "sin", "cos", "sin", "q", "k", "v", "mixed", "lse",
    "heads", "wo",
]  # fmt: skip
DENSE = ["x", "mean", "norm", "weight", "h", "wg", "h", "wu", "gate", "silu", "up", "product", "wd"]

Layers = list[list[int]]


def feature(*what: object) -> int:
    return hash(what) % 2**64


def transformer(_: random.Random) -> Layers:
    """Equal layers between a head and a tail that begins as a layer does."""
    names = [["tokens", "positions"], *[[*ATTENTION, *DENSE]] * 32, ["x", "mean", "norm", "weight", "logits", "targets"]]
    return [[feature(name) for name in layer] for layer in names]


def convolutions(_: random.Random) -> Layers:
    """Shapes of its own in each layer, weights and statistics of the same shapes every few."""
    parts = ("in", "weight", "conv", "scale", "statistics", "normed", "active", "weight2", "out")
    shared = {"weight": 4, "scale": 4, "weight2": 4, "statistics": 1}
    return [[feature(part, layer % shared.get(part, 1_000)) for part in parts] for layer in range(100)]


def experts(rng: random.Random) -> Layers:
    """Attention alike in each layer; every other one routes a number of tokens of its own to each of four experts."""
    layers = []
    for layer in range(24):
        names: list[object] = list(ATTENTION)
        if layer % 2:
            names += ["x", "scores", "chosen"]
            for tokens in rng.choices(range(1, 4000), k=4):
                parts = ("rows", "in", "gate", "silu", "up", "product")
                names += [*((part, tokens) for part in parts), "wg", "wu", "wd"]
        else:
            names += DENSE
        layers.append([feature(name) for name in names])
    return layers


FAMILIES = {family.__name__: family for family in (transformer, convolutions, experts)}


class Observed(NamedTuple):
    """A save of an edited step."""

    feature: int
    known: int | None
    """Which known save it is."""


def numbered(layers: Layers) -> list[list[Observed]]:
    number = iter(range(sum(map(len, layers))))
    return [[Observed(value, next(number)) for value in layer] for layer in layers]


def edited(rng: random.Random, layers: Layers, *, share: float, layer_edits: int, alike: float) -> list[Observed]:
    """`share` of the saves edited: whole layers left out or run twice first, then single saves inserted, left out, replaced or
    swapped with the next one. Of inserted and replacing ones `alike` look like some known save, the others like none."""
    known = [value for layer in layers for value in layer]
    left = share * len(known)
    kept = numbered(layers)
    for _ in range(layer_edits):
        at = rng.randrange(len(kept))
        left -= len(kept[at])
        if rng.random() < 0.5:
            del kept[at]
        else:
            kept.insert(at, kept[at])
    saves = [save for layer in kept for save in layer]
    while left > 0:
        at = rng.randrange(len(saves) - 1)
        other = Observed(rng.choice(known) if rng.random() < alike else feature("new", rng.random()), None)
        match rng.choice(("insert", "leave out", "replace", "swap")):
            case "insert":
                saves.insert(at, other)
            case "leave out":
                del saves[at]
            case "replace":
                saves[at] = other
            case _:
                saves[at], saves[at + 1] = saves[at + 1], saves[at]
                left -= 1
        left -= 1
    return saves


def record(features: Sequence[int], save_of: Sequence[int] | None = None) -> StepRecord:
    return StepRecord(fingerprint=0, features=tuple(features), save_of=array("i", save_of or [NOT_A_USE] * len(features)))


def matched(known: Sequence[int], observed: Sequence[int], *, aligned: int = 0) -> list[int | None]:
    matcher = Matcher(record(known))
    matcher.begin_step(aligned=aligned)
    return [matcher.match(value) for value in observed[aligned:]]


class Score(NamedTuple):
    right: int
    matches: int
    found: int
    """Right ones, no more of a class than are there."""
    there: int

    def __add__(self, other: object) -> Score:
        assert isinstance(other, Score)
        return Score(*(a + b for a, b in zip(self, other, strict=True)))


def scored(known: Sequence[int], observed: Sequence[Observed]) -> Score:
    named = matched(known, [save.feature for save in observed])
    matches = [name for name in named if name is not None]
    assert len(set(matches)) == len(matches), "a known save was named twice"
    classes = [tuple(known[max(0, at - NEIGHBOURS) : at + 1]) for at in range(len(known))]
    there = Counter(classes[at] for at in {save.known for save in observed if save.known is not None})
    right = Counter(
        classes[name]
        for name, save in zip(named, observed, strict=True)
        if name is not None and save.known is not None and classes[name] == classes[save.known]
    )
    return Score(
        right=right.total(),
        matches=len(matches),
        found=sum(min(count, there[which]) for which, count in right.items()),
        there=there.total(),
    )


# --- the bound


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize(
    ("share", "layer_edits", "alike"),
    [(0.1, 0, 0.0), (0.1, 0, 0.25), (0.1, 1, 0.0), (0.1, 1, 0.25), (0.01, 0, 0.5)],
    ids=["new", "alike", "layer", "layer and alike", "few"],
)
def test_an_edited_step_is_matched(
    family: Callable[[random.Random], Layers], share: float, layer_edits: int, alike: float
) -> None:
    total = Score(0, 0, 0, 0)
    for seed in SEEDS:
        rng = random.Random(seed)
        layers = family(rng)
        observed = edited(rng, layers, share=share, layer_edits=layer_edits, alike=alike)
        total += scored([value for layer in layers for value in layer], observed)
    assert total.there > 15_000
    assert total.right / total.matches >= 0.99
    assert total.found / total.there >= 0.99


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("twice", [False, True], ids=["left out", "run twice"])
def test_whole_layers_cost_their_own_tensors_and_a_few(family: Callable[[random.Random], Layers], twice: bool) -> None:
    for seed in SEEDS:
        rng = random.Random(seed)
        layers = family(rng)
        at = rng.randrange(1, len(layers) - 1)
        kept = numbered(layers)
        observed = [save for layer in (kept[: at + twice] + kept[at + (not twice) :]) for save in layer]
        score = scored([value for layer in layers for value in layer], observed)
        assert score.there - score.found <= 9
        assert score.matches - score.right <= 6


# --- one edit at a time


@given(st.lists(st.integers(0, 3), max_size=60))
def test_a_step_without_an_edit_is_matched_one_to_one(features: list[int]) -> None:
    assert matched(features, features) == list(range(len(features)))


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 4), max_size=40))
def test_any_two_steps_give_features_that_are_equal_and_each_save_once(known: list[int], observed: list[int]) -> None:
    named = matched(known, observed)
    given_away = [name for name in named if name is not None]
    assert len(set(given_away)) == len(given_away)
    assert all(known[name] == value for name, value in zip(named, observed, strict=True) if name is not None)
    same = 0
    while same < min(len(known), len(observed)) and known[same] == observed[same]:
        same += 1
    assert named[:same] == list(range(same))


LETTERS = [feature(letter) for letter in "abcdefghijklmnopqrstuvwxyz"]


@pytest.mark.parametrize(
    ("observed", "expected"),
    [
        ("abXcd", "ab.cd"),
        ("abXYZcd", "ab...cd"),
        ("abd", "abd"),
        ("abef", "abef"),
        ("abXd", "ab.d"),
        ("acbd", "acbd"),
        ("abcabcd", "abc...d"),  # what was there already is not there again
        ("abjklcdmn", "ab.kl.dmn"),  # a part before its time, then the one that was passed: each believed at its second save
        ("XYZ", "..."),
        ("Xabc", ".abc"),
        ("xyz", ".yz"),
        ("abcdefghijklmnopqrstuvwxyzXa", "abcdefghijklmnopqrstuvwxyz.."),
    ],
)
def test_edits_of_a_step_of_different_saves(observed: str, expected: str) -> None:
    known = {**dict(zip("abcdefghijklmnopqrstuvwxyz", LETTERS, strict=True)), **{new: feature(new, "new") for new in "XYZ"}}
    named = matched(LETTERS, [known[letter] for letter in observed])
    assert "".join("." if at is None else chr(ord("a") + at) for at in named) == expected


def test_after_an_edit_it_is_aligned_again() -> None:
    """Behind a run without a gap one comparison does, whatever came before: then nothing but the next feature matters."""
    known = [*LETTERS, *LETTERS]
    matcher = Matcher(record(known))
    matcher.begin_step()
    assert matcher.match(feature("new")) is None
    assert matcher.is_deviating
    in_doubt = []
    for at in range(STEADY_RUN):
        assert matcher.match(known[at]) == at
        in_doubt.append(matcher.is_deviating)
    assert in_doubt == [True] * (STEADY_RUN - 1) + [False]
    assert [matcher.match(value) for value in known[STEADY_RUN:]] == list(range(STEADY_RUN, len(known)))


def test_a_rare_feature_jumps_further_than_a_common_one() -> None:
    a, b, c, d, *rest = LETTERS
    common = feature("common")
    known = [a, b, c, d, rest[0], *[common] * 12]
    assert matched(known, [a, b, rest[0]]) == [0, 1, 4]
    known = [a, b, c, d, *[common] * 12, rest[0]]
    assert matched(known, [a, b, common]) == [0, 1, None]  # one of twelve: rather inserted than two left out ...
    assert matched(known, [a, b, common, common, common]) == [0, 1, None, 4, 5]  # ... until the next ones agree


# --- uses, and beginning in the middle


KNOWN_USES = record([1, 2, 3, 30, 31, 20, 10], [-1, -1, -1, 2, 2, 1, 0])


def test_a_use_is_found_through_its_save() -> None:
    matcher = Matcher(KNOWN_USES)
    assert [matcher.match(value) for value in (1, 9, 3)] == [0, None, 2]
    assert [matcher.match_use(save) for save in (0, None, 2, 2)] == [6, None, 3, 4]
    assert matcher.match_use(2) is None  # used more often than it was known to be
    assert matcher.match_use(1) == 5


def test_a_step_may_have_agreed_up_to_somewhere() -> None:
    matcher = Matcher(KNOWN_USES)
    matcher.begin_step(aligned=2)
    assert matcher.match(3) == 2
    matcher.begin_step(aligned=4)  # all saves and one use
    assert matcher.match(3) is None
    assert [matcher.match_use(save) for save in (2, 2, 1, 0)] == [4, None, 5, 6]
    matcher.begin_step()
    assert [matcher.match(value) for value in (1, 2, 3)] == [0, 1, 2]
    assert matcher.match_use(2) == 3


def test_uses_and_saves_in_turn() -> None:
    """Two micro-batches: a save's hook is not its place among the saves."""
    matcher = Matcher(record([1, 2, 20, 10, 1, 2, 20, 10], [-1, -1, 1, 0, -1, -1, 5, 4]))
    matcher.begin_step(aligned=3)
    assert matcher.match_use(0) == 3
    assert [matcher.match(value) for value in (1, 2)] == [4, 5]
    assert [matcher.match_use(save) for save in (5, 4)] == [6, 7]


def test_an_empty_step_matches_nothing() -> None:
    assert matched([], [1, 2, 1]) == [None] * 3


def test_order_is_kept_where_only_single_saves_were_edited() -> None:
    """What is matched rises, but where two changed places."""
    rng = random.Random(0)
    layers = transformer(rng)
    known = [value for layer in layers for value in layer]
    observed = edited(rng, layers, share=0.05, layer_edits=0, alike=0.0)
    names = [name for name in matched(known, [save.feature for save in observed]) if name is not None]
    back = sum(b < a for a, b in pairwise(names))
    truth = [save.known for save in observed if save.known is not None]
    assert back <= sum(b < a for a, b in pairwise(truth)) + 2
