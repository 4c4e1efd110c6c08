"""Parameters that are on the device in turn: training, and any access to a parameter, have plain PyTorch's values.

The reference is plain PyTorch on the same device, with nothing of ours around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import chameleon_mm as cm
from chameleon_mm.device import Device
from chameleon_mm.device.process import ThisProcess
from chameleon_mm.state import hosted, parameter_swap
from chameleon_mm.state import parameter_watch as watch
from chameleon_mm.state.hosted import HostedStorage, Where
from chameleon_mm.state.parameter_swap import ParameterSwap, plain_parts
from chameleon_mm.units import KIB, MIB
from tests._fakes import refusing
from tests._ordering import SLOW_LINK
from tests._parameter_programs import OPTIMIZERS, PROGRAMS, WIDTH, Make, Plain, Swapped, go_on, mlp, train
from tests._programs import same
from tests.observed import SimLifetimeError, SimRaceError

pytestmark = pytest.mark.usefixtures("no_gc", "short_search")


@pytest.fixture(autouse=True)
def _small_ones_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosted, "MIN_BYTES", KIB)


@pytest.fixture(autouse=True)
def _no_watch_stays() -> Iterator[None]:
    """A watch that outlives its test would see the later ones."""
    yield
    stays = torch.overrides._get_current_function_mode()
    while torch.overrides._get_current_function_mode() is not None:
        torch.overrides._pop_mode()
    assert stays is None


def left(loop: Plain) -> list[Tensor]:
    """Return the tensors after a program: parameters, buffers, gradients, optimizer state."""
    assert loop.trained is not None
    tensors: list[Any] = [*loop.trained.parameters(), *loop.trained.buffers(), *(p.grad for p in loop.trained.parameters())]
    state = {} if loop.stepped is None else loop.stepped.state_dict()["state"]
    tensors += [value for entry in state.values() for _, value in sorted(entry.items())]
    return [t.detach().cpu().clone() for t in tensors if isinstance(t, Tensor)]


HOLDING = ("gradient penalty", "gradients that are used and have graphs", "modules of many kinds", "read between steps")
"""Programs that hold more on the device by themselves than the budget."""


def away(loop: Swapped) -> list[Tensor]:
    """The parameters that are in host memory alone."""
    assert loop.trained is not None
    params = list(loop.trained.parameters())
    with torch._C.DisableTorchFunction():  # or asking would bring them back
        return [p for p in params if not p.untyped_storage().nbytes()]


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plans": {},
    "rule": {"plans": False},
    "parameters alone": {"with_optimizer": False},
}


COMBINED = [
    pytest.param(name, how, marks=() if number % 3 == place else [pytest.mark.slow, pytest.mark.thorough])
    for number, name in enumerate(PROGRAMS)
    for place, how in enumerate(CONFIGURATIONS)
]
"""Each program with one configuration; with the two others in `thorough`."""


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph:UserWarning")  # a program does, and breaks the cycle
@pytest.mark.parametrize(("name", "how"), COMBINED)
def test_a_program_has_plain_pytorchs_bits(name: str, how: str, device: Device) -> None:
    plain = Plain(device.torch_device)
    expected = PROGRAMS[name](plain)
    with device.compute():
        loop = Swapped(device, (100 if how == "parameters alone" else 160) * KIB, **CONFIGURATIONS[how])
        seen = PROGRAMS[name](loop)
        loop.close()
        assert loop.session is not None
        report = loop.session.report()
        assert same(seen, expected)
        assert same(left(loop), left(plain))
    assert report.parameter_bytes_swapped_in > 0
    told = [figures.peak_hbm_bytes for figures in report.step_figures]
    assert len(told) == len(loop.peaks) and all(bytes_ <= peak for bytes_, peak in zip(told, loop.peaks, strict=True))
    if name not in HOLDING and how != "parameters alone":
        assert max(loop.peaks) <= loop.session.hbm_budget
    assert loop.session.pool.stats().live_bytes == 0


def test_optimizer_state_fits_beside_what_other_code_holds(device: Device) -> None:
    """The budget is then larger, and what may come and go at once is not."""
    with device.compute():
        held = torch.empty(1 * MIB, device=device.torch_device, dtype=torch.uint8)
        loop = Swapped(device, 160 * KIB, **CONFIGURATIONS["rule"])
        PROGRAMS["written by hand"](loop)
        loop.close()
    assert loop.session is not None and held.nbytes > loop.session.hbm_budget // 2
    assert max(loop.peaks) <= loop.session.hbm_budget


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_two_hundred_steps_have_plain_pytorchs_bits(make: Make, device: Device) -> None:
    plain = Plain(device.torch_device)
    expected = train(plain, make, steps=200)
    with device.compute():
        loop = Swapped(device, 160 * KIB)
        assert same(train(loop, make, steps=200), expected)
        loop.close()
        assert same(left(loop), left(plain))


# --- memory


def deep() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(5) for layer in mlp().children()))


def test_a_model_four_times_the_device_trains_on_it() -> None:
    """The device has a quarter of plain training's memory: the model is built on the host, and never all on the device."""
    plain = cm.SimDevice()
    with plain.compute():
        expected = train(Plain(plain.torch_device), OPTIMIZERS["AdamW, fused"], deep)
        plain_peak = plain.peak_allocated_bytes()
    small = cm.SimDevice("h200", plain_peak // 4)
    loop = Swapped(small, 0)
    loop.budget = plain_peak // 4
    loop.model(deep)  # outside of `compute()`: in host memory
    loop.optimizer(OPTIMIZERS["AdamW, fused"])
    with small.compute():
        seen = go_on(loop, 4)
        assert same(seen, expected)
        assert max(loop.peaks) <= plain_peak // 4
        loop.close()
    assert loop.session is not None
    assert loop.session._executor.metrics.totals.budget_misses == 0


def test_after_the_session_all_is_on_the_device_and_plain(device: Device) -> None:
    plain = Plain(device.torch_device)
    train(plain, steps=3)
    go_on(plain, 2)
    with device.compute():
        loop = Swapped(device, 128 * KIB)
        train(loop, steps=3)
        model = loop.trained
        assert model is not None
        assert away(loop)
        loop.close()
        assert all(p.untyped_storage().nbytes() for p in model.parameters())
        assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters())
        assert torch.overrides._get_current_function_mode() is None
        after = Plain(device.torch_device)
        after.trained, after.stepped = loop.trained, loop.stepped
        go_on(after, 2)
        assert same(left(after), left(plain))


def test_what_does_not_fit_after_the_session_is_host_memory(caplog: pytest.LogCaptureFixture) -> None:
    device = cm.SimDevice("h200", 400 * KIB)
    plain = Plain(device.torch_device)
    train(plain, OPTIMIZERS["Adafactor"], steps=2)
    with device.compute():
        loop = Swapped(device, 80 * KIB, with_optimizer=False)
        train(loop, OPTIMIZERS["Adafactor"], steps=2)
        blocking = torch.zeros((device.capacity - device.allocated_bytes() - 12 * KIB) // 4)
        loop.close()
        assert "of parameters and gradients do not fit on the device and are in host memory now" in caplog.text
        del blocking
    assert same(left(loop), left(plain))


@pytest.mark.parametrize("host_bytes", [0, 40 * KIB, 120 * KIB])
def test_what_the_host_does_not_take_stays(host_bytes: int, device: Device) -> None:
    plain = Plain(device.torch_device)
    expected = train(plain)
    with device.compute():
        pool = cm.PinnedPool(max(1, host_bytes), device=device, chunk_bytes=max(1, host_bytes))
        loop = Swapped(device, 160 * KIB, pool=pool)
        assert same(train(loop), expected)
        loop.close()
        assert same(left(loop), left(plain))
        assert loop.session is not None
        assert loop.session.report().fallbacks > 0


def test_a_budget_that_is_changed(device: Device) -> None:
    plain = Plain(device.torch_device)
    expected = [*train(plain), *go_on(plain, 2), *go_on(plain, 2)]
    with device.compute():
        loop = Swapped(device, 160 * KIB)
        seen = train(loop)
        session = loop.opened()
        budget = session.hbm_budget
        for change in (64 * KIB, -32 * KIB):
            loop.peaks.clear()
            session.hbm_budget = budget + change
            seen += go_on(loop, 2)
            assert max(loop.peaks) <= budget + change
        with pytest.raises(cm.InfeasibleBudget):
            session.hbm_budget = 32 * KIB
        loop.close()
        assert same(seen, expected)
        assert same(left(loop), left(plain))


def test_an_error_in_a_step_leaves_all_as_in_plain_pytorch(device: Device) -> None:
    def fail(loop: Plain) -> list[Tensor]:
        seen = train(loop, steps=2)
        assert loop.trained is not None
        assert loop.stepped is not None
        for at in ("forward", "backward"):
            x = loop.batch(9)
            with pytest.raises(RuntimeError, match="the user's own"), loop.step():
                for i, layer in enumerate(loop.trained.children()):
                    x = layer(x)
                    if at == "forward" and i == 4:
                        raise RuntimeError("the user's own")
                    if at == "backward" and i == 4:
                        x.register_hook(refusing(RuntimeError, "the user's own"))
                x.square().mean().backward()
            del x
        loop.stepped.step()
        loop.stepped.zero_grad()
        return [*seen, *go_on(loop, 2)]

    plain = Plain(device.torch_device)
    expected = fail(plain)
    with device.compute():
        loop = Swapped(device, 160 * KIB)
        seen = fail(loop)
        loop.close()
        assert same(seen, expected)
        assert same(left(loop), left(plain))


# --- orders that are missing


def without_wait(self: HostedStorage, compute: Any) -> None:
    if self.where is Where.COMING:
        assert self._in is not None
        self._context.back_queue.issue(self._in)
        self.where, self._held = Where.ON_DEVICE, None


def without_order(self: HostedStorage) -> bool:
    assert self._out is not None
    self._context.out_queue.issue(self._out)
    return True


def without_write(self: HostedStorage) -> None:
    """Mutant: a gradient or a parameter counts as equal to its host copy despite writes."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # freed unordered as well, in a finaliser
@pytest.mark.parametrize(
    ("what", "mutant"), [("arrive", without_wait), ("_ordered_after_copy", without_order)], ids=["Swap-in", "Reclaim"]
)
def test_a_missing_order_is_seen(what: str, mutant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostedStorage, what, mutant)
    device = cm.SimDevice(SLOW_LINK)
    loop = Swapped(device, 160 * KIB, plans=False)
    with device.compute():
        with pytest.raises(SimRaceError):
            train(loop)
        with suppress(Exception):  # the mutant may leave errors
            loop.close()


@pytest.mark.parametrize(
    ("owner", "what", "mutant"),
    [
        (HostedStorage, "note_writes", without_write),
        (watch, "_may_write", lambda *call: ()),
    ],
    ids=["writes", "writes that no counter tells of"],
)
def test_a_rule_that_is_missing_is_seen(
    owner: Any, what: str, mutant: Callable[..., Any], sim: cm.SimDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each without its rule: some program has other bits, or an operator finds no memory under a tensor."""
    monkeypatch.setattr(owner, what, mutant)

    def goes_wrong(name: str) -> bool:
        expected = PROGRAMS[name](Plain(sim.torch_device))
        with sim.compute():
            loop = Swapped(sim, 128 * KIB, plans=False)
            try:
                return not same(PROGRAMS[name](loop), expected)
            except (SimLifetimeError, RuntimeError):
                return True
            finally:
                with suppress(Exception):  # whatever the mutant left behind
                    loop.close()

    names = ("accumulation, clipped, gradients kept", "modules of many kinds", "checkpointed", "written by hand")
    assert any(goes_wrong(name) for name in names)


@pytest.mark.gpu
def test_operators_saved_by_other_peoples_hooks_must_bring_what_they_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    device = cm.CudaDevice()
    monkeypatch.setattr(ParameterSwap, "use_at", lambda self, nodes, entries: None)
    loop = Swapped(device, 160 * KIB, plans=False)
    with device.compute():
        with pytest.raises(RuntimeError, match="out of bounds for storage of size 0"):
            PROGRAMS["checkpointed"](loop)
        loop.close()


# --- bad input


def test_bad_input_is_one_sentence(device: Device) -> None:
    model = mlp().to(device.torch_device)
    with pytest.raises(ValueError, match="parameters: expected 'keep' or 'swap', got 'swop'"):
        cm.SwapSession("1GiB", device=device, model=model, parameters="swop")
    with pytest.raises(ValueError, match="expected the model whose parameters are swapped, got none; pass model=, too"):
        cm.SwapSession("1GiB", device=device, parameters="swap")
    with pytest.raises(ValueError, match="root is compiled; leave parameters='keep'"):
        cm.SwapSession("1GiB", device=device, model=cast(nn.Module, torch.compile(model)), parameters="swap")
    with pytest.raises(cm.InfeasibleBudget, match=r"the room for a parameter of .* its gradient and what comes next") as caught:
        cm.SwapSession(KIB, device=device, model=model, parameters="swap")
    assert caught.value.smallest_bytes is not None


def swapped_directly(part: nn.Module) -> None:
    assert isinstance(part, nn.Linear)
    torch.utils.swap_tensors(part.weight, nn.Parameter(part.weight.detach() * 2))


CONVERSIONS: dict[str, Callable[[nn.Module], object]] = {
    "to another dtype": lambda part: part.bfloat16().float(),
    "to another place": lambda part: part.to_empty(device=next(part.parameters()).device),
    "loaded": lambda part: part.load_state_dict({name: value * 2 for name, value in part.state_dict().items()}),
    "directly": swapped_directly,
}


@pytest.mark.parametrize("kind", CONVERSIONS)
def test_a_conversion_by_swapped_tensors_is_refused_with_nothing_changed(device: Device, kind: str) -> None:
    """Only the swapped model refuses. Plain PyTorch, in the same program, does not convert."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        return mlp().to(device.torch_device)

    def trained(model: nn.Module, session: cm.SwapSession | None = None) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for number in range(4):
            with nullcontext() if session is None else session.step():
                model(torch.full((4, WIDTH), number + 1.0, device=device.torch_device)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            if number == 1 and session is not None:
                torch.__future__.set_swap_module_params_on_conversion(True)
                try:
                    CONVERSIONS[kind](nn.Linear(WIDTH, WIDTH))
                    with pytest.raises(RuntimeError, match=words):
                        CONVERSIONS[kind](model.get_submodule("0"))
                finally:
                    torch.__future__.set_swap_module_params_on_conversion(False)
        return [p.detach().clone() for p in model.parameters()]

    words = "Cannot swap t1" if kind == "directly" else r"^parameters='swap': expected a conversion of the model that keeps"
    plain, model = trained(made()), made()
    budget = device.allocated_bytes() + 4 * MIB
    with device.compute(), cm.SwapSession(budget, device=device, model=model, parameters="swap", min_bytes=1) as session:
        ours = trained(model, session)
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


TORCHSCRIPT: dict[str, Callable[[nn.Module], nn.Module]] = {
    "scripted": torch.jit.script,
    "traced": lambda part: torch.jit.trace(part, torch.ones(2, WIDTH)),
    "scripted inside": lambda part: nn.Sequential(nn.ModuleDict({"inner": torch.jit.script(part)})["inner"]),
    "traced function of it": lambda part: torch.jit.trace_module(part, {"forward": torch.ones(2, WIDTH)}),
}


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("make", TORCHSCRIPT.values(), ids=TORCHSCRIPT)
def test_torchscript_is_refused_by_name(make: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), make(nn.Linear(WIDTH, WIDTH)))
    with pytest.raises(ValueError, match=r"on one device, got one whose 1(\.0)? is TorchScript, .*; leave parameters='keep'$"):
        cm.SwapSession("1GiB", device="sim", model=model, parameters="swap")


def test_parameters_that_somebody_else_shards_are_refused(device: Device) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    model = nn.Linear(WIDTH, WIDTH, device=device.torch_device)
    model.weight = nn.Parameter(TwoTensor(torch.ones(WIDTH, WIDTH), torch.ones(WIDTH, WIDTH)))
    with pytest.raises(
        ValueError,
        match=r"expected plain tensors, .* got TwoTensor for weight, which is trained, or which somebody else shards",
    ):
        cm.SwapSession("1GiB", device=device, model=model, parameters="swap")


class Packed(nn.Module):
    """Frozen bytes as a quantised layer packs them, and a scale that is trained. It notes where its kernel reads them."""

    def __init__(self, packed: Tensor) -> None:
        super().__init__()
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.read_at: list[list[tuple[int, int, tuple[int, ...]]]] = []

    def forward(self, x: Tensor) -> Tensor:
        whole: Any = self.packed
        parts = [whole.a, whole.b] if hasattr(whole, "a") else [whole]
        with torch._C.DisableTorchFunction():  # as a kernel does: code that asks in sight may write, and is no kernel
            assert all(part.untyped_storage().nbytes() for part in parts)
            self.read_at.append([(part.data_ptr() % ALIGNED, part.storage_offset(), part.stride()) for part in parts])
        weight = sum(part.view(torch.int8)[: WIDTH * WIDTH].float().view(WIDTH, WIDTH) for part in parts) / 128
        out: Tensor = torch.tanh(self.scale * (x @ cast(Tensor, weight)))
        return out


ALIGNED = 64
"""Bytes by which any storage is aligned that torch allocates, on a CPU and on a GPU."""


def packed_layers(device: torch.device) -> nn.Module:
    """Two weights in one storage, the other not aligned; one inside of its own; one of a wrapper subclass; plain ones."""
    from torch.testing._internal.two_tensor import TwoTensor

    torch.manual_seed(0)
    size = WIDTH * WIDTH

    def packed(size: int) -> Tensor:
        return torch.randint(256, (size,), dtype=torch.uint8).to(device)

    pair, third = packed(2 * size + 7), packed(3 * size)
    wrapped = TwoTensor(packed(size), packed(size + 3)[:size])
    weights = [pair[:size], pair[size + 7 :], third[size : 2 * size], wrapped, *(packed(size) for _ in range(4))]
    return nn.Sequential(*map(Packed, weights)).to(device)


def test_packed_weights_come_back_at_the_alignment_that_they_left_and_leave_once(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of packed weights load many bytes at once, from addresses that they do not check."""
    monkeypatch.setattr(parameter_swap, "WINDOW_SHARE", 0.0)  # room for the fewest weights

    def trained(**given: Any) -> tuple[list[Tensor], list[Any], int, Any]:
        model: Any = packed_layers(device.torch_device)
        frozen = {s._cdata: s.nbytes() for layer in model for t in plain_parts(layer.packed) for s in [t.untyped_storage()]}
        seen, handle = [], None
        if given:
            handle = cm.attach(model, hbm_budget=device.allocated_bytes() + 256 * KIB, device=device, **given)
        for step in range(4):
            torch.manual_seed(step)
            loss = model(torch.randn(WIDTH, WIDTH).to(device.torch_device)).square().mean()
            loss.backward()
            seen += [loss.detach().cpu(), *(p.grad.cpu().clone() for p in model.parameters() if p.grad is not None)]
            model.zero_grad()
        if handle is not None:
            handle.detach()
        return seen, [layer.read_at for layer in model], sum(frozen.values()), handle

    expected, at, nbytes, _ = trained()
    with device.compute():
        seen, at_then, _, handle = trained(host_budget="8MiB", parameters="swap")
    assert same(expected, seen)
    assert at_then == at
    assert len({address for layer in at for address, _, _ in layer[0]}) == 2
    assert len({offset for layer in at for _, offset, _ in layer[0]}) == 3
    report = handle.report()
    assert report.parameter_bytes_swapped_in > 2 * nbytes
    assert report.parameter_bytes_swapped_out == nbytes


def test_a_forked_child_is_told_that_it_cannot_read_them(sim: cm.SimDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    with sim.compute():
        loop = Swapped(sim, 160 * KIB)
        train(loop, steps=1)
        assert loop.trained is not None
        gone = away(loop)[0]
        pid = ThisProcess.pid
        monkeypatch.setattr(ThisProcess, "pid", pid + 1)
        with pytest.raises(RuntimeError, match=r"expected to be read in the process of its session .* got a read in a forked"):
            gone.sum()
        monkeypatch.setattr(ThisProcess, "pid", pid)
        loop.close()


def test_a_lazy_model_is_told_to_run_first() -> None:
    with pytest.raises(ValueError, match="expected parameters that have a shape"):
        cm.SwapSession("1GiB", device="sim", model=nn.LazyLinear(4), parameters="swap")


@torch.library.custom_op("chameleon_mm_tests::reads", mutates_args=())
def reads(x: Tensor) -> Tensor:
    return x + 1


@torch.library.custom_op("chameleon_mm_tests::writes", mutates_args={"x"})
def writes(x: Tensor) -> None:
    x.add_(1)


def test_an_operator_called_without_its_overloads_name_writes_what_an_overload_may_write() -> None:
    """A frozen weight that one only reads is not copied out again."""
    operators: Any = torch.ops.chameleon_mm_tests
    t = torch.ones(2)
    assert watch._may_write(operators.reads, "reads", (t,), {}) == ()
    assert watch._may_write(operators.writes, "writes", (t,), {}) == ((t,), {})
    assert watch._may_write(torch.ops.aten.add, "add", (t, t), {}) == ((t, t), {})  # its overload `out` writes
