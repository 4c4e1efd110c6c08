"""`cm.install()` replaces torch's `save_on_cpu`, which other libraries offer as an option, and restores it."""

from __future__ import annotations

import gc
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import offload_wrapper

import chameleon_mm as cm
from chameleon_mm.api.save_on_cpu import InstalledSaveOnCpu
from chameleon_mm.device import Device
from tests._plain_models import Case, language, llama
from tests._plain_training import CUDA, SIM, differences, trained_plainly

TORCHS_OWN = (torch.autograd.graph.save_on_cpu,)
"""Torch's own class, in a tuple, where nothing replaces it."""


@pytest.fixture(autouse=True)
def _torchs_own_is_back() -> Iterator[None]:
    yield
    cm.uninstall()
    assert torch.autograd.graph.save_on_cpu is TORCHS_OWN[0]


def ours() -> type[InstalledSaveOnCpu]:
    there: Any = torch.autograd.graph.save_on_cpu
    assert issubclass(there, InstalledSaveOnCpu)
    found: type[InstalledSaveOnCpu] = there
    return found


def check_ours_is_used(plain: Case, offloading: Case, device: Device) -> None:
    """Check that, with ours installed, training of `offloading` moves data to the host and has the bits of `plain`, which keeps
    all. Torch's own `save_on_cpu` is no reference: it gives back a transposed weight as a contiguous one, and on a GPU another
    kernel multiplies by that."""
    kind = SIM if device.simulated else CUDA
    expected = trained_plainly(plain, kind)
    cm.install(device=device, min_bytes=256)
    with device.compute():
        got = trained_plainly(offloading, kind)
    assert differences(expected, {name.replace("_checkpoint_wrapped_module.", ""): seen for name, seen in got.items()}) == []
    gc.collect()
    stats = ours()._the_manager().pool.stats()
    assert stats.peak_live_bytes > 0
    assert stats.num_live == 0


def test_torchs_offload_wrapper_uses_ours(device: Device) -> None:
    def case(wrap: Callable[[nn.Module], nn.Module]) -> Case:
        def build() -> nn.Module:
            layers = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64)) for _ in range(3))
            return nn.Sequential(*map(wrap, layers))

        return Case(build=build, loss=lambda model: model(torch.randn(32, 64)).square().mean(), steps=3)

    check_ours_is_used(case(lambda layer: layer), case(offload_wrapper), device)


def test_hugging_faces_offload_of_checkpoints_uses_ours(sim: cm.SimDevice) -> None:
    def case(*, offload: bool) -> Case:
        def build() -> Any:
            model: Any = llama(3)()
            if not hasattr(model, "activation_checkpointing_enable"):
                pytest.skip("this transformers has no offload of checkpoints")
            model.activation_checkpointing_enable(offload=offload)
            model.config.use_cache = False
            return model

        return Case(build=build, loss=language(), steps=3)

    check_ours_is_used(case(offload=False), case(offload=True), sim)  # torch's own does not run without an accelerator


def test_modules_that_imported_the_name_see_ours_and_then_torchs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    early: Any = types.ModuleType("early")
    early.save_on_cpu = early.another_name = TORCHS_OWN[0]
    monkeypatch.setitem(sys.modules, "early", early)
    cm.install()
    wrapper: Any = importlib.import_module("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    assert wrapper.save_on_cpu is early.save_on_cpu is early.another_name is ours()
    late: Any = types.ModuleType("late")
    late.save_on_cpu = torch.autograd.graph.save_on_cpu
    monkeypatch.setitem(sys.modules, "late", late)
    cm.uninstall()
    assert wrapper.save_on_cpu is early.save_on_cpu is early.another_name is late.save_on_cpu is TORCHS_OWN[0]


def test_it_may_be_installed_twice_alike_and_not_otherwise() -> None:
    cm.install(min_bytes="1KiB")
    there = ours()
    cm.install(min_bytes="1KiB")
    assert ours() is there
    with pytest.raises(RuntimeError, match=r"expected torch's own save_on_cpu, got ours with other arguments; call uninstall"):
        cm.install()
    cm.uninstall()
    cm.uninstall()
    cm.install()
    assert ours() is not there


def test_classes_made_of_it_and_managers_made_before_go_on(sim: cm.SimDevice) -> None:
    before = TORCHS_OWN[0](pin_memory=False)
    cm.install(device=sim, min_bytes=256)

    class Mine(torch.autograd.graph.save_on_cpu):
        def __init__(self) -> None:
            super().__init__(pin_memory=True)

    x = torch.randn(64, 64, requires_grad=True)
    with sim.compute(), Mine() as entered:
        assert entered is None  # as torch's
        y = x.exp().sin().cos()
    assert isinstance(Mine(), saved_tensors_hooks) and isinstance(Mine(), torch.autograd.graph.save_on_cpu)
    assert ours()._the_manager().pool.stats().num_live > 0
    pool = ours()._the_manager().pool
    cm.uninstall()
    with before:
        z = y * 2
    with sim.compute():
        z.sum().backward()  # saved by our class, used after it is uninstalled
    same = x.detach().clone().requires_grad_()
    (same.exp().sin().cos() * 2).sum().backward()
    assert x.grad is not None and same.grad is not None and torch.equal(x.grad, same.grad)
    del y, z
    assert pool.stats().num_live == 0
