"""Each ordering rule of the swap path, broken on purpose: every mutant goes red, and the whole path stays green.

A mutant drops the waits of one stream on another's events, reclaims without a wait, copies in the middle of an op, keys
storages by address, or skips the version check. The simulator must say so: with its race detector, and for the waits again
with the detector off, as wrong numbers or a lost source. So must CUDA's stand-in, whose runtime names both sides of what no
event orders.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import chameleon_mm as cm
from chameleon_mm.swap.host_copy import State
from tests._ordering import (
    BYTES,
    WAITS,
    Machine,
    OnCuda,
    OnSim,
    Scenario,
    drop_waits,
    executor,
    host_block_reused_from_another_stream,
    host_copy_read_from_another_stream,
    one_training_step,
    reclaim_early,
    release_without_event,
    saved,
)
from tests._programs import deep
from tests.cuda_stand_in import control
from tests.observed import SimLifetimeError, SimRaceError

pytestmark = [
    pytest.mark.usefixtures("no_gc"),
    # A mutant also breaks code that runs when its graph is dropped, where an error can only be reported.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

NAMED = {OnSim: "not ordered after", OnCuda: "no event orders"}
"""Message of the machine's detector for a missing order."""

MACHINES = [OnSim, pytest.param(OnCuda, marks=pytest.mark.gpu)]
BYTES_ALONE = partial(OnSim, check_races=False)


@pytest.fixture(autouse=True)
def _far_behind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA no event completes by luck, which would make the wait on it needless: the device always lags.

    A GPU would mostly be right by luck: only the stand-in is tested."""
    if request.node.get_closest_marker("gpu") is not None:
        from chameleon_mm.device.cuda.cuda_stream import CudaEvent

        if not control.is_loaded():
            pytest.skip("a GPU names no violation")
        request.getfixturevalue("fresh_blocks")
        monkeypatch.setattr(CudaEvent, "query", lambda self: False)


def red(scenario: Scenario, machine: Machine) -> str:
    """Return the evidence that `scenario` goes wrong: the race, or "other numbers"; empty if there is none."""
    said = ""
    try:
        scenario(machine)
    except SimRaceError as race:
        return str(race)
    except (SimLifetimeError, AssertionError):
        said = "other numbers"
    if isinstance(machine, OnCuda):
        torch.cuda.synchronize()
        said = "\n".join(control.violations()) or said
    return said


@pytest.mark.parametrize(
    "scenario", [one_training_step, host_copy_read_from_another_stream, host_block_reused_from_another_stream]
)
@pytest.mark.parametrize("make", [*MACHINES, BYTES_ALONE])
def test_the_path_as_it_is_stays_green(make: Callable[[], Machine], scenario: Scenario) -> None:
    assert red(scenario, make()) == ""


@pytest.mark.parametrize("make", MACHINES)
@pytest.mark.parametrize(("waiter", "recorder"), WAITS)
def test_without_one_wait_the_race_is_named(
    waiter: str, recorder: str, make: type[Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = make()
    dropped = drop_waits(monkeypatch, machine, waiter, recorder)
    assert NAMED[make] in red(WAITS[waiter, recorder], machine)
    assert dropped[0] > 0


@pytest.mark.parametrize("recorder", ["d2h", "h2d"])
def test_without_one_wait_the_numbers_are_wrong(recorder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits whose lack the simulator shows as bytes even with the detector off.

    The others are also covered by chance here (by a wait on another stream, or because the simulator reuses no memory): only
    the detector can show them."""
    machine = BYTES_ALONE()
    drop_waits(monkeypatch, machine, "compute", recorder)
    assert red(WAITS["compute", recorder], machine) == "other numbers"


@pytest.mark.parametrize("make", MACHINES)
def test_reclaiming_early_goes_red(make: type[Machine], monkeypatch: pytest.MonkeyPatch) -> None:
    reclaim_early(monkeypatch)
    assert red(one_training_step, make())


@pytest.mark.parametrize("make", MACHINES)
def test_a_host_block_without_its_event_goes_red(make: type[Machine], monkeypatch: pytest.MonkeyPatch) -> None:
    release_without_event(monkeypatch)
    assert red(host_block_reused_from_another_stream, make())


def test_copying_in_the_middle_of_an_op_goes_red(monkeypatch: pytest.MonkeyPatch) -> None:
    def noisy(x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return F.rrelu(x * 1, 0.1, 0.9, training=True)

    def step() -> None:
        machine = OnSim()
        device = machine.device
        swapper = executor(machine, cm.PinnedPool("4MiB", device=device))
        with device.compute():
            x = torch.randn(64, 64, requires_grad=True)
            (expected,) = torch.autograd.grad(deep(noisy(x)).sum(), x)
            junk = [torch.full((64, 64), float(n)) for n in range(64)]  # or memory used again still holds the same noise
            del junk
            with torch.autograd.graph.saved_tensors_hooks(swapper.save, swapper.use):
                out = deep(noisy(x)).sum()
            (got,) = torch.autograd.grad(out, x)
        assert torch.equal(got, expected)

    step()
    numbers = iter(range(1_000_000))
    monkeypatch.setattr("chameleon_mm.swap.swap_outs.sequence_nr", lambda: next(numbers))  # every hook: "the op is over"
    with pytest.raises((SimRaceError, SimLifetimeError, AssertionError)):
        step()


def test_two_storages_in_turn_at_one_address_are_two() -> None:
    """The second must not be taken for the first, whose bytes are on the host."""
    machine = OnSim()
    device = machine.device
    swapper = executor(machine, cm.PinnedPool("4MiB", device=device))
    others: list[Tensor] = []
    with device.compute():
        first = torch.randn(BYTES // 4)
        kept, address = first.clone(), first.data_ptr()
        one = saved(machine, swapper, first)
        swapper.save(torch.randn(8, requires_grad=True))
        del first
        one.claim.saved.reclaim()
        assert one.claim.saved.state is State.ON_HOST
        second = torch.randn(BYTES // 4)
        while second.data_ptr() != address and len(others) < 64:  # an allocator hands it out again before long, as a rule
            others.append(second)
            second = torch.randn(BYTES // 4)
        two = saved(machine, swapper, second)
        assert torch.equal(swapper.use(one), kept)
        assert torch.equal(swapper.use(two), second)
