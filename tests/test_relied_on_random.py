"""Random programs that write, unseen, what autograd did not save: no gradient is silently wrong.

    in each step:  plain PyTorch's bits, or the named error in a step that wrote

A program all of whose writes are in each step never raises.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from tests._mixes import Proofs
from tests._relied_on import LINKS, SHARES, Budget, Case, Mixed, Refused, Setting, complaint, plainly, trained
from tests._relied_on_programs import ROWS, SIDE, Program, When
from tests._unseen_kernels import OPERATORS, custom_unsaid, scale

# --- what programs are made of
#
# A list of instructions on sources: tensors that only casts, scalar products and sums read, of which autograd saves no operand.
# So a write of a source is never a write of a saved tensor, and eager is right by construction. Autograd saves functions of the
# casts. Each write has its steps: all, or every n-th.


READS: dict[str, Callable[[Tensor], Tensor]] = {
    "sin": torch.sin,
    "cos": torch.cos,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}

WRITERS: dict[str, Callable[[Tensor, float], object]] = {
    "pointer": scale,
    "data": lambda x, by: x.data.mul_(by),
    "unsaid": lambda x, by: OPERATORS.scale_unsaid(x.detach(), by),
    "custom unsaid": lambda x, by: custom_unsaid(x.detach(), by),
    "dlpack": lambda x, by: from_dlpack(x.detach()).mul_(by),
}

FACTORS = (0.5, 0.75, 1.25, 1.5)


@dataclass(frozen=True)
class Write:
    """Writer, its factor, the steps in which it writes, and whether it writes in a hook of backward."""

    how: str
    by: float
    every: int
    in_backward: bool

    def now(self, number: int) -> bool:
        return number % self.every == self.every - 1


@dataclass(frozen=True)
class Instruction:
    """A name, two sources, a factor, and a write where it is one."""

    name: str
    i: int
    j: int
    factor: float
    read: str = ""
    write: Write | None = None


class RandomProgram(Program):
    """Runs the instructions of its class."""

    instructions: ClassVar[tuple[Instruction, ...]] = ()
    whens = (When.EACH,)

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("book", torch.randn(ROWS, SIDE).half())
        self.book: Tensor
        self.shift = nn.Parameter(torch.randn(SIDE))

    @classmethod
    def writes_in(cls, number: int, when: When) -> bool:
        return any(one.write is not None and one.write.now(number) for one in cls.instructions)

    @classmethod
    def in_each(cls) -> bool:
        """True if all of its writes are in each step."""
        return all(one.write is None or one.write.every == 1 for one in cls.instructions)

    def forward(self) -> Tensor:
        sources = [self.embedded(), self.embedded(1), self.book]
        losses = [sources[1].float().mean()]
        later: list[Callable[[], object]] = []
        for one in self.instructions:
            x, y = sources[one.i % len(sources)], sources[one.j % len(sources)]
            if one.name == "read":
                losses.append((READS[one.read](x.float() * one.factor + self.shift)).mean())
            elif one.name == "scaled":
                sources.append(x * one.factor)
            elif one.name == "sum":
                sources.append(x + y)
            elif one.write is not None and one.write.now(self.number):
                write = WRITERS[one.write.how]
                if one.write.in_backward:
                    later.append(lambda write=write, x=x, by=one.write.by: write(x, by))  # type: ignore[misc]  # bound now
                else:
                    write(x, one.write.by)
        last = self.embedded(2).float()
        losses.append(last.sin().mean())

        def write_all(_: Tensor) -> None:
            with torch.no_grad():
                for write in later:
                    write()

        last.register_hook(write_all)
        return torch.stack(losses).sum()


def random_program(seed: int) -> type[RandomProgram]:
    draw = random.Random(seed)
    instructions = [_read(draw), _read(draw)]
    instructions += [draw.choice((_read, _read, _source, _write))(draw) for _ in range(draw.randint(5, 9))]
    instructions += [_write(draw), _read(draw)]
    return type(f"Random{seed}", (RandomProgram,), {"instructions": tuple(instructions), "__doc__": f"Random program {seed}."})


def _read(draw: random.Random) -> Instruction:
    return Instruction("read", draw.randrange(8), 0, float(draw.randint(1, 6)), draw.choice(list(READS)))


def _source(draw: random.Random) -> Instruction:
    return Instruction(draw.choice(("scaled", "sum")), draw.randrange(8), draw.randrange(8), draw.choice(FACTORS))


def _write(draw: random.Random) -> Instruction:
    every = draw.choice((1, 1, 2, 3, 4))
    write = Write(draw.choice(list(WRITERS)), draw.choice(FACTORS), every, draw.random() < 0.3)
    return Instruction("write", draw.randrange(8), 0, 1.0, write=write)


PROGRAMS = 200
QUICK = 10
PER_CHUNK = 19


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


@pytest.mark.ci
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


@pytest.mark.parametrize(
    "programs", [QUICK, pytest.param(PROGRAMS, marks=[pytest.mark.slow, pytest.mark.thorough])], ids=["quick", "all"]
)
def test_eager_runs_every_random_program_and_to_the_same_bits_twice(programs: int) -> None:
    for seed in range(programs):
        case = Case(random_program(seed), When.EACH)
        first = plainly.__wrapped__(case)
        assert not any(isinstance(step, Refused) for step in first.steps), seed
        assert plainly(case).steps == first.steps, seed


def test_the_writes_of_most_programs_are_in_some_steps_alone() -> None:
    each = sum(random_program(seed).in_each() for seed in range(PROGRAMS))
    assert PROGRAMS // 10 < each < PROGRAMS // 2
