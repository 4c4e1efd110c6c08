"""Torch's own database of operators: what each returns and all its gradients, bit for bit, with and without swapping.

    for sample in op.sample_inputs(...):
        eager   = run(sample)                     # outputs and gradients as bits, or the error
        swapped = run(sample, under our hooks)    # what was saved is on the host, its HBM gone, before backward begins
        assert swapped == eager, and no block of the pool is live

Inputs are activations, copies of leaves in the same layout: a leaf itself stays on the device. Between forward and backward
nobody but autograd holds an input or an output, so a use finds nothing on the device and has to swap in.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import chameleon_mm as cm
from chameleon_mm.device import Device
from chameleon_mm.executor import Executor, ProtectedStorages, SwappedView
from chameleon_mm.executor.handles import Handle
from chameleon_mm.policy import DefaultRule, Limits

pytest.importorskip("expecttest", reason="the operator database imports it; it comes with the extra `dev`")
from torch.testing._internal.common_methods_invocations import op_db

pytestmark = [
    pytest.mark.usefixtures("frozen_gc"),
    # Torch's own about the operators: deprecated, in beta, casting complex to real. The library gives no warnings.
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

OPS: dict[str, Any] = {op.formatted_name: op for op in op_db if op.supports_autograd}

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64)
SAMPLES = 5
TWICE = 2
"""Samples of an operator that are differentiated a second time, too."""

COMMON = (
    "__getitem__", "__rmatmul__", "_softmax_backward_data", "addmm", "amax", "atan2", "bmm", "clamp", "cos", "cumprod",
    "div_no_rounding_mode", "einsum", "exp", "fft_rfft", "gather", "index_add", "index_select", "linalg_det", "linalg_norm",
    "linalg_svd", "log_softmax", "logsumexp", "masked_fill", "matmul", "max_reduction_with_dim", "mul", "native_layer_norm",
    "nn_functional_avg_pool2d", "nn_functional_batch_norm", "nn_functional_conv2d", "nn_functional_conv_transpose2d",
    "nn_functional_cross_entropy", "nn_functional_dropout", "nn_functional_embedding", "nn_functional_embedding_bag",
    "nn_functional_gelu", "nn_functional_glu", "nn_functional_grid_sample", "nn_functional_group_norm",
    "nn_functional_huber_loss", "nn_functional_layer_norm", "nn_functional_linear", "nn_functional_mse_loss",
    "nn_functional_nll_loss", "nn_functional_prelu", "nn_functional_relu", "nn_functional_rms_norm", "nn_functional_rrelu",
    "nn_functional_scaled_dot_product_attention", "nn_functional_silu", "nn_functional_softplus", "norm", "pow", "prod",
    "rsqrt", "scatter_add", "sigmoid", "softmax", "sort", "std", "tanh", "topk", "var", "where",
)  # fmt: skip
"""Operators that models are made of, each of which saves something that can move."""

OUTPUTS_NOT_REPRODUCED = {
    "linalg_lstsq": "its driver gelsy starts from pivots that torch leaves uninitialised",
    "linalg_lstsq_grad_oriented": "as linalg_lstsq",
}
"""Operators whose outputs eager itself does not reproduce, and why. Their gradients it does."""


# --- where it runs


@dataclass(frozen=True)
class Setting:
    """A device, and the context in which eager and swapped runs both take place."""

    device: Device
    compute: Callable[[], AbstractContextManager[Any]]


@pytest.fixture(params=["compute", "hooks only", pytest.param("cuda", marks=pytest.mark.gpu)])
def setting(request: pytest.FixtureRequest) -> Iterator[Setting]:
    """The simulator within its dispatch mode, under which autograd takes other formulas for a few operators, and without it,
    as on a GPU, where hooks are all there is; then the GPU."""
    if request.param != "cuda":
        device = cm.SimDevice()
        yield Setting(device, device.compute if request.param == "compute" else nullcontext)
        return
    torch.use_deterministic_algorithms(True, warn_only=True)  # atomic additions would differ from one eager run to the next
    try:
        yield Setting(cm.CudaDevice(), nullcontext)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def frozen_gc() -> Iterator[None]:
    """No garbage collection, as `no_gc`, for a thousand tests: what is there before them is set aside once, not searched each
    time."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


# --- one run of one sample


@dataclass(frozen=True)
class Bits:
    """All that a program can tell of a tensor: NaN payloads and the sign of zero, strides, conj and neg bits."""

    dtype: torch.dtype
    layout: torch.layout
    shape: torch.Size
    stride: tuple[int, ...]
    lazy: tuple[bool, bool]
    data: bytes = field(repr=False)

    @staticmethod
    def of(t: Tensor) -> Bits:
        dense = t.detach() if t.layout is torch.strided else t.detach().to_dense()
        raw = dense.resolve_conj().view(_SAME_SIZE[t.dtype]) if t.dtype in _SAME_SIZE else dense
        return Bits(t.dtype, t.layout, t.shape, dense.stride(), (t.is_conj(), t.is_neg()), raw.numpy(force=True).tobytes())


_SAME_SIZE = {torch.bfloat16: torch.int16, torch.complex32: torch.int32}
"""For dtypes that NumPy lacks."""


@dataclass(frozen=True)
class Outcome:
    """What a sample gave: the operator's outputs, first and second gradients; or the error."""

    error: str = ""
    outputs: tuple[Bits | None, ...] = ()
    gradients: tuple[Bits | None, ...] = ()
    second_gradients: tuple[Bits | None, ...] = ()

    def without_data(self) -> Outcome:
        def bare(all_bits: tuple[Bits | None, ...]) -> tuple[Bits | None, ...]:
            return tuple(None if bits is None else replace(bits, data=b"") for bits in all_bits)

        return Outcome(self.error, bare(self.outputs), bare(self.gradients), bare(self.second_gradients))


def bits_of(tensors: Sequence[Tensor | None]) -> tuple[Bits | None, ...]:
    return tuple(None if t is None else Bits.of(t) for t in tensors)


def activation(t: Tensor, leaves: list[Tensor]) -> Tensor:
    """A copy of `t`, its storage and layout, that came out of an operator; of a new leaf if `t` requires a gradient."""
    if t.layout is not torch.strided:  # stays on the device in any case
        leaf = t.detach().clone()
        if t.requires_grad:
            leaves.append(leaf.requires_grad_())
        return leaf
    plain = t.detach().conj() if t.is_conj() else t.detach()
    leaf = plain.clone()
    items = plain.untyped_storage().nbytes() // plain.element_size()
    whole = leaf.stride() == plain.stride() and items == plain.numel()
    if not whole:
        leaf = plain.as_strided((items,), (1,), 0).clone()
    if t.requires_grad:
        leaves.append(leaf.requires_grad_())
    made = leaf.clone()
    if not whole:
        made = made.as_strided(plain.shape, plain.stride(), plain.storage_offset())
    return made.conj() if t.is_conj() else made


def forward(op: Any, sample: Any, leaves: list[Tensor]) -> tuple[list[Tensor], tuple[Bits | None, ...]]:
    """Where to start backward from, and the outputs as bits. Holds no input and no output any more."""
    args, kwargs = tree_map(
        lambda x: activation(x, leaves) if isinstance(x, Tensor) else x, ((sample.input, *sample.args), sample.kwargs)
    )
    out = op.gradcheck_wrapper(op.get_op(), *args, **kwargs)
    if sample.output_process_fn_grad is not None:
        out = sample.output_process_fn_grad(out)
    outputs = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
    return [t.clone() for t in outputs if t.requires_grad], bits_of(outputs)  # a clone's node saves nothing


def run(op: Any, sample: Any, executor: Executor | None, *, twice: bool) -> Outcome:
    """Forward and backward of one sample, in eager or with what is saved swapped by `executor`."""

    def all_leaves_the_device() -> None:
        if executor is not None:
            executor.end_step(completed=False)

    torch.manual_seed(0)
    leaves: list[Tensor] = []
    hooks = nullcontext() if executor is None else torch.autograd.graph.saved_tensors_hooks(executor.save, executor.use)
    second: tuple[Bits | None, ...] = ()
    try:
        with hooks:
            roots, outputs = forward(op, sample, leaves)
            if not roots:
                return Outcome(outputs=outputs)
            all_leaves_the_device()
            directions = [torch.randn_like(root, requires_grad=twice) for root in roots]
            gradients: Sequence[Tensor | None] = torch.autograd.grad(
                roots, leaves, directions, allow_unused=True, create_graph=twice
            )
            first = bits_of(gradients)
            roots = [g.clone() for g in gradients if g is not None and g.requires_grad]
            del gradients
            if roots:
                all_leaves_the_device()
                again = [torch.randn_like(root) for root in roots]
                second = bits_of(torch.autograd.grad(roots, [*leaves, *directions], again, allow_unused=True))
    except Exception as error:  # noqa: BLE001 - whatever it is, it has to be the same with and without swapping
        return Outcome(error=f"{type(error).__name__}: {error}")
    return Outcome("", outputs, first, second)


def run_eager(op: Any, sample: Any, *, twice: bool) -> tuple[Outcome, Callable[[Outcome], Outcome]]:
    """The outcome, and what of an outcome eager gives again whenever it is asked."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        outcome = run(op, sample, None, twice=twice)
    # Said on CUDA alone, of each operator whose result depends on the order in which threads add.
    deterministic = not any("does not have a deterministic implementation" in str(w.message) for w in said)

    def promised(some: Outcome) -> Outcome:
        if op.formatted_name in OUTPUTS_NOT_REPRODUCED:
            some = replace(some, outputs=())
        return some if deterministic else some.without_data()

    return outcome, promised


# --- an operator


class SweepingExecutor(Executor):
    """Swaps every storage, gives its HBM back at every look, and counts the saves that it swaps."""

    def __init__(self, device: Device) -> None:
        self.pool = cm.PinnedPool("64MiB", device=device, chunk_bytes=1 << 20)
        self.swapped = 0
        limits, protected = Limits(leaving_bytes=0), ProtectedStorages()
        super().__init__(device, self.pool, rule=DefaultRule(min_bytes=0), limits=limits, protected=protected)

    def save(self, t: Tensor) -> Handle:
        handle = super().save(t)
        self.swapped += isinstance(handle, SwappedView)
        return handle


def spread(samples: Sequence[Any], at_most: int) -> list[Any]:
    """The first, the last, and what lies evenly between: neighbours are alike."""
    if len(samples) <= at_most:
        return list(samples)
    return [samples[i * (len(samples) - 1) // (at_most - 1)] for i in range(at_most)]


def end_backward() -> None:
    """After an error in backward torch holds what it was differentiating, hooks or not, until the thread's next backward."""
    torch.ones(1, requires_grad=True).mul(2).backward()


def sweep(
    name: str, setting: Setting, executor: SweepingExecutor, *, dtypes: Sequence[torch.dtype], samples: int, twice: int
) -> None:
    """Samples of one operator, eager against swapped; the first `twice` of them are differentiated twice, too."""
    op, kind = OPS[name], setting.device.torch_device.type
    differentiable = [dtype for dtype in dtypes if dtype in op.supported_backward_dtypes(kind)]
    if not differentiable:
        pytest.skip(f"torch has no gradient of {name} on {kind}")
    compared = 0
    for dtype in differentiable:
        for number, sample in enumerate(spread(list(op.sample_inputs(kind, dtype, requires_grad=True)), samples)):
            what = f"{name}, {dtype}, sample {number}"
            with setting.compute():
                eager, promised = run_eager(op, sample, twice=False)
                swapped = run(op, sample, executor, twice=False)
                assert not eager.error, f"{what}: {eager.error}"
                assert promised(swapped) == promised(eager), what
                assert executor.pool.stats().num_live == 0, what
                compared += any(bits is not None for bits in eager.gradients)
                if number < twice:
                    eager, promised = run_eager(op, sample, twice=True)
                    swapped = run(op, sample, executor, twice=True)
                    assert promised(swapped) == promised(eager), f"{what}, twice"
                    if swapped.error:
                        end_backward()
                    assert executor.pool.stats().num_live == 0, f"{what}, twice"
    assert compared, f"{name}: no sample gave a gradient"


@pytest.mark.parametrize("name", COMMON)
def test_operators_that_models_are_made_of(name: str, setting: Setting) -> None:
    executor = SweepingExecutor(setting.device)
    sweep(name, setting, executor, dtypes=(torch.float32, torch.bfloat16), samples=2, twice=1)
    assert executor.meter.totals.bytes_swapped_out > 0
    assert executor.meter.totals.bytes_swapped_in > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", OPS)
def test_every_differentiable_operator(name: str, setting: Setting) -> None:
    executor = SweepingExecutor(setting.device)
    sweep(name, setting, executor, dtypes=DTYPES, samples=SAMPLES, twice=TWICE)
    moved = executor.meter.totals.bytes_swapped_out > 0 and executor.meter.totals.bytes_swapped_in > 0
    assert moved == (executor.swapped > 0), f"{executor.swapped} saves were to move"


# --- the sweep itself


class FlipsOneBit(SweepingExecutor):
    def use(self, handle: Handle) -> Tensor:
        wrong = super().use(handle).detach().clone()
        wrong.view(torch.int32).bitwise_xor_(1)
        return wrong


class LosesStrides(SweepingExecutor):
    def use(self, handle: Handle) -> Tensor:
        return super().use(handle).contiguous()


class NeverLetsGo(SweepingExecutor):
    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.handles: list[Handle] = []

    def save(self, t: Tensor) -> Handle:
        self.handles.append(super().save(t))
        return self.handles[-1]


# Max pooling of a channels-last image has a channels-last gradient, so lost strides show by themselves, however a CPU rounds.
@pytest.mark.parametrize(
    ("faulty", "name"), [(FlipsOneBit, "mul"), (LosesStrides, "nn_functional_max_pool2d"), (NeverLetsGo, "mul")]
)
def test_the_sweep_sees_a_faulty_executor(faulty: type[SweepingExecutor], name: str, setting: Setting) -> None:
    with pytest.raises(AssertionError, match=f"{name}, torch.float32"):
        sweep(name, setting, faulty(setting.device), dtypes=(torch.float32,), samples=SAMPLES, twice=0)
