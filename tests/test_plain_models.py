"""Well-known models, and recurrent layers in three dtypes, train under swapping as plain PyTorch trains them, bit for bit.

Losses, gradients, weights and random state. The reference is torch alone: tensors of the CPU, or of CUDA for a session there;
no dispatch mode, no simulated device, nothing of ours around it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor, nn

from tests._plain_models import CASES, Case
from tests._plain_training import CUDA, SIM, Kind, check_save_on_cpu, check_session, differences, trained_plainly

pytestmark = pytest.mark.usefixtures("no_gc", "short_search")

SAMPLE = (
    "llama", "mixtral", "mamba", "bert", "gpt-2, micro-batches", "gpt-2, recomputed", "t5", "vit", "resnet",
    "u-net, autocast, micro-batches", "experts",
)  # fmt: skip
"""What CI trains in a session; by `save_on_cpu` it trains one."""
QUICK = ("llama", "resnet", "experts")
"""Those that every run trains."""
KINDS = [pytest.param(SIM, id="sim"), pytest.param(CUDA, id="cuda", marks=pytest.mark.gpu)]
THOROUGH = [pytest.mark.slow, pytest.mark.thorough]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow if name in SAMPLE else THOROUGH) for name in CASES],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_session_trains_as_plain_pytorch_does(name: str, kind: Kind) -> None:
    check_session(CASES[name], kind)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name == "bert" else THOROUGH) for name in CASES])
@pytest.mark.parametrize("kind", KINDS)
def test_save_on_cpu_trains_as_plain_pytorch_does(name: str, kind: Kind) -> None:
    check_save_on_cpu(CASES[name], kind)


def test_the_comparison_sees_one_bit() -> None:
    plain = trained_plainly(CASES["vit"])
    other = dict(plain)
    name = next(name for name in other if "gradient" in name)
    dtype, shape, strides, raw = other[name]
    other[name] = dtype, shape, strides, bytes([raw[0] ^ 1]) + raw[1:]
    assert differences(plain, other) == [name]


# --- recurrent layers and cells

# On a CPU they write in place to outputs of `unsafe_chunk`, which share a storage and no version counter. Which of them do
# depends on dtype and strides.


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


ALL_LAYERS = [
    pytest.param(layer, dtype, contiguous, id=f"{layer}-{str(dtype)[6:]}-{'contiguous' if contiguous else 'strided'}")
    for layer, dtype, contiguous in product(LAYERS, DTYPES, (True, False))
]


def each(part: slice) -> list[ParameterSet]:
    """All of them, of which every run takes `part`."""
    sample = ALL_LAYERS[part]
    return [one if one in sample else pytest.param(*one.values, id=one.id, marks=THOROUGH) for one in ALL_LAYERS]


LAYER_SAMPLE = slice(None, None, 5)
"""Every layer, every dtype, contiguous and not: no list that `ALL_LAYERS` is the product of has a factor 5 in its length."""


@pytest.mark.ci
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("layer", "dtype", "contiguous"), each(LAYER_SAMPLE))
def test_a_session_trains_recurrent_layers_as_plain_pytorch_does(
    layer: str, dtype: torch.dtype, contiguous: bool, kind: Kind
) -> None:
    """On a GPU fused kernels run, which save one workspace for all gates."""
    check_session(case_of(layer, dtype, contiguous=contiguous), kind)


@pytest.mark.parametrize(("layer", "dtype", "contiguous"), each(LAYER_SAMPLE))
def test_save_on_cpu_trains_recurrent_layers_as_plain_pytorch_does(layer: str, dtype: torch.dtype, contiguous: bool) -> None:
    check_save_on_cpu(case_of(layer, dtype, contiguous=contiguous))


@pytest.mark.gpu
@pytest.mark.parametrize(("layer", "dtype", "contiguous"), each(slice(1)))
def test_save_on_cpu_trains_recurrent_layers_on_cuda(layer: str, dtype: torch.dtype, contiguous: bool) -> None:
    check_save_on_cpu(case_of(layer, dtype, contiguous=contiguous), CUDA)
