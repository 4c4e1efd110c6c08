"""Stand-in's operators: on "cuda" they give the CPU's bits, and treat streams and graphs as a GPU's do. Also random numbers,
CUDA graphs, and the bytes reported to the runtime.

These tests are about the stand-in itself. On a GPU there is nothing to test here.
"""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map

from chameleon_mm.kernels.checksum import add_checksum
from tests._op_samples import OPS, Bits, bits_of, samples_of
from tests.cuda_stand_in import control

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not control.is_loaded(), reason="tests the CUDA stand-in itself; it is not loaded"),
]

aten = torch.ops.aten

# --------------------------------------------------------------------------------------------------------------- operators

DRAWN = {
    "bernoulli", "cauchy", "exponential", "geometric", "log_normal", "multinomial", "nn_functional_alpha_dropout",
    "nn_functional_dropout", "nn_functional_dropout2d", "nn_functional_dropout3d",
    "nn_functional_feature_alpha_dropout_with_train", "nn_functional_multi_head_attention_forward", "nn_functional_rrelu",
    "normal", "normal_in_place", "normal_number_mean", "pca_lowrank", "rand_like", "randint_like", "randn_like",
    "svd_lowrank", "uniform",
}  # fmt: skip
"""Operators that draw random numbers: the device's generator is not the CPU's."""

UNSET = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
"""Operators whose result is uninitialized memory."""

OF_THE_CPU = {"histogram", "histogramdd", "sparse_mm_reduce", "tensor_split"}
"""Operators that torch has on the CPU alone, or with an argument on the CPU."""

APART = {"nn_functional_scaled_dot_product_attention", "to"}
"""Attention has a test of its own; `to` has a sample that copies to the host and does not wait."""

SHARDS = 8


def weights(like: Tensor) -> Tensor:
    return torch.linspace(-1, 1, like.numel(), dtype=torch.float64).reshape(like.shape).to(like.dtype).to(like.device)


def outcome(op: Any, sample: Any) -> list[Bits | None] | str:
    """Outputs and gradients as bits, or the error's type."""
    leaves = [t for t in tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(t, Tensor) and t.requires_grad]
    sample = sample.transform(lambda t: t.clone() if isinstance(t, Tensor) else t)
    try:
        out = op.gradcheck_wrapper(op.get_op(), sample.input, *sample.args, **sample.kwargs)
        outputs = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        roots = [t for t in outputs if t.requires_grad]
        found: list[Bits | None] = [Bits.of(t) for t in outputs]
        if roots and leaves:
            gradients = torch.autograd.grad(roots, leaves, [weights(t) for t in roots], allow_unused=True)
            found += bits_of(gradients)
    except (RuntimeError, IndexError, NotImplementedError) as error:
        return type(error).__name__
    return found


def on_cuda(x: Any) -> Any:
    return x.detach().cuda().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own about the operators
@pytest.mark.parametrize(
    ("dtype", "shard"),
    [
        pytest.param(dtype, shard, marks=() if dtype is torch.float32 or shard < 2 else pytest.mark.thorough)
        for dtype, shard in product((torch.float32, torch.bfloat16, torch.int64), range(SHARDS))
    ],
    ids=str,
)
def test_operators_give_the_cpus_bits(dtype: torch.dtype, shard: int) -> None:
    left_out = DRAWN | UNSET | OF_THE_CPU | APART
    compared, different = 0, []
    for name, op in [*OPS.items()][shard::SHARDS]:
        if name in left_out or name.startswith("jiterator_") or dtype not in op.supported_dtypes("cpu"):
            continue
        needs_grad = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
        for sample in samples_of(op, "cpu", dtype, 1, requires_grad=needs_grad):
            expected = outcome(op, sample)
            if isinstance(expected, str):
                continue  # the CPU refuses the sample
            compared += 1
            if outcome(op, sample.transform(on_cuda)) != expected:
                different.append(name)
    assert not different
    assert compared > 20


def test_a_number_takes_the_dtype_that_it_has_beside_a_tensor() -> None:
    x = torch.tensor([1.0, -1.0], dtype=torch.float64, device="cuda")
    assert torch.where(x > 0, x, 0.1).tolist() == [1.0, 0.1]
    assert torch.mul(2, x, out=torch.empty_like(x)).tolist() == [2.0, -2.0]


# --------------------------------------------------------------------------------------------------------------- attention


def heads(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def attended(inputs: list[Tensor], device: str, **kwargs: Any) -> tuple[Tensor, list[Tensor], Any]:
    query, key, value = (t.to(device).requires_grad_() for t in inputs)
    kwargs = tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, kwargs)
    out = F.scaled_dot_product_attention(query, key, value, **kwargs)
    gradients = torch.autograd.grad(out, (query, key, value), weights(out))
    return out.detach().cpu(), [g.cpu() for g in gradients], out.grad_fn


@pytest.mark.parametrize(
    ("backend", "dtype", "how"),
    [
        *(
            (backend, dtype, {"is_causal": is_causal})
            for backend, other in (
                (SDPBackend.FLASH_ATTENTION, torch.float16),
                (SDPBackend.EFFICIENT_ATTENTION, torch.float32),
            )
            for dtype in (other, torch.bfloat16)
            for is_causal in (False, True)
        ),
        (SDPBackend.EFFICIENT_ATTENTION, torch.float32, {"attn_mask": heads((2, 4, 10, 10), torch.float32, 3)}),
    ],
)
def test_fused_attention_gives_the_bits_of_the_cpus(backend: SDPBackend, dtype: torch.dtype, how: dict[str, Any]) -> None:
    inputs = [heads((2, 4, 10, 16), dtype, seed) for seed in range(3)]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # the CPU's one fused kernel
        expected, expected_gradients, _ = attended(inputs, "cpu", **how)
    with sdpa_kernel(backend):
        got, gradients, node = attended(inputs, "cuda", **how)
    assert ("Flash" if backend is SDPBackend.FLASH_ATTENTION else "Efficient") in node.name()
    assert torch.equal(got, expected)
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected_gradients, strict=True))


def described(t: Any) -> Any:
    return (t.shape, t.stride(), t.dtype) if isinstance(t, Tensor) else t


@pytest.mark.parametrize("length", [10, 64])
def test_fused_attention_returns_what_torch_says_a_gpu_returns(length: int) -> None:
    """Torch's own functions for the shapes of the GPU's results are the reference: they run on the device "meta"."""
    query, key, value = (
        heads((2, 4, length, 16), torch.bfloat16, s).transpose(1, 2).contiguous().transpose(1, 2) for s in range(3)
    )
    for op, rest in (
        (aten._scaled_dot_product_flash_attention.default, ()),
        (aten._scaled_dot_product_efficient_attention.default, (None, True)),
    ):
        expected = op(*(t.to("meta") for t in (query, key, value)), *rest)
        got = op(*(t.cuda() for t in (query, key, value)), *rest)
        assert [described(t) for t in got] == [described(t) for t in expected]
    places = [t.device.type for t in got]
    assert places == ["cuda", "cuda", "cpu", "cpu"]  # seed and offset of the memory-efficient kernel are the host's


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("value_size", [4, 8])
def test_gradients_of_attention_by_differences(dropout_p: float, is_causal: bool, value_size: int) -> None:
    sizes = [(1, 2, 5, 4), (1, 2, 5, 4), (1, 2, 5, value_size)]
    inputs = [heads(size, torch.float64, s).cuda().requires_grad_() for s, size in enumerate(sizes)]
    bias = heads((1, 2, 5, 5), torch.float64, 9).cuda().requires_grad_()

    def out(*given: Tensor) -> Tensor:
        torch.cuda.manual_seed(3)  # the same mask each time
        result: Tensor = aten._scaled_dot_product_efficient_attention(*given, True, dropout_p, is_causal)[0]
        return result

    assert torch.autograd.gradcheck(out, (*inputs, bias), atol=1e-4)


# --------------------------------------------------------------------------------------------------------------- recurrent


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("bias", [True, False])
def test_layers_agree_with_the_cpus(kind: Any, bias: bool) -> None:
    """Not bit for bit: the CPU multiplies a whole sequence by the input's weights at once, a GPU one step at a time."""
    torch.manual_seed(1)
    plain = kind(6, 8, num_layers=2, bias=bias, bidirectional=True, dtype=torch.float64)
    moved = kind(6, 8, num_layers=2, bias=bias, bidirectional=True, dtype=torch.float64, device="cuda")
    moved.load_state_dict(plain.state_dict())
    x = torch.randn(5, 3, 6, dtype=torch.float64)

    def everything(layer: nn.Module, device: str) -> list[Tensor]:
        out, _ = layer(x.to(device))
        out.backward(weights(out))
        return [out.detach().cpu(), *(p.grad.cpu() for p in layer.parameters() if p.grad is not None)]

    for got, expected in zip(everything(moved, "cuda"), everything(plain, "cpu"), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-13, rtol=1e-13)


# --------------------------------------------------------------------------------------------------------- nested and sparse


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
@pytest.mark.filterwarnings("ignore:Sparse C:UserWarning")  # in beta, torch says
def test_sparse_products_and_their_gradients_have_the_cpus_bits(layout: torch.layout) -> None:
    def outcome(device: str) -> list[Tensor]:
        dense = heads((5, 4), torch.float32, 0).relu().to(device)
        x = heads((4, 3), torch.float32, 1).to(device).requires_grad_()
        product = dense.to_sparse(layout=layout) @ x.sin()
        gradient = torch.autograd.grad(product, x, weights(product))[0]
        return [product.detach().cpu(), gradient.cpu(), dense.to_sparse(layout=layout).to_dense().cpu()]

    assert all(torch.equal(a, b) for a, b in zip(outcome("cuda"), outcome("cpu"), strict=True))


# ------------------------------------------------------------------------------------------------------------------ Triton


def test_the_language_is_tritons_own_again_after_a_kernel_was_interpreted() -> None:
    tl = importlib.import_module("triton.language")
    pack = importlib.import_module("chameleon_mm.kernels.pack_kernels").pack

    def own() -> tuple[object, ...]:
        of_tensors = vars(tl.tensor)
        return of_tensors.get("__bool__"), of_tensors["__str__"], tl.range, tl.static_range, tl.dtype.to_ir, tl.load

    before = own()
    x, out = torch.arange(64, device="cuda"), torch.empty(512, dtype=torch.uint8, device="cuda")
    pack(out, [x.view(torch.uint8)], [0], num_programs=1)
    assert torch.equal(out.view(torch.int64), x)
    assert own() == before


def _checksum() -> Tensor:
    out = torch.tensor([17], device="cuda")
    add_checksum(out, torch.arange(5000, device="cuda").to(torch.uint8), num_programs=2)
    return out


def _captured() -> Tensor:
    x = torch.arange(8.0, device="cuda")
    graph, y = captured(lambda: x[::2] * 2 + 1)
    x.add_(1)
    graph.replay()
    return cast(Tensor, y)


@pytest.mark.parametrize("compute", [_checksum, _captured])
def test_another_default_device_changes_nothing(compute: Callable[[], Tensor]) -> None:
    torch.manual_seed(3)
    expected = compute().cpu()
    torch.manual_seed(3)
    with torch.device("cuda"):
        assert torch.equal(compute().cpu(), expected)


def test_a_library_in_a_linked_folder_is_led_as_well(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("cupy_backends.cuda.api.runtime")
    assert spec is not None and spec.origin is not None
    (tmp_path / "link").symlink_to(Path(spec.origin).parent)
    from tests.cuda_stand_in.bindings import lead_functions  # which needs torch's CUDA build

    assert lead_functions(str(tmp_path / "link" / Path(spec.origin).name)) > 0


# ------------------------------------------------------------------------------------------------------------------ graphs


def captured(program: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = program()
    return graph, out


def test_a_captured_training_step_gives_eagers_bits() -> None:
    def trained(step: Callable[[nn.Module, Tensor, torch.optim.Optimizer], Callable[[], None]]) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        x = torch.zeros(5, 8, device="cuda")
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
            optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
        run = step(model, x, optimizer)
        for i in range(4):
            x.copy_(torch.randn(5, 8, generator=torch.Generator().manual_seed(i)))
            run()
        return [p.detach().cpu() for p in model.parameters()]

    def eager(model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        def run() -> None:
            optimizer.zero_grad(set_to_none=False)
            model(x).square().mean().backward()
            optimizer.step()

        return run

    def replayed(model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        graph, _ = captured(eager(model, x, optimizer))
        return graph.replay

    assert all(torch.equal(a, b) for a, b in zip(trained(eager), trained(replayed), strict=True))


def test_each_replay_draws_other_numbers_and_a_seed_repeats_them() -> None:
    x = torch.ones(64, device="cuda")
    graph, (first, second) = captured(lambda: (F.dropout(x, 0.5), torch.rand(64, device="cuda")))

    def replays() -> list[Tensor]:
        torch.cuda.manual_seed(5)
        drawn = []
        for _ in range(2):
            graph.replay()
            drawn += [first.cpu(), second.cpu()]
        return drawn

    drawn = replays()
    assert not torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[1], drawn[3])
    assert all(torch.equal(a, b) for a, b in zip(drawn, replays(), strict=True))


def test_what_needs_the_host_is_refused_in_a_capture() -> None:
    """In a process of its own: a capture that cannot be ended leaves torch's allocator waiting for its end."""
    script = """
import torch
x, before = torch.ones(4, device="cuda"), torch.cuda.current_stream()
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.nonzero()
except RuntimeError as error:
    print("captur" in str(error))
torch.cuda.set_stream(before)
torch.cuda.synchronize()
print((x + 1).tolist())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["True", "[2.0, 2.0, 2.0, 2.0]"]


# ------------------------------------------------------------------------------------------------------------ random numbers


def test_a_restored_state_repeats_and_the_cpus_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    state = torch.cuda.get_rng_state()
    first = torch.rand(10, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(10, device="cuda"), first)
    assert torch.equal(torch.get_rng_state(), before)


# ------------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t,
        lambda t: t.t(),
        lambda t: t[2:5],
        lambda t: t[:, 1:3],
        lambda t: t[::2, ::3],
        lambda t: t[:, :1].expand(8, 5),
        lambda t: t.as_strided((4, 6), (2, 1)),
        lambda t: t[0, 0],
        lambda t: t.reshape(2, 4, 6)[:, 1:3, 2:4].permute(2, 0, 1),
    ],
)
def test_the_bytes_of_a_tensor_are_told_exactly(view: Callable[[Tensor], Tensor]) -> None:
    from tests.cuda_stand_in.memory import spans

    base = torch.zeros(8, 6, device="cuda")
    view(base).fill_(1)
    touched = [base.data_ptr() + 4 * i for i in base.reshape(-1).nonzero().flatten().tolist()]
    told = spans(view(base))
    assert told is not None
    assert sorted(at for start, size in told for at in range(start, start + size, 4)) == touched


def test_a_result_is_hidden_from_streams_that_do_not_wait() -> None:
    if control.mode() == "threads":
        pytest.skip("threads: operators run at once, and nothing hides what they wrote")
    x = torch.ones(1024, device="cuda") * 2
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        wrong = x + 1
    assert wrong.isnan().all()
    control.violations()  # it is one
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        right = x + 1
    torch.cuda.synchronize()
    assert right.tolist() == [3.0] * 1024
