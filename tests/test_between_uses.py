"""Steps that use saved tensors several times, as two backwards over one graph do: a storage idle between two uses may be away.

The planner's arithmetic is compared with a step carried out one action after the other; then training within budgets for which
something has to be away between two uses is compared with what is simulated, and with plain PyTorch, which knows of no device
and no hooks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import chameleon_mm as cm
from chameleon_mm.errors import InfeasibleBudget
from chameleon_mm.plan.bounds import ideal
from chameleon_mm.plan.planner import generate_plan
from chameleon_mm.plan.problem import Problem
from chameleon_mm.plan.simulate import simulate
from chameleon_mm.plan.step_program import OUT, RECLAIM, RELEASE, USE, StepProgram
from chameleon_mm.plan.swap_plan import Action, SwapPlan
from chameleon_mm.plan.timing import LinkCost
from chameleon_mm.plan.trace import NEVER, StepPhase, TensorKind, Trace, TraceBuilder
from chameleon_mm.plan.unswapped_memory import Candidates, peak_memory, smallest_budget
from chameleon_mm.record.recorder import Recorder
from chameleon_mm.report.step_picture import STALL, PlannedStepData, picture_of
from tests._hybrid_traces import carried_out_recomputing
from tests._oracles import assert_as_carried_out, plan_within_host
from tests._random_models import SLOW_GPU, far_ahead, link_of, planning, seeds, train
from tests._trace_records import hooks_of
from tests._traces import H200_LINK, away_before_first_uses_alone, between, plan_of
from tests.test_policy_planner import any_step, held_to

FORWARD, BACKWARD = StepPhase.FORWARD, StepPhase.BACKWARD
SLOW_LINK = LinkCost(d2h_gbps=0.5, h2d_gbps=0.5, duplex_gbps=0.8, copy_us=3.0, hbm_gbps=5.0)


def used_again(random: Random, most: int = 10) -> Trace:
    """A step that saves up to `most` storages and goes over them two or three times; some are held meanwhile."""
    b = TraceBuilder(start_bytes=random.randrange(4096))
    fresh: list[int] = []

    def hooked() -> None:
        while fresh:
            b.sendable(fresh.pop(), b.num_hooks - 1)

    def op(phase: StepPhase, writes: Sequence[int] = ()) -> None:
        b.op("aten::mm", phase, random.choice((0.0, random.random() * 60)), writes=writes)

    saved = []
    for _ in range(random.randint(2, most)):
        x = b.tensor(random.randrange(1, 60_000), TensorKind.ACTIVATION)
        op(FORWARD, (x,))
        b.save(x)
        hooked()
        fresh.append(x)
        saved.append(x)
        if random.random() < 0.8:
            b.released(x)
    b.save(-1)
    hooked()
    rounds = random.choice((2, 2, 3))
    for n in range(rounds):
        order = saved[::-1]
        if random.random() < 0.3:
            random.shuffle(order)
        for x in order:
            hook = b.use(x)
            t = b.tensor(random.randrange(20_000))
            op(BACKWARD, (t,))
            if random.random() < 0.8:
                b.released_after(hook)
            b.dies(t)
            if n == rounds - 1:
                b.dies(x)
    return b.finish(7)


def random_actions(random: Random, trace: Trace) -> SwapPlan:
    """Plan by which some idle storages are away, before a first use or between two. It promises nothing."""
    candidates = Candidates.of(trace, between_uses=True)
    rows = sorted((i for i in range(len(candidates)) if random.random() < 0.8), key=lambda i: int(candidates.use[i]))
    tensors = [int(candidates.tensor[i]) for i in rows]
    actions: list[Action] = []
    for i, tensor in zip(rows, tensors, strict=True):
        nbytes, sendable, first, use = (
            int(column[i]) for column in (candidates.nbytes, candidates.sendable, candidates.first, candidates.use)
        )
        again = any(action.tensor == tensor for action in actions)
        reclaim_at = random.randint(first, use)
        out_at = reclaim_at if again else random.randint(sendable, reclaim_at)
        in_at = random.choice((use, random.randint(reclaim_at, use)))
        moved = nbytes if tensors.count(tensor) > 1 else random.choice((nbytes, random.randint(1, nbytes)))
        actions.append(
            Action(tensor=tensor, nbytes=moved, out_at=out_at, reclaim_at=reclaim_at, in_at=in_at, use_at=use, again=again)
        )
    return plan_of(trace, actions)


# --- simulated


@given(st.randoms(use_true_random=False))
def test_memory_and_time_are_those_of_a_step_carried_out_one_by_one_and_nothing_crosses_to_the_host_twice(
    random: Random,
) -> None:
    trace = used_again(random)
    plan = random_actions(random, trace)
    timeline = assert_as_carried_out(trace, plan, SLOW_LINK)
    out = [span.tensor for span in timeline.out_spans]
    assert sorted(out) == sorted({action.tensor for action in plan.actions})
    assert len(timeline.in_spans) == len(plan.actions)


def two_rounds() -> Trace:
    """Storage 0, of 4096 bytes, is saved at hook 0 and used at hooks 3 and 6; it is idle at 2, and at 5."""
    b = TraceBuilder(start_bytes=0)
    x = b.tensor(4096, TensorKind.ACTIVATION)
    b.op("aten::mm", FORWARD, 10.0, writes=(x,))
    b.save(x)
    b.released(x)
    for _ in range(2):
        b.save(-1)
        b.sendable(x, 1)
        b.op("aten::mm", FORWARD, 10.0)
    for use in range(2):
        hook = b.use(x)
        b.op("aten::mm", BACKWARD, 10.0)
        if use == 0:
            b.released_after(hook)
            for _ in range(2):
                b.use(-1)
                b.op("aten::mm", BACKWARD, 10.0)
    b.dies(x)
    return b.finish(7)


FIRST = Action(tensor=0, nbytes=4096, out_at=1, reclaim_at=2, in_at=3, use_at=3)
AGAIN = Action(tensor=0, nbytes=4096, out_at=5, reclaim_at=5, in_at=6, use_at=6, again=True)


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ([FIRST, replace(AGAIN, again=False)], "expected `again` of every action for a tensor but its first, got False"),
        ([AGAIN], "expected `again` of every action for a tensor but its first, got True"),
        ([replace(FIRST, nbytes=100), AGAIN], "expected 4096 bytes, all of it, in each of its actions, got 100 and 4096"),
        ([FIRST, replace(AGAIN, out_at=3, reclaim_at=3)], "reclaim_at of 4 or later"),
        ([FIRST, replace(AGAIN, use_at=6, in_at=5), AGAIN], "expected one action for a tensor, got two for one use"),
    ],
)
def test_actions_that_nobody_could_carry_out_are_refused(actions: list[Action], message: str) -> None:
    trace = two_rounds()
    simulate(trace, plan_of(trace, [FIRST, AGAIN]), SLOW_LINK)
    simulate(trace, plan_of(trace, [replace(AGAIN, again=False)]), SLOW_LINK)
    with pytest.raises(ValueError, match=message):
        simulate(trace, plan_of(trace, actions), SLOW_LINK)


def test_a_program_copies_out_once_and_frees_without_a_copy_after_that() -> None:
    trace = two_rounds()
    rows = StepProgram.of(trace, plan_of(trace, [FIRST, AGAIN])).rows
    assert [row.ops for row in rows[:-1]] == [
        (), ((OUT, 0, 4096),), ((RECLAIM, 0, 4096),), (), (), ((RELEASE, 0, 4096),), (),
    ]  # fmt: skip
    assert [(row.kind, row.ins) for row in rows if row.ins] == [(USE, (0,))] * 2  # each use brings it back


# --- planned


@settings(max_examples=100)
@given(seed=st.integers(0, 10**6), share=st.floats(0, 1.0), slow=st.booleans())
@example(seed=1118, share=0.0, slow=True)  # storages away between uses come back after the last first use
def test_a_plan_keeps_its_budget_exactly_as_simulated(seed: int, share: float, slow: bool) -> None:
    trace, cost = used_again(Random(seed)), SLOW_LINK if slow else H200_LINK
    budget = between(trace, share)
    plan = generate_plan(trace, budget, None, cost, drafts=60)
    held_to(trace, plan, cost)
    assert max(carried_out_recomputing(trace, plan)) == plan.peak_bytes
    assert ideal(trace, budget, cost) <= plan.step_us * (1 + 1e-9)


STEPS: dict[str, Callable[[int], Trace]] = {"used once": any_step, "used again": lambda seed: used_again(Random(seed))}
"""Random steps, by the number that they are drawn from."""


@pytest.mark.parametrize("make", STEPS.values(), ids=STEPS)
@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), short=st.integers(1, 5000))
def test_below_the_least_the_error_names_a_budget_that_will_do(make: Callable[[int], Trace], seed: int, short: int) -> None:
    trace = make(seed)
    least = smallest_budget(trace)
    if least <= short:
        return
    with pytest.raises(InfeasibleBudget, match=f"expected {least} bytes") as refusal:
        generate_plan(trace, least - short, None, SLOW_LINK)
    assert refusal.value.smallest_bytes == least
    held_to(trace, generate_plan(trace, least, None, SLOW_LINK, drafts=60), SLOW_LINK)


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), share=st.floats(0, 1.0))
def test_nothing_is_away_between_uses_where_first_uses_are_enough(seed: int, share: float) -> None:
    trace = used_again(Random(seed))
    budget, alone = between(trace, share), away_before_first_uses_alone(trace)
    plan = generate_plan(trace, budget, None, SLOW_LINK, drafts=60)
    if budget >= smallest_budget(alone):
        assert plan == generate_plan(alone, budget, None, SLOW_LINK, drafts=60)
        assert ideal(trace, budget, SLOW_LINK) == ideal(alone, budget, SLOW_LINK)
    else:
        with pytest.raises(InfeasibleBudget):
            generate_plan(alone, budget, None, SLOW_LINK, drafts=60)


@pytest.mark.parametrize("make", STEPS.values(), ids=STEPS)
@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), share=st.floats(0, 0.9), of_host=st.floats(0, 0.99))
def test_a_host_budget_holds_or_the_error_names_both_ways_out(
    make: Callable[[int], Trace], seed: int, share: float, of_host: float
) -> None:
    trace = make(seed)
    plan = plan_within_host(trace, between(trace, share), of_host, SLOW_LINK)
    if plan is not None:
        held_to(trace, plan, SLOW_LINK)


def test_what_is_used_all_the_time_is_not_said_to_be_something_else() -> None:
    """The peak is the saved tensors, which the program holds from one use to the next."""
    trace = away_before_first_uses_alone(two_rounds())
    trace = replace(trace, tensor_released=np.full_like(trace.tensor_released, NEVER))
    assert Problem.of(trace, between_uses=True).least_bytes == 4096
    with pytest.raises(InfeasibleBudget, match=r"None of the 4\.00 KiB of activations can be away then: .* Raise the budget"):
        generate_plan(trace, 4095, None, H200_LINK)


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6))
def test_a_picture_has_the_waits_that_are_simulated(seed: int) -> None:
    """Each wait of storages that leave twice is a wait of compute. Operators and waits take the whole step."""
    trace = used_again(Random(seed))
    plan = generate_plan(trace, smallest_budget(trace), None, SLOW_LINK, drafts=0)
    timeline = simulate(trace, plan, SLOW_LINK)
    picture = picture_of(PlannedStepData(trace=trace, plan=plan, link=SLOW_LINK, predicted=False, times_us=()))
    waits = sum(bar.end_us - bar.start_us for bar in picture.compute if bar.kind == STALL)
    assert waits == pytest.approx(timeline.stall_us)
    assert {row.tensor for row in picture.tensors if row.moved_bytes} == {action.tensor for action in plan.actions}
    assert sum(row.moved_bytes for row in picture.tensors) == plan.moved_bytes


TIME_SHARE = 0.02


# --- recorded


def test_a_recorder_notes_until_when_what_was_used_is_held(sim: cm.SimDevice) -> None:
    with sim.compute():
        recorder = Recorder(sim)
        with recorder:
            x = torch.ones(16, 16)  # tick 0
            storage = x.untyped_storage()
            traced = recorder.add_claim(storage)
            recorder.on_save([traced])  # 1
            y = x.exp()  # 2
            del x
            recorder.sendable(traced)

            def used() -> Tensor:
                recorder.on_use([traced])
                with recorder.paused():
                    recorder.restored(traced, storage)
                    return torch.empty(0).set_(storage, 0, (16, 16), (16, 1))

            held = used()  # 3
            y = y * held  # 4
            y = y + held  # 5
            del held
            y = y.exp()  # 6
            held = used()  # 7
            y = y * held  # 8: held until it is used again
            recorder.on_use([traced])  # 9: by somebody of whom nobody tells what he was given
            del held
            y.exp()  # 10
            recorder.retired(traced)
        trace = recorder.finish()
    assert [(hook.tick, hook.released) for hook in hooks_of(trace)] == [(1, NEVER), (3, 5), (7, NEVER), (9, NEVER)]


# --- carried out


def budget_of(seed: int, share: float, backwards: int) -> tuple[int, bool]:
    """Return a budget for the model of `seed`, and whether absences before first uses alone are too few for it."""
    device = far_ahead()
    steps, _ = train(seed, device, planning(device), steps=2, backwards=backwards)
    trace = steps[-1].trace
    assert trace is not None
    least = smallest_budget(trace)
    budget = least + int((peak_memory(trace).nbytes - least) * share)
    return budget, budget < smallest_budget(away_before_first_uses_alone(trace))


@pytest.mark.ci
@pytest.mark.parametrize("seed", seeds(2, of=range(6)))
@pytest.mark.parametrize(("share", "backwards"), [(0.02, 2), (0.4, 2), (0.1, 3)])
def test_the_executor_does_what_was_simulated(seed: int, share: float, backwards: int) -> None:
    """Check device memory to the byte, time closely, and the numbers of the same steps without swapping."""
    budget, is_between_uses = budget_of(seed, share, backwards)
    device = far_ahead()
    pool = cm.PinnedPool("64MiB", device=device)
    executor = planning(device, budget, pool=pool)
    expected, unswapped = train(seed, far_ahead(), steps=5, backwards=backwards)
    steps, swapped = train(seed, device, executor, steps=5, backwards=backwards)
    assert [step.loss for step in steps] == [step.loss for step in expected]
    assert all(torch.equal(a, b) for a, b in zip(swapped, unswapped, strict=True))
    for step in steps[1:]:
        assert step.plan is not None
        assert step.trace is not None
        assert is_between_uses == any(action.again for action in step.plan.actions)
        timeline = simulate(step.trace, step.plan, link_of(SLOW_GPU))
        assert step.peak_bytes == timeline.peak_bytes <= budget
        assert step.step_us == pytest.approx(timeline.step_us, rel=TIME_SHARE)
    assert not executor.registry.all()
    assert pool.stats().live_bytes == 0
    del swapped
    assert device.allocated_bytes() == 0


def without_first_actions(plan: SwapPlan) -> list[Action]:
    """Return the second actions alone. Their storages are then on the device alone when dropped, and must be copied out."""
    return [action for action in plan.actions if action.again]


def at_once(plan: SwapPlan) -> list[Action]:
    """Dropped at the hook of a use, which comes after the drop, and asked back at any."""
    return [
        dataclasses.replace(a, out_at=max(0, a.out_at - 3), reclaim_at=max(0, a.reclaim_at - 3), in_at=max(0, a.in_at - 2))
        for a in plan.actions
    ]


@pytest.mark.parametrize("seed", seeds(1, of=range(3)))
@pytest.mark.parametrize("wrong", [without_first_actions, at_once])
def test_a_wrong_plan_costs_time_alone(
    seed: int, wrong: Callable[[SwapPlan], list[Action]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[SwapPlan]()

    def plans(trace: Trace, hbm_budget: int, host_budget: int, link: LinkCost, **_: Any) -> Sequence[SwapPlan]:
        plan = generate_plan(trace, smallest_budget(trace), None, link, drafts=0)
        made.append(dataclasses.replace(plan, actions=tuple(wrong(plan))))
        return [made[-1]]

    monkeypatch.setattr("chameleon_mm.follow.adaptation.candidate_plans", plans)
    device = far_ahead()
    executor = planning(device)
    expected, unswapped = train(seed, far_ahead(), steps=4, backwards=2)
    steps, swapped = train(seed, device, executor, steps=4, backwards=2)
    assert [step.loss for step in steps] == [step.loss for step in expected]
    assert all(torch.equal(a, b) for a, b in zip(swapped, unswapped, strict=True))
    assert all(step.plan in made for step in steps[1:])  # it was followed all the same
    assert any(action.again for plan in made for action in plan.actions)


# --- sessions


class Keeps(torch.autograd.Function):
    """Function that holds its saved tensors until its own backward runs again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.exp(x)
        ctx.save_for_backward(y)
        return y.sin()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        ctx.held = y
        return torch.mul(grads[0] * y.cos(), y)


keeps: Callable[[Tensor], Tensor] = Keeps.apply


class Trunk(nn.Module):
    """A trunk of wide layers with dropout, and two heads."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(48, 192), nn.GELU(), nn.Dropout(0.1), nn.Linear(192, 48)) for _ in range(6)
        )
        self.heads = nn.ModuleList(nn.Linear(48, 48) for _ in range(2))
        self.keeps = keeps

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = x + layer(keeps(x) if self.keeps else x)
        return self.heads[0](x).square().mean(), self.heads[1](x).abs().mean()


def one_graph_twice(model: Trunk, x: Tensor) -> None:
    loss = sum(model(x))
    assert isinstance(loss, Tensor)
    loss.backward(retain_graph=True)
    loss.backward()


def two_losses(model: Trunk, x: Tensor) -> None:
    one, two = model(x)
    one.backward(retain_graph=True)
    two.backward()


def gradients_first(model: Trunk, x: Tensor) -> None:
    one, two = model(x)
    weights = list(model.layers.parameters())
    grads = torch.autograd.grad(one, weights, retain_graph=True)
    norm = torch.stack([g.square().sum() for g in grads]).sum()
    (one / (1 + norm) + two).backward()


def one_for_each_row(model: Trunk, x: Tensor) -> None:
    one, two = model(x)
    for weight in (0.5, 0.25, 0.125):
        (one * weight).backward(retain_graph=True)
    two.backward()


Program = Callable[[Trunk, Tensor], None]


def train_on(program: Program, keeps: bool, in_step: Callable[[Callable[[], None]], None], steps: int = 5) -> list[bytes]:
    """Gradients of every step, and the weights at the end; bytes, because a tensor would count as the device's."""
    torch.manual_seed(3)
    model, found = Trunk(keeps), list[bytes]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            program(model, torch.randn(128, 48))
            optimizer.step()

        in_step(step)
        found += [p.grad.numpy().tobytes() for p in model.parameters() if p.grad is not None]
    return [*found, *(p.detach().numpy().tobytes() for p in model.parameters())]


@pytest.mark.ci
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("program", [one_graph_twice, two_losses, gradients_first, one_for_each_row])
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_are_plain_pytorchs_within_a_tight_budget(program: Program, keeps: bool, recompute: bool) -> None:
    plain = train_on(program, keeps, lambda step: step())
    device = cm.SimDevice()
    with device.compute():
        train_on(program, keeps, lambda step: step())
    device, unswapped, peaks = cm.SimDevice(), device.peak_allocated_bytes(), list[int]()
    budget = int(unswapped * 0.7)
    with device.compute(), cm.SwapSession(budget, "64MiB", device, 1024, recompute=recompute) as session:

        def swapped(step: Callable[[], None]) -> None:
            device.reset_peaks()
            with session.step():
                step()
            peaks.append(device.peak_allocated_bytes())

        got = train_on(program, keeps, swapped)
    report = session.report()
    assert got == plain
    assert max(peaks) <= budget < unswapped
    assert report.plan_cache_hits == 4
    assert report.budget_misses == 0
