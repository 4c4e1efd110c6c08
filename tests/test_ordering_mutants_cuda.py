"""Each ordering rule of the swap path, broken on purpose on torch's CUDA build: every mutant goes red.

The programs are those of `test_ordering_mutants.py`. What says so is the stand-in's runtime, which names both sides of what
no event orders, or the numbers, which are not eager's. A GPU would mostly be right by luck: it is not asked.
"""

from __future__ import annotations

import pytest
import torch

from chameleon_mm.device.cuda.cuda_stream import CudaEvent
from tests._ordering import (
    WAITS,
    OnCuda,
    Scenario,
    drop_waits,
    host_block_reused_from_another_stream,
    host_copy_read_from_another_stream,
    one_training_step,
    reclaim_early,
    release_without_event,
)
from tests.cuda_stand_in import control

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("no_gc", "fresh_blocks"),
    pytest.mark.skipif(torch.version.cuda is None or not control.is_loaded(), reason="a GPU names no violation"),
]

SCENARIOS = [one_training_step, host_copy_read_from_another_stream, host_block_reused_from_another_stream]


@pytest.fixture(autouse=True)
def _far_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """No event is found complete by luck, which would make the wait on it needless: the device is always behind the host."""
    monkeypatch.setattr(CudaEvent, "query", lambda self: False)


def red(scenario: Scenario, machine: OnCuda) -> str:
    """What says that `scenario` goes wrong: the violations, or "other numbers"; empty: nothing does."""
    try:
        scenario(machine)
    except AssertionError:
        numbers = "other numbers"
    else:
        numbers = ""
    torch.cuda.synchronize()
    return "\n".join(control.violations()) or numbers


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_path_as_it_is_stays_green(scenario: Scenario) -> None:
    assert red(scenario, OnCuda()) == ""


@pytest.mark.parametrize(("waiter", "recorder"), WAITS)
def test_without_one_wait_both_sides_are_named(waiter: str, recorder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = OnCuda()
    dropped = drop_waits(monkeypatch, machine, waiter, recorder)
    said = red(WAITS[waiter, recorder], machine)
    assert dropped[0] > 0
    assert "no event orders" in said


def test_reclaiming_early_goes_red(monkeypatch: pytest.MonkeyPatch) -> None:
    reclaim_early(monkeypatch)
    assert red(one_training_step, OnCuda())


def test_a_host_block_without_its_event_goes_red(monkeypatch: pytest.MonkeyPatch) -> None:
    release_without_event(monkeypatch)
    assert red(host_block_reused_from_another_stream, OnCuda())
