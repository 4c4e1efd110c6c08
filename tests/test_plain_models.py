"""Well-known models train under swapping as plain PyTorch trains them, bit for bit: losses, gradients, weights, random state.

The reference is torch alone: tensors of the CPU, or of CUDA for a session there; no dispatch mode, no simulated device, nothing
of ours around it.
"""

from __future__ import annotations

import pytest

from tests._plain_models import CASES
from tests._plain_training import CUDA, SIM, Kind, check_save_on_cpu, check_session, differences, trained_plainly

pytestmark = pytest.mark.usefixtures("no_gc")

SAMPLE = (
    "llama", "mixtral", "mamba", "bert", "gpt-2, micro-batches", "gpt-2, recomputed", "t5", "vit", "resnet",
    "u-net, autocast, micro-batches", "experts",
)  # fmt: skip
"""What every run trains in a session; by `save_on_cpu` it trains one."""
KINDS = [pytest.param(SIM, id="sim"), pytest.param(CUDA, id="cuda", marks=pytest.mark.gpu)]
THOROUGH = [pytest.mark.slow, pytest.mark.thorough]


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in SAMPLE else THOROUGH) for name in CASES])
@pytest.mark.parametrize("kind", KINDS)
def test_a_session_trains_as_plain_pytorch_does(name: str, kind: Kind) -> None:
    check_session(CASES[name], kind)


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "bert" else THOROUGH) for name in CASES])
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
