"""The watch of `chameleon-mm run`, in this process: it finds training, swaps it exactly, and leaves no trace in the model."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torchs

import chameleon_mm as cm
from chameleon_mm.device import Device
from chameleon_mm.tools.training_watch import Stopped, TrainingWatch
from tests._op_samples import BareMode


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, 64), nn.GELU(), nn.BatchNorm1d(64), nn.Linear(64, 64), nn.Dropout(0.1), nn.Linear(64, 32)
    )


def train(device: Device, *, steps: int = 4, each: Callable[[nn.Module], object] = lambda model: None) -> list[Tensor]:
    """Train without any knowledge of a watch, and return the results."""
    model = net().to(device.torch_device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses = []
    for _ in range(steps):
        for _ in range(2):
            loss = model(torch.randn(128, 32).to(device.torch_device)).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        model.eval()
        losses.append(model(torch.ones(2, 32).to(device.torch_device)).detach().sum())  # with gradients on, and never used
        model.train()
        each(model)
    return [value.cpu() for value in (*losses, *model.state_dict().values())]


@contextmanager
def watched(device: Device, budget: str | None = None) -> Iterator[TrainingWatch]:
    watch = TrainingWatch(lambda model, name: cm.SwapSession(budget, "64MiB", device, min_bytes=256, model=model))
    watch.begin()
    try:
        yield watch
    finally:
        watch.finish(None)


def no_hook_is_left() -> bool:
    return not torchs._has_any_global_hook() and torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_training_is_swapped_with_the_same_bits_and_nothing_is_left(device: Device) -> None:
    expected = train(device)
    with watched(device) as watch:
        found = train(device)
        report = watch.finish(None)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert report is not None
    assert report.steps == 4  # the last evaluation has gradients on: it begins a step that never ends, and does not count
    assert report.bytes_swapped_out > 0
    assert report.steps_by_phase["planned"] >= 1
    assert no_hook_is_left()


def test_models_are_saved_and_copied_as_without_a_watch(sim: Device) -> None:
    saved: list[bytes] = []

    def save(model: nn.Module) -> None:
        file = io.BytesIO()
        torch.save(copy.deepcopy(model), file)
        saved.append(file.getvalue())

    train(sim, each=save)
    alone, saved = saved, []
    with watched(sim):
        train(sim, each=save)
    assert saved == alone


def test_no_session_is_made_for_a_budget_below_what_never_moves(sim: Device) -> None:
    with watched(sim, "10KiB") as watch, pytest.raises(Stopped) as stopped:
        train(sim)
    assert stopped.value.code == 1
    assert watch.failure is not None
    assert "10.0 KiB" in watch.failure
    assert no_hook_is_left()


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t), "saved-tensor hooks of the program's own"),
        (BareMode, "a dispatch mode of the program's own"),
    ],
)
def test_nothing_is_put_between_a_program_and_its_own_hooks_or_modes(
    sim: Device, block: Callable[[], object], words: str
) -> None:
    expected = train(sim)
    with watched(sim) as watch:
        with block():  # type: ignore[attr-defined]  # a context manager
            found = train(sim)
        assert watch.postponed is not None
        assert words in watch.postponed
        assert watch.finish(None) is None
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_training_after_a_block_of_the_programs_own_hooks_is_swapped(sim: Device) -> None:
    with watched(sim) as watch:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            train(sim, steps=1)
        train(sim)
        report = watch.finish(None)
    assert report is not None
    assert report.steps == 4
    assert no_hook_is_left()


def test_the_watch_is_away_while_a_module_runs(sim: Device) -> None:
    seen: list[int] = []

    class Looking(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(len(torchs._global_forward_pre_hooks))
            return super().forward(x)

    model = nn.Sequential(Looking(32, 32), Looking(32, 32))
    with watched(sim):
        for enabled in (False, True, True):
            with torch.set_grad_enabled(enabled):
                model(torch.randn(4, 32))
        with pytest.raises(RuntimeError):
            model(torch.randn(4, 5))
        assert len(torchs._global_forward_pre_hooks) == 1  # also after an error
        assert not any(module._forward_hooks for module in model.modules())
    assert seen == [0] * 7
