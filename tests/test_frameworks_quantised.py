"""Adapters over frozen, quantised weights that are streamed: each byte of those is copied out once, each bit is plain's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import chameleon_mm as cm
from chameleon_mm.state import hosted, parameter_swap
from chameleon_mm.state.parameter_swap import LEAST_STORAGES, plain_parts
from chameleon_mm.units import KIB
from tests._frameworks import Seen
from tests._plain_models import language
from tests._plain_training import Outcome, differences, peak_and_left
from tests._quantised_models import QUANTISED, save, tuned

STEPS, LAYERS = 5, 4

READ_AS_DATA = ("bnb 8-bit",)
"""Weights that a layer reads by `.data` on a CPU: no version counter would show a write after that, so they are copied each
time that they leave. On CUDA these layers do not read them so."""


@pytest.fixture(autouse=True)
def _most_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosted, "MIN_BYTES", KIB)
    monkeypatch.setattr(parameter_swap, "WINDOW_SHARE", 0.0)  # room for the fewest weights


def frozen(model: nn.Module) -> list[int]:
    """Bytes of the storages of frozen weights that may leave. Those of adapters are too small, and those that a file of weights
    is mapped to belong to the file."""
    storages = {
        storage._cdata: storage for p in model.parameters() for part in plain_parts(p) for storage in [part.untyped_storage()]
    }
    return [storage.nbytes() for storage in storages.values() if storage.nbytes() >= KIB and storage.resizable()]


class Training:
    """One that counts nothing and swaps nothing by itself."""

    def __init__(self, folder: Path, how: str) -> None:
        self.seen = Seen()
        self.model = tuned(folder, how)
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-2)
        self._loss = language()

    def forward(self) -> Tensor:
        return self._loss(self.model)

    def step(self) -> None:
        loss = self.forward()
        loss.backward()
        self.seen.note("loss", loss)
        for p in self.model.parameters():
            if p.grad is not None:
                self.seen.note("gradient", p.grad)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def finish(self) -> Outcome:
        return self.seen.finish(self.model, self.optimizer)


def plain(folder: Path, how: str) -> Outcome:
    training = Training(folder, how)
    for _ in range(STEPS):
        training.step()
    return training.finish()


def half_of_the_activations(folder: Path, how: str) -> int:
    """Budget with half of the room that activations take, and room for the least of the frozen weights."""
    device = cm.SimDevice()
    with device.compute():
        training = Training(folder, how)
        sizes = frozen(training.model)
        peak, left = peak_and_left(device, training)
    return peak - left // 2 - (sum(sizes) - LEAST_STORAGES * max(sizes))


@pytest.mark.ci
@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=[pytest.mark.slow] if how in READ_AS_DATA else []) for how in QUANTISED]
)
def test_frozen_weights_are_copied_out_once(how: str, tmp_path: Path) -> None:
    """Within a budget of half the activations, and room for three of the weights."""
    save(tmp_path, LAYERS)
    expected = plain(tmp_path, how)
    budget = half_of_the_activations(tmp_path, how)
    device = cm.SimDevice()
    with device.compute():
        training = Training(tmp_path, how)
        sizes = frozen(training.model)
        device.reset_peaks()
        handle = cm.attach(
            training.model, hbm_budget=budget, host_budget="64MiB", device=device, min_bytes=256, parameters="swap"
        )
        for _ in range(STEPS):
            training.step()
        peak = device.peak_allocated_bytes()
        handle.detach()
        assert differences(expected, training.finish()) == []
    report = handle.report()
    assert (report.parameter_bytes_swapped_out == sum(sizes)) is (how not in READ_AS_DATA)
    assert report.parameter_bytes_swapped_in > STEPS * sum(sizes) // 2
    assert report.bytes_swapped_out > 0
    assert report.steps == STEPS
    assert peak <= budget
