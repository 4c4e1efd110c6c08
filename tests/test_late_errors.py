"""Errors in finalisers are raised once, by the next entry, and neither leaked nor printed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch._dynamo  # imported late, by a session, it leaves frames in cycles, and the session in those
from torch import Tensor

import chameleon_mm as cm
from chameleon_mm.swap.saved_storage import SavedStorage
from tests._fakes import Unwatched
from tests._ordering import SLOW_LINK
from tests._programs import deep
from tests.observed import SimLifetimeError, SimRaceError

pytestmark = pytest.mark.usefixtures("no_gc")


@pytest.fixture
def unraisable(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[BaseException | None]]:
    """Collect the exceptions that the interpreter would print as "Exception ignored in"."""
    seen: list[BaseException | None] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda told: seen.append(told.exc_value))
    yield seen
    seen.clear()


@contextmanager
def failing_ends() -> Iterator[list[str]]:
    """Make every saved tensor that autograd releases inside fail after its release; yield the errors' texts."""
    made: list[str] = []
    retire = SavedStorage.retire

    def fails(self: SavedStorage) -> None:
        retire(self)
        made.append(f"number {len(made)}")
        raise SimRaceError(made[-1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SavedStorage, "retire", fails)
        yield made


def one_fails(x: Tensor) -> None:
    """A graph with one saved tensor is dropped, and its end fails."""
    out = torch.exp(x * 1.5)
    with failing_ends() as made:
        del out
    assert len(made) == 1


ENTRIES = ["a hook", "a step's end", "the next step", "the report", "the session's end"]


@pytest.mark.parametrize("entry", ENTRIES)
def test_it_is_raised_at_the_next_entry_and_once(entry: str, sim: cm.SimDevice, unraisable: list[BaseException | None]) -> None:
    x = torch.randn(64, 64, requires_grad=True)
    with sim.compute():
        (expected,) = torch.autograd.grad(deep(x * 2).sum(), x)
    session = cm.SwapSession("64MiB", "4MiB", sim, min_bytes=0)

    def step(what: Callable[[], object] = lambda: None) -> None:
        with session.step():
            assert torch.equal(torch.autograd.grad(deep(x * 2).sum(), x)[0], expected)
            what()

    def body() -> None:
        with session:
            step()
            if entry == "a step's end":
                raises(lambda: step(lambda: one_fails(x)))
            else:
                one_fails(x)
            if entry == "the session's end":
                return
            if entry == "a hook":
                raises(lambda: torch.exp(x * 2))
            elif entry == "the next step":
                raises(step)
            elif entry == "the report":
                raises(session.report)
            step()
            step()

    def raises(work: Callable[[], object]) -> None:
        note = ""
        try:
            work()
        except SimRaceError as error:  # not pytest.raises, which keeps frames, and with them the saved tensors
            note = f"{error}: {error.__notes__}"
        assert note.startswith("number 0") and "given back" in note

    if entry == "the session's end":
        raises(body)
    else:
        body()
    assert session.report().bytes_swapped_in > 0
    assert session.pool.stats().num_live == len(session._executor.registry.all()) == 0
    assert unraisable == []


def test_of_several_none_is_lost(sim: cm.SimDevice, unraisable: list[BaseException | None]) -> None:
    session = cm.SwapSession("64MiB", "4MiB", sim, min_bytes=0)
    told = []
    with session, session.step():
        out = deep(torch.randn(64, 64, requires_grad=True))
        with failing_ends() as made:
            del out
        assert len(made) > 1
        for _ in made:
            with pytest.raises(SimRaceError) as caught:
                session.report()
            told.append(str(caught.value))
        session.report()
    assert told == made
    assert session.pool.stats().num_live == 0
    assert unraisable == []


def lose_a_source(x: Tensor) -> None:
    """A saved tensor loses its memory while its copy out is pending, and the graph is dropped: the simulator finds out in the
    finaliser of the last handle."""
    middle = torch.exp(x * 1.5)
    out = torch.tanh(middle + 1)  # the hook of another operator: the copy of `middle` begins
    middle.untyped_storage().resize_(0)
    del out, middle


def test_the_drop_in_raises_it_at_its_end_or_at_a_hook(unraisable: list[BaseException | None]) -> None:
    hooks = cm.save_on_cpu(device=Unwatched(SLOW_LINK), min_bytes=0)
    hooks._executor.outs.pack_below_bytes = 0
    x = torch.randn(64, 64, requires_grad=True)
    with hooks:
        deep(x).sum().backward()  # what a pass takes is known from here on: before, none of its copies is pending for long
    hooks.device.synchronize()  # the link is free: the next copy is handed over
    with pytest.raises(SimLifetimeError, match="source was resized"), hooks:
        lose_a_source(x)
    with hooks:
        deep(x)
    with pytest.raises(KeyError, match="the user's own"), hooks:
        one_fails(x)
        raise KeyError("the user's own")  # is not replaced
    with pytest.raises(SimRaceError, match="number 0"), hooks:
        pass
    with hooks:
        deep(x)
    assert hooks.pool.stats().num_live == 0
    assert unraisable == []


def test_what_nobody_comes_for_is_told_by_the_interpreter(sim: cm.SimDevice, unraisable: list[BaseException | None]) -> None:
    """An error must not vanish with the executor that kept it; nor may it keep that one alive."""
    session = cm.SwapSession("64MiB", "4MiB", sim, min_bytes=0)
    with pytest.raises(KeyError), session:
        one_fails(torch.randn(64, 64, requires_grad=True))
        raise KeyError
    assert unraisable == []
    del session
    assert [type(error) for error in unraisable] == [SimRaceError]
