"""`cm.attach` finds the steps of any loop by itself, changes no bit of it, and leaves nothing behind."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import chameleon_mm as cm
from chameleon_mm.device import Device
from tests._frameworks import check_nothing_left, swapping
from tests._plain_training import Outcome, differences, image

STEPS = 5
Loop = Callable[["Loops"], None]


def network(device: str = "cpu") -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)).to(
        device
    )


class Loops:
    """Training loops of many kinds. Each is run on plain tensors first, and then attached."""

    def __init__(self, device: str = "cpu") -> None:
        self.model = network(device)
        self.device = device
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.seen: Outcome = {}
        torch.manual_seed(5)

    def loss(self, rows: int = 8) -> Tensor:
        loss: Tensor = self.model(torch.randn(rows, 16, device=self.device)).square().mean()
        self.seen[f"{len(self.seen)}: loss"] = image(loss)
        return loss

    def plain(self) -> None:
        for _ in range(STEPS):
            self.loss().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def zero_first(self) -> None:
        for _ in range(STEPS):
            self.optimizer.zero_grad()
            self.loss().backward()
            self.optimizer.step()

    def micro_batches(self) -> None:
        for _ in range(STEPS):
            for rows in (8, 4, 8):
                self.loss(rows).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def skipping_scaler(self) -> None:
        scaler = torch.amp.GradScaler(self.device, init_scale=2.0**8, growth_interval=2)
        for number in range(STEPS):
            loss = self.loss() * (float("inf") if number == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(self.optimizer)
            scaler.update()
            self.optimizer.zero_grad()

    def two_optimizers(self) -> None:
        """As Muon and AdamW share a model: matrices for one, the rest for the other."""
        matrices = torch.optim.SGD([p for p in self.model.parameters() if p.dim() == 2], lr=1e-2, momentum=0.9)
        others = torch.optim.AdamW([p for p in self.model.parameters() if p.dim() != 2], lr=1e-2)
        for _ in range(STEPS):
            self.loss().backward()
            for optimizer in (matrices, others):
                optimizer.step()
                optimizer.zero_grad()

    def closures(self) -> None:
        optimizer = torch.optim.LBFGS(self.model.parameters(), lr=0.1, max_iter=3)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss()
            loss.backward()
            return loss

        for _ in range(STEPS):
            optimizer.step(closure)

    def evaluation(self) -> None:
        for number in range(STEPS):
            self.loss().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.model.eval()
            with torch.no_grad():
                self.loss(3)
            with torch.inference_mode():
                self.loss(2)
            if number == 2:
                self.loss(5)  # with a graph that nobody uses
            self.model.train()

    def failing_forward(self) -> None:
        for _ in range(STEPS):
            with pytest.raises(RuntimeError, match="shapes"):
                self.model(torch.randn(8, 15, device=self.device))
            self.loss().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def failing_backward(self) -> None:
        def fail(_gradient: Tensor) -> None:
            raise ArithmeticError("no")

        for _ in range(STEPS):
            hidden = self.model[:3](torch.randn(8, 16, device=self.device))
            hidden.register_hook(fail)
            with pytest.raises(ArithmeticError):
                self.model[3:](hidden).sum().backward()
            self.optimizer.zero_grad()
            self.loss().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def finish(self) -> Outcome:
        self.seen["random"] = image(torch.get_rng_state())
        return {**self.seen, **{name: image(value) for name, value in self.model.state_dict().items()}}


LOOPS = {
    "plain": (Loops.plain, STEPS),
    "zero first": (Loops.zero_first, STEPS),
    "micro-batches": (Loops.micro_batches, STEPS),
    "skipping scaler": (Loops.skipping_scaler, STEPS),
    "two optimizers": (Loops.two_optimizers, STEPS),
    "closures": (Loops.closures, None),
    "evaluation": (Loops.evaluation, None),
    "failing forward": (Loops.failing_forward, STEPS),
    "failing backward": (Loops.failing_backward, None),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_gives_the_same_bits_and_leaves_nothing(name: str, device: Device) -> None:
    loop, steps = LOOPS[name]
    kind = device.torch_device.type
    plain = Loops(kind)
    loop(plain)
    attached = Loops(kind)
    handle = cm.attach(attached.model, hbm_budget="64MiB", host_budget="64MiB", device=device, min_bytes=256)
    loop(attached)
    handle.detach()
    report = handle.report()
    assert differences(plain.finish(), attached.finish()) == []
    assert report.bytes_swapped_out > 0
    assert report.plan_cache_hits > 0
    assert report.problems == ()
    assert report.steps == steps if steps is not None else report.steps >= STEPS
    check_nothing_left(attached.model)
    gc.collect()
    assert handle.session.pool.stats().num_live == 0


def test_a_model_that_nobody_calls_has_no_steps_and_says_so() -> None:
    loops = Loops()
    with cm.attach(nn.ModuleList([loops.model]), **swapping("64MiB")) as handle:
        loops.plain()
    assert handle.report().steps == 0
    assert len(handle.report().problems) == 1
    assert "step" in handle.report().problems[0]


def test_adversaries_with_a_session_each_give_the_same_bits() -> None:
    """The one's loss goes through the other: what both save is swapped by the session that was entered last."""

    def train(*, attached: bool) -> Outcome:
        maker, critic = Loops(), Loops()
        head = nn.Linear(4, 16)
        handles = [cm.attach(loops.model, **swapping("64MiB")) for loops in (maker, critic)] if attached else []
        for _ in range(STEPS):
            made = head(maker.model(torch.randn(8, 16)))
            (critic.loss() - critic.model(made.detach()).square().mean()).backward()
            critic.optimizer.step()
            critic.optimizer.zero_grad()
            critic.model(made).square().mean().backward()
            maker.optimizer.step()
            maker.optimizer.zero_grad()
        for handle in reversed(handles):
            handle.detach()
            assert handle.report().steps > 0
        return {f"{n} {key}": value for n, loops in enumerate((maker, critic)) for key, value in loops.finish().items()}

    assert differences(train(attached=False), train(attached=True)) == []


def test_two_attached_models_take_turns() -> None:
    """Each has a session of its own; steps of one lie beside those of the other."""

    def train(*, attached: bool) -> tuple[Outcome, list[cm.Attachment]]:
        pair = Loops(), Loops()
        handles = [cm.attach(loops.model, **swapping("64MiB")) for loops in pair] if attached else []
        for _ in range(STEPS):
            for loops in pair:
                loops.loss().backward()
                loops.optimizer.step()
                loops.optimizer.zero_grad()
        for handle in reversed(handles):
            handle.detach()
        outcome = {f"{n} {key}": value for n, loops in enumerate(pair) for key, value in loops.finish().items()}
        return outcome, handles

    plain, _ = train(attached=False)
    swapped, handles = train(attached=True)
    assert differences(plain, swapped) == []
    assert [handle.report().steps for handle in handles] == [STEPS, STEPS]


def test_an_optimizer_that_is_given_has_its_state_on_the_host() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    same = copy.deepcopy(model)
    for net, attached in ((model, True), (same, False)):
        torch.manual_seed(1)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        handle = cm.attach(net, optimizer, device="sim") if attached else None
        for _ in range(3):
            net(torch.randn(4, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if handle is not None:
            handle.detach()
            assert handle.report().state_bytes_swapped_out > 0
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), same.parameters(), strict=True))


def test_graphs_that_live_on_are_used_after_it_is_detached(sim: cm.SimDevice) -> None:
    plain = Loops()
    plain.loss().backward()
    attached = Loops()
    with cm.attach(attached.model, **swapping("64MiB", device=sim)) as handle:
        loss = attached.loss()
    assert handle.report().steps == 0
    loss.backward()
    for a, b in zip(plain.model.parameters(), attached.model.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)
    del loss
    gc.collect()
    assert handle.session.pool.stats().num_live == 0


def test_what_raises_in_its_block_leaves_nothing() -> None:
    loops = Loops()
    with pytest.raises(ArithmeticError), cm.attach(loops.model, **swapping("64MiB")) as handle:
        loops.loss()
        raise ArithmeticError
    check_nothing_left(loops.model)
    handle.detach()
    assert handle.report().steps == 0


@pytest.mark.parametrize("part", ["it", "a part of it", "the whole"])
def test_it_is_attached_once(part: str) -> None:
    outer, inner = nn.Sequential(network()), None
    inner = outer[0]
    first, second = {"it": (inner, inner), "a part of it": (inner, outer), "the whole": (outer, inner)}[part]
    with cm.attach(first, **swapping("64MiB")):
        if part == "the whole":
            cm.attach(second, **swapping("64MiB")).detach()  # a session for a part, inside of the other
        else:
            with pytest.raises(
                ValueError, match=r"attach: expected a model that is not attached, got a .* attached already; detach"
            ):
                cm.attach(second, **swapping("64MiB"))
    check_nothing_left(outer)
    cm.attach(second, **swapping("64MiB")).detach()


def test_training_that_began_goes_on_attached() -> None:
    def train(*, attached: bool) -> Outcome:
        loops = Loops()
        loops.plain()
        loss = loops.loss()  # a forward before, whose backward comes after
        handle = cm.attach(loops.model, **swapping("64MiB")) if attached else None
        loss.backward()
        loops.optimizer.step()
        loops.optimizer.zero_grad()
        loops.plain()
        if handle is not None:
            handle.detach()
            assert handle.report().steps == STEPS
        return loops.finish()

    assert differences(train(attached=False), train(attached=True)) == []


@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_models_are_attached_as_they_are_called(in_place: bool) -> None:
    def train(*, attached: bool) -> Outcome:
        torch._dynamo.reset()
        loops = Loops()
        if in_place:
            loops.model.compile(backend="aot_eager")
        called: Any = loops.model if in_place else torch.compile(loops.model, backend="aot_eager")
        handle = cm.attach(called, **swapping("64MiB")) if attached else None
        for _ in range(STEPS):
            loss = called(torch.randn(8, 16)).square().mean()
            loops.seen[f"{len(loops.seen)}: loss"] = image(loss)
            loss.backward()
            loops.optimizer.step()
            loops.optimizer.zero_grad()
        if handle is not None:
            handle.detach()
            assert handle.report().steps == STEPS
            check_nothing_left(called)
        return loops.finish()

    assert differences(train(attached=False), train(attached=True)) == []


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        (
            (None,),
            TypeError,
            "model: expected a torch.nn.Module, got None .NoneType.; pass the model that the training loop calls",
        ),
        ((nn.Linear,), TypeError, "model: expected a torch.nn.Module, got the class Linear itself"),
        ((network(), "adam"), TypeError, "optimizer: expected"),
        ((network(), None, "1KiB"), cm.InfeasibleBudget, "hbm_budget: expected"),
        ((network(), None, "20 GB?"), ValueError, "hbm_budget"),
    ],
)
def test_wrong_arguments_are_one_sentence(arguments: tuple[Any, ...], kind: type[Exception], words: str) -> None:
    model, optimizer, budget = (*arguments, None, None)[:3]
    with pytest.raises(kind, match=words):
        cm.attach(model, optimizer, hbm_budget=budget, device=cm.SimDevice())
    if isinstance(model, nn.Module):
        check_nothing_left(model)


def test_another_thread_may_train_and_not_detach() -> None:
    loops = Loops()
    handle = cm.attach(loops.model, **swapping("64MiB"))
    raised: list[BaseException] = []

    def elsewhere() -> None:
        loops.plain()  # hooks are each thread's own: it trains as ever
        try:
            handle.detach()
        except cm.SessionClosedError as error:
            raised.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "expected to be left on the thread that entered it" in str(raised[0])
    assert handle.report().steps == 0
    loops.plain()
    assert handle.report().steps == STEPS
    handle.detach()
    check_nothing_left(loops.model)
