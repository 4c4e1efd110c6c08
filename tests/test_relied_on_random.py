"""Random programs that write, unseen, what autograd did not save: no gradient is silently wrong.

    in each step:  plain PyTorch's bits, or the named error in a step that wrote

A program all of whose writes are in each step never raises. What programs are made of: `_relied_on_random.py`.
"""

from __future__ import annotations

import random

import pytest

from tests._mixes import Proofs
from tests._relied_on import LINKS, SHARES, Budget, Case, Mixed, Refused, Setting, complaint, plainly, trained
from tests._relied_on_programs import When
from tests._relied_on_random import random_program

PROGRAMS = 200
QUICK = 30
PER_CHUNK = 17


def setting_of(seed: int) -> Setting:
    draw = random.Random(f"setting {seed}")
    if draw.random() < 0.5:
        return Budget(draw.choice(SHARES), draw.choice(LINKS[1:]))
    return Mixed(seed, draw.choice((Proofs.FIRST, Proofs.EACH)), draw.choice((0.6, 0.9, 1.0)), draw.choice((0.4, 1.0)))


def problem(seed: int) -> str | None:
    program = random_program(seed)
    case, setting = Case(program, When.EACH), setting_of(seed)
    broken = complaint(case, trained(case, setting), named=not program.in_each())
    return None if broken is None else f"program {seed}, {setting}: {broken}"


@pytest.mark.usefixtures("quiet", "each_watch")
@pytest.mark.parametrize("seed", range(QUICK))
def test_a_random_program_is_right_or_named(seed: int) -> None:
    assert problem(seed) is None


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.usefixtures("quiet", "each_watch")
@pytest.mark.parametrize("first", range(QUICK, PROGRAMS, PER_CHUNK))
def test_more_random_programs_are_right_or_named(first: int) -> None:
    broken = [found for seed in range(first, min(first + PER_CHUNK, PROGRAMS)) if (found := problem(seed)) is not None]
    assert not broken, "\n".join(broken)


def test_eager_runs_every_random_program_and_to_the_same_bits_twice() -> None:
    for seed in range(PROGRAMS):
        case = Case(random_program(seed), When.EACH)
        first = plainly.__wrapped__(case)
        assert not any(isinstance(step, Refused) for step in first.steps), seed
        if seed < QUICK:
            assert plainly(case).steps == first.steps, seed


def test_the_writes_of_most_programs_are_in_some_steps_alone() -> None:
    each = sum(random_program(seed).in_each() for seed in range(PROGRAMS))
    assert PROGRAMS // 10 < each < PROGRAMS // 2
