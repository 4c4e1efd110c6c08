"""Known steps: kept by use, guessed by what followed what, told apart at the first hook that tells."""

from __future__ import annotations

from array import array

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


def test_nothing_is_known_at_first() -> None:
    cache = StepCache[str](2)
    assert run(cache, "ab") == ["-", "-", "-"]
    assert cache.current is None


def test_another_takes_over_at_the_hook_that_tells_them_apart() -> None:
    cache = knowing("abcx", "abcy")
    assert run(cache, "abcx") == ["abcy"] * 4 + ["abcx"]
    cache = knowing("abxq", "abcx", "abcy", "zzzz")
    assert run(cache, "abxq") == ["zzzz", "abcy", "abcy", "abxq", "abxq"]


def test_only_what_agreed_all_the_way_takes_over() -> None:
    cache = knowing("qbd", "abc")
    assert run(cache, "abd") == ["abc", "abc", "abc", "-"]  # "qbd" has the d, but another beginning
    assert cache.current is not None
    assert cache.current.plan == "abc"


def test_a_longer_step_takes_over_where_a_shorter_one_ends() -> None:
    cache = knowing("abab", "ab")
    assert run(cache, "abab") == ["ab", "ab", "ab", "abab", "abab"]
    assert run(cache, "ababa") == ["abab"] * 5 + ["-"]


def test_after_a_deviation_nothing_is_followed() -> None:
    cache = knowing("abc")
    assert run(cache, "axc") == ["abc", "abc", "-", "-"]
    assert run(cache, "abc") == ["abc"] * 4


def test_hooks_that_agree_need_not_be_told() -> None:
    cache = knowing("abcdx", "abcdy", "abz")
    cache.begin_step()
    assert cache.current is not None
    assert cache.current.plan == "abz"
    assert cache.follow(2, ("c",))  # the first two were
    assert cache.current.plan == "abcdy"
    assert cache.follow(4, ("x",))
    assert (cache.current.plan, may_be(cache)) == ("abcdx", ["abcdx"])
    assert not cache.follow(5, ("x",))
    assert may_be(cache) == []


def may_be(cache: StepCache[str]) -> list[str]:
    return [entry.plan for entry in cache.agreeing()]


def test_what_a_step_may_be_yet() -> None:
    cache = knowing("abcx", "abcy", "abz")
    cache.begin_step()
    seen = [may_be(cache)]
    for hook, letter in enumerate("abcy"):
        cache.follow(hook, (letter,))
        seen.append(sorted(may_be(cache)))
    assert seen == [["abz", "abcx", "abcy"], *[["abcx", "abcy", "abz"]] * 2, ["abcx", "abcy"], ["abcy"]]
    cache = knowing("abc", "ab")
    cache.begin_step()
    cache.follow(0, ("a",))
    cache.follow(1, ("b",))
    assert may_be(cache) == ["ab", "abc"]  # it may end here, or go on
    assert cache.follow(2, ("c",))
    assert may_be(cache) == ["abc"]
    assert not cache.follow(3, ("x",))
    assert may_be(cache) == []
    assert may_be(StepCache[str](2)) == []


@given(st.lists(st.text("ab", max_size=6), max_size=8), st.text("abc", max_size=7))
def test_whatever_is_known_it_is_followed_as_far_as_it_goes(texts: list[str], text: str) -> None:
    cache = knowing(*texts)
    plans = run(cache, text)
    for hooks, plan in enumerate(plans[1:], 1):
        begins = text[:hooks]
        if plan == "-":
            assert not any(other.startswith(begins) for other in texts)
        else:
            assert plan.startswith(begins)


# --- what is expected


def hits_at_once(cache: StepCache[str], pattern: str, rounds: int, settle: int) -> bool:
    """Whether from round `settle` on every step of `pattern`, one for each letter, was guessed before its first hook."""
    guesses = [run(cache, name * 3)[0] == name * 3 for _ in range(rounds) for name in pattern]
    return all(guesses[settle * len(pattern) :])


@pytest.mark.parametrize("pattern", ["a", "ab", "abc", "aab", "aabb", "abac", "aaaaab", "aaaaabb", "aaaabbbc"])
def test_patterns_are_guessed_before_the_first_hook(pattern: str) -> None:
    """After three rounds. Two lengths in turn, two micro-batches and then one, an evaluation every so many steps: whatever two
    steps tell, or how often the last one came in a row."""
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
    assert guess.plan == "bb"  # the most recently used: nobody knows what came before


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


def test_a_step_that_went_is_no_longer_told_apart_from() -> None:
    cache = knowing("abcd", "abxx", capacity=2)
    run(cache, "abcd")
    cache.put(step("zz"), "zz")  # "abxx" goes
    run(cache, "abcd")
    cache.begin_step()
    cache.follow(0, ("a",))
    assert may_be(cache) == ["abcd"]


def test_equal_fingerprints_of_different_steps_are_not_mixed_up() -> None:
    cache = StepCache[str](4)
    cache.put(step("ab", fingerprint=7), "ab")
    cache.begin_step()
    assert [cache.follow(hook, (letter,)) for hook, letter in enumerate("ac")] == [True, False]
    assert cache.end_step(step("ac", fingerprint=7)) is None
    found = cache.end_step(step("ab", fingerprint=7))
    assert found is not None
    assert found.plan == "ab"


def test_a_step_is_found_at_its_end_though_nobody_followed_it() -> None:
    cache = knowing("ab")
    cache.begin_step()
    found = cache.end_step(step("ab"))
    assert found is not None
    assert (found.plan, found.fingerprint) == ("ab", hash("ab"))


def test_steps_without_hooks_are_known_too() -> None:
    cache = knowing("", "ab")
    assert run(cache, "") == ["ab"]
    assert run(cache, "ab") == ["", "ab", "ab"]


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_capacity_below_one_is_refused(capacity: int) -> None:
    with pytest.raises(ValueError, match="capacity of 1 or more"):
        StepCache[str](capacity)
