"""Known steps: kept by use, guessed from the order of steps, distinguished at the first hook that differs."""

from __future__ import annotations

from array import array
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_mm.follow.step_cache import CONTEXTS_PER_STEP, StepCache
from chameleon_mm.record.light_profiler import NOT_A_USE, StepRecord


def step(text: str, fingerprint: int | None = None) -> StepRecord:
    """A step with a save for every letter."""
    return StepRecord(
        fingerprint=hash(text) if fingerprint is None else fingerprint,
        features=tuple(zip(text)),
        save_of=array("i", [NOT_A_USE] * len(text)),
    )


def knowing(*texts: str, capacity: int = 16) -> StepCache[str]:
    """Each step with its own text for a plan, the last one the most recently used."""
    cache = StepCache[str](capacity)
    for text in texts:
        cache.put(step(text), text)
    return cache


def run(cache: StepCache[str], text: str) -> list[str]:
    """Go through a step. Returns the plan in use before its first hook and after each one; "-": none from there on."""
    guess = cache.begin_step()
    plans = ["-" if guess is None else guess.plan]
    for hook, letter in enumerate(text):
        follows = cache.follow(hook, (letter,))
        plans.append("-" if not follows or cache.current is None else cache.current.plan)
    cache.end_step(step(text))
    return plans


# --- following


def may_be(cache: StepCache[str]) -> list[str]:
    return [entry.plan for entry in cache.agreeing()]


WORDS = st.lists(st.text("ab", max_size=6), max_size=8, unique=True)


@given(WORDS, st.text("abc", max_size=7), st.integers(1, 8), st.randoms())
def test_what_agrees_with_all_hooks_so_far_is_followed(texts: list[str], text: str, capacity: int, rng: Random) -> None:
    """Among several, the followed step is kept, else the latest used. Hooks of the followed step need not be reported."""
    cache = knowing(*texts, capacity=capacity)
    known = list(dict.fromkeys(reversed(texts)))[:capacity]  # the latest used first
    guess, followed = cache.begin_step(), known[:1]
    assert [guess.plan] == known[:1] if guess else not known
    for hook, letter in enumerate(text):
        agree = [other for other in known if other.startswith(text[: hook + 1])] if followed else []
        if followed and followed[0] in agree and rng.random() < 0.5:
            continue
        assert cache.follow(hook, (letter,)) is bool(agree)
        followed = [] if not agree else followed if followed[0] in agree else agree[:1]
        assert may_be(cache)[:1] == followed and sorted(may_be(cache)) == sorted(agree)
    found = cache.end_step(step(text))
    assert (found.plan if found else None) == (text if text in known else None)


# --- what is expected


def hits_at_once(cache: StepCache[str], pattern: str, rounds: int, settle: int) -> bool:
    """True if, from round `settle` on, every step of `pattern` (one per letter) was guessed before its first hook."""
    guesses = [run(cache, name * 3)[0] == name * 3 for _ in range(rounds) for name in pattern]
    return all(guesses[settle * len(pattern) :])


@pytest.mark.parametrize("pattern", ["a", "ab", "abc", "aab", "aabb", "abac", "aaaaab", "aaaaabb", "aaaabbbc"])
def test_patterns_are_guessed_before_the_first_hook(pattern: str) -> None:
    """After three rounds. Two lengths in turn, two micro-batches and then one, or an evaluation at a fixed interval: two
    earlier steps predict the next, or the length of the last run does."""
    assert hits_at_once(knowing(*(name * 3 for name in set(pattern))), pattern, rounds=6, settle=3)


def test_a_rare_step_is_no_new_habit() -> None:
    cache = knowing("tt", "ee")
    guesses = [run(cache, name * 2)[0] for name in "ttttettttt"]
    assert guesses[2:] == ["tt", "tt", "tt", "ee", "tt", "tt", "tt", "tt"]  # "ee" was the latest used: nothing else was known
    guesses = [run(cache, name * 2)[0] for name in "tettt"]
    assert guesses == ["tt"] * 5


def test_a_change_for_good_is_one() -> None:
    cache = knowing("ff", "ss")
    guesses = [run(cache, name * 2)[0] for name in "ssssffff"]
    assert guesses[5:] == ["ff"] * 3


def test_a_step_that_did_not_end_teaches_nothing() -> None:
    cache = knowing("aa", "bb")
    for name in ("aa", "bb", "aa", "bb"):
        run(cache, name)
    cache.begin_step()
    cache.abandon_step()
    assert cache.current is None
    assert not cache.follow(0, ("a",))
    guess = cache.begin_step()
    assert guess is not None
    assert guess.plan == "bb"  # the most recently used: the step before is unknown


def test_what_followed_a_step_that_is_gone_is_not_guessed() -> None:
    cache = knowing("aa", capacity=1)
    run(cache, "aa")
    run(cache, "aa")
    cache.put(step("bb"), "bb")
    assert run(cache, "bb")[0] == "bb"


def test_what_followed_what_is_bounded() -> None:
    cache = knowing("aa", capacity=2)
    for number in range(200):
        run(cache, f"{number:03}")
    assert len(cache._followed_by) == CONTEXTS_PER_STEP * 2


# --- what is kept


def plans_of(cache: StepCache[str]) -> list[str]:
    """Plans of the cached steps, the least recently used first."""
    return [entry.plan for entry in cache.entries()]


def test_the_least_recently_used_goes() -> None:
    cache = knowing("aa", "bb", "cc", capacity=3)
    run(cache, "aa")
    run(cache, "bb")
    cache.put(step("dd"), "dd")
    assert plans_of(cache) == ["aa", "bb", "dd"]


def test_a_plan_is_replaced() -> None:
    cache = knowing("aa", "ab", capacity=2)
    cache.put(step("aa"), "better")
    assert plans_of(cache) == ["ab", "better"]
    run(cache, "ab")
    assert run(cache, "aa") == ["ab", "ab", "better"]


def test_equal_fingerprints_of_different_steps_are_not_mixed_up() -> None:
    cache = StepCache[str](4)
    cache.put(step("ab", fingerprint=7), "ab")
    cache.begin_step()
    assert [cache.follow(hook, (letter,)) for hook, letter in enumerate("ac")] == [True, False]
    assert cache.end_step(step("ac", fingerprint=7)) is None
    found = cache.end_step(step("ab", fingerprint=7))
    assert found is not None
    assert found.plan == "ab"


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_capacity_below_one_is_refused(capacity: int) -> None:
    with pytest.raises(ValueError, match="capacity of 1 or more"):
        StepCache[str](capacity)
