"""Remove each rule that keeps recomputation exact once: a test of it must fail.

check(program)                 # as it is: plain PyTorch's bits
without(rule); check(program)  # other bits, or an error that plain PyTorch does not have
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

import chameleon_mm as cm
from chameleon_mm.device import SPECS
from chameleon_mm.swap.executor import Executor
from chameleon_mm.swap.recipe_runner import Comparisons, RecipeRunner
from chameleon_mm.swap.recomputing import ParameterSizes
from chameleon_mm.swap.saved_storage import SavedStorage
from chameleon_mm.swap.swap_ins import Rescue
from tests import test_recompute_exact as exact
from tests._mix_models import MODELS, train
from tests._mixes import Mix, Proofs, mixed
from tests.observed import SimRaceError
from tests.test_compute_streams import Side
from tests.test_recompute_exact import ALL, LARGE, SIDE, Program, grads, leaf, outcome, outside

pytestmark = [
    pytest.mark.usefixtures("no_gc", "each_watch"),
    # A mutant also breaks code that runs when its graph is dropped, where an error can only be reported.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

Mutate = Callable[[pytest.MonkeyPatch], None]


def unproven(admitted: frozenset[str] = ALL) -> Mix:
    """Return a mix that drops everything, without running a recipe against its original first."""
    return Mix(1, drop=1.0, held=0.0, proofs=Proofs.NEVER, admitted=admitted)


def is_exact(program: Program, steps: int = 3) -> bool:
    return outcome(program, steps, mixed(unproven())) == outcome(program, steps)


def model_is_exact(name: str, mix: Mix) -> bool:
    try:
        return train(MODELS[name], 2, lambda model: mixed(mix, model=model))[0] == train(MODELS[name], 2)[0]
    except cm.RecomputeMismatch:
        return False


def nothing(*_: object) -> None:
    pass


def without_random_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chameleon_mm.swap.recipe._random_state", lambda operation: nullcontext())


def with_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_DisableAutocast", nullcontext)


def without_rescue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Executor, "before_write", nothing)


def by_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small inputs as they are, in place of copies: Note [Relied on], rule 1."""
    monkeypatch.setattr(RecipeRunner, "copied", lambda self, storage, dropping: storage)


def while_others_hold_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drop that does not wait until only the session has the source: rule 1."""
    monkeypatch.setattr(SavedStorage, "is_private", True)


def after_autograd_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recompute nothing when autograd releases a source that others hold: rule 2."""
    monkeypatch.setattr(Rescue, "let_go", nothing)


def after_autograds_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recompute nothing at autograd's last use of a source, or before a user's function receives it: rule 2."""
    monkeypatch.setattr(Rescue, "hand_out", nothing)
    monkeypatch.setattr(Rescue, "let_go", nothing)


def without_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chameleon_mm.swap.recipe.applied", lambda settings: nullcontext())


def from_the_default_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("calls", "call_notes"):
        monkeypatch.setattr(f"chameleon_mm.record.{module}.generator_of", lambda args, kwargs: torch.default_generator)


MUTANTS: list[tuple[Mutate, Program]] = [
    (without_random_state, exact.several_in_flight),
    (with_autocast, exact.autocast_in_backward),
    (without_rescue, exact.written_while_relied_on),
    (by_reference, exact.batch_written(SIDE)),
    (after_autograd_let_go, exact.relied_on_by_a_graph_that_goes),
    (after_autograds_last_use, exact.two_optimizers),
    (after_autograds_last_use, exact.written_by_its_own_node),
    (without_settings, exact.other_default_dtype),
    (without_settings, exact.other_precision),
    (from_the_default_generator, exact.own_generator),
]


@pytest.mark.parametrize(("mutate", "program"), MUTANTS, ids=lambda one: one.__qualname__.partition(".")[0])
def test_without_one_rule_a_program_has_other_bits(mutate: Mutate, program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    if program is exact.other_precision and not precision_matters():
        pytest.skip("this CPU multiplies alike at every precision")
    assert is_exact(program)
    mutate(monkeypatch)
    assert not is_exact(program)


def precision_matters() -> bool:
    a, b = torch.randn(64, 512), torch.randn(512, 64)
    highest = a @ b
    torch.set_float32_matmul_precision("medium")
    try:
        return not torch.equal(a @ b, highest)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_without_the_random_state_a_model_has_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert model_is_exact("dropout transformer", unproven())
    without_random_state(monkeypatch)
    assert not model_is_exact("dropout transformer", unproven())


def test_what_is_dropped_while_others_hold_its_source_has_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    def holding() -> cm.SwapSession:
        return mixed(Mix(1, drop=1.0, held=1.0, proofs=Proofs.NEVER, admitted=ALL))

    expected = outcome(exact.held_and_written_in_backward, 2)
    assert outcome(exact.held_and_written_in_backward, 2, holding()) == expected
    while_others_hold_it(monkeypatch)
    assert outcome(exact.held_and_written_in_backward, 2, holding()) != expected


def test_without_the_comparison_a_hidden_write_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 3: with nothing proven first, the checksum alone finds the write."""
    expected = outcome(exact.written_unseen, 1)
    found = outcome(exact.written_unseen, 1, mixed(unproven()))
    assert isinstance(found, str)
    assert found.startswith("RecomputeMismatch")
    monkeypatch.setattr(Comparisons, "settle", nothing)
    silent = outcome(exact.written_unseen, 1, mixed(unproven()))
    assert not isinstance(silent, str)
    assert silent != expected


def test_without_the_proof_a_hidden_write_gives_other_bits() -> None:
    assert not is_exact(exact.written_unseen)
    session = mixed(Mix(1, drop=1.0, held=0.0, proofs=Proofs.FIRST, admitted=ALL))
    assert outcome(exact.written_unseen, 3, session) == outcome(exact.written_unseen, 3)


def normalised() -> list[Tensor]:
    x, mean, variance = leaf(8, 4, 6, 6), outside(4), outside(4).abs()
    z = torch.batch_norm(x * 2, None, None, mean, variance, True, 0.1, 1e-5, False).sin().exp()
    return [*grads(z.sum(), x), mean, variance]


@pytest.mark.parametrize("hidden", [True, False])
@pytest.mark.parametrize("left_out", [True, False])
def test_statistics_that_would_move_twice(left_out: bool, hidden: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch norm runs again without its running statistics, and its writes are known though its schema omits them: red
    without both."""
    if not left_out:
        monkeypatch.setattr("chameleon_mm.swap.recipe.without_updates", lambda _, args: args)
    if not hidden:
        monkeypatch.setattr("chameleon_mm.device.operators._HIDDEN_WRITES", frozenset())
        monkeypatch.setattr("chameleon_mm.record.call_notes._of_torch", {})
        by_reference(monkeypatch)
    expected = outcome(normalised, 2)
    assert (outcome(normalised, 2, mixed(unproven())) == expected) == (hidden or left_out)


def test_a_parameter_on_its_way_gives_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """... to recipes that do not wait for a step in which it keeps its size."""
    model = exact.Sharded()

    def program() -> list[Tensor]:
        model.fetch()
        x = leaf(LARGE, LARGE)
        y = x * model.shift  # saves the parameter
        y.register_hook(lambda g: model.fetch())  # right before it is needed
        z = y.sin().exp().tanh()
        del y
        model.free()
        other = x.sin()
        model.fetch(filled=False)
        return grads(z.sum() + other.sum(), x)

    assert is_exact(program)
    monkeypatch.setattr(ParameterSizes, "note", lambda self, storage: True)
    assert not is_exact(program)


# --- streams

SLOW_LINK = dataclasses.replace(SPECS["h200"], h2d_gbps=0.5, d2h_gbps=0.5, duplex_gbps=0.8)


def recomputed_aside_and_used_here() -> None:
    """A source is overwritten on a second stream, so its result is recomputed there; the first stream uses it. In plain PyTorch
    the first stream has nothing to wait for."""
    device = cm.SimDevice(SLOW_LINK)
    x = torch.randn(LARGE, LARGE, requires_grad=True)
    expected = torch.autograd.grad((x * 2 + 1).sin().sum(), x)[0]
    session = mixed(unproven(), device=device, min_bytes=0)
    with session:
        side = Side(device)
        with session.step():
            source = x * 2
            beside = source.sin()  # autograd relies on the source, though no backward comes here
            z = (source + 1).sin()
            other = x.sin()  # storages saved before are dropped here
            with side.current():
                source.detach().zero_()
            (got,) = torch.autograd.grad(z.sum(), x)
            assert torch.equal(got, expected)
            side.joined()
            del z, other, beside, source


def test_what_is_recomputed_on_another_stream_does_not_stay_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    recomputed_aside_and_used_here()
    monkeypatch.setattr("chameleon_mm.swap.swap_ins.swap_out_now", nothing)
    with pytest.raises((SimRaceError, AssertionError)):
        recomputed_aside_and_used_here()
