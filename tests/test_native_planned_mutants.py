"""Each ordering rule of the hooks in C++, broken on purpose: every mutant goes red, as the stand-in names what is not ordered.

A mutant is the helper compiled from its source with one line changed. Not among them is what only a second stream could show:
the hooks are Python's there, and `test_ordering_mutants_cuda.py` has their mutants. Nor are the waits that one stream's other
waits include: a host block's for its last use, and a copy back's for the copy out.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests._native import helper, mutated, only
from tests.cuda_stand_in import control
from tests.test_native_planned import _untimed, made, plain, same, session_for, steps_in_session, written_after_its_save

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("no_gc", "_untimed", "fresh_blocks"),
    pytest.mark.skipif(torch.version.cuda is None or not control.is_loaded(), reason="a GPU names no violation"),
]

__all__ = ["_untimed"]

ORDERS = {
    "d2h waits for compute": ("planned_moves.h", "(after.it, 0, record(p.main))", "(after.it, 0, record(p.out.stream))"),
    "compute waits for d2h": ("planned_moves.h", "wait(p.main, done.it);  // Note [Reclaim]", "// Note [Reclaim]"),
    "h2d waits for compute": ("planned_moves.h", "owner_is_done(record(p.main))", "owner_is_done(record(p.in.stream))"),
    "compute waits for h2d": ("planned_moves.h", "if (!is_complete(arrived.it)) wait(p.main, arrived.it);", ";"),
}  # fmt: skip
"""File, what is in it once, and what the mutant has instead."""


def use_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have sessions use the helper, compiled from the source that there is now, and no other."""
    helper("planned", monkeypatch)
    only(["planned"], monkeypatch)


def red() -> str:
    """What says that steps of a chain go wrong: the violations, or "other numbers"; empty: nothing does."""
    expected, peak = plain("chain")
    control.violations()
    got = steps_in_session(session_for(peak), made("chain"))
    torch.cuda.synchronize()
    return "\n".join(control.violations()) or ("" if same(expected, got) else "other numbers")


def test_the_hooks_as_they_are_stay_green(monkeypatch: pytest.MonkeyPatch) -> None:
    use_helper(monkeypatch)
    assert red() == ""


@pytest.mark.parametrize("rule", ORDERS)
def test_without_one_order_it_goes_red(rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutated("planned", *ORDERS[rule], tmp_path, monkeypatch)
    assert red()


def test_without_the_versions_check_a_write_goes_unnoticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutated("planned", "planned.cpp", "if (has_moved(probe) || !is_here(h))", "if (!is_here(h))", tmp_path, monkeypatch)
    _, peak = plain("chain")
    model = made("chain")
    with session_for(peak) as session:
        for _ in range(4):
            with session.step():
                written_after_its_save(model, write=False)
                model.zero_grad()
        with session.step():
            written_after_its_save(model)  # eager raises here
    model.zero_grad()
