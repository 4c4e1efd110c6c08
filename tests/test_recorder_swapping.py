"""Messages of the swapper to the recorder: storages that return in other memory, claims that end, waits, wrappers, pauses."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from chameleon_mm.device.sim import SimDevice
from chameleon_mm.device.sim.cost_model import CostModel
from chameleon_mm.plan.trace import NEVER, StepPhase, TensorKind, Trace
from chameleon_mm.record.recorder import Recorder, RecordingHooks
from chameleon_mm.record.step_log import UNMOVABLE, EventTimes, PricedTimes
from chameleon_mm.tools.demo import GPT, GPTConfig
from tests._fakes import refusing
from tests._trace_records import hooks_of, ops_of, tensors_of

pytestmark = pytest.mark.usefixtures("no_gc")

KB = 1024
"""float32 [16, 16]."""


def square() -> Tensor:
    return torch.ones(16, 16)


def copied(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Other memory with the same bytes, as a swap-in makes it."""
    return torch.empty(0, dtype=torch.uint8).set_(storage).clone().untyped_storage()


def names_of(trace: Trace) -> list[str]:
    return [op.name.partition(".")[0].removeprefix("aten::") for op in ops_of(trace)]


def test_a_claim_that_ends_unused_ends_the_storage(sim: SimDevice) -> None:
    with sim.compute():
        recorder = Recorder(sim)
        with recorder:
            x = square()
            storage: torch.UntypedStorage | None = x.untyped_storage()
            traced = recorder.add_claim(x.untyped_storage())
            assert recorder.add_claim(x.untyped_storage()) is traced
            recorder.on_save([traced])
            del x
            square()  # tick 2
            storage = None  # swapped out
            square()  # 3
            recorder.retired(traced)
            square()  # 4: one of two claims is left
            recorder.retired(traced)
            square()  # 5
        trace = recorder.finish()
    assert storage is None
    record = tensors_of(trace)[traced.number]
    assert (record.released, record.dies) == (1, 4)


def test_a_storage_that_dies_under_its_claim_is_released_then(sim: SimDevice) -> None:
    """A handle dropped its memory while the model still held the tensor: its later release is seen by a weak reference."""
    with sim.compute():
        recorder = Recorder(sim)
        with recorder:
            x = square()  # tick 0
            traced = recorder.add_claim(x.untyped_storage())
            recorder.on_save([traced])  # 1
            square()  # 2
            del x
            square()  # 3
            recorder.on_use([traced])
        trace = recorder.finish()
    record = tensors_of(trace)[traced.number]
    assert (record.released, record.dies) == (2, trace.num_ticks)


def test_what_is_held_until_its_use_is_never_released(sim: SimDevice) -> None:
    with sim.compute():
        recorder = Recorder(sim)
        with recorder:
            x = square()
            view = x[2:]
            traced = recorder.add_claim(x.untyped_storage())
            recorder.on_save([traced])
            del x
            square()
            recorder.on_use([traced])
            del view
            square()
        trace = recorder.finish()
    assert tensors_of(trace)[traced.number].released == NEVER


def test_one_call_of_autograd_is_one_tick_whatever_was_taken_apart(sim: SimDevice) -> None:
    with sim.compute():
        recorder = Recorder(sim)
        with recorder:
            a, b = square(), square()
            one, two = recorder.add_claim(a.untyped_storage()), recorder.add_claim(b.untyped_storage())
            for saved in ([one, two], [one, None], [one, one], [None], []):
                recorder.on_save(saved)
                recorder.on_use(saved)
        trace = recorder.finish()
    expected = [UNMOVABLE, one.number, one.number, UNMOVABLE, UNMOVABLE]
    assert [hook.tensor for hook in hooks_of(trace) if not hook.use] == expected
    assert [hook.tensor for hook in hooks_of(trace) if hook.use] == expected
    assert trace.num_ticks == 2 + 10


def test_another_recorders_storages_are_nobodys(sim: SimDevice) -> None:
    with sim.compute():
        x = square()
        old = Recorder(sim)
        stale = old.add_claim(x.untyped_storage())
        old.finish()
        recorder = Recorder(sim)
        with recorder:
            other = square()
            mine = recorder.add_claim(other.untyped_storage())
            recorder.sendable(stale)
            recorder.restored(stale, other.untyped_storage())
            recorder.on_use([stale])
            recorder.retired(stale)
            recorder.on_use([stale, mine])
        trace = recorder.finish()
    assert [hook.tensor for hook in hooks_of(trace)] == [UNMOVABLE, mine.number]
    assert len(tensors_of(trace)) == 1


def test_a_subclass_is_recorded_by_what_it_wraps(sim: SimDevice) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    with sim.compute():
        recorder = Recorder(sim)
        with recorder:
            pair = TwoTensor(square(), square())
            doubled = pair + pair
        trace = recorder.finish()
        assert isinstance(doubled, TwoTensor)
        assert torch.equal(doubled.a, 2 * square())
    assert names_of(trace) == ["ones", "ones", "add", "add"]
    assert [op.writes for op in ops_of(trace)] == [(0,), (1,), (2,), (3,)]


def test_composites_are_taken_apart(sim: SimDevice) -> None:
    """In inference mode composites arrive whole, and their inner allocations would not be seen."""
    with sim.compute(), torch.inference_mode():
        x, w = square(), square()
        sim.reset_peaks()
        recorder = Recorder(sim)
        with recorder:
            y = torch.nn.functional.linear(x, w).softmax(0).reshape(-1)
        trace = recorder.finish()
    assert "linear" not in names_of(trace) and "softmax" not in names_of(trace)
    assert {"mm", "_softmax"} <= set(names_of(trace))
    assert y.numel() == 256


def test_resizes_end_one_storage_and_begin_another(sim: SimDevice) -> None:
    with sim.compute():
        recorder = Recorder(sim)
        with recorder:
            x = square()  # tick 0
            x.resize_(32, 16)  # 1
            x.untyped_storage().resize_(0)  # past every dispatcher: seen at the next operator that is given it
            x.view(-1)  # 2
        trace = recorder.finish()
    assert [(t.nbytes, t.born, t.dies) for t in tensors_of(trace)] == [(KB, 0, 0), (2 * KB, 1, 1), (0, 2, 3)]


def test_kinds_by_what_is_named_and_by_what_is_seen() -> None:
    def record(*, named: bool) -> dict[TensorKind, int]:
        device = SimDevice()
        torch.manual_seed(0)
        with device.compute():
            model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
            optimizer = torch.optim.AdamW(model.parameters())
            x = torch.randn(4, 16)

            def step() -> None:
                model(x).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()

            step()
            recorder = Recorder(device, model=model if named else None, optimizers=[optimizer] if named else [])
            with recorder, RecordingHooks(recorder):
                step()
            trace = recorder.finish()
        return {kind: sum(t.kind is kind for t in tensors_of(trace)) for kind in TensorKind}

    counts, seen = record(named=True), record(named=False)
    assert counts == seen  # running statistics too, which are updated past their operator's schema
    # Weights and biases of three layers; mean, variance and count; as many gradients; two moments and a count for each.
    assert [counts[kind] for kind in (TensorKind.PARAMETER, TensorKind.BUFFER, TensorKind.GRADIENT, TensorKind.OPTIMIZER)] == [
        6, 3, 6, 18]  # fmt: skip
    assert counts[TensorKind.INPUT] == 1
    assert counts[TensorKind.ACTIVATION] > 0


def test_what_the_step_never_touches_is_in_what_it_began_with(sim: SimDevice) -> None:
    with sim.compute():
        model = nn.Linear(16, 16, bias=False)
        model.weight.grad = square()
        aside = square()
        recorder = Recorder(sim, model=model)
        with recorder:
            square()
            model.weight.grad = None  # gone without any operator
            square()
            del aside  # and so is the unnamed tensor
            square()
        trace = recorder.finish()
    assert trace.start_bytes == 3 * KB
    gone = [(t.kind, t.nbytes, t.dies) for t in tensors_of(trace) if t.born < 0 and t.dies < trace.num_ticks]
    assert gone == [(TensorKind.GRADIENT, KB, 0), (TensorKind.INPUT, KB, 1)]
    assert [t.kind for t in tensors_of(trace) if t.dies == trace.num_ticks] == [TensorKind.PARAMETER]


def test_phases(sim: SimDevice) -> None:
    with sim.compute():
        x = square().requires_grad_()
        recorder = Recorder(sim)
        with recorder, RecordingHooks(recorder):
            for _ in range(2):
                x.exp().sum().backward()
            with torch.no_grad():
                x.sub_(1.0)
            x.sin().sum()  # an evaluation with a graph: forward again from its save on
        trace = recorder.finish()
    phases = [op.phase for op in ops_of(trace)]
    changes = [phase for i, phase in enumerate(phases) if i == 0 or phases[i - 1] is not phase]
    assert changes == [
        StepPhase.FORWARD, StepPhase.BACKWARD, StepPhase.FORWARD, StepPhase.BACKWARD, StepPhase.OPTIMIZER, StepPhase.FORWARD,
    ]  # fmt: skip
    assert [op.name for op in ops_of(trace) if op.phase is StepPhase.OPTIMIZER] == ["aten::sub_.Tensor"]


class Swapper(torch.autograd.graph.saved_tensors_hooks):
    """Drops every saved storage at the next hook and brings it back for its use: the least that swapping can be."""

    def __init__(self, recorder: Recorder) -> None:
        self.counts = counts = list[int]()
        held: list[_Held] = []
        back: dict[int, weakref.ref[torch.UntypedStorage]] = {}

        def drop() -> None:
            while held:
                saved = held.pop()
                with recorder.paused(), torch.no_grad():
                    assert saved.storage is not None
                    saved.host, saved.storage = copied(saved.storage), None

        def on_save(t: Tensor) -> _Held | Tensor:
            drop()
            if isinstance(t, nn.Parameter) or isinstance(t._base, nn.Parameter):
                recorder.on_save([])
                return t
            saved = _Held(recorder, t)
            recorder.on_save([saved.traced])
            held.append(saved)
            counts.append(1)
            return saved

        def on_use(saved: _Held | Tensor) -> Tensor:
            drop()
            if isinstance(saved, Tensor):
                recorder.on_use([])
                return saved
            recorder.on_use([saved.traced])
            with recorder.paused(), torch.no_grad():
                ref = back.get(saved.traced.number)
                storage = None if ref is None else ref()
                if storage is None:
                    assert saved.host is not None
                    storage = copied(saved.host)
                    back[saved.traced.number] = weakref.ref(storage)
                    recorder.restored(saved.traced, storage)
                return torch.empty(0, dtype=saved.dtype).set_(storage, *saved.geometry)

        super().__init__(on_save, on_use)


class _Held:
    def __init__(self, recorder: Recorder, t: Tensor) -> None:
        self.recorder = recorder
        self.storage: torch.UntypedStorage | None = t.untyped_storage()
        self.host: torch.UntypedStorage | None = None
        self.traced = recorder.add_claim(self.storage)
        self.dtype = t.dtype
        self.geometry = (int(t.storage_offset()), t.shape, t.stride())

    def __del__(self) -> None:
        self.recorder.retired(self.traced)


def test_a_step_recorded_under_swapping_is_the_step_without() -> None:
    """The operators, storages and lifetimes are equal, regardless of what swapping drops, copies and allocates meanwhile."""

    def record(*, swapping: bool) -> Trace:
        device = device_bound()
        torch.manual_seed(2)
        with device.compute():
            model = GPT(GPTConfig(layers=2, width=32, heads=2, context=16))
            optimizer = torch.optim.AdamW(model.parameters())
            ids = torch.randint(256, (2, 16))
            recorder = Recorder(device, model=model, optimizers=[optimizer])
            hooks = Swapper(recorder) if swapping else RecordingHooks(recorder)
            with recorder, hooks:
                for _ in range(2):
                    model.loss(ids, ids).backward()
                optimizer.step()
            if isinstance(hooks, Swapper):
                assert len(hooks.counts) > 50
            return recorder.finish()

    plain, swapped = record(swapping=False), record(swapping=True)
    columns = ("op_name", "op_phase", "op_tick", "read_tensors", "write_tensors", "tensor_bytes", "tensor_kind",
               "tensor_born", "tensor_dies", "tensor_released", "hook_tick", "hook_use", "hook_tensor")  # fmt: skip
    assert [column for column in columns if getattr(plain, column).tolist() != getattr(swapped, column).tolist()] == []
    assert plain.start_bytes == swapped.start_bytes


# --- times


def device_bound() -> SimDevice:
    """A device whose clock is the kernels' alone: launches take the host no time."""
    spec = SimDevice().spec
    cost = CostModel(spec=spec, launch_us=0, view_us=0, event_us=0, copy_us=0)
    return SimDevice(cost=cost)


def big() -> Tensor:
    return torch.ones(512, 512)


def test_waits_are_no_operators_time() -> None:
    device = device_bound()
    d2h = device.new_stream("d2h")
    host = device.alloc_pinned(1 << 20)

    def record(*, wait: bool) -> Trace:
        with device.compute():
            x = big()
            recorder = Recorder(device)
            with recorder:
                y = x.exp()
                if wait:
                    with recorder.paused(), recorder.untimed():
                        flat = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
                        compute = device.current_stream()
                        d2h.wait(compute.record())
                        d2h.copy(host, flat)
                        compute.wait(d2h.record())
                y.exp()
            return recorder.finish()

    before = device.current_stream().record(timed=True)
    waited = record(wait=True)
    after = device.current_stream().record(timed=True)
    device.synchronize()
    plain = record(wait=False)
    assert waited.op_us.tolist() == pytest.approx(plain.op_us.tolist())
    assert after.elapsed_us(before) > 2 * float(waited.op_us.sum())


def test_sparse_events_divide_a_stretch_by_an_estimate() -> None:
    device = device_bound()

    def record(ops_per_event: int) -> Trace:
        with device.compute():
            x = torch.ones(2048, 2048)  # large enough for no kernel to be the shortest there is
            recorder = Recorder(device, times=EventTimes(device, ops_per_event=ops_per_event))
            with recorder:
                for _ in range(3):
                    x.exp().t()
                    torch.add(x, x)
            return recorder.finish()

    exact, sparse = record(1), record(4)
    assert sparse.duration_us == pytest.approx(exact.duration_us)
    assert float(sparse.op_us[:4].sum()) == pytest.approx(float(exact.op_us[:4].sum()))
    assert [us == 0 for us in sparse.op_us] == [op.name == "aten::t" for op in ops_of(sparse)]


def test_timing_counts_no_flops_by_reading_the_device(monkeypatch: pytest.MonkeyPatch, sim: SimDevice) -> None:
    """And a formula of torch's that fails on an operator's arguments does not end the step."""
    from torch.utils import flop_counter

    fails = refusing(AssertionError, "not these arguments")
    monkeypatch.setitem(flop_counter.flop_registry, torch.ops.aten.mm, fails)
    x = square()
    recorder = Recorder(sim, times=EventTimes(sim, ops_per_event=2))  # outside of compute(), whose own price would ask too
    with recorder:
        x @ x
    assert names_of(recorder.finish()) == ["mm"]


# --- fake tensors


def test_a_fake_step_is_the_real_one() -> None:
    """No memory, no kernel: the same operators, storages and lifetimes, with times by their price."""

    def step(model: nn.Module, x: Tensor, recorder: Recorder) -> Trace:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with recorder, RecordingHooks(recorder):
            model(x).square().sum().backward()
            optimizer.step()
        return recorder.finish()

    def make() -> tuple[nn.Module, Tensor]:
        return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4)), torch.randn(8, 16)

    device = device_bound()
    with device.compute():
        model, x = make()
        real = step(model, x, Recorder(device, model=model))
    elsewhere = device_bound()
    with FakeTensorMode():
        model, x = make()
        fake = step(model, x, Recorder(elsewhere, model=model, times=PricedTimes(elsewhere.cost.kernel_us)))
    assert elsewhere.peak_allocated_bytes() == 0
    assert [op.name for op in ops_of(fake)] == [op.name for op in ops_of(real)]
    for column in ("op_phase", "op_tick", "read_tensors", "write_tensors", "tensor_bytes", "tensor_kind",
                   "tensor_born", "tensor_dies", "tensor_released", "tensor_sendable", "hook_tick", "hook_tensor"):  # fmt: skip
        assert getattr(fake, column).tolist() == getattr(real, column).tolist(), column
    assert fake.start_bytes == real.start_bytes
    assert fake.op_us.tolist() == pytest.approx(real.op_us.tolist())
