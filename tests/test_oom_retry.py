"""Operators that find no memory, simulated at every allocation of a step: training has the same bits as with enough memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from chameleon_mm.device.operators import OpCall, OpFacts
from chameleon_mm.device.sim import SimDevice
from chameleon_mm.record.recorder import Recorder
from chameleon_mm.record.retry import OomRetry, tried_bytes
from chameleon_mm.units import MIB
from tests._trace_records import ops_of

KB = 1024
"""float32 [16, 16]."""


def square() -> Tensor:
    return torch.ones(16, 16)


class Short(TorchDispatchMode):
    """Mode below the recorder: the `nth` operator that makes a tensor fails `times` times, after it ran."""

    def __init__(self, nth: int, times: int, *, mutating: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch annotates no argument of it
        self.nth, self.times, self.mutating = nth, times, mutating
        self.seen = 0
        self.failing: Any = None
        self.failed: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        facts = OpFacts.of(func)
        out = func(*args, **(kwargs or {}))
        if facts.kernel and not facts.composite and facts.repeatable is not self.mutating:
            again = self.failing is func and self.times > 0
            self.seen += not again
            if (again or self.seen == self.nth) and self.times > 0:
                self.times -= 1
                self.failing = func
                self.failed.append(func.name())
                raise torch.OutOfMemoryError("out of memory. Tried to allocate 1.50 MiB. Nothing is free.")
        return out


class Frees:
    """Callback that frees memory a given number of times, then no more."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.asked: list[tuple[int, int]] = []

    def __call__(self, nbytes: int, excluded: Sequence[torch.UntypedStorage]) -> bool:
        self.asked.append((nbytes, len(excluded)))
        self.times -= 1
        return self.times >= 0


class Net(nn.Module):
    """Linear, normalised, convolved, attended, dropped out."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(4, 4, 3, padding=1), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.down(F.gelu(self.up(self.norm(self.conv(x))))), 0.3)
        q = x.unsqueeze(1)
        mixed = F.scaled_dot_product_attention(q, q, q, dropout_p=0.2).squeeze(1)
        return F.rrelu(mixed, training=True) * torch.rand_like(mixed)


def train(short: Short | None, free: Callable[[int, Sequence[torch.UntypedStorage]], bool] | None) -> list[Tensor]:
    """Return everything that a step changes: loss, gradients, weights, state of the generator."""
    torch.manual_seed(5)
    device = SimDevice()
    with device.compute():
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        x = torch.randn(2, 4, 8)
        recorder = Recorder(device, model=model, reclaim_some=free)
        with short or nullcontext(), recorder:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
        trace = recorder.finish()
        assert trace.num_ticks > 50
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *grads, *model.parameters(), torch.get_rng_state()]


@pytest.fixture(scope="module")
def allocations() -> int:
    """Number of operators of the step that may fail and run again."""
    short = Short(-1, 0)
    train(short, None)
    return short.seen


@pytest.fixture(scope="module")
def expected() -> list[Tensor]:
    return train(None, None)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("shortages", "every"),
    [(1, 1), (3, 3), pytest.param(3, 1, marks=[pytest.mark.slow, pytest.mark.thorough])],
    ids=["one", "several, at a third of them", "several"],
)
def test_a_shortage_at_every_allocation_changes_no_bit(
    expected: list[Tensor], allocations: int, shortages: int, every: int
) -> None:
    """A single shortage ends at the plain retry; more shortages need memory to be freed."""
    assert allocations > 50
    failed = set()
    for nth in range(1, allocations + 1, every):
        short, free = Short(nth, shortages), Frees(10)
        outcome = train(short, free)
        assert len(short.failed) == shortages
        assert len(free.asked) == shortages - 1
        assert all(nbytes >= 1.5 * MIB for nbytes, _ in free.asked)
        assert len(outcome) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(outcome, expected, strict=True)), short.failed
        failed.update(short.failed)
    assert every > 1 or {"aten::bernoulli_.float", "aten::rand_like", "aten::native_dropout"} & failed


def test_a_mutating_operator_raises_as_it_would() -> None:
    count = Short(-1, 0, mutating=True)
    train(count, None)
    assert count.seen > 10
    for nth in range(1, count.seen + 1):
        short, free = Short(nth, 1, mutating=True), Frees(10)
        with pytest.raises(torch.OutOfMemoryError, match="Nothing is free"):
            train(short, free)
        assert len(short.failed) == 1
        assert free.asked == []


def test_it_raises_once_nothing_is_freed_any_more() -> None:
    for frees in range(3):
        short, free = Short(3, 100), Frees(frees)
        with pytest.raises(torch.OutOfMemoryError, match="Nothing is free"):
            train(short, free)
        # Once, once more at once, and once after each time that something was freed.
        assert len(short.failed) == 2 + frees
        assert len(free.asked) == 1 + frees


def test_a_device_that_is_too_small_trains_once_something_goes(no_gc: None) -> None:
    """A capacity limits the device: a retry fits because other memory was freed, never the operator's own."""
    device = SimDevice(hbm_bytes=5 * KB)
    with device.compute():
        ballast = [square() for _ in range(2)]
        x = square()
        freed: list[tuple[int, list[int]]] = []

        def free(nbytes: int, excluded: Sequence[torch.UntypedStorage]) -> bool:
            freed.append((nbytes, [storage.nbytes() for storage in excluded]))
            assert any(storage is x.untyped_storage() for storage in excluded)
            if ballast:
                ballast.pop()
                return True
            return False

        recorder = Recorder(device, reclaim_some=free)
        with recorder:
            y = x.exp()
            z = x * y  # 5 KB of 5
            w = x + z  # needs one of the two
            v = x - w  # and the other
            with pytest.raises(torch.OutOfMemoryError, match="simulated device"):
                x / v
        assert recorder.oom_retries == 2 + 2 + 1
        trace = recorder.finish()
    assert torch.equal(w, x + x * x.exp())
    assert [op.name.partition(".")[0] for op in ops_of(trace)] == ["aten::exp", "aten::mul", "aten::add", "aten::sub"]
    assert [nbytes >= KB for nbytes, _ in freed] == [True] * 3
    assert [sizes for _, sizes in freed] == [[KB, KB]] * 3


def test_a_failure_holds_no_tensor_while_something_is_freed(sim: SimDevice, no_gc: None) -> None:
    """The failure's traceback would hold tensors: the results of the failed attempt must be freed by then."""
    made: list[weakref.ref[torch.UntypedStorage]] = []

    def fails_twice() -> Tensor:
        result = square()
        made.append(weakref.ref(result.untyped_storage()))
        if len(made) < 3:
            raise torch.OutOfMemoryError("out of memory")
        return result

    alive: list[bool] = []

    def free(nbytes: int, excluded: Sequence[torch.UntypedStorage]) -> bool:
        assert (nbytes, len(excluded)) == (0, 1)
        alive.extend(ref() is not None for ref in made)
        return True

    call = call_of(torch.ops.aten.exp.default, square())
    call.func = lambda *_: fails_twice()
    out = OomRetry(sim, free).run(call)
    assert out.untyped_storage() is made[2]()
    assert alive == [False, False]


def test_an_error_that_goes_on_leaves_nothing_behind(no_gc: None) -> None:
    """The error holds the frame that raised it, and so the operator's tensors: only as long as it is handled."""
    device = SimDevice(hbm_bytes=2 * KB)
    with device.compute():
        x, y = square(), square()
        recorder = Recorder(device, reclaim_some=Frees(0))
        with recorder, pytest.raises(torch.OutOfMemoryError) as caught:
            x + y
        del caught
        kept, kept_storages = weakref.ref(recorder), [weakref.ref(t.untyped_storage()) for t in (x, y)]
        del recorder, x, y
    assert kept() is None
    assert [ref() is None for ref in kept_storages] == [True, True]


def call_of(func: Any, *args: Any, **kwargs: Any) -> OpCall:
    return OpCall(OpFacts.of(func), func, args, kwargs, device_type="cpu")


def test_a_generator_of_its_own_is_set_back_too(sim: SimDevice) -> None:
    generator = torch.Generator().manual_seed(1)
    expected = torch.rand(4, generator=torch.Generator().manual_seed(1))
    default = torch.get_rng_state()
    call, attempts = call_of(torch.ops.aten.rand.generator, [4], generator=generator), []
    draw = call.func

    def fails_once(*args: Any, **kwargs: Any) -> Any:
        drawn = draw(*args, **kwargs)
        torch.rand(1)
        attempts.append(drawn)
        if len(attempts) == 1:
            raise torch.OutOfMemoryError("out of memory")
        return drawn

    call.func = fails_once
    assert torch.equal(OomRetry(sim, Frees(0)).run(call), expected)
    torch.set_rng_state(default)
    torch.rand(1)
    after_one = torch.get_rng_state()
    torch.set_rng_state(default)
    attempts.clear()
    generator.manual_seed(1)
    OomRetry(sim, Frees(0)).run(call)
    assert torch.equal(torch.get_rng_state(), after_one)


@pytest.mark.parametrize(
    "func",
    [
        torch.ops.aten.add_.Tensor,
        torch.ops.aten.add.out,
        torch.ops.aten._foreach_add_.Scalar,
        torch.ops.aten.native_batch_norm.default,  # updates running statistics past its schema
        torch.ops.aten.cudnn_batch_norm.default,
        torch.ops._c10d_functional.all_reduce.default,
        torch.ops.c10d.allgather_.default,
    ],
    ids=str,
)
def test_what_may_never_run_twice(sim: SimDevice, func: Any) -> None:
    facts = OpFacts.of(func)
    attempts = []

    def fails(*_: Any) -> None:
        attempts.append(1)
        raise torch.OutOfMemoryError("out of memory")

    call = OpCall(facts, fails, (), {}, device_type="cpu")
    with pytest.raises(torch.OutOfMemoryError):
        OomRetry(sim, Frees(9)).run(call)
    assert len(attempts) == 1


def test_every_operator_of_torchs_that_takes_a_generator_is_known_to_draw() -> None:
    names: Iterable[str] = torch._C._dispatch_get_all_op_names()
    takes = []
    for name in names:
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if namespace == "aten":
            func = getattr(getattr(torch.ops.aten, packet), overload or "default")
            if any("Generator" in str(argument.type) for argument in func._schema.arguments):
                takes.append(name)
                assert OpFacts.of(func).random, name
    assert len(takes) > 50


@pytest.mark.parametrize(
    ("message", "nbytes"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB", 2 << 30),
        ("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 ...", 20 << 20),
        ("out of memory on the simulated device. Tried to allocate 512 B. It has", 512),
        ("HIP out of memory. Tried to allocate 512 bytes.", 512),
    ],
)
def test_what_was_asked_for_is_read_and_rounded_up(message: str, nbytes: int) -> None:
    asked = tried_bytes(torch.OutOfMemoryError(message))
    assert nbytes <= asked <= nbytes * 1.02


def test_a_message_that_does_not_say_how_much_says_nothing() -> None:
    assert tried_bytes(torch.OutOfMemoryError("no memory")) == 0
