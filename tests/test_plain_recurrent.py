"""Recurrent layers and cells train under swapping as plain PyTorch trains them, bit for bit, in three dtypes.

On a CPU they write in place to outputs of `unsafe_chunk`, which share a storage and no version counter. Which of them do
depends on dtype and strides.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor, nn

from tests._plain_models import Case
from tests._plain_training import CUDA, check_save_on_cpu, check_session

pytestmark = pytest.mark.usefixtures("no_gc")

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
WIDTH = 16
LENGTH, ROWS = 6, 8


class Unrolled(nn.Module):
    """A cell, step after step over a sequence, and its state with it."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        state: Any = None
        outs = []
        for part in x.unbind(0):
            state = self.cell(part, state)
            outs.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(outs), None


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.1),
    "gru": lambda: nn.GRU(WIDTH, WIDTH, num_layers=2, dropout=0.1),
    "rnn": lambda: nn.RNN(WIDTH, WIDTH, num_layers=2, dropout=0.1, nonlinearity="relu"),
    "lstm, both ways": lambda: nn.LSTM(WIDTH, WIDTH // 2, bidirectional=True),
    "lstm cell": lambda: Unrolled(nn.LSTMCell(WIDTH, WIDTH)),
    "gru cell": lambda: Unrolled(nn.GRUCell(WIDTH, WIDTH)),
    "rnn cell": lambda: Unrolled(nn.RNNCell(WIDTH, WIDTH)),
}


class Predictor(nn.Module):
    """The layer between two linear ones."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.before, self.layer, self.after = nn.Linear(WIDTH, WIDTH), layer, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.after(self.layer(self.before(x))[0])
        return out


def case_of(layer: str, dtype: torch.dtype, *, contiguous: bool) -> Case:
    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(LENGTH, ROWS, WIDTH, dtype=dtype)
        if not contiguous:
            x = torch.randn(ROWS, WIDTH, LENGTH, dtype=dtype).permute(2, 0, 1)
        value: Tensor = model(x).square().mean()
        return value

    return Case(build=lambda: Predictor(LAYERS[layer]()).to(dtype), loss=loss)


ALL = [
    pytest.param(layer, dtype, contiguous, id=f"{layer}-{str(dtype)[6:]}-{'contiguous' if contiguous else 'strided'}")
    for layer, dtype, contiguous in product(LAYERS, DTYPES, (True, False))
]
THOROUGH = [pytest.mark.slow, pytest.mark.thorough]


def each(part: slice) -> list[ParameterSet]:
    """All of them, of which every run takes `part`."""
    sample = ALL[part]
    return [one if one in sample else pytest.param(*one.values, id=one.id, marks=THOROUGH) for one in ALL]


SAMPLE = slice(None, None, 5)
"""Every layer, every dtype, contiguous and not: the lists that `ALL` is the product of have no length with a factor 5."""


@pytest.mark.parametrize(("layer", "dtype", "contiguous"), each(SAMPLE))
def test_a_session_trains_recurrent_layers_as_plain_pytorch_does(layer: str, dtype: torch.dtype, contiguous: bool) -> None:
    check_session(case_of(layer, dtype, contiguous=contiguous))


@pytest.mark.parametrize(("layer", "dtype", "contiguous"), each(slice(1)))
def test_save_on_cpu_trains_recurrent_layers_as_plain_pytorch_does(layer: str, dtype: torch.dtype, contiguous: bool) -> None:
    check_save_on_cpu(case_of(layer, dtype, contiguous=contiguous))


@pytest.mark.gpu
@pytest.mark.parametrize(("layer", "dtype", "contiguous"), each(SAMPLE))
def test_a_session_trains_recurrent_layers_on_cuda(layer: str, dtype: torch.dtype, contiguous: bool) -> None:
    """A GPU's fused kernels run, which save one workspace for all gates."""
    check_session(case_of(layer, dtype, contiguous=contiguous), CUDA)


@pytest.mark.gpu
@pytest.mark.parametrize(("layer", "dtype", "contiguous"), each(slice(1)))
def test_save_on_cpu_trains_recurrent_layers_on_cuda(layer: str, dtype: torch.dtype, contiguous: bool) -> None:
    check_save_on_cpu(case_of(layer, dtype, contiguous=contiguous), CUDA)
