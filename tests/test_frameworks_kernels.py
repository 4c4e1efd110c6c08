"""Hugging Face's `kernels` works with this library: both packages' names end alike, and its layers are swapped like others."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import chameleon_mm as cm
from tests._frameworks import Seen, swapping
from tests._plain_training import Outcome, differences

ROOT = Path(__file__).resolve().parents[1]


def hugging_faces() -> Any:
    """Return the installed package `kernels`. In a checkout's own folder, the name is that of a folder there."""
    path = sys.path
    sys.path = [entry for entry in path if Path(entry).resolve() != ROOT]
    sys.modules.pop("kernels", None)
    try:
        return importlib.import_module("kernels")
    finally:
        sys.path = path


kernels: Any = hugging_faces()


CALLS: list[int] = []
"""Rows of each call: a kernel's layer may have no state of its own."""


class Fast(nn.Module):
    """Replacement of a layer, as a kernel repository offers it."""

    has_backward = True

    def forward(self, x: Tensor) -> Tensor:
        CALLS.append(len(x))
        return F.silu(x) * x


class Local:
    """A repository that holds one layer and needs no network."""

    layer_name = "Fast"

    def load(self) -> type[nn.Module]:
        return Fast


class Slow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x) * x


def trained(*, attached: bool) -> Outcome:
    seen = Seen()
    layer = kernels.use_kernel_forward_from_hub("Gate")(type("Gate", (Slow,), {}))
    model = nn.Sequential(nn.Linear(16, 64), layer(), nn.Linear(64, 64), layer(), nn.Linear(64, 1))
    with kernels.use_kernel_mapping({"Gate": {"cpu": Local()}}):
        kernels.kernelize(model, mode=kernels.Mode.TRAINING, device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    handle = cm.attach(model, **swapping("64MiB")) if attached else None
    for _ in range(5):
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.note("loss", loss)
    outcome, _ = seen.finish_attached(handle, model, optimizer)
    if handle is not None:
        assert handle.report().bytes_swapped_out > 0
        assert handle.report().steps == 5
    return outcome


def test_kernels_are_two_packages() -> None:
    ours = importlib.import_module("chameleon_mm.kernels")
    assert kernels is not ours
    assert kernels.__file__ != ours.__file__
    assert hasattr(kernels, "kernelize") and not hasattr(ours, "kernelize")


def test_a_kernelized_layer_is_swapped_as_any_other() -> None:
    CALLS.clear()
    plain = trained(attached=False)
    assert len(CALLS) == 10
    assert differences(plain, trained(attached=True)) == []
    assert len(CALLS) == 20
