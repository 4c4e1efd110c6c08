"""`attach` finds the steps of any loop, with the bits of plain PyTorch, and leaves nothing installed."""

from __future__ import annotations

import copy
import io
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import chameleon_mm as cm
from chameleon_mm.api.attach import Attachment
from chameleon_mm.device import Device
from chameleon_mm.report.step_history import StepFigures, log_values
from chameleon_mm.swap.metrics import StepKind
from chameleon_mm.units import KIB, MIB
from tests._fakes import refusing
from tests._programs import assert_same, on_a_thread

pytestmark = pytest.mark.usefixtures("short_search")

BUDGET = 10 * MIB
STEPS = 6


def layers(device: torch.device | str = "cpu", *, width: int = 128, drop: float = 0.1) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (
        nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(drop), nn.Linear(4 * width, width)) for _ in range(3)
    )
    return nn.Sequential(*blocks).to(device)


def batch_on(model: nn.Module, rows: int = 512) -> Tensor:
    return torch.randn(rows, 128).to(next(model.parameters()).device)  # the same numbers on every device


Attach = Callable[..., Attachment | None]
Loop = Callable[[torch.device, Attach], list[Tensor]]


def state_of(*things: nn.Module | torch.optim.Optimizer) -> list[Tensor]:
    """All tensors of models and optimizers, on the host."""
    found: list[Tensor] = []
    for thing in things:
        if isinstance(thing, nn.Module):
            found += [t.detach().cpu().clone() for t in thing.state_dict().values()]
        else:
            found += [v.cpu().clone() for state in thing.state.values() for v in state.values() if isinstance(v, Tensor)]
    return found


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(batch_on(model)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def check_bits(
    train: Callable[[Attach], list[Tensor]], device: Device, steps: int, moves: str = "bytes_swapped_out", **given: Any
) -> None:
    """Attached, `train` has the bits of plain PyTorch; so many steps are found, something moves, and nothing is left."""
    torch.manual_seed(1)
    plain = train(lambda *model: None)
    handles: list[Attachment] = []
    # Earlier tests hold bytes on a GPU, which a process has only one of.
    given = {"hbm_budget": device.allocated_bytes() + BUDGET, "min_bytes": 64 * KIB, **given}

    def attach(*model: Any) -> Attachment:
        handles.append(cm.attach(*model, device=device, **given))
        return handles[0]

    torch.manual_seed(1)
    assert_same(plain, train(attach))
    (handle,) = handles
    report = handle.report()
    assert getattr(report, moves) > 0
    assert report.steps == steps
    assert report.problems == ()
    handle.detach()
    check_nothing_left(handle)


def micro_batches(where: torch.device, attach: Attach) -> list[Tensor]:
    """Accumulation, clipping, evaluation with gradients off and on, and a scheduler."""
    model = layers(where)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    attach(model)
    seen = []
    for i in range(STEPS):
        for _ in range(2):
            loss = model(batch_on(model)).square().mean() / 2
            loss.backward()
            seen.append(loss.detach().cpu())
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if i % 2:
            model.eval()
            with torch.no_grad():
                seen.append(model(batch_on(model, 8)).sum().cpu())
            model.train()
    return seen + state_of(model, optimizer)


def skipped_steps(where: torch.device, attach: Attach) -> list[Tensor]:
    """No optimizer steps in one iteration of three, as where a gradient scaler has found an infinity."""
    model = layers(where)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    attach(model)
    for i in range(STEPS):
        model(batch_on(model)).square().mean().backward()
        if i % 3 != 1:
            optimizer.step()
        optimizer.zero_grad()
    return state_of(model, optimizer)


def two_optimizers(where: torch.device, attach: Attach) -> list[Tensor]:
    """Train with an optimizer for weights, another for all else. From the second step on, the second one ends a step."""
    model = layers(where)
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(weights, lr=1e-2), torch.optim.AdamW(others, lr=1e-3)]
    attach(model)
    for _ in range(STEPS):
        model(batch_on(model)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return state_of(model, *optimizers)


def closures(where: torch.device, attach: Attach) -> list[Tensor]:
    """Forward and backward run inside of the optimizer's step, several times: each time is a step of the session."""
    model = layers(where, drop=0.0)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-2, max_iter=3)
    attach(model)
    for _ in range(STEPS):
        batch = batch_on(model)

        def closure(batch: Tensor = batch) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(batch).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    return state_of(model)


def adversaries(where: torch.device, attach: Attach) -> list[Tensor]:
    """A second model, whose own optimizer ends no step, reads the first one's results."""
    maker, judge = layers(where), layers(where, drop=0.0)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-2) for model in (maker, judge)]
    attach(maker)
    for _ in range(STEPS):
        made = maker(batch_on(maker))
        judge(made.detach()).square().mean().backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        judge(made).mean().backward()
        optimizers[0].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return state_of(maker, judge)


def failures(where: torch.device, attach: Attach) -> list[Tensor]:
    """Some forwards and backwards raise, and the loop goes on."""
    model = layers(where)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    attach(model)
    for i in range(STEPS):
        try:
            out = model(batch_on(model))
            if i == 1:
                raise RuntimeError("in forward")
            if i == 3:
                out.register_hook(refusing(RuntimeError, "in backward"))
            out.square().mean().backward()
            optimizer.step()
        except RuntimeError:
            pass
        optimizer.zero_grad()
    return state_of(model, optimizer)


def by_hand(where: torch.device, attach: Attach) -> list[Tensor]:
    """No optimizer at all: the loop writes to the parameters, and gradients become zeros, which are never gone."""
    model = layers(where)
    attach(model)
    for _ in range(STEPS):
        model(batch_on(model)).square().mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                p.sub_(1e-2 * p.grad)
                p.grad.zero_()
    return state_of(model)


def thawed_later(where: torch.device, attach: Attach) -> list[Tensor]:
    """The optimizer has no parameter of the model at first, and gets them after two steps."""
    model, head = layers(where), nn.Linear(128, 128).to(where)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    model.requires_grad_(requires_grad=False)
    attach(model)
    for i in range(STEPS):
        if i == 2:
            model.requires_grad_()
            optimizer.add_param_group({"params": [*model.parameters()]})
        head(model(batch_on(model))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=i < 2)
    return state_of(model, head, optimizer)


def tangents(where: torch.device, attach: Attach) -> list[Tensor]:
    """Backward through forward-mode derivatives: where a parameter has no tangent, a tensor without memory is saved."""
    model = layers(where, drop=0.0)  # CUDA's dropout has no such derivative
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    attach(model)
    for _ in range(STEPS):
        with forward_ad.dual_level():
            batch = batch_on(model)
            out = forward_ad.unpack_dual(model(forward_ad.make_dual(batch, torch.ones_like(batch))))
            (out.primal.square().mean() + out.tangent.square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return state_of(model)


def inner_loops(where: torch.device, attach: Attach) -> list[Tensor]:
    """Steps within a step, by `autograd.grad` and by `functional_call`, which replaces parameters by results."""
    model = layers(where, drop=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    attach(model)
    for _ in range(STEPS):
        given = dict(model.named_parameters())
        loss = model(batch_on(model)).square().mean()
        gradients = torch.autograd.grad(loss, [*given.values()], create_graph=True)
        adapted = {name: p - 0.1 * g for (name, p), g in zip(given.items(), gradients, strict=True)}
        torch.func.functional_call(model, adapted, batch_on(model)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return state_of(model)


LOOPS: dict[Loop, int] = {
    micro_batches: 6, skipped_steps: 6, two_optimizers: 6, closures: 18, adversaries: 6, failures: 5, thawed_later: 6,
    tangents: 6,
    by_hand: 5,  # the last ends as the next forward would begin
    inner_loops: 12,  # `autograd.grad` leaves no gradient, as if it were gone by the next forward
}  # fmt: skip
"""Steps that each has, as its session counts them."""


@pytest.mark.ci
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_loop_has_the_bits_of_plain_pytorch(loop: Loop, device: Device) -> None:
    check_bits(lambda attach: loop(device.torch_device, attach), device, LOOPS[loop])


def check_nothing_left(handle: Attachment) -> None:
    model = handle._model
    assert not [module for module in model.modules() if module._forward_pre_hooks]
    assert handle._optimizer_stepped not in _global_optimizer_post_hooks.values()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert _get_current_dispatch_mode_stack() == []
    assert handle.session.pool.stats().num_live == 0
    handle.detach()  # does nothing


def test_the_state_of_an_optimizer_that_is_given_moves(sim: cm.SimDevice) -> None:
    def train(attach: Attach) -> list[Tensor]:
        model = layers(drop=0.0)
        optimizer = torch.optim.AdamW(model.parameters())
        attach(model, optimizer)
        for _ in range(3):
            step(model, optimizer)
        return state_of(model, optimizer)

    check_bits(train, sim, 3, "state_bytes_swapped_out", hbm_budget="64MiB", min_bytes=None)


def test_a_copy_of_an_attached_model_and_a_file_of_it_are_not_attached(sim: cm.SimDevice) -> None:
    model = layers()
    with cm.attach(model, device=sim):
        average, file = copy.deepcopy(model), io.BytesIO()
        torch.save(model, file)
        assert b"chameleon" not in file.getvalue()
        file.seek(0)
        read = torch.load(file, weights_only=False)
    x = batch_on(model)
    assert torch.equal(average.eval()(x), read.eval()(x))
    with cm.attach(average, device=sim), cm.attach(read, device=sim):
        pass


@pytest.mark.parametrize("way", ["wrapped", "in place"])
def test_a_compiled_model_has_its_own_bits(way: str, sim: cm.SimDevice) -> None:
    def train(attach: Attach) -> list[Tensor]:
        model = layers(drop=0.0)
        called: Any = torch.compile(model, backend="aot_eager") if way == "wrapped" else model
        if way == "in place":
            model.compile(backend="aot_eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        attach(called)
        for _ in range(3):
            step(called, optimizer)
        return state_of(model)

    try:
        check_bits(train, sim, 3)
    finally:
        torch._dynamo.reset()


# --- wrong use


def test_a_model_is_attached_once(sim: cm.SimDevice) -> None:
    model = layers()
    with cm.attach(model, device=sim):
        with pytest.raises(ValueError, match=r"got a Sequential that is attached already; detach that first"):
            cm.attach(model, device=sim)
        with pytest.raises(ValueError, match=r"got a ModuleList whose part '0' is attached already"):
            cm.attach(nn.ModuleList([model]), device=sim)
    cm.attach(model, device=sim).detach()


class Elsewhere(Tensor):
    """Tensor that reports an absent device, as a real tensor there does."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch names no types
        raise AssertionError(f"{func} ran on it")


@pytest.mark.parametrize("name", ["xpu", "mps", "privateuseone", "meta"])
def test_a_model_on_another_kind_of_device_is_refused_by_name_with_nothing_attached(name: str, sim: cm.SimDevice) -> None:
    model, before = layers(), dict(_global_optimizer_post_hooks)
    refused = pytest.raises(ValueError, match=rf"model: expected .* on CUDA, or on the CPU .*, got one on {name}, .* move")
    if name == "meta":
        with cm.attach(layers(), device=sim) as later, refused:
            later._model.to(name)(torch.ones(8, 8, device=name))
        model.to(name)
    else:
        model.register_buffer("mean", Tensor._make_wrapper_subclass(Elsewhere, (8, 8), device=torch.device(name)))
    for device in (sim, None):
        with refused:
            cm.attach(model, device=device)
    with refused, cm.SwapSession(model=model, device=sim):
        raise AssertionError("the session began")
    assert not model._forward_pre_hooks
    assert dict(_global_optimizer_post_hooks) == before
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_a_model_that_comes_to_its_device_later_has_its_budget_checked_before_the_first_step(sim: cm.SimDevice) -> None:
    model = layers(width=8)
    with cm.attach(model, hbm_budget=MIB, device=sim), sim.compute():
        held = torch.ones(MIB)
        with pytest.raises(cm.InfeasibleBudget, match="raise the budget"):
            model(torch.ones(4, 8))
        del held
        model(torch.ones(4, 8)).sum().backward()


def test_a_model_whose_first_forward_makes_its_parameters(sim: cm.SimDevice) -> None:
    def train(attach: Attach) -> list[Tensor]:
        model = nn.Sequential(nn.LazyLinear(512), nn.GELU(), nn.LazyLinear(128))
        attach(model)
        model(torch.randn(512, 128)).square().mean().backward()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for _ in range(STEPS):
            step(model, optimizer)
        return state_of(model)

    check_bits(train, sim, STEPS)


def test_training_on_another_thread_is_told(sim: cm.SimDevice) -> None:
    model = layers()
    handle = cm.attach(model, device=sim)
    on_a_thread(lambda: model(batch_on(model)).sum().backward())
    handle.detach()
    assert "was called on the thread MainThread with gradients on" in handle.report().problems[0]


class Pair(nn.Module):
    """Its loop calls the children alone."""

    def __init__(self, maker: nn.Module, judge: nn.Module) -> None:
        super().__init__()
        self.maker, self.judge = maker, judge

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("expected not to be called")


TOGETHER: dict[str, Callable[[nn.Module, nn.Module], nn.Module]] = {
    "list": lambda maker, judge: nn.ModuleList([maker, judge]),
    "dict": lambda maker, judge: nn.ModuleDict({"maker": maker, "judge": judge}),
    "nested": lambda maker, judge: nn.ModuleList([nn.ModuleDict({"maker": maker}), judge]),
    "sequential": nn.Sequential,
    "module": Pair,
}


@pytest.mark.ci
@pytest.mark.parametrize("together", TOGETHER)
@pytest.mark.parametrize("by_turns", [False, True])
def test_steps_of_a_module_whose_children_alone_are_called_are_found(together: str, by_turns: bool, sim: cm.SimDevice) -> None:
    """`by_turns`: each child has an optimizer of its own, and a step of its own."""

    def train(attach: Attach) -> list[Tensor]:
        maker, judge = layers(drop=0.0), layers(drop=0.0)
        parts = [maker, judge] if by_turns else [nn.ModuleList([maker, judge])]
        optimizers = [torch.optim.SGD(part.parameters(), lr=1e-2) for part in parts]
        attach(TOGETHER[together](maker, judge))
        for _ in range(STEPS):
            for optimizer in optimizers:
                judge(maker(batch_on(maker))).square().mean().backward()
                optimizer.step()
                maker.zero_grad()
                judge.zero_grad()
        return state_of(maker, judge)

    check_bits(train, sim, STEPS * (1 + by_turns))


def trains(called: nn.Module, owner: nn.Module) -> None:
    """Run three steps of an optimizer of `owner`'s parameters, while `called` runs."""
    optimizer = torch.optim.SGD([*owner.parameters()] or [torch.zeros(1)], lr=1e-2)
    for _ in range(3):
        loss = called(torch.randn(512, 128)).square().mean()
        if loss.requires_grad:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


SILENT: dict[str, tuple[str, dict[str, Any]]] = {
    "another thread": ("attach was called on the thread MainThread, and the optimizer steps on", {}),
    "frozen": ("the model has no parameter that requires a gradient", {}),
    "no parameters": ("the model has no parameter that requires a gradient", {}),
    "never called": ("neither the attached Sequential nor a child of it was called", {}),
    "hbm_budget": ("expected at most the device's 1.00 GiB, got 800.0 GiB", {"hbm_budget": "800GiB"}),
    "host_budget": (
        "expected at least min_bytes, 64.0 KiB, the least storage that moves, got 1.00 KiB",
        {"host_budget": "1KiB"},
    ),
}


@pytest.mark.parametrize("why", SILENT)
def test_where_nothing_moves_one_sentence_says_why_by_the_third_step(why: str, caplog: pytest.LogCaptureFixture) -> None:
    sentence, arguments = SILENT[why]
    model = nn.Sequential(nn.GELU()) if why == "no parameters" else layers()
    model.requires_grad_(requires_grad=why != "frozen")
    arguments = {"hbm_budget": BUDGET, "device": cm.SimDevice(hbm_bytes="1GiB"), "min_bytes": 64 * KIB, **arguments}
    with cm.attach(model, **arguments) as handle:
        if why == "another thread":
            on_a_thread(lambda: trains(model, model))
        else:
            trains(layers() if why == "never called" else model, model)
        (said,) = [record.message for record in caplog.records if "chameleon_mm.api" in record.name]
        assert sentence in said
        assert [problem for problem in handle.report().problems if sentence in problem]
        assert "session.step()" not in said
    assert len([record for record in caplog.records if "chameleon_mm.api" in record.name]) == 1


def test_a_second_attach_on_a_thread_is_said_to_the_first(caplog: pytest.LogCaptureFixture) -> None:
    models = [nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), 1e-3) for model in models]
    attached = [
        cm.attach(model, optimizer, device="sim", min_bytes=0) for model, optimizer in zip(models, optimizers, strict=True)
    ]
    for _ in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            model(torch.randn(32, 64)).sum().backward()
            optimizer.step()
    assert "attach(nn.ModuleList([a, b]))" in "".join(attached[0].report().problems)
    for attachment in reversed(attached):
        attachment.detach()


def test_an_optimizer_in_backward_steps_on_autograds_own_thread_and_is_no_misuse(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    model = layers().to(device.torch_device)

    def stepped(parameter: Tensor) -> None:
        optimizer = torch.optim.SGD([parameter], lr=0.01)
        optimizer.step()
        optimizer.zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(stepped)
    with cm.attach(model, hbm_budget=BUDGET, device=device, min_bytes=64 * KIB) as handle:
        model(torch.ones(2, 128, device=device.torch_device)).sum().backward()
        assert handle.report().problems == ()
    assert "the optimizer steps on" not in caplog.text


def test_a_loop_logs_the_figures_of_the_steps_since_its_last_log(sim: cm.SimDevice) -> None:
    told: list[StepFigures] = []
    with sim.compute():
        model = layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        with cm.attach(
            model, device=sim, hbm_budget=BUDGET, host_budget="64MiB", min_bytes="64KiB", progress=told.append
        ) as swap:
            assert swap.log_values() == {}
            step(model, optimizer)
            first = swap.log_values()
            assert swap.log_values() == {}
            for _ in range(4):
                step(model, optimizer)
            rest = swap.log_values()
    one, *others = told
    assert first == {
        "swap_step_us": one.step_us, "swap_peak_at_least_bytes": one.peak_hbm_bytes, "swap_peak_bytes": one.peak_hbm_bytes,
        "swap_budget_bytes": BUDGET, "swap_bytes_out": one.bytes_out, "swap_stall_us": one.stall_us,
    }  # fmt: skip
    assert rest["swap_peak_at_least_bytes"] == max(figures.peak_hbm_bytes for figures in others)
    assert rest["swap_bytes_out"] == sum(figures.bytes_out for figures in others) / 4 > 0
    assert rest["swap_step_us"] == statistics.median(figures.step_us or 0 for figures in others)
    assert rest["swap_stall_us"] == pytest.approx(sum(figures.stall_us or 0 for figures in others) / 4, rel=1e-12)


class Reader(nn.Module):
    """A model of text, called as people's are."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layers = nn.Embedding(16, 128), layers()

    def forward(self, input_ids: Any, attention_mask: Tensor | None = None) -> Tensor:
        ids = input_ids["input_ids"] if isinstance(input_ids, dict) else input_ids
        total: Tensor = self.layers(self.table(ids).flatten(0, 1)).sum()
        return total


def test_the_tokens_of_all_micro_batches_are_counted_and_no_evaluations(sim: cm.SimDevice) -> None:
    told: list[StepFigures] = []
    with sim.compute():
        model, mask = Reader(), torch.ones(2, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        ids = [torch.zeros(2, length, dtype=torch.int64) for length in (8, 5, 3)]
        with cm.attach(model, device=sim, progress=told.append) as swap:
            for calls in (
                [partial(model, ids[0]), partial(model, input_ids=ids[1], attention_mask=mask)],
                [partial(model, {"input_ids": ids[2]})],
            ):
                for call in calls:
                    call().backward()
                    with torch.no_grad():
                        model(ids[0])
                optimizer.step()
                optimizer.zero_grad()
            values = swap.log_values()
    assert [figures.tokens for figures in told] == [2 * 8 + 2 * 5, 2 * 3]
    assert values["swap_tokens_per_s"] == 1e6 * 32 / sum(figures.step_us or 0 for figures in told)
    timed, host = replace(told[0], step_us=50.0, tokens=7), replace(told[0], step_us=None, host_us=9.0, tokens=8)
    assert log_values([timed, host, replace(timed, tokens=None)])["swap_tokens_per_s"] == 1e6 * 7 / 50
    assert log_values([host])["swap_tokens_per_s"] == 1e6 * 8 / 9


def test_without_a_timed_step_the_hosts_clock_tells_the_time_and_no_stall() -> None:
    untimed = StepFigures(
        index=3, kind=StepKind.PLANNED, simulated=False, host_us=2000.0, peak_hbm_bytes=7, peak_hbm_at_most_bytes=None,
        hbm_budget_bytes=9, host_bytes=0, bytes_out=4, bytes_in=4,
    )  # fmt: skip
    values = {"swap_step_us": 2000.0, "swap_peak_at_least_bytes": 7, "swap_budget_bytes": 9, "swap_bytes_out": 4.0}
    assert log_values([untimed]) == values
    assert log_values([]) == {}
