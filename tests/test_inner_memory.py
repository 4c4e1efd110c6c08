"""Memory that operators hold inside themselves: the simulator charges it, recorders see it, and plans leave room for it."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.attention import SDPBackend, sdpa_kernel

import chameleon_mm as cm
from chameleon_mm.device import Device, MemoryReading
from chameleon_mm.device.operators import _FORMULAS, OpCall, OpFacts, inner_bytes
from chameleon_mm.plan.trace import TensorKind, Trace, TraceBuilder
from chameleon_mm.plan.unswapped_memory import memory_curve, peak_memory
from chameleon_mm.record.recorder import Recorder
from chameleon_mm.record.step_log import PricedTimes
from chameleon_mm.record.storages import Readings, StorageTable
from chameleon_mm.tools.demo import GPT, GPTConfig
from chameleon_mm.tools.prediction import needs_of
from chameleon_mm.units import KIB
from tests._plain_training import Image, image
from tests._runs import Run, run_steps
from tests._trace_records import ops_of

pytestmark = pytest.mark.usefixtures("no_gc")

aten = torch.ops.aten

SCORES = (2, 3, 40, 40)
"""Shape of attention's scores, 38,400 bytes of float32. Inside: bools per element (9,600) and row (240), a scalar; rounded
up."""
SCORES_BYTES, SCORES_INSIDE = 38_400, 9_728 + 512 + 512


def called(func: torch._ops.OpOverload[..., object], *args: object) -> int:
    return inner_bytes(OpCall(OpFacts.of(func), func, args, {}, device_type="meta"))


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


# --- the formulas


def test_what_attention_without_a_fused_kernel_holds() -> None:
    assert called(aten._safe_softmax.default, meta(*SCORES), -1) == SCORES_INSIDE
    assert called(aten._safe_softmax.default, meta(*SCORES, dtype=torch.bfloat16), -1) == SCORES_INSIDE
    assert called(aten._safe_softmax.default, meta(0, 4), -1) == 512
    assert called(aten._safe_softmax.default, meta(), 0) == 3 * 512
    assert called(aten._softmax.default, meta(*SCORES), -1, False) == 0


def test_what_the_backward_of_fused_attention_holds() -> None:
    def backward(dtype: torch.dtype, kv_heads: int = 8) -> int:
        q, k = meta(2, 8, 130, 80, dtype=dtype), meta(2, kv_heads, 200, 80, dtype=dtype)
        func = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        return called(func, q, q, k, k, q, meta(2, 8, 130), 0.0, True)

    # 130 rows become 256, of 80 numbers 96.
    accumulated, sums = 2 * 8 * 256 * 96 * 4, 2 * 8 * 256 * 4
    assert backward(torch.bfloat16) == accumulated + sums
    assert backward(torch.float16, kv_heads=2) == accumulated + sums + 2 * (2 * 8 * 200 * 80 * 2)
    assert backward(torch.float32) == 0  # another kernel


def test_what_the_backward_of_an_embedding_holds() -> None:
    def backward(indices: int, vocabulary: int, dtype: torch.dtype = torch.bfloat16) -> int:
        grad, which = meta(indices, 64, dtype=dtype), meta(indices, dtype=torch.int64)
        return called(aten.embedding_dense_backward.default, grad, which, vocabulary, -1, False)

    assert backward(3072, 1000) == 0
    # A row of float32 for every ten of 4,000 indices, and for each of 1,000 words.
    rows, indices, words = 1400 * 64 * 4, 32_256, 8_192
    assert backward(4000, 1000) == rows + 6 * indices + 2 * words + 11_264


def test_what_the_norm_of_many_tensors_holds() -> None:
    tensors = [meta(100), meta(3 * 65_536 + 1), meta(7)]
    assert called(aten._foreach_norm.Scalar, tensors, 2) == 512
    assert called(aten._foreach_norm.Scalar, [meta(40 * 65_536, dtype=torch.float16)] * 10, 2) == 10 * 40 * 4 + 448


class RefusesSizes(Tensor):
    """Subclass that does not report its size."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.size, Tensor.numel, Tensor.dim, Tensor.shape.__get__):  # type: ignore[attr-defined]  # a property
            raise RuntimeError(f"{func}: this class has no sizes")
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]  # torch annotates none


def symbolic(*shape: int) -> Tensor:
    """Tensor whose sizes are symbols without a value."""
    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes):
        return torch.empty([shapes.create_unbacked_symint() for _ in shape])


ODD_TENSORS: dict[str, Callable[[], Tensor]] = {
    "nested": lambda: torch.nested.as_nested_tensor([torch.zeros(3, 3), torch.zeros(5, 5)], layout=torch.strided),
    "jagged": lambda: torch.nested.as_nested_tensor([torch.zeros(3, 4), torch.zeros(5, 4)], layout=torch.jagged),
    "refuses": lambda: torch.zeros(3, 4).as_subclass(RefusesSizes),
    "symbolic": lambda: symbolic(3, 4),
    "sparse": lambda: torch.eye(4).to_sparse(),
}

ARGUMENTS: dict[str, Callable[[Any], tuple[object, ...]]] = {
    "_safe_softmax": lambda t: (t, -1),
    "_foreach_norm": lambda t: ([t, meta(100)], 2),
    "embedding_dense_backward": lambda t: (t, t, 5, -1, True),
    "_scaled_dot_product_flash_attention_for_cpu_backward": lambda t: (t, t, t, t, t, t, 0.0, True),
}
"""Arguments of every operator that has a formula, among them a given tensor."""


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("kind", ODD_TENSORS)
def test_no_formula_raises_for_tensors_without_plain_sizes(kind: str) -> None:
    odd = ODD_TENSORS[kind]()
    assert ARGUMENTS.keys() == _FORMULAS.keys()
    for name, arguments in ARGUMENTS.items():
        (overload, *_) = getattr(aten, name).overloads()
        func = getattr(getattr(aten, name), overload)
        assert called(func, *arguments(odd)) >= 0
    if kind in ("nested", "refuses", "symbolic"):
        assert called(aten._safe_softmax.default, odd, -1) == 0
    with pytest.raises(ValueError, match="not enough values to unpack"):  # for plain tensors it is raised
        q = meta(2, 3, dtype=torch.float16)
        called(aten._scaled_dot_product_flash_attention_for_cpu_backward.default, *[q] * 6, 0.0, True)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_products_of_nested_tensors_are_priced_at_nothing_instead_of_failing(sim: cm.SimDevice) -> None:
    a, b = (torch.nested.as_nested_tensor([torch.ones(n, n) for n in (3, 5)], layout=torch.strided) for _ in range(2))
    with sim.compute():
        got = torch.bmm(a, b)
    assert torch.equal(got.values(), torch.bmm(a, b).values())


def _attention(x: Tensor) -> Tensor:
    q, k, v = (x.unflatten(-1, (2, 8)).transpose(1, 2) for _ in range(3))
    return F.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize(
    "layer",
    [
        _attention,
        lambda x: F.softmax(x, -1),
        lambda x: F.layer_norm(x, (16,)),
        lambda x: F.linear(F.gelu(x), torch.ones(4, 16)),
    ],
)
def test_layers_over_jagged_tensors_run(layer: Callable[[Tensor], Tensor], sim: cm.SimDevice) -> None:
    def step() -> Tensor:
        torch.manual_seed(0)
        values = torch.randn(32, 16, requires_grad=True)
        x = torch.nested.nested_tensor_from_jagged(values * 2, offsets=torch.tensor([0, 7, 20, 32]))
        layer(x).values().square().mean().backward()
        assert values.grad is not None
        return values.grad

    plain = step()
    with sim.compute(), cm.save_on_cpu(device=sim, min_bytes=1):
        assert torch.equal(step(), plain)


# --- the simulator


@pytest.mark.parametrize("short", [0, 512])
def test_the_simulator_charges_it_while_the_operator_runs_or_is_out_of_memory(short: int) -> None:
    sim = cm.SimDevice(hbm_bytes=2 * SCORES_BYTES + SCORES_INSIDE - short)
    with sim.compute():
        x = torch.zeros(SCORES)
        sim.reset_peaks()
        before = sim.read_memory()
        if short:
            with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 10.5 KiB"):
                aten._safe_softmax.default(x, -1)
            assert sim.allocated_bytes() == SCORES_BYTES
            return
        y = aten._safe_softmax.default(x, -1)
    after = sim.read_memory()
    assert after.allocated_bytes == before.allocated_bytes + SCORES_BYTES
    assert after.cumulative_bytes == before.cumulative_bytes + SCORES_BYTES + SCORES_INSIDE
    assert sim.peak_allocated_bytes() == after.allocated_bytes + SCORES_INSIDE
    assert y.shape == x.shape


# --- the recorder


def recorded(device: Device, run: Callable[[Tensor], Tensor]) -> Trace:
    with device.compute():
        x = torch.zeros(SCORES, device=device.torch_device)
        recorder = Recorder(device)
        with recorder:
            y = run(x)
        trace = recorder.finish()
        del y
    return trace


def test_a_recorder_sees_what_operators_hold_inside(device: Device) -> None:
    trace = recorded(device, lambda x: aten._safe_softmax.default(x + 1, -1) * 2)
    assert [(op.name, op.inner_bytes) for op in ops_of(trace)] == [
        ("aten::add.Tensor", 0),
        ("aten::_safe_softmax", SCORES_INSIDE),
        ("aten::mul.Tensor", 0),
    ]
    peak = peak_memory(trace)
    beside_x = 2 * SCORES_BYTES  # x + 1 and the softmax; then that and its double
    assert (peak.tick, peak.inner_bytes, peak.nbytes) == (1, SCORES_INSIDE, trace.start_bytes + beside_x + SCORES_INSIDE)
    assert memory_curve(trace).tolist()[2] == trace.start_bytes + beside_x


def test_on_shapes_alone_it_is_that_of_the_formulas() -> None:
    sim = cm.SimDevice()
    with FakeTensorMode():
        x = torch.zeros(SCORES)
        recorder = Recorder(sim, times=PricedTimes(sim.cost.kernel_us))
        with recorder:
            y = aten._safe_softmax.default(x + 1, -1)
    trace = recorder.finish()
    assert [op.inner_bytes for op in ops_of(trace)] == [0, SCORES_INSIDE]
    inside = next(need for need in needs_of(trace, peak_memory(trace)) if need.name == "inside operators")
    assert (inside.most_bytes, inside.at_peak_bytes) == (SCORES_INSIDE, SCORES_INSIDE)
    assert y.shape == x.shape


@pytest.mark.gpu
def test_what_an_operator_keeps_is_no_memory_inside_it() -> None:
    device, kept = cm.CudaDevice(), list[Tensor]()

    @torch.library.custom_op("chameleon_mm_tests::with_workspace", mutates_args=())
    def with_workspace(x: Tensor) -> Tensor:
        if not kept:
            kept.append(torch.empty(64 * KIB, dtype=torch.uint8, device=x.device))
        for _ in range(2):
            scratch = torch.empty(16 * KIB, dtype=torch.uint8, device=x.device)
            del scratch
        return torch.zeros_like(x)

    trace = recorded(device, lambda x: with_workspace(with_workspace(x)))
    assert [op.inner_bytes for op in ops_of(trace)] == [32 * KIB, 32 * KIB]


class Counters:
    """Device whose counters a test sets."""

    def __init__(self) -> None:
        self.allocated = self.cumulative = 0

    def read_memory(self) -> MemoryReading:
        return MemoryReading(self.allocated, self.cumulative, self.allocated)

    def take(self, nbytes: int) -> None:
        self.allocated += nbytes
        self.cumulative += nbytes


@pytest.mark.ci
@pytest.mark.parametrize("seed", range(20))
def test_what_is_allocated_and_gone_again_is_told_from_what_stays(seed: int) -> None:
    rng, counters = Random(seed), Counters()
    readings = Readings(counters)  # type: ignore[arg-type]  # all that it asks of a device
    book = StorageTable(TraceBuilder(start_bytes=0), allocated_bytes=0)
    storages: list[torch.UntypedStorage] = []
    for tick in range(30):
        for at in reversed(range(len(storages))):
            if rng.random() < 0.3:
                counters.allocated -= storages.pop(at).nbytes()
        book.record_deaths()
        workspace = rng.choice((0, 0, 4096))
        counters.take(workspace)
        scratch = [512 * rng.randrange(50) for _ in range(rng.randrange(3))]
        for nbytes in scratch:
            counters.take(nbytes)
        counters.allocated -= sum(scratch)
        sizes = [512 * rng.randrange(1, 20) for _ in range(rng.randrange(3))]
        for nbytes in sizes:
            counters.take(nbytes)
            storages.append(torch.UntypedStorage(nbytes))
            book.add(storages[-1], born=tick, counted=True)
        assert readings.take(book, tick=tick, made_bytes=sum(sizes)) == sum(scratch)


# --- training within a budget

VOCABULARY, ROWS, LENGTH = 32, 4, 128


def loss_of(model: GPT, ids: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return model.loss(ids, ids)


def train(
    device: Device, lengths: list[int], budget: int | None = None, *, evaluates: bool = False, eager: bool = False
) -> Run:
    """`eager`: by plain PyTorch, with nothing of ours around it. Without a budget: nothing is swapped."""
    chance = Random(1)

    def make() -> tuple[GPT, torch.optim.Optimizer]:
        config = GPTConfig(layers=6, width=32, heads=4, context=LENGTH, vocabulary=VOCABULARY, dropout=0.0)
        model = GPT(config).to(device.torch_device)
        return model, torch.optim.SGD(model.parameters(), lr=1e-2)

    def step(model: GPT, optimizer: torch.optim.Optimizer, number: int) -> list[Image]:
        ids = torch.randint(VOCABULARY, (ROWS, lengths[number]), generator=torch.Generator().manual_seed(number))
        ids = ids.to(device.torch_device)
        if evaluates and chance.random() < 0.25:
            with torch.no_grad():
                loss_of(model, ids)
        loss = loss_of(model, ids)
        loss.backward()
        images = [image(t) for t in (loss, *(p.grad for p in model.parameters())) if t is not None]
        optimizer.step()
        optimizer.zero_grad()
        return images

    return run_steps(None if eager else device, make, step, len(lengths), budget, min_bytes=4 * KIB)


@pytest.mark.parametrize("share", [1 / 2, 3 / 4])
def test_a_planned_step_keeps_its_budget_with_what_operators_hold_inside(device: Device, share: float) -> None:
    lengths = [LENGTH] * 5
    idle = max(train(device, lengths[:2]).peaks)
    budget = int(idle * share)
    got = train(device, lengths, budget)
    assert got.recorded == [True, *[False] * 4]
    assert got.kinds.count("planned") == 4
    assert max(got.peaks[1:]) <= budget < idle
    assert got.seen == train(device, lengths, eager=True).seen


def test_without_it_the_same_step_passes_its_budget(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Readings.take

    def blind(self: Readings, *args: object, **kwargs: object) -> int:
        real(self, *args, **kwargs)  # type: ignore[arg-type]  # handed through
        return 0

    monkeypatch.setattr(Readings, "take", blind)
    monkeypatch.setattr(type(device), "block_slack_bytes", 0)  # or a plan leaves room that hides it
    budget = max(train(device, [LENGTH] * 2).peaks) // 2
    assert max(train(device, [LENGTH] * 4, budget).peaks[1:]) > budget


@pytest.mark.slow
@pytest.mark.parametrize("device", ["sim", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.thorough])], indirect=True)
@pytest.mark.parametrize("share", [0.5, pytest.param(0.6, marks=pytest.mark.thorough)])
def test_a_changing_sequence_passes_no_budget_once_its_steps_are_known(device: Device, share: float) -> None:
    rng = Random(3)
    lengths = [rng.choice((64, 80, 96, 128)) for _ in range(60)]
    budget = int(max(train(device, lengths, evaluates=True).peaks) * share)
    got = train(device, lengths, budget, evaluates=True)
    assert [number for number, peak in enumerate(got.peaks) if peak > budget and not got.recorded[number]] == []
    assert got.report.plan_cache_hits >= 50
    assert got.seen == train(device, lengths, evaluates=True, eager=True).seen


def test_a_reading_looks_at_what_has_died_and_not_at_all_that_was_there() -> None:
    class Expected(dict[int, Any]):
        def values(self) -> Any:
            pytest.fail("all that was there before the step is looked at")

        items = __iter__ = values

    table = StorageTable(TraceBuilder(start_bytes=8 * 512), allocated_bytes=8 * 512)
    before = [torch.empty(512, dtype=torch.uint8) for _ in range(8)]
    for storage in [t.untyped_storage() for t in before]:
        table.expect(storage, TensorKind.OPTIMIZER)
    del storage
    table._expected = Expected(table._expected)
    for left in (7, 6, 5):
        del before[2]
        table.read(left * 512, (), fresh=False, tick=0)
    assert [(traced.kind, traced.dead) for traced in table.traced] == [(TensorKind.OPTIMIZER, True)] * 3
