"""Parameters that are on the device in their turn: training, and whoever touches a parameter, have what plain PyTorch has.

The reference is plain PyTorch on the same device, with nothing of ours around it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from chameleon_mm.device import Device
from chameleon_mm.parameters import swapping
from chameleon_mm.units import KIB
from tests._parameter_programs import PROGRAMS, Plain, Swapped

pytestmark = pytest.mark.usefixtures("no_gc")


@pytest.fixture(autouse=True)
def _small_ones_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swapping, "MIN_BYTES", KIB)


def equal(got: list[Tensor], expected: list[Tensor]) -> bool:
    return len(got) == len(expected) and all(
        a.shape == b.shape and torch.equal(a.cpu(), b.cpu()) for a, b in zip(got, expected, strict=True)
    )


def left(loop: Plain) -> list[Tensor]:
    """What a program leaves: parameters, buffers, gradients, optimizer state."""
    assert loop.trained is not None
    tensors: list[Any] = [*loop.trained.parameters(), *loop.trained.buffers(), *(p.grad for p in loop.trained.parameters())]
    state = {} if loop.stepped is None else loop.stepped.state_dict()["state"]
    tensors += [value for entry in state.values() for _, value in sorted(entry.items())]
    return [t.detach().cpu().clone() for t in tensors if isinstance(t, Tensor)]


HOLDING = ("gradient penalty", "modules of many kinds", "read between steps")
"""Programs that hold more on the device by themselves than the budget that all are given."""

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plans": {},
    "rule": {"plans": False},
    "parameters alone": {"with_optimizer": False},
}


@pytest.mark.parametrize("how", CONFIGURATIONS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_has_plain_pytorchs_bits(name: str, how: str, device: Device) -> None:
    plain = Plain(device.torch_device)
    expected = PROGRAMS[name](plain)
    with device.compute():
        loop = Swapped(device, 160 * KIB, **CONFIGURATIONS[how])
        seen = PROGRAMS[name](loop)
        loop.close()
        assert loop.session is not None
        report = loop.session.report()
        assert equal(seen, expected)
        assert equal(left(loop), left(plain))
    assert report.parameter_bytes_swapped_in > 0
    if name not in HOLDING and how != "parameters alone":
        assert max(loop.peaks) <= loop.session.hbm_budget
    assert loop.session.pool.stats().live_bytes == 0
