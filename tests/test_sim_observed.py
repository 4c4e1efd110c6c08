"""The simulated device with the tests' observer and without one: the same bits, times and memory; only the observer accuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import chameleon_mm as cm
from chameleon_mm.device.sim import SimDevice, SimObserver
from tests.observed import SimRaceError, StrictObserver

N = 64


def unobserved() -> SimDevice:
    """A device as a user has it."""
    device = SimDevice()
    device.attach_observer(SimObserver())
    return device


def trained(device: SimDevice | None) -> list[Tensor]:
    """Weights after four steps of a net; in a session where a device is given."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Dropout(0.1)) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.randn(256, 128)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    if device is None:
        for _ in range(4):
            step()
        return list(model.parameters())
    with cm.SwapSession("3MiB", "64MiB", device, 0, model=model, optimizer=optimizer) as session:
        for _ in range(4):
            with session.step():
                step()
    assert session.report().bytes_swapped_in > 0
    return list(model.parameters())


def test_every_device_of_a_test_is_observed(sim: SimDevice) -> None:
    assert isinstance(sim._machine.observer, StrictObserver)
    assert isinstance(cm.SimDevice("a100")._machine.observer, StrictObserver)


def test_what_is_counted_and_computed_is_the_same_without_the_observer() -> None:
    observed, plain = SimDevice(), unobserved()
    weights = trained(None)
    for device in (observed, plain):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(trained(device), weights, strict=True))
    assert plain.host_us == observed.host_us
    assert plain.read_memory() == observed.read_memory()
    for direction in ("d2h", "h2d"):
        assert plain.copy_spans(direction) == observed.copy_spans(direction)


def test_without_the_observer_copies_are_done_at_once_and_nothing_is_refused() -> None:
    device = unobserved()
    hbm, host, back = device.current_stream().alloc(N).fill_(1), device.alloc_pinned(N), device.current_stream().alloc(N)
    d2h, h2d = device.new_stream("d2h"), device.new_stream("h2d")
    d2h.copy(host, hbm)
    h2d.pack(back, [hbm], [0])
    device.current_stream().free(hbm)
    assert host.tolist() == back.tolist() == hbm.tolist() == [1] * N


RACES = """
import sys
import chameleon_mm as cm
device = cm.SimDevice()
device.new_stream("d2h").copy(device.alloc_pinned(64), device.current_stream().alloc(64))
print(sys.argv[1:], __name__)
"""


@pytest.mark.parametrize("observed", [False, True])
def test_a_program_is_observed_where_it_is_asked_for(observed: bool, tmp_path: Path) -> None:
    program = tmp_path / "races.py"
    program.write_text(RACES)
    command = [sys.executable, *(["-m", "tests.observed"] if observed else []), str(program), "--some"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    if observed:
        assert done.returncode == 1
        assert f"{SimRaceError.__name__}: buffer #" in done.stderr
    else:
        assert (done.stdout, done.stderr) == ("['--some'] __main__\n", "")
