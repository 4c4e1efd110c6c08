"""Loop that runs a compiled plan: its steps are eager's, and leaving it is reported to the director once.

The reference is plain PyTorch: the same program with no session, no simulated device and no mode around it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import chameleon_mm as cm
from chameleon_mm.device import Device
from chameleon_mm.plan.step_program import KEPT, Keys, Row, StepProgram
from chameleon_mm.plan.swap_plan import SwapPlan
from chameleon_mm.plan.trace import Trace
from chameleon_mm.record.calls import Relied
from chameleon_mm.swap import hook_lock, step_loop
from chameleon_mm.swap.hand_over import HandOver
from chameleon_mm.swap.handles import Handle, KeptTensor, SavedBytes
from chameleon_mm.swap.host_copy import State
from chameleon_mm.swap.recipe import Reliance
from chameleon_mm.swap.recomputing import Recomputing
from chameleon_mm.swap.saved_storage import SavedStorage
from chameleon_mm.swap.step_loop import LoopSlot, StepLoop
from chameleon_mm.swap.swap_ins import Rescue
from tests._fakes import refusing
from tests._native import keep_first_plan
from tests._ordering import Machine, OnCuda, OnSim, drop_waits
from tests._plain_training import Image, image
from tests.observed import SimLifetimeError, SimRaceError

pytestmark = [
    pytest.mark.usefixtures("no_gc"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # of what a mutant breaks at the end
]

MACHINES = [OnSim, pytest.param(OnCuda, marks=pytest.mark.gpu)]

SIDE, LAYERS, STEPS = 128, 6, 5
ROOM = 10 * SIDE * SIDE * 4
"""Bytes of a session above its weights and input: less than autograd saves."""


# --- what runs


class Work:
    """A chain of operators, one letter each: tanh, sigmoid, a product, a view that is saved again, a write in place."""

    def __init__(self, machine: Machine) -> None:
        torch.manual_seed(3)
        self.weights = [
            torch.randn(SIDE, SIDE, device=machine.torch_device, requires_grad=True) for _ in range(LAYERS)
        ]  # fmt: skip
        self.x = torch.randn(SIDE, SIDE, device=machine.torch_device)
        self.keeps, self.made = False, list[Tensor]()
        """True if the model keeps the result of each tanh; the results kept in the latest step."""
        self.after: Callable[[int, Tensor], object] = lambda number, x: None
        """Called after each letter, with its number and what it made."""

    def step(self, word: str) -> list[Tensor]:
        # Not `torch.autograd.grad`: a thread of autograd's holds its result for a while after it returned. A step recorded in
        # this time would start with more memory than the others.
        self.forward(word).backward()
        found = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in self.weights]
        for weight in self.weights:
            weight.grad = None
        return found

    def forward(self, word: str) -> Tensor:
        x, held = self.x, None
        self.made = []
        for number, (letter, weight) in enumerate(zip(word, self.weights * len(word), strict=False)):
            if letter == "m":
                x = x @ weight
            elif letter == "t":
                x = x.tanh()
                if self.keeps:
                    self.made.append(x)
            elif letter == "v":
                x = x.t().sigmoid() * x.t()
            elif letter == "h":
                held = x
                x = x.exp().clamp(max=3)
            elif letter == "i":
                x = (x * weight).relu_()
            self.after(number, x)
        if self.keeps:
            self.made = [t.detach().clone() for t in self.made]  # read while what only autograd needs is away
        return x.sum() if held is None else x.sum() + held.mean()


WORD = "mtvmhimtmv"


Steps = list[list[Image]]
"""Gradients of each step."""


def plainly(machine: Machine, words: Sequence[str]) -> Steps:
    work = Work(machine)
    return [list(map(image, work.step(word))) for word in words]


def with_little_room(device: Device, room: int = ROOM) -> cm.SwapSession:
    return cm.SwapSession(device.allocated_bytes() + room, "64MiB", device, min_bytes=256, recompute=False)


class Session:
    """The same steps in a session with little room, on a slow link."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.device = machine, machine.device
        self.done: list[int] = []
        """Latest hook that the loop did in each step."""

    def run(self, words: Sequence[str], *, inside: Any = None) -> Steps:
        found: Steps = []
        with self.device.compute():
            work = Work(self.machine)
            self.device.reset_peaks()  # a CUDA device's peak is its whole process's
            with with_little_room(self.device) as session:
                self.budget = session.hbm_budget_bytes
                self.loop: StepLoop = session._executor.hand_over.loop
                for number, word in enumerate(words):
                    if inside is not None:
                        inside(number)
                    with session.step():
                        found.append(list(map(image, work.step(word))))
                    self.done.append(self.loop.hook)
                self.device.synchronize()
                self.report = session.report()
        return found


@pytest.mark.parametrize("machine_type", MACHINES)
def test_a_planned_step_runs_by_the_loop_to_its_end(machine_type: type[Machine], monkeypatch: pytest.MonkeyPatch) -> None:
    keep_first_plan(monkeypatch)  # else a plan on trial is timed, which the helper does not do
    words = [WORD] * 8
    expected, session = plainly(machine_type(), words), Session(machine_type())
    assert session.run(words) == expected
    assert session.report.bytes_swapped_out > 0
    hooks = session.done[-1] + 1
    assert session.report.plan_cache_hits >= 2
    assert session.report.planned is not None and hooks == session.report.planned.plan.num_hooks
    assert session.device.peak_allocated_bytes() <= session.budget


def all_at_their_uses(patch: pytest.MonkeyPatch) -> None:
    """Have plans bring back all of what moves at its use, in place of earlier."""
    of = StepProgram.of

    def late(trace: Trace, plan: SwapPlan, keys: Keys | None = None) -> StepProgram:
        swaps = tuple(replace(action, in_at=action.use_at) for action in plan.actions)
        return of(trace, replace(plan, actions=swaps), keys)

    patch.setattr(StepProgram, "of", late)


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize("machine_type", MACHINES)
def test_the_loop_brings_back_at_a_use_what_is_planned_for_it(
    refuses: bool, machine_type: type[Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`refuses`: Python's loop finds no memory for one, and the executor brings that back."""
    keep_first_plan(monkeypatch)
    all_at_their_uses(monkeypatch)
    machine, words = machine_type(), [WORD] * 8
    prefetch, tried, count, done = StepLoop._prefetch, list[int](), HandOver._count, list[int]()

    def counted(self: HandOver, *of: Any) -> None:
        done.append(self.loop.swap_ins_on_demand)
        count(self, *of)

    def finds_none_once(loop: StepLoop, numbers: Sequence[int], *, is_ahead: bool = True) -> None:
        tried.append(0)
        if len(tried) != 3:
            prefetch(loop, numbers, is_ahead=is_ahead)

    monkeypatch.setattr(HandOver, "_count", counted)
    if refuses:
        monkeypatch.setattr(StepLoop, "_prefetch", finds_none_once)
    expected, session = plainly(machine_type(), words), Session(machine)
    assert session.run(words) == expected
    assert session.report.planned is not None and session.done[-1] + 1 == session.report.planned.plan.num_hooks
    assert session.report.swap_ins_on_demand > sum(done) > 0  # the first steps' are the executor's
    assert session.device.peak_allocated_bytes() <= session.budget


@pytest.mark.parametrize("machine_type", MACHINES)
def test_a_backward_on_another_thread_that_leaves_comes_back(
    machine_type: type[Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autograd uses a thread of its own for a CUDA device. A save there is the executor's."""
    keep_first_plan(monkeypatch)
    expected, machine = plainly(machine_type(), [WORD])[0], machine_type()

    def backward() -> None:
        with machine.device.compute():
            loss.backward()

    with planned(machine) as (work, session), session.step():
        hand_over, loss = session._executor.hand_over, work.forward(WORD)
        loss.register_hook(lambda gradient: hand_over.come_back())  # before any use
        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
        way = session._executor.director.way
        assert way is not None and hand_over.loop.hook == way.program.plan.num_hooks - 1
        assert hand_over.loop.home == 0
        found = [image(torch.zeros_like(w) if w.grad is None else w.grad) for w in work.weights]
    assert found == expected


@pytest.mark.ci
@pytest.mark.parametrize(("at", "letter"), list(enumerate("mtvhimtvhim")))
def test_a_step_that_leaves_at_any_place_is_eagers(at: int, letter: str) -> None:
    words = [WORD] * 4 + [WORD[:at] + letter + WORD[at:], WORD, WORD[:at] or "m", WORD]
    expected, session = plainly(OnSim(), words), Session(OnSim())
    assert session.run(words) == expected
    assert session.done[3] >= 20


@pytest.mark.parametrize("letter", "mv")
@pytest.mark.parametrize("at", [1, 5, 9])
@pytest.mark.gpu
def test_a_step_that_leaves_on_cuda_is_eagers(at: int, letter: str) -> None:
    words = [WORD] * 4 + [WORD[:at] + letter + WORD[at:], WORD]
    expected, session = plainly(OnCuda(), words), Session(OnCuda())
    assert session.run(words) == expected


def test_a_late_op_is_carried_out_at_the_next_hook_of_any_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    in_loop, done = StepLoop._run, 0

    def run(loop: StepLoop, row: Row, hook: int, running: int) -> bool:
        nonlocal done
        was_late = row.kind == KEPT and not row.ops and bool(loop._late)
        goes_on = in_loop(loop, row, hook, -1 if row.ops else running)  # the ops of this row wait for the next hook
        if was_late and goes_on:
            assert not loop._late
            done += 1
        return goes_on

    monkeypatch.setattr(StepLoop, "_run", run)
    words = [WORD] * STEPS
    assert Session(OnSim()).run(words) == plainly(OnSim(), words)
    assert done


def test_the_loop_brings_nothing_back_at_a_hook_on_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    in_loop, left = StepLoop._use, 0

    def use(loop: StepLoop, handle: Handle, thread: int) -> Tensor | None:
        nonlocal left
        if not loop._rows[loop.hook + 1].ins or type(handle) is not KeptTensor:
            return in_loop(loop, handle, thread)
        with monkeypatch.context() as patch:
            patch.setattr(type(loop._compute), "is_current", lambda stream: False)
            patch.setattr(
                StepLoop,
                "_copy",
                lambda *_: pytest.fail("the loop began a copy back on a stream that is not current"),
            )
            t = in_loop(loop, handle, thread)
        assert t is None
        left += 1
        return t

    monkeypatch.setattr(StepLoop, "_use", use)
    words = [WORD] * STEPS
    assert Session(OnSim()).run(words) == plainly(OnSim(), words)
    assert left


@pytest.mark.parametrize(
    ("waiter", "recorder"), [("d2h", "compute"), ("compute", "d2h"), ("h2d", "compute"), ("compute", "h2d")]
)
def test_a_planned_step_without_one_wait_goes_red(waiter: str, recorder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[list[int]] = []
    machine = OnSim()

    def inside(number: int) -> None:
        if number == STEPS - 1:
            dropped.append(drop_waits(monkeypatch, machine, waiter, recorder))

    words, session = [WORD] * STEPS, Session(machine)
    with pytest.raises((SimRaceError, SimLifetimeError, AssertionError)):
        assert session.run(words, inside=inside) == plainly(OnSim(), words)
    assert dropped[0][0] > 0


def test_a_write_to_what_is_saved_raises_eagers_error_in_the_loop() -> None:
    def step(x: Tensor, weight: Tensor, *, write: bool) -> None:
        y = (x @ weight).tanh()
        loss = (y.exp() @ weight).sum()
        if write:
            with torch.no_grad():
                y.add_(1)
        loss.backward()

    device = cm.SimDevice()
    x, weight = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE, requires_grad=True)
    with pytest.raises(RuntimeError) as eager:
        step(x, weight, write=True)
    with device.compute(), cm.SwapSession("512KiB", "64MiB", device, min_bytes=256, recompute=False) as session:
        for number in range(STEPS):
            weight.grad = None
            with session.step():
                if number < STEPS - 1:
                    step(x, weight, write=False)
                    continue
                with pytest.raises(RuntimeError) as swapped:
                    step(x, weight, write=True)
                assert session._executor.hand_over.loop.hook > 0
    assert str(swapped.value) == str(eager.value)


def test_without_its_check_the_version_is_not_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SavedBytes, "check", lambda self: None)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_a_write_to_what_is_saved_raises_eagers_error_in_the_loop()


@contextmanager
def planned(machine: Machine, word: str = WORD, room: int = ROOM) -> Iterator[tuple[Work, cm.SwapSession]]:
    """A session whose next step of these letters follows a plan."""
    with machine.device.compute():
        work = Work(machine)
        with with_little_room(machine.device, room) as session:
            for _ in range(STEPS - 1):
                with session.step():
                    work.step(word)
            yield work, session


def kept_by_the_model() -> list[Image]:
    """Return the tensors that the model keeps of a planned step, after the step."""
    with planned(OnSim()) as (work, session):
        work.keeps = True
        with session.step():
            work.step(WORD)
        return list(map(image, work.made))


def test_what_a_model_keeps_in_a_planned_step_is_not_emptied() -> None:
    work = Work(OnSim())
    work.keeps = True
    work.step(WORD)
    assert kept_by_the_model() == list(map(image, work.made))


def test_without_the_use_count_it_is_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_loop, "held_alone", lambda *_: True)
    with pytest.raises((RuntimeError, SimLifetimeError, SimRaceError, AssertionError)):
        test_what_a_model_keeps_in_a_planned_step_is_not_emptied()


def drop_a_graph_under_its_copies() -> int:
    """Return the number of copies out that were on their way in a planned step as its graph went."""
    with planned(OnSim()) as (work, session):
        with session.step():
            loss = work.forward(WORD[:6])
            leaving = len(session._executor.hand_over.loop._under_copy)
            del loss  # and with it the graph
        session.device.synchronize()
        return leaving


def test_a_copy_holds_what_it_reads_though_the_graph_is_gone() -> None:
    assert drop_a_graph_under_its_copies() > 0


def test_without_that_hold_the_source_is_freed_under_its_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing(dict[int, LoopSlot]):
        def __setitem__(self, number: int, slot: LoopSlot) -> None: ...

        def __delitem__(self, number: int) -> None: ...

    begin = StepLoop._begin

    def begun(loop: StepLoop, num_storages: int = 0) -> None:
        begin(loop, num_storages)
        loop._under_copy = Nothing()

    monkeypatch.setattr(StepLoop, "_begin", begun)
    with pytest.raises((SimLifetimeError, SimRaceError)):
        drop_a_graph_under_its_copies()


@pytest.mark.gpu
def test_a_copy_under_way_as_a_capture_begins_is_waited_for_after_it(quiet: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture that waited for work from before it would be lost. Its refused backward gives the step back in the middle."""
    keep_first_plan(monkeypatch)  # else a plan on trial is timed, which the helper does not do
    with torch.cuda.stream(torch.cuda.Stream()):
        ones = torch.ones(SIDE, SIDE, device="cuda")
        expected = plainly(OnCuda(), [WORD[:3], WORD])
        with planned(OnCuda()) as (work, session):
            loop, results = session._executor.hand_over.loop, dict[int, Tensor]()
            work.after = results.__setitem__
            with session.step():
                out, work.after = work.forward(WORD[:8]), lambda number, x: None
                early = results[2].sum()
                results.clear()
                del out  # and with it what only its graph needs, under its copies
                assert loop.follows
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin()
                made = (ones + 1).sin()
                with pytest.raises(RuntimeError, match="capture both together"):
                    early.backward()
                assert not loop.follows
                graph.capture_end()
                graph.replay()
                assert torch.equal(made, (ones + 1).sin())
                early.backward()
                found = [[image(torch.zeros_like(w) if w.grad is None else w.grad) for w in work.weights]]
            for weight in work.weights:
                weight.grad = None
            with session.step():
                found.append(list(map(image, work.step(WORD))))
            assert session.pool.stats().num_live == 0
        assert found == expected


@pytest.mark.parametrize("what", ["relied", "proof"])
@pytest.mark.parametrize("machine_type", MACHINES)
def test_a_record_that_recipes_rely_on_or_that_has_a_proof_is_the_executors_to_use(
    what: str, machine_type: type[Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a graph of an earlier step, which recomputed, shares a storage with this one."""

    def hand_out(_: Rescue, relied: Relied, handle: Handle, saved: SavedStorage) -> None:
        seen.append(saved)
        relied.dependents.clear()

    def prove(_: Recomputing, saved: SavedStorage, restore: object) -> None:
        seen.append(saved)
        saved.proof = None

    keep_first_plan(monkeypatch)  # else a plan on trial is timed, which the helper does not do
    monkeypatch.setattr(Rescue, "hand_out", hand_out)
    monkeypatch.setattr(Recomputing, "prove", prove)
    seen, expected = list[SavedStorage](), plainly(machine_type(), [WORD])
    with planned(machine_type()) as (work, session), session.step():
        work.after = lambda number, x: number == 7 and session.report()  # what was saved before has a record
        loss, way = work.forward(WORD), session._executor.director.way
        assert session._executor.hand_over.loop.follows and way is not None
        records: list[Any] = [saved for saved in way.storages.values() if saved.state is not State.RETIRED]
        for saved in records:
            saved.relied = Relied(dependents=[weakref.ref(saved)]) if what == "relied" else None
            saved.proof = SimpleNamespace() if what == "proof" else None
        loss.backward()
        assert [[image(torch.zeros_like(w) if w.grad is None else w.grad) for w in work.weights]] == expected
        assert set(seen) == set(records) and len(records) > 1
        del records, saved
        seen.clear()


@pytest.mark.parametrize(("every", "goes_on"), [(8, True), (1, False)])
@pytest.mark.parametrize("machine_type", MACHINES)
def test_a_step_is_given_back_as_often_as_the_loop_was_worth_it(
    every: int, goes_on: bool, machine_type: type[Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_first_plan(monkeypatch)  # else a plan on trial is timed, which the helper does not do
    word = WORD * 6
    expected = plainly(machine_type(), [word])
    with planned(machine_type(), word, 2 * ROOM) as (work, session), session.step():
        work.after = lambda number, x: number < 48 and number % every == every - 1 and session.report()
        loss = work.forward(word)
        assert session._executor.hand_over.loop.follows is goes_on
        loss.backward()
        assert [[image(torch.zeros_like(w) if w.grad is None else w.grad) for w in work.weights]] == expected


@pytest.mark.parametrize("machine_type", MACHINES)
def test_memory_of_a_rescue_while_the_loop_follows_is_no_growth(
    machine_type: type[Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the last handle of a source goes outside of hooks, in a graph of an earlier step, which recomputed."""
    keep_first_plan(monkeypatch)  # else a plan on trial is timed, which the helper does not do
    with planned(machine_type()) as (work, session), session.step():
        budget = session._executor.budget
        monkeypatch.setattr(Rescue, "let_go", lambda rescue, reliance: budget.note_allocated(1 << 20))
        loss, loop = work.forward(WORD), session._executor.hand_over.loop
        before = loop.taken
        session._executor.has_ended(Reliance.__new__(Reliance))
        assert loop.follows and loop.taken == before + (1 << 20)
        loss.backward()


# --- giving back: while a hook waits for the lock, and with an error in it


def test_a_handle_that_is_given_back_while_its_hook_waits_for_the_lock_is_the_executors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, done = list[Callable[[], None]](), 0

    class Lock:
        def __init__(self) -> None:
            self.real = threading.Lock()
            self.acquire, self.release = self.real.acquire, self.real.release

        def __enter__(self) -> None:
            if before:
                before.pop()()
            self.real.acquire()

        def __exit__(self, *_: object) -> None:
            self.real.release()

    def taken_over() -> None:
        nonlocal done
        executor.hand_over.come_back()
        executor._enter_loop()
        done += executor.hand_over.loop.follows

    monkeypatch.setattr(hook_lock, "threading", SimpleNamespace(Lock=Lock))
    expected = plainly(OnSim(), [WORD])
    with planned(OnSim()) as (work, session):
        executor = session._executor
        with session.step():
            loss = work.forward(WORD)
            before.append(taken_over)
            loss.backward()
        assert [[image(torch.zeros_like(w) if w.grad is None else w.grad) for w in work.weights]] == expected
    assert done == 1


def test_an_error_as_all_is_given_back_is_told_and_the_next_step_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    with planned(OnSim()) as (work, session):
        with session.step():
            loss = work.forward(WORD)
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(HandOver, "_adopt", refusing(KeyboardInterrupt))
                session.report()
            with pytest.raises(RuntimeError, match="expected the session's record of it, got none"):
                loss.backward()
            del loss
        for weight in work.weights:
            weight.grad = None
        with session.step():
            found = list(map(image, work.step(WORD)))
        pool = session.pool
    assert [found] == plainly(OnSim(), [WORD])
    assert pool.stats().num_live == 0


def test_a_child_that_is_forked_while_another_thread_has_the_lock_does_not_hang() -> None:
    expected = plainly(OnSim(), [WORD])
    with planned(OnSim()) as (work, session), session.step():
        loss = work.forward(WORD)
        held, over, lock = threading.Event(), threading.Event(), session._executor.hook_lock.lock

        def hold() -> None:
            with lock:
                held.set()
                over.wait()

        holder = threading.Thread(target=hold)
        holder.start()
        held.wait()
        child = os.fork()  # where the lock is held for ever, and nothing was given back
        if child == 0:
            try:
                loss.backward()
            except RuntimeError as error:
                session._executor.hand_over.come_back()
                os._exit(0 if "forked child" in str(error) else 2)
            os._exit(3)
        over.set()
        holder.join()
        assert os.waitpid(child, 0)[1] == 0
        loss.backward()
        assert [[image(torch.zeros_like(w) if w.grad is None else w.grad) for w in work.weights]] == expected
