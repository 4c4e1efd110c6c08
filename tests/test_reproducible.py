"""Deterministic kernels for as long as a block lasts, without an environment variable."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from chameleon_mm.device import resolve_device
from chameleon_mm.device.reproducible import reproducible

FLAGS: Any = torch.utils.deterministic  # its attribute is a property that torch adds at run time


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("fill", [True, False])
def test_torchs_settings_are_put_back(mode: int, fill: bool) -> None:
    before = torch.get_deterministic_debug_mode(), FLAGS.fill_uninitialized_memory
    try:
        torch.set_deterministic_debug_mode(mode)
        FLAGS.fill_uninitialized_memory = fill
        with pytest.raises(KeyError), reproducible():
            assert torch.get_deterministic_debug_mode() == 2  # "error"
            assert FLAGS.fill_uninitialized_memory is False
            raise KeyError
        assert (torch.get_deterministic_debug_mode(), FLAGS.fill_uninitialized_memory) == (mode, fill)
    finally:
        torch.set_deterministic_debug_mode(before[0])
        FLAGS.fill_uninitialized_memory = before[1]


def test_an_operator_without_a_deterministic_kernel_raises() -> None:
    with reproducible(), pytest.raises(RuntimeError, match="put_"):
        torch.zeros(4).put_(torch.tensor([1, 1]), torch.tensor([1.0, 2.0]))


@pytest.mark.gpu
def test_matrix_products_need_no_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)  # tests/conftest.py sets it
    x = torch.randn(512, 512, device=resolve_device("cuda").torch_device)
    with reproducible():
        assert torch.equal(x @ x, x @ x)
