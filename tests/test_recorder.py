"""A recorded step: its memory is the device's to the byte; it is the same every time, and it changes nothing."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from chameleon_mm.device.sim import SimDevice
from chameleon_mm.plan.trace import StepPhase, TensorKind, Trace
from chameleon_mm.record.recorder import Recorder, RecordingHooks
from chameleon_mm.record.step_log import StepLog
from chameleon_mm.tools.demo import GPT, GPTConfig
from tests._trace_records import hooks_of, ops_of, tensors_of


def square() -> Tensor:
    return torch.ones(16, 16)


def rounded(trace: Trace) -> np.ndarray[Any, np.dtype[np.int64]]:
    return -(-trace.tensor_bytes // 512) * 512


def curve(trace: Trace) -> list[int]:
    """Return the allocated bytes at each tick and after the last: the start bytes, and each storage while it lives."""
    change = np.zeros(trace.num_ticks + 2, np.int64)
    here = trace.tensor_born >= 0
    np.add.at(change, trace.tensor_born[here], rounded(trace)[here])
    np.add.at(change, trace.tensor_dies + 1, -rounded(trace))
    return list(map(int, trace.start_bytes + np.cumsum(change[: trace.num_ticks + 1])))


class Recomputed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@dataclass
class Case:
    model: Callable[[], nn.Module]
    batch: Callable[[], Tensor]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = torch.optim.AdamW
    micro_batches: int = 1


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.RReLU()
    )


def gpt() -> nn.Module:
    return GPT(GPTConfig(layers=2, width=32, heads=2, context=16))


CASES = {
    "mlp": Case(mlp, lambda: torch.randn(8, 16)),
    "mlp, plain loops": Case(mlp, lambda: torch.randn(8, 16), lambda p: torch.optim.AdamW(p, foreach=False)),
    "mlp, fused": Case(mlp, lambda: torch.randn(8, 16), lambda p: torch.optim.AdamW(p, fused=True)),
    "mlp, momentum": Case(mlp, lambda: torch.randn(8, 16), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "mlp, accumulated": Case(mlp, lambda: torch.randn(8, 16), micro_batches=3),
    "convolutional": Case(convolutional, lambda: torch.randn(4, 2, 12, 12)),
    "gpt": Case(gpt, lambda: torch.randint(256, (2, 16))),
    "gpt, accumulated": Case(gpt, lambda: torch.randint(256, (2, 16)), micro_batches=2),
    "recomputed": Case(lambda: Recomputed(reentrant=False), lambda: torch.randn(4, 16), micro_batches=2),
    "recomputed, reentrant": Case(lambda: Recomputed(reentrant=True), lambda: torch.randn(4, 16)),
    "recurrent": Case(lambda: nn.LSTM(8, 12, num_layers=2, dropout=0.1), lambda: torch.randn(5, 3, 8)),
}


class Training:
    """Loop as users write it: the loss and the output of a step live on in the next one."""

    def __init__(self, case: Case, device: SimDevice) -> None:
        torch.manual_seed(3)
        self.case, self.device = case, device
        with device.compute():
            self.model = case.model()
            self.optimizer = case.optimizer(self.model.parameters())
        self.out: Tensor | None = None
        self.loss: Tensor | None = None

    def step(self) -> None:
        self.optimizer.zero_grad()
        for _ in range(self.case.micro_batches):
            out = self.model(self.case.batch())
            self.out = out[0] if isinstance(out, tuple) else out
            self.loss = self.out.square().mean()
            self.loss.backward()
        self.optimizer.step()

    def plain(self, steps: int = 1) -> None:
        with self.device.compute():
            for _ in range(steps):
                self.step()

    def recorded(self, *, named: bool = True, make: Callable[..., Recorder] = Recorder) -> Trace:
        """A step's trace; the device's peak is that of the step."""
        with self.device.compute():
            self.device.reset_peaks()
            model, optimizers = (self.model, [self.optimizer]) if named else (None, [])
            recorder = make(self.device, model=model, optimizers=optimizers)
            with recorder, RecordingHooks(recorder):
                self.step()
            return recorder.finish()


@pytest.mark.parametrize(
    ("warm", "named"), [(1, True), *(pytest.param(*how, marks=pytest.mark.ci) for how in ((0, True), (2, False)))]
)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.usefixtures("no_gc")
def test_the_memory_of_a_trace_is_the_devices(case: Case, warm: int, named: bool) -> None:
    """At its peak, at its end, and after each operator, where it is read below the recorder. A first step makes the optimizer's
    state; in later ones gradients and outputs of the last one go."""
    training = Training(case, SimDevice())
    training.plain(warm)
    readings: list[int] = []

    class Reads(StepLog):
        def after(self, *args: Any) -> None:
            super().after(*args)
            readings.append(training.device.allocated_bytes())

    def recorder_of(device: SimDevice, **given: Any) -> Recorder:
        recorder = Recorder(device, **given)
        recorder._log.__class__ = Reads
        return recorder

    trace = training.recorded(named=named, make=recorder_of)
    assert [curve(trace)[tick] for tick in trace.op_tick] == readings
    assert max(curve(trace)) == training.device.peak_allocated_bytes()
    assert curve(trace)[-1] == training.device.allocated_bytes()


COMPARED = (
    "op_name", "op_phase", "op_tick", "read_offsets", "read_tensors", "write_offsets", "write_tensors",
    "tensor_bytes", "tensor_kind", "tensor_born", "tensor_released", "tensor_sendable", "tensor_dies", "hook_tick", "hook_use",
    "hook_tensor",
)  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_two_recordings_of_the_same_step_are_the_same(case: Case) -> None:
    first, second = Training(case, SimDevice()), Training(case, SimDevice())
    kept = [square() for _ in range(7)]  # so that nothing lies where it lay
    second.plain(1)
    first.plain(1)
    a, b = first.recorded(), second.recorded()
    assert a.op_names == b.op_names and a.num_ticks == b.num_ticks > 0
    assert [column for column in COMPARED if not np.array_equal(getattr(a, column), getattr(b, column))] == []
    assert np.array_equal(a.op_us, b.op_us)
    assert len(kept) == 7


@pytest.mark.usefixtures("no_gc")
def test_nothing_is_kept_alive() -> None:
    """Neither by a recorder that is at work, nor by one that has finished, and no collection is needed."""
    device = SimDevice()
    with device.compute():
        recorder = Recorder(device, model=(model := mlp()))
        with recorder, RecordingHooks(recorder):
            before = device.allocated_bytes()
            model(torch.randn(8, 16)).sum().backward()
            model.zero_grad()
            assert device.allocated_bytes() == before
            x = torch.randn(8, 16)
            storage = weakref.ref(x.untyped_storage())
            del x
            assert storage() is None
        recorder.finish()
        gone = weakref.ref(recorder)
        del recorder
        assert gone() is None
        del model
        assert device.allocated_bytes() == 0


@pytest.mark.usefixtures("no_gc")
def test_a_recorder_that_was_stopped_writes_nothing_and_watches_nothing(sim: SimDevice) -> None:
    with sim.compute():
        model = mlp()
        recorder = Recorder(sim, model=model)
        with recorder, RecordingHooks(recorder):
            x = torch.randn(8, 16)
            out = model(x)
            watched = weakref.getweakrefcount(x.untyped_storage())
            before = recorder._log.builder.num_ops
            with recorder.paused(), recorder.untimed():
                recorder.stop()
            out.sum().backward()
            assert recorder._log.builder.num_ops == before > 0
            assert weakref.getweakrefcount(x.untyped_storage()) == watched - 1
        with pytest.raises(RuntimeError, match="expected a recorder that saw the whole step"):
            recorder.finish()
    assert all(p.grad is not None for p in model.parameters())


def test_what_was_saved_is_told_with_its_ticks(sim: SimDevice) -> None:
    with sim.compute():
        w = square().requires_grad_()
        recorder = Recorder(sim)
        with recorder, RecordingHooks(recorder):
            a = w.exp()  # saves its result: hook 0
            b = a.sin()  # saves a: hook 1
            held = b
            c = b.cos()  # saves b: hook 2
            del a, b
            d = c * 1.5
            del c
            del held
            loss = d.sum()
            del d
            loss.backward()
        trace = recorder.finish()
    exp, sin, cos, mul, total = (next(op for op in ops_of(trace) if op.name == f"aten::{name}") for name in (
        "exp", "sin", "cos", "mul.Tensor", "sum"))  # fmt: skip
    of_a, of_b = (tensors_of(trace)[op.writes[0]] for op in (exp, sin))
    assert [hook.tensor for hook in hooks_of(trace)[:3]] == [exp.writes[0], exp.writes[0], sin.writes[0]]
    assert (of_a.born, of_b.born) == (exp.tick, sin.tick)
    # `a` is released after cos ran; `b` when `held` goes, after the product.
    assert (of_a.released, of_b.released) == (cos.tick, mul.tick)
    # The operator that saved it is over by the next hook of another: of cos, and in backward.
    assert (of_a.sendable, of_b.sendable) == (1, 3)
    assert (total.phase, ops_of(trace)[-1].phase) == (StepPhase.FORWARD, StepPhase.BACKWARD)
    uses = [hook for hook in hooks_of(trace) if hook.use]
    assert [hook.tensor for hook in uses] == [sin.writes[0], exp.writes[0], exp.writes[0]]
    # Each dies with the product that is the last of the formulas it is used in: of cos, then of sin and exp.
    products = [op.tick for op in ops_of(trace) if op.name == "aten::mul.Tensor" and op.phase is StepPhase.BACKWARD]
    assert len(products) == 4
    assert (of_b.dies, of_a.dies) == (products[1], products[3])
    assert of_a.kind is of_b.kind is TensorKind.ACTIVATION
