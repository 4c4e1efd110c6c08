"""Recomputed storages have plain PyTorch's bits, regardless of writes to their sources in between.

    Pointers, kernels of extensions, aliases, hooks and optimizers write activations and buffers that autograd did not save.
    Eager is right, so a session is right: see `complaint` for what "right" is.

Here a diagonal of programs, budgets, links and mixes, of which some programs run everywhere; their product is `thorough`.
The reference is torch alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

import chameleon_mm as cm
from tests._mix_models import bits
from tests._mixes import Proofs
from tests._relied_on import (
    CASES,
    LINKS,
    SHARES,
    STEPS,
    Budget,
    Case,
    Mixed,
    Refused,
    Setting,
    complaint,
    device_of,
    plainly,
    roomy,
    trained,
)
from tests._relied_on_programs import PROGRAMS, ActorCritic, Book, Program, UpdatedInBackward, When, waves

pytestmark = pytest.mark.usefixtures("quiet", "short_search")

MIXED_STEPS = 5
"""Enough for a write in the fourth step and a step after it."""

MIXES = tuple(
    Mixed(seed, proofs, drop, held)
    for seed, (proofs, drop, held) in enumerate(
        [
            (Proofs.FIRST, 0.9, 0.4),
            (Proofs.EACH, 0.9, 1.0),
            (Proofs.FIRST, 0.6, 1.0),
            (Proofs.EACH, 1.0, 0.4),
            (Proofs.EACH, None, None),
        ]
    )
)

KINDS = (
    "PointerAfterRead",
    "FunctionMarked",
    "OperatorUnsaid",
    "CustomSaid",
    "DlpackAlias",
    "Data",
    "Undone",
    "BetweenMadeAndSaved",
    "CheckpointedReentrant",
    "Rotated",
    "ResidualByPointer",
    "LossOverLogits",
    "GateOverSaved",
    "HiddenByPointer",
    "BookByData",
    "BookInFullHook",
    "UpdatedInBackward",
    "ActorCritic",
    "SavedMarked",
)
"""A program or two of each kind."""

QUICK = (
    "PointerAfterRead",
    "FunctionMarked",
    "CustomSaid",
    "DlpackAlias",
    "BetweenMadeAndSaved",
    "Rotated",
    "BookByData",
    "UpdatedInBackward",
)
"""Those of `make test`."""


def diagonal(number: int) -> list[tuple[Case, Setting]]:
    """A budget and a link for a program that writes in each step, others for one that writes in some, and a mix."""
    program = PROGRAMS[number]
    each, fourth = (Case(program, when) for when in When)
    if issubclass(program, (Book, UpdatedInBackward, ActorCritic)):  # that is recomputed on the slowest link alone
        budgets = [Budget(SHARES[2 + number % 2], "slowest"), Budget(SHARES[3 - number % 2], "slowest")]
    else:
        budgets = [
            Budget(SHARES[number % 4], "slow" if number % 8 else "default"),
            Budget(SHARES[1 + (number + 1) % 4], "slowest"),
        ]
        if number % 2:
            budgets.reverse()
    mix = ((each, fourth)[number % 2], MIXES[number % len(MIXES)])
    return [(each, budgets[0]), (fourth, budgets[1]), mix]


def marks(program: type[Program], watch: str) -> list[pytest.MarkDecorator]:
    """CI takes those of `KINDS` with both watches, the others with one."""
    if program.__name__ in QUICK and watch == "watch":
        return []
    return [pytest.mark.slow] if watch == "watch" or program.__name__ in KINDS else [pytest.mark.slow, pytest.mark.thorough]


DIAGONAL = [
    pytest.param(watch, number, id=f"{watch}-{program.__name__}", marks=marks(program, watch))
    for number, program in enumerate(PROGRAMS)
    for watch in ("watch", "notes")
]


SETTINGS: tuple[Setting, ...] = (*(Budget(share, link) for link in LINKS for share in SHARES), *MIXES)


def problem(case: Case, setting: Setting, kind: str = "sim", *, named: bool | None = None) -> str | None:
    """Return a description of a case's fault, or None."""
    steps = MIXED_STEPS if isinstance(setting, Mixed) else STEPS
    broken = complaint(case, trained(case, setting, kind, steps), kind=kind, named=named)
    return None if broken is None else f"{case}, {setting}: {broken}"


def named(value: object) -> str:
    if isinstance(value, Mixed):
        return f"mix {value.seed}"
    return f"{value.share} {value.link}" if isinstance(value, Budget) else str(value)


@pytest.mark.ci
@pytest.mark.parametrize(("each_watch", "number"), DIAGONAL, indirect=["each_watch"])
def test_a_write_that_eager_allows_changes_no_bit(each_watch: str, number: int) -> None:
    broken = [found for case, setting in diagonal(number) if (found := problem(case, setting)) is not None]
    assert not broken, "\n".join(broken)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.usefixtures("each_watch")
@pytest.mark.parametrize("setting", SETTINGS, ids=named)
@pytest.mark.parametrize("case", CASES, ids=named)
def test_a_write_that_eager_allows_changes_no_bit_at_any_budget_on_any_link_and_with_any_mix(
    case: Case, setting: Setting
) -> None:
    assert problem(case, setting) is None


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.usefixtures("each_watch")
@pytest.mark.parametrize("seed", range(10, 13))
@pytest.mark.parametrize("case", CASES, ids=named)
def test_without_proofs_a_write_is_recomputed_or_named(case: Case, seed: int) -> None:
    """With `Proofs.NEVER` no original is compared, so a step with an unseen write may end in the error."""
    unseen = not case.program.seen and not case.program.eager_refuses
    assert problem(case, Mixed(seed, Proofs.NEVER), named=case.named_error or unseen) is None


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "when"),
    [
        pytest.param(name, when, marks=() if number % 2 == turn else pytest.mark.thorough)
        for number, name in enumerate(KINDS)
        for turn, when in enumerate(When)
    ],
)
def test_a_write_on_cuda_changes_no_bit(name: str, when: When) -> None:
    (program,) = (program for program in PROGRAMS if program.__name__ == name)
    case = Case(program, when)
    settings: tuple[Setting, ...] = (*MIXES[1:3], Budget(SHARES[KINDS.index(name) % 5]))
    for setting in settings:
        assert problem(case, setting, "cuda") is None


class TwoKinds(Program):
    """Two kinds of step that begin alike. The one that writes drops what autograd saved of the tensor before its backward."""

    def forward(self) -> Tensor:
        h = self.embedded().float()
        saved = h.sin()
        loss = waves(h)
        if not self.write:
            return loss + saved.mean() + waves(self.embedded(1), (1.5, 2.5, 3.5, 4.5))
        small = (self.weight * self.weight).sin().exp().sum()
        with torch.no_grad():
            h.mul_(0.5)
        del saved
        return loss + small


@pytest.mark.usefixtures("each_watch")
def test_a_step_that_turns_out_to_be_another_kind_is_watched_on_if_it_dropped_anything() -> None:
    """The other kind recomputes nothing, and writes what the first kind's recipes rely on."""

    def steps(model: Program, session: cm.SwapSession | None) -> Iterator[bytes]:
        for number, writes in enumerate((False, True, False, False, False, True)):
            with session.step() if session else nullcontext():
                model.step(number, writes)
            assert model.weight.grad is not None
            yield bits(model.weight.grad)
            model.weight.grad = None

    torch.manual_seed(0)
    expected, device = list(steps(TwoKinds(), None)), device_of("slowest")
    torch.manual_seed(0)
    with device.compute():
        model = TwoKinds()
        with cm.SwapSession(device.allocated_bytes() + (1300 << 10), "64MiB", device, min_bytes=1, model=model) as session:
            assert list(steps(model, session)) == expected
        assert session._executor.metrics.totals.recomputed > 0


# --- what the programs are worth


@pytest.mark.slow  # sees nothing of the library
def test_the_programs_are_plain_pytorchs() -> None:
    """Each gives the same bits twice, and is refused by eager where it says so and nowhere else."""
    for case in CASES:
        plain = plainly(case)
        assert plainly.__wrapped__(case).steps == plain.steps, case
        for number, step in enumerate(plain.steps):
            assert isinstance(step, Refused) == (case.program.eager_refuses and case.program.writes_in(number, case.when)), (
                f"{case}, step {number}"
            )


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(3000)  # some 180 trainings, which take minutes on a busy machine
def test_most_programs_recompute() -> None:
    """Within a budget or with a mix of the diagonal. A program that recomputes nothing tests nothing."""

    def ran_recipes(case: Case, setting: Setting) -> bool:
        done = trained(case, setting)
        # With a proof each time nothing is dropped: recipes run while the originals are held.
        return bool(done.proofs if isinstance(setting, Mixed) and setting.proofs is Proofs.EACH else done.recomputed)

    pairs = [pair for number in range(len(PROGRAMS)) for pair in diagonal(number)]
    without = [f"{case} {setting}" for case, setting in pairs if not ran_recipes(case, setting)]
    assert len(without) <= len(pairs) // 3, without


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.usefixtures("each_watch")
@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("case", CASES, ids=named)
def test_a_session_with_room_gives_the_same(case: Case, link: str) -> None:
    assert complaint(case, roomy(case, link)) is None


def test_the_comparison_sees_one_bit_and_an_error_that_is_not_allowed() -> None:
    case = CASES[0]
    got = trained(case, Budget(0.9, "default"))
    first = got.steps[0]
    assert not isinstance(first, Refused) and first[0] is not None
    got.steps[0] = (bytes([first[0][0] ^ 1]) + first[0][1:], *first[1:])
    assert "other bits in [0]" in (complaint(case, got) or "")
    got.steps[0] = Refused("RuntimeError", "one of the variables has been modified by an inplace operation")
    assert "refused in eager's words" in (complaint(case, got) or "")
