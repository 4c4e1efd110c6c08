"""Torch's own database of operators: results and all gradients, bit for bit as in plain eager.

The reference has nothing of ours around it. Against it: the simulator's compute, recorded steps, hooks that swap everything,
`save_on_cpu`, and steps of a session, recorded and planned. `tests/_op_sweep.py` says what may differ, and measures it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from tests._op_samples import OPS, differentiable
from tests._op_sweep import (
    IN_SIMULATOR,
    ON_CUDA,
    OTHER_FORWARD_UNDER_A_MODE,
    OTHER_UNDER_A_MODE,
    Way,
    differs_under_a_mode,
    opened,
    skip_without_samples,
    sweep,
    sweep_without_gradient,
)

pytestmark = [
    pytest.mark.usefixtures("no_gc"),
    # Torch's own about the operators: deprecated, in beta, casting complex to real. The library gives no warnings.
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

SAMPLES = {torch.float32: 2, torch.complex128: 1, torch.bfloat16: 1}
"""Samples per operator, by dtype, in the order in which dtypes are tried. The first sample is also differentiated twice.

A run of CI takes the first dtype of which torch has a gradient: swapping knows no dtype."""
DTYPES = tuple(SAMPLES)

COMMON = (
    "__getitem__", "addmm", "clamp", "cumprod", "einsum", "fft_rfft", "gather", "index_add", "linalg_norm", "linalg_pinv",
    "logsumexp", "masked_fill", "matmul", "max_reduction_with_dim", "mul", "nn_functional_batch_norm",
    "nn_functional_channel_shuffle", "nn_functional_conv2d", "nn_functional_cross_entropy", "nn_functional_dropout",
    "nn_functional_embedding", "nn_functional_gelu", "nn_functional_glu", "nn_functional_group_norm",
    "nn_functional_layer_norm", "nn_functional_linear", "nn_functional_mish", "nn_functional_prelu", "nn_functional_relu",
    "nn_functional_rms_norm", "nn_functional_rrelu", "nn_functional_scaled_dot_product_attention", "nn_functional_silu", "pow",
    "prod", "softmax", "sort", "std", "tanh", "where",
)  # fmt: skip
"""Operators that models are made of, each of which saves something that can move, and those with something of their own."""

CUDA_ALONE = tuple(name for name in OPS if name.startswith("jiterator_"))
"""Operators that torch has on CUDA alone."""


@pytest.fixture(params=["sim", pytest.param("cuda", marks=pytest.mark.gpu)])
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    """Type of device of the tensors: the CPU's, which the simulator takes for its own, and the GPU's."""
    if request.param == "sim":
        yield "cpu"
        return
    torch.use_deterministic_algorithms(True, warn_only=True)  # atomic additions would differ from one eager run to the next
    try:
        yield "cuda"
    finally:
        torch.use_deterministic_algorithms(False)


def ways_on(kind: str, *, all_ways: bool) -> dict[str, Callable[[], Way]]:
    """Ways to run a sample; without `all_ways` the two that have all in them: hooks that swap everything, a session."""
    ways = IN_SIMULATOR if kind == "cpu" else ON_CUDA
    return {label: way for label, way in ways.items() if all_ways or label in ("swapped", "session")}


def check(name: str, kind: str, dtypes: Sequence[torch.dtype], *, all_ways: bool = True) -> int:
    """Compare the operator's samples in each dtype, one of each without `all_ways`. Returns how many there were."""
    with opened(ways_on(kind, all_ways=all_ways)) as ways:
        counts = {one: SAMPLES[one] if all_ways else 1 for one in dtypes}
        return sum(sweep(name, ways, device_type=kind, dtypes=(one,), samples=n, twice=1) for one, n in counts.items())


def check_in_first_dtype(name: str, kind: str, *, all_ways: bool = True) -> int:
    found = check(name, kind, differentiable(OPS[name], kind, DTYPES)[:1], all_ways=all_ways)
    with opened(ways_on(kind, all_ways=all_ways)) as ways:
        return found + sweep_without_gradient(name, ways, device_type=kind, samples=1)


@pytest.mark.ci
@pytest.mark.parametrize("name", COMMON)
def test_operators_that_models_are_made_of(name: str, kind: str) -> None:
    assert check_in_first_dtype(name, kind)


@pytest.mark.parametrize(("name", "dtype"), [("nn_functional_silu", torch.bfloat16), ("linalg_pinv", torch.complex128)])
def test_operators_whose_other_dtypes_take_another_way(name: str, dtype: torch.dtype) -> None:
    """A kernel that rounds once where a chain of operators rounds after each, and bits for "conjugated" within an operator."""
    assert check(name, "cpu", [dtype])


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(OPS.keys() - set(COMMON) - set(CUDA_ALONE)))
def test_every_other_operator(name: str) -> None:
    skip_without_samples(name, check_in_first_dtype(name, "cpu", all_ways=False))


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("name", OPS)
def test_every_operator_in_each_dtype(name: str, kind: str) -> None:
    if kind == "cpu" and name in CUDA_ALONE:
        pytest.skip(f"torch has {name} on CUDA alone")
    found = check(name, kind, differentiable(OPS[name], kind, DTYPES), all_ways=kind == "cpu")
    skip_without_samples(name, found + check_in_first_dtype(name, kind, all_ways=False))


@pytest.mark.ci
@pytest.mark.parametrize("name", OTHER_UNDER_A_MODE | OTHER_FORWARD_UNDER_A_MODE)
def test_what_is_listed_does_differ_under_a_mode_that_does_nothing(name: str) -> None:
    """In some sample: other factors are multiplied, or strides differ. No CPU rounds all of that to the same."""
    differs = differs_under_a_mode(name, DTYPES, at_most=20)
    if name in {"matmul", "__rmatmul__"}:  # the samples are few: some CPUs round them to the same
        differs = differs or one_product_differs_from_each()
    assert differs, f"{name}: take it off the list"


def one_product_differs_from_each() -> bool:
    """True if a batch of matrices times one matrix has other bits than one product each, which `matmul` uses under a mode."""
    random = torch.Generator().manual_seed(0)
    for rows, inner, columns in itertools.product((1, 5, 10), repeat=3):
        batch, one = torch.randn(10, rows, inner, generator=random), torch.randn(inner, columns, generator=random)
        product = torch.mm(batch.reshape(-1, inner), one).reshape(10, rows, columns)
        if not torch.equal(product, torch.bmm(batch, one.expand(10, inner, columns))):
            return True
    return False
