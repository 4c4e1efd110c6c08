"""Steps that have nothing to move run without hooks (`native/switch.cpp`): as plain PyTorch, within the budget all the same."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import chameleon_mm as cm
from chameleon_mm.device.cuda import CudaDevice
from chameleon_mm.executor.unhooked_steps import MOST_UNHOOKED, RESERVED_DIVISOR, STEPS_BEFORE
from chameleon_mm.profiler.dispatch_state import saved_tensor_hooks_on_top
from chameleon_mm.saved.timed_spans import StepKind
from chameleon_mm.step_figures import StepFigures
from tests._native import helper, mutated, only
from tests._plain_training import CUDA, Outcome, differences, image

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("no_gc")]

BUDGET = 208 << 20
FEW, MANY = 8, 1 << 15
"""Rows of a batch that fits many times, and of one whose activations are more than the budget."""

WITHOUT = StepKind.UNHOOKED.value
AT_FIRST = 1 + STEPS_BEFORE
"""Steps that have hooks before one has none: one is recorded, the others follow its plan."""


@pytest.fixture(autouse=True)
def switch(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The helper, and no other."""
    found = helper("switch", monkeypatch)
    only(["switch"], monkeypatch)
    return found


class Training:
    """A small model with dropout, step by step; what comes of it, to be compared."""

    def __init__(self) -> None:
        torch.cuda.empty_cache()
        torch.manual_seed(1)
        with torch.device("cuda"):
            blocks = [(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64), nn.Tanh()) for _ in range(4)]
            self.model = nn.Sequential(*(layer for block in blocks for layer in block))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2, momentum=0.9)
        self.seen: Outcome = {}
        self.steps = 0

    def loss(self, rows: int) -> Tensor:
        y: Tensor = self.model(torch.randn(rows, 64, device="cuda"))
        return y.square().mean()

    def step(self, rows: int) -> None:
        self.loss(rows).backward()
        self.note()

    def note(self) -> None:
        self.steps += 1
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None
            self.seen[f"step {self.steps}: gradient of {name}"] = image(parameter.grad)
        self.optimizer.step()
        self.optimizer.zero_grad()


def trained_plainly(rows: Sequence[int]) -> Outcome:
    training = Training()
    for number in rows:
        training.step(number)
    return training.seen


def in_session(told: list[StepFigures], budget: int = BUDGET, **how: Any) -> cm.SwapSession:
    return cm.SwapSession(budget, "1GiB", CUDA.make(), recompute=False, progress=told.append, **how)


def trained(rows: Sequence[int], **how: Any) -> tuple[Outcome, list[StepFigures]]:
    training, told = Training(), list[StepFigures]()
    with (session := in_session(told)).pool, session:
        for number in rows:
            with session.step(**how):
                training.step(number)
    assert saved_tensor_hooks_on_top() is None
    return training.seen, told


def kinds(told: Sequence[StepFigures]) -> list[str]:
    return [figures.kind.value for figures in told]


def bring(session: cm.SwapSession, training: Training) -> None:
    """Train until the steps have no hooks."""
    while session.report().steps_by_phase.get(WITHOUT, 0) < 2:
        assert training.steps < 3 * STEPS_BEFORE
        with session.step():
            training.step(FEW)


# --- what runs without


def test_steps_with_nothing_to_move_run_without_hooks_bit_for_bit_as_plain_pytorch() -> None:
    steps = AT_FIRST + MOST_UNHOOKED + 6
    seen, told = trained([FEW] * steps)
    assert differences(trained_plainly([FEW] * steps), seen) == []
    expected = [number >= AT_FIRST and (number - AT_FIRST) % (MOST_UNHOOKED + 1) != MOST_UNHOOKED for number in range(steps)]
    assert [kind == WITHOUT for kind in kinds(told)] == expected
    assert [figures.index for figures in told] == list(range(steps))
    assert told[AT_FIRST + MOST_UNHOOKED].step_us is not None  # the sample is timed
    assert all(0 < figures.peak_hbm_bytes <= BUDGET for figures in told if figures.kind is StepKind.UNHOOKED)


def test_such_a_step_calls_no_hook() -> None:
    training = Training()
    with (session := in_session([])).pool, session:
        bring(session, training)
        before = sum(session.report().kept_by_reason.values())
        with session.step():
            assert saved_tensor_hooks_on_top() is None
            training.step(FEW)
        assert sum(session.report().kept_by_reason.values()) == before
        top = saved_tensor_hooks_on_top()
        assert top is not None
        assert top[0] is session._save
        with session.step(hooked=True):
            training.step(FEW)
        assert sum(session.report().kept_by_reason.values()) > before


def test_what_moves_something_has_hooks() -> None:
    training, told, rows = Training(), list[StepFigures](), MANY // 8
    with (session := in_session(told, BUDGET // 6)).pool, session:
        for _ in range(AT_FIRST + 6):
            with session.step():
                training.step(rows)
    assert differences(trained_plainly([rows] * training.steps), training.seen) == []
    assert kinds(told)[-1] == StepKind.PLANNED.value
    assert WITHOUT not in kinds(told)
    assert told[-1].bytes_out > 0


# --- a step that wants more


def test_a_step_that_wants_more_memory_has_hooks_from_there_on() -> None:
    rows = [FEW] * (AT_FIRST + 4) + [MANY] + [FEW] * STEPS_BEFORE
    torch.cuda.reset_peak_memory_stats()
    seen, told = trained(rows)
    assert differences(trained_plainly(rows), seen) == []
    large = AT_FIRST + 4
    assert kinds(told)[large - 1] == WITHOUT
    assert kinds(told)[large] == StepKind.BY_RULE.value
    assert told[large].bytes_out > BUDGET // 4
    assert told[large].peak_hbm_bytes <= BUDGET
    assert WITHOUT not in kinds(told)[large:]  # it is watched what becomes of it


def test_a_helper_that_does_not_put_them_back_lets_it_pass_its_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutated("switch", "switch.cpp", "if (off_here) off_here->on_again();", "", tmp_path, monkeypatch)
    rows = [FEW] * (AT_FIRST + 1) + [MANY, FEW]
    torch.cuda.reset_peak_memory_stats()  # so that a step's own peak is known
    seen, told = trained(rows)
    assert differences(trained_plainly(rows), seen) == []
    assert told[-2].bytes_out == 0
    assert told[-2].peak_hbm_bytes > BUDGET


def test_one_within_what_the_allocator_has_is_not_noticed_and_takes_no_more() -> None:
    rows = [FEW] * (AT_FIRST + 4) + [4 * FEW] + [FEW] * 4
    seen, told = trained(rows)
    assert differences(trained_plainly(rows), seen) == []
    assert kinds(told)[AT_FIRST + 4] == WITHOUT
    assert max(figures.peak_hbm_bytes for figures in told) <= BUDGET // RESERVED_DIVISOR


def test_a_miss_in_a_backward_on_the_training_thread_takes_no_hooks_with_it() -> None:
    """Nodes of the CPU run there, on a stack of hooks of their own, which goes as the backward ends."""

    def run(step: Callable[[], AbstractContextManager[object]], tops: list[object]) -> Outcome:
        training = Training()
        large = torch.ones(1 << 22, device="cuda", requires_grad=True)
        for number in range(AT_FIRST + 4):
            with step():
                if number == AT_FIRST + 2:
                    large.cpu().sum().backward()
                training.step(FEW)
            tops.append(saved_tensor_hooks_on_top())
        training.seen["large"] = image(cast("Tensor", large.grad))
        return training.seen

    plain, tops = run(nullcontext, []), list[Any]()
    with (session := in_session([])).pool, session:
        seen = run(session.step, tops)
        assert all(top is not None and top[0] is session._save for top in tops)
    assert differences(plain, seen) == []
    assert session.report().steps_by_phase[WITHOUT] == 2
    assert saved_tensor_hooks_on_top() is None


@pytest.mark.parametrize("how", ["twice", "recomputed"])
def test_a_step_that_saves_behind_a_use_keeps_its_hooks(how: str) -> None:
    """What one backward reserves the next forward gets without asking; what runs again in a backward saves on other threads."""

    def run(step: Callable[[], AbstractContextManager[object]]) -> Outcome:
        training = Training()
        for _ in range(AT_FIRST + 4):
            with step():
                if how == "twice":
                    training.loss(FEW).backward()
                    training.loss(FEW).backward()
                else:
                    x = torch.randn(FEW, 64, device="cuda", requires_grad=True)
                    cast("Tensor", checkpoint(training.model, x, use_reentrant=True)).sum().backward()
                training.note()
        return training.seen

    plain = run(nullcontext)
    with (session := in_session([])).pool, session:
        seen = run(session.step)
    assert differences(plain, seen) == []
    assert WITHOUT not in session.report().steps_by_phase
    assert session.report().steps_by_phase["planned"] > STEPS_BEFORE


def test_a_loop_that_always_wants_more_is_tried_ever_less_often() -> None:
    training, told = Training(), list[StepFigures]()
    with (session := in_session(told)).pool, session:
        for _ in range(8 * STEPS_BEFORE):
            torch.cuda.empty_cache()
            with session.step():
                training.step(MANY // 8)  # nothing of it moves, and its blocks were given back
    tried = [figures.index for figures in told if figures.kind is StepKind.BY_RULE]
    assert WITHOUT not in kinds(told)
    assert [later - one for one, later in itertools.pairwise(tried)] == [2 * STEPS_BEFORE + 1, 4 * STEPS_BEFORE + 1]


def test_what_the_hooks_noted_of_a_part_is_no_other_steps() -> None:
    training, told = Training(), list[StepFigures]()
    with (session := in_session(told)).pool, session:
        with session.step():
            training.loss(FEW)  # a forward alone
        bring(session, training)
        with session.step():
            training.step(MANY)
        assert (session._executor._saved_any, session._executor.budget.headroom.position) == (False, 0)
        with session.step():
            training.step(FEW)
    assert session.report().problems == ()


class Interrupted:
    """A switch in the middle of which an interrupt comes, once."""

    def __init__(self, real: Any, where: str) -> None:
        self._real, self._where = real, where

    def off(self, limit_bytes: int) -> Any:
        found = self._real.off(limit_bytes)
        self._interrupt("off")
        return found

    def on(self) -> bool | None:
        self._interrupt("on")
        found: bool | None = self._real.on()
        return found

    def _interrupt(self, where: str) -> None:
        if where == self._where:
            self._where = ""
            raise KeyboardInterrupt


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("where", ["off", "on"])
def test_an_interrupt_leaves_no_step_without_hooks_behind(where: str, hooked: bool) -> None:
    training, told = Training(), list[StepFigures]()
    with (session := in_session(told)).pool, session:
        bring(session, training)
        session._unhooked._switch = Interrupted(session._unhooked._switch, where)
        with pytest.raises(KeyboardInterrupt), session.step():
            training.step(FEW)
        training.optimizer.zero_grad()
        with session.step(hooked=hooked):
            within = saved_tensor_hooks_on_top()
            training.step(FEW)
        # One that was interrupted as it ended was over: the next one may do without again.
        assert kinds(told)[-1] == (StepKind.UNHOOKED if where == "on" and not hooked else StepKind.PLANNED).value
        assert (within is None) == (kinds(told)[-1] == WITHOUT)
        assert (top := saved_tensor_hooks_on_top()) is not None
        assert top[0] is session._save
    assert saved_tensor_hooks_on_top() is None


# --- who else has hooks


@pytest.mark.parametrize("rows", [FEW, MANY])
def test_hooks_of_others_stay_above_them(rows: int) -> None:
    training, saved = Training(), list[Tensor]()

    def note(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with (session := in_session([])).pool, session, ExitStack() as longer:
        bring(session, training)
        with session.step():
            longer.enter_context(saved_tensors_hooks(note, lambda t: t))
            training.step(rows)
            theirs = len(saved)
            assert theirs > 0
        assert (top := saved_tensor_hooks_on_top()) is not None
        assert top[0] is note
        saved.clear()
        longer.close()
        assert (top := saved_tensor_hooks_on_top()) is not None
        assert top[0] is session._save
        with session.step():
            training.step(FEW)
    assert saved == []
    assert saved_tensor_hooks_on_top() is None


def test_beneath_hooks_of_others_nothing_is_taken_off() -> None:
    training, told = Training(), list[StepFigures]()
    with (session := in_session(told)).pool, session:
        bring(session, training)
        with saved_tensors_hooks(lambda t: t, lambda t: t), session.step():
            training.step(FEW)
    assert kinds(told)[-1] != WITHOUT


@pytest.mark.parametrize("rows", [FEW, MANY])
def test_where_torch_forbids_hooks_they_come_back_later(rows: int) -> None:
    training = Training()
    with (session := in_session([])).pool, session:
        bring(session, training)
        with ExitStack() as longer:
            with session.step():
                longer.enter_context(disable_saved_tensors_hooks("not here"))
                training.step(rows)
            assert (top := saved_tensor_hooks_on_top()) is not None
            assert top[0] is session._save
            with pytest.raises(RuntimeError, match="not here"):
                saved_tensors_hooks(lambda t: t, lambda t: t).__enter__()
        with session.step():
            training.step(FEW)
    assert saved_tensor_hooks_on_top() is None


# --- how it ends


@pytest.mark.parametrize("rows", [FEW, MANY])
@pytest.mark.parametrize("leaves_session", [False, True])
def test_an_error_in_such_a_step_leaves_the_hooks_as_they_were(rows: int, leaves_session: bool) -> None:
    training, told = Training(), list[StepFigures]()
    with (session := in_session(told)).pool:
        with pytest.raises(KeyError), session if leaves_session else nullcontext():
            if not leaves_session:
                session.__enter__()
            bring(session, training)
            with session.step():
                training.loss(rows).backward()
                raise KeyError
        if not leaves_session:
            assert (top := saved_tensor_hooks_on_top()) is not None
            assert top[0] is session._save
            training.optimizer.zero_grad()
            with session.step():
                training.step(FEW)
            session.__exit__(None, None, None)
            assert kinds(told)[-1] != WITHOUT
    assert StepKind.FAILED.value in session.report().steps_by_phase
    assert saved_tensor_hooks_on_top() is None


@pytest.mark.parametrize("dropped", [False, True])
def test_a_step_that_is_never_left_takes_no_hooks_with_it(dropped: bool) -> None:
    training = Training()
    with (session := in_session([])).pool, session:
        bring(session, training)
        step = session.step()
        step.__enter__()
        training.step(FEW)
        assert saved_tensor_hooks_on_top() is None
        if dropped:
            del step
            assert (top := saved_tensor_hooks_on_top()) is not None
            assert top[0] is session._save
    assert saved_tensor_hooks_on_top() is None
    assert session.report().steps_by_phase[StepKind.FAILED.value] == 1


def test_a_step_on_a_thread_without_the_hooks_is_an_ordinary_one() -> None:
    training, told = Training(), list[StepFigures]()
    with (session := in_session(told)).pool, session:
        bring(session, training)

        def elsewhere() -> None:
            with session.step():
                training.step(FEW)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert (top := saved_tensor_hooks_on_top()) is not None
        assert top[0] is session._save
    assert kinds(told)[-1] != WITHOUT


@pytest.mark.parametrize("hooked", [False, True])
def test_a_step_that_ends_on_another_thread_leaves_its_hooks_for_the_next(hooked: bool) -> None:
    training, told = Training(), list[StepFigures]()
    with (session := in_session(told)).pool, session:
        bring(session, training)
        step = session.step()
        step.__enter__()
        training.step(FEW)
        thread = threading.Thread(target=step.__exit__, args=(None, None, None))
        thread.start()
        thread.join()
        with session.step(hooked=hooked):
            assert (top := saved_tensor_hooks_on_top()) is not None
            assert top[0] is session._save
            training.step(FEW)
        assert kinds(told)[-1] == StepKind.PLANNED.value
    assert saved_tensor_hooks_on_top() is None


# --- what else decides


def test_a_budget_that_leaves_less_room_brings_the_hooks_back() -> None:
    training, told = Training(), list[StepFigures]()
    with (session := in_session(told)).pool, session:
        bring(session, training)
        session.hbm_budget = RESERVED_DIVISOR * torch.cuda.memory_reserved() - 1
        for _ in range(AT_FIRST + 4):
            with session.step():
                training.step(FEW)
        assert WITHOUT not in kinds(told)[-AT_FIRST - 4 :]
        session.hbm_budget = BUDGET
        for number in range(STEPS_BEFORE + 2):
            with session.step():
                training.step(FEW)
            if number < STEPS_BEFORE:
                assert kinds(told)[-1] != WITHOUT
        assert WITHOUT in kinds(told)[-2:]
    assert differences(trained_plainly([FEW] * training.steps), training.seen) == []


def _swap_parameters(training: Training) -> dict[str, Any]:
    return {"model": training.model, "parameters": "swap"}


@pytest.mark.parametrize(
    "how",
    [
        lambda training: {"plans": False},
        lambda training: {"verify": True},
        lambda training: {"model": training.model, "optimizer": training.optimizer},
        _swap_parameters,
    ],
    ids=["no plans", "verify", "optimizer", "parameters"],
)
def test_sessions_that_do_more_keep_their_hooks(how: Callable[[Training], dict[str, Any]]) -> None:
    training, told = Training(), list[StepFigures]()
    with (session := in_session(told, **how(training))).pool, session:
        for _ in range(AT_FIRST + 6):
            with session.step():
                training.step(FEW)
    assert WITHOUT not in kinds(told)


def _by_attach(training: Training, steps: int) -> dict[str, int]:
    with cm.attach(training.model, training.optimizer, hbm_budget=BUDGET, host_budget="1GiB", device=CudaDevice()) as session:
        for _ in range(steps):
            training.step(FEW)
        return session.report().steps_by_phase


def _by_run_step(training: Training, steps: int) -> dict[str, int]:
    with (session := in_session([], model=training.model)).pool, session:
        for _ in range(steps):
            session.run_step(lambda: training.step(FEW))
        return session.report().steps_by_phase


def _hooked(training: Training, steps: int) -> dict[str, int]:
    with (session := in_session([])).pool, session:
        for _ in range(steps):
            with session.step(hooked=True):
                training.step(FEW)
        return session.report().steps_by_phase


@pytest.mark.parametrize("way", [_by_attach, _by_run_step, _hooked])
def test_steps_that_are_watched_have_them(way: Callable[[Training, int], dict[str, int]]) -> None:
    steps = AT_FIRST + 6
    training = Training()
    found = way(training, steps)
    assert WITHOUT not in found
    assert found["planned"] > STEPS_BEFORE
    assert differences(trained_plainly([FEW] * steps), training.seen) == []


def test_a_graph_of_an_earlier_step_may_be_used_in_one_without_hooks() -> None:
    def run(step: Callable[[], AbstractContextManager[object]]) -> Outcome:
        training = Training()
        for _ in range(AT_FIRST + 3):
            with step():
                training.step(FEW)
        with step():
            kept = training.loss(FEW)
            training.step(FEW)
        with step():
            kept.backward()
            training.step(FEW)
        return training.seen

    plain = run(nullcontext)
    with (session := in_session([])).pool, session:
        seen = run(session.step)
    assert differences(plain, seen) == []
    assert session.report().steps_by_phase[WITHOUT] >= 4


def test_a_switch_of_other_hooks_does_nothing(switch: ModuleType) -> None:
    def save(t: Tensor) -> Tensor:
        return t

    mine = switch.HookSwitch(torch.cuda.current_device(), save)
    assert not mine.off(1 << 60)
    assert mine.on() is None
    with saved_tensors_hooks(save, save):
        assert not mine.off(0)  # something is reserved
        with saved_tensors_hooks(lambda t: t, save):
            assert not mine.off(1 << 60)
        allocated, peak = mine.off(1 << 60)
        assert (allocated, peak) == (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated())
        assert saved_tensor_hooks_on_top() is None
        assert not switch.HookSwitch(torch.cuda.current_device(), save).off(1 << 60)
        assert not mine.off(1 << 60)
        assert mine.on()
        assert mine.on() is None
        assert (top := saved_tensor_hooks_on_top()) is not None
        assert top[0] is save


def test_a_session_in_a_cycle_is_collected() -> None:
    training = Training()
    session = in_session([], model=training.model)
    with session.pool, session:
        bring(session, training)
    training.model.session = session  # type: ignore[assignment]  # a cycle
    gone = weakref.ref(session)
    del session, training
    gc.collect()
    assert gone() is None
