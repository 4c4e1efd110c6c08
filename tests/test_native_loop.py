"""C++ loop of planned steps: its steps are eager's, and Python continues whatever it hands over.

The reference is plain PyTorch. What the tests of the Python loop say holds with the helper, too: `make test-native` runs them.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import chameleon_mm as cm
from chameleon_mm.device import Device
from chameleon_mm.swap.hand_over import HandOver
from tests._native import helper, keep_first_plan, mutated, only
from tests._plain_training import Image, image
from tests.cuda_stand_in import control
from tests.test_attach import LOOPS, check_bits, skipped_steps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("no_gc", "quiet"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # of what a mutant breaks at the end
]

SIDE, STEPS, LAST = 64, 8, 7
"""The first step is recorded, the next two are timed, the others are the helper's."""

NBYTES = SIDE * SIDE * 4

CUDA = torch.device("cuda", 0)


@pytest.fixture
def native_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("memory", "loop"):
        helper(name, monkeypatch)
    only(["memory", "loop"], monkeypatch)
    keep_first_plan(monkeypatch)


# --- steps


class Step:
    """State of a step besides its leaf: its number, tensors held between steps, the session."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.leaf = torch.randn(SIDE, SIDE, device=CUDA, requires_grad=True)
        self.weight = torch.nn.Parameter(torch.eye(SIDE, device=CUDA) * 0.9)
        self.number = 0
        self.stream = torch.cuda.Stream()
        self.graph: Tensor | None = None
        self.during: Callable[[int], None] = lambda operator: None
        self.give_back: Callable[[], object] = lambda: None
        """Has all that the helper has handed over to Python, in the session."""

    def grad(self, y: Tensor, **how: bool) -> Tensor:
        self.leaf.grad = None
        y.sum().backward(**how)
        return self.leaf_grad().clone()

    def leaf_grad(self) -> Tensor:
        assert self.leaf.grad is not None
        return self.leaf.grad


Found = list[Tensor | str]
Program = Callable[[Step], Found]


def chain(s: Step, length: int = 20, at: Callable[[int, Tensor], object] = lambda i, y: None) -> Tensor:
    y: Tensor = s.leaf
    for i in range(length):
        y = y.sin()
        at(i, y)
        s.during(i)
    return y


def sines(y: Tensor, length: int) -> Tensor:
    for _ in range(length):
        y = y.sin()
    return y


def plain(s: Step) -> Found:
    return [s.grad(chain(s))]


def views(s: Step) -> Found:
    a = s.leaf.sin()
    b = a.t()[3:40:2] * a.t()[3:40:2].cos()
    c = (b.exp() * a[0, :1].expand(19, SIDE)).sum(0)
    z = torch.view_as_complex(a.reshape(-1, 2)).conj()
    return [s.grad(c.sin().sin() + (z * z.sin()).real.sum())]


def held_by_the_model(s: Step) -> Found:
    held: list[Tensor] = []
    first = 0 if s.number < LAST - 1 else 2  # the tensors held at the end are unknown to the plan
    y = chain(s, 20, lambda i, y: held.append(y) if i % 3 == first else y.untyped_storage())
    before = [t.detach().clone() for t in held]
    return [s.grad(y), *before, *held]


def written(s: Step) -> Found:
    held: list[Tensor] = []

    def at(i: int, y: Tensor) -> None:
        if i == 3:
            held.append(y.detach() if s.number % 2 else y)
        if i == 12 and LAST - 2 <= s.number < LAST:
            with torch.no_grad():
                held[0].mul_(2)

    try:
        return [s.grad(chain(s, 20, at))]
    except RuntimeError as error:
        return [str(error)]


class SavesItsResult(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y: Tensor = x.sin()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        x: Tensor = ctx.saved_tensors[0]
        return gradients[0] * x.cos()


def functions_in_python(s: Step) -> Found:
    y: Tensor = s.leaf
    held: list[Tensor] = []
    for _ in range(8):
        y = SavesItsResult.apply(y).exp()  # type: ignore[no-untyped-call]  # torch annotates no `apply`
        y = SavesItsResult.apply(y)  # type: ignore[no-untyped-call]  # the same
        held.append(y)
    if s.number == LAST - 1:  # autograd's thread keeps an error's frames until its next work
        with torch.no_grad():
            held[2].add_(1)
    del held
    try:
        return [s.grad(y)]
    except RuntimeError as error:
        return [str(error)]


def two_backwards(s: Step) -> Found:
    y = chain(s).sum()
    first = s.grad(y, retain_graph=True)
    y.backward()
    return [first, s.leaf_grad()]


def second_order(s: Step) -> Found:
    (g,) = torch.autograd.grad(chain(s, 12).sum(), s.leaf, create_graph=True)
    return [s.grad(g.square())]


def ends_with_an_error(s: Step) -> Found:
    try:
        s.grad(chain(s))
        raise KeyError
    except KeyError:
        return [s.leaf_grad()]


def another_thread(s: Step) -> Found:
    more: list[Tensor] = []
    y = chain(s, 8)
    thread = threading.Thread(target=lambda: more.append(chain(s, 5)))
    thread.start()
    thread.join()
    return [s.grad(y + more[0])]


def another_stream(s: Step) -> Found:
    y, stream, before = chain(s, 8), torch.cuda.Stream(), torch.cuda.current_stream()
    stream.wait_stream(before)
    with torch.cuda.stream(stream):
        y = y.sin().cos() if s.number == LAST else y
    before.wait_stream(stream)
    return [s.grad(y.sin().sin())]


def kept_use_on_another_stream(s: Step) -> Found:
    """Copies back are due after the use of a tensor that stays."""
    y, before = chain(s, 10), torch.cuda.current_stream()
    (s.leaf[1, :60] * 1.0).sin().sin()
    row = s.leaf[0, :60] * 1.0
    if s.number == LAST:
        s.stream.wait_stream(before)
    with torch.cuda.stream(s.stream if s.number == LAST else before):
        for _ in range(8):
            row = row.sin()
    if s.number == LAST:
        before.wait_stream(s.stream)
    y = y + row.sum()
    return [s.grad(sines(y, 10))]


def goes_on_on_another_stream(s: Step) -> Found:
    """The helper comes back where it may: not after a save that stays on another stream than the step's."""
    s.leaf.grad = None
    chain(s, 12).sum().backward()
    before = torch.cuda.current_stream()
    if s.number == LAST:
        s.stream.wait_stream(before)
        s.give_back()
    with torch.cuda.stream(s.stream if s.number == LAST else before):
        y = sines(s.leaf, 15)
    if s.number == LAST:
        before.wait_stream(s.stream)
    y.sum().backward()
    return [s.leaf_grad()]


def collected_as_it_is_handed_over(s: Step) -> Found:
    """Python 3.11 collects as it allocates. The tensor being handed over may then be gone."""
    y = chain(s, 8)
    ring: list[object] = [sines(y, 6)]
    ring.append(ring)
    del ring
    s.give_back()
    found = s.grad(sines(y, 8))
    gc.collect()
    return [found]


def captured_behind_a_dropped_graph(s: Step) -> Found:
    """On a stream that is not the default one."""
    out, static = s.leaf.detach().sin(), torch.ones(SIDE, SIDE, device=CUDA, requires_grad=True)
    torch.cuda.synchronize()
    y = chain(s, 10)
    if s.number == LAST:
        sines(y, 6)
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        made = static.sin()
        graph.capture_end()
        graph.replay()
        out = made.detach().clone()
    return [s.grad(sines(y, 10)), out]


def dropped_in_between(s: Step) -> Found:
    if s.number >= LAST - 1:  # the plan knows nothing of it
        chain(s, 9)
    filled = torch.full((SIDE, SIDE), 7.0, device=CUDA)
    return [s.grad(chain(s)), filled]


def micro_batches(s: Step) -> Found:
    s.leaf.grad = None
    for factor in range(1, 4):
        (chain(s, 12) * factor).sum().backward()
    return [s.leaf_grad()]


def outlives_its_step(s: Step) -> Found:
    found: Found = [s.grad(chain(s, 10))] if s.graph is None else [s.grad(s.graph)]
    s.graph = chain(s, 10)
    return found


def looked_at(s: Step) -> Found:
    y = chain(s, 8)
    saved = y.grad_fn._saved_self.clone()  # type: ignore[union-attr]  # a node's own
    return [s.grad(y.cos().cos()), saved]


def with_parameters(s: Step) -> Found:
    x: Tensor = s.leaf
    for _ in range(4):
        x = torch.nn.functional.layer_norm(x @ s.weight, (SIDE,)).relu() * x
    s.weight.grad = None
    return [s.grad(x), s.weight.grad]  # type: ignore[list-item]  # it has one


def other_operators(s: Step) -> Found:
    y = chain(s, 9)
    return [s.grad((y.cos() if s.number % 4 == LAST % 4 else y.sin()).sin().sin())]


PROGRAMS: list[tuple[Program, int]] = [
    (plain, 12), (views, 12), (held_by_the_model, 26), (written, 12), (functions_in_python, 20), (two_backwards, 12),
    (second_order, 26), (ends_with_an_error, 12), (another_thread, 12), (another_stream, 12), (dropped_in_between, 12),
    (micro_batches, 10), (outlives_its_step, 24), (looked_at, 11), (with_parameters, 12), (other_operators, 12),
    (kept_use_on_another_stream, 14), (kept_use_on_another_stream, 16), (goes_on_on_another_stream, 10),
]  # fmt: skip
"""Each with the tensors that its budget has room for."""


def images(found: Found) -> list[Image | str]:
    return [one if isinstance(one, str) else image(one.cpu()) for one in found]


class Session:
    """Steps of a program in a session."""

    def __init__(self, program: Program, room: int, *, host: str = "64MiB") -> None:
        from chameleon_mm.device.cuda import CudaDevice

        self.device: Device = CudaDevice()
        self.program, self.room, self.host = program, room, host
        self.entered: list[int] = []
        """Steps whose hooks the helper took."""
        self.hooks: list[int] = []
        """Latest hook of the loop in each step."""

    def run(self, during: Callable[[cm.SwapSession, Step, int], None] | None = None) -> list[list[Image | str]]:
        found, step = [], Step()
        self.device.release_unused()  # else a block that is free too early is seldom the next one
        self.before = self.device.allocated_bytes()
        self.device.reset_peaks()  # a CUDA device's peak is its whole process's
        budget = self.before + self.room * NBYTES
        with cm.SwapSession(budget, self.host, self.device, min_bytes=256, recompute=False) as session:
            native = session._executor.hand_over
            step.give_back = session.report  # which counts all, wherever it is
            for step.number in range(STEPS):
                if during is not None:
                    step.during = partial(during, session, step)
                with session.step():
                    found.append(images(self.program(step)))
                self.hooks.append(session._executor.hand_over.loop.hook)
                if native._entries[0] == session._executor.registry.epoch:
                    self.entered.append(step.number)
            step.graph = None
            gc.collect()  # objects held by an error's frames
            self.device.synchronize()
            self.report, self.live = session.report(), session.pool.stats().live_bytes
            assert not session._executor.context.held and not session._executor.registry.all()
        return found


def plainly(program: Program) -> list[list[Image | str]]:
    step, found = Step(), []
    for step.number in range(STEPS):
        found.append(images(program(step)))
    return found


@pytest.mark.usefixtures("native_loop")
@pytest.mark.parametrize(("program", "room"), PROGRAMS, ids=lambda value: getattr(value, "__name__", ""))
def test_its_steps_are_eagers(program: Program, room: int) -> None:
    expected, session = plainly(program), Session(program, room)
    assert session.run() == expected
    assert session.live == 0
    # What another thread has allocated comes when it comes: on a fast or a busy machine no step of that program may be entered.
    assert session.entered or program is another_thread


@pytest.mark.usefixtures("native_loop")
@pytest.mark.parametrize("room", [12, 14, 18])
def test_a_capture_on_the_steps_stream_is_eagers(room: int) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        expected, session = plainly(captured_behind_a_dropped_graph), Session(captured_behind_a_dropped_graph, room)
        assert session.run() == expected
    assert session.entered and session.live == 0


@pytest.mark.usefixtures("native_loop")
@pytest.mark.parametrize("allocations", range(0, 60, 12))
def test_a_collection_while_all_is_handed_over_is_harmless(allocations: int, monkeypatch: pytest.MonkeyPatch) -> None:
    give_back, thresholds = HandOver.give_back, gc.get_threshold()

    class Collecting:
        """The helper, with a collection after so many allocations of its."""

        def __init__(self, loop: Any) -> None:
            self._loop = loop

        def __getattr__(self, number: str) -> Any:
            return getattr(self._loop, number)

        def give_back(self) -> Any:
            gc.set_threshold(gc.get_count()[0] + allocations, 1 << 20, 1 << 20)
            gc.enable()
            try:
                return self._loop.give_back()
            finally:
                gc.disable()
                gc.set_threshold(*thresholds)

    def collected(native: HandOver) -> None:
        loop = native.loop
        if loop.follows:
            native.loop = Collecting(loop)
            give_back(native)
            native.loop = loop

    monkeypatch.setattr(HandOver, "give_back", collected)
    expected, session = plainly(collected_as_it_is_handed_over), Session(collected_as_it_is_handed_over, 16)
    assert session.run() == expected
    assert session.entered and session.live == 0


@pytest.mark.usefixtures("native_loop")
def test_a_use_while_another_thread_hands_over_waits_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    adopt, graphs, threads = HandOver._adopt, list[Tensor](), list[threading.Thread]()

    def adopted(native: HandOver, *arguments: Any) -> None:
        if graphs:
            threads.append(threading.Thread(target=graphs.pop().backward))
            threads[0].start()
            time.sleep(0.3)  # by then its first hook asks for its handle
        adopt(native, *arguments)

    def program(s: Step) -> Found:
        s.leaf.grad = None
        y = chain(s, 14).sum()
        if s.number == LAST:
            graphs.append(y)
            s.give_back()
            graphs.clear()
        if s.number == LAST and threads:
            threads[0].join()
        else:
            y.backward()
        return [s.leaf_grad()]

    monkeypatch.setattr(HandOver, "_adopt", adopted)
    expected, session = plainly(program), Session(program, 10)
    assert session.run() == expected
    assert threads and session.live == 0


@pytest.mark.usefixtures("native_loop")
def test_it_does_a_planned_step_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, give_back = list[str](), HandOver.give_back

    def noted(native: HandOver) -> None:
        if native.loop.follows:
            calls.append("give_back")
        give_back(native)

    monkeypatch.setattr(HandOver, "give_back", noted)
    expected, session = plainly(plain), Session(plain, 12)

    def during(_: cm.SwapSession, step: Step, operator: int) -> None:
        if step.number == LAST and operator == 1:
            calls.clear()

    assert session.run(during) == expected
    assert LAST in session.entered and session.hooks[LAST] == 39
    assert session.report.bytes_swapped_out > 0 and session.report.prefetches > 0
    assert session.device.peak_allocated_bytes() <= session.before + 12 * NBYTES
    assert calls == ["give_back"]  # as the step ends


@pytest.mark.usefixtures("native_loop")
def test_an_attached_loop_that_skips_optimizer_steps_has_its_steps() -> None:
    """A step ends at the next forward, if a backward has run: the helper's hooks count too."""
    check_bits(lambda attach: skipped_steps(CUDA, attach), cm.CudaDevice(), LOOPS[skipped_steps])


@pytest.mark.usefixtures("native_loop")
@pytest.mark.parametrize("at", range(0, 20, 3))
def test_it_hands_over_in_the_middle_of_any_step(at: int) -> None:
    expected, session = plainly(plain), Session(plain, 12)
    followed: list[bool] = []

    def during(running: cm.SwapSession, step: Step, operator: int) -> None:
        if step.number >= LAST - 2 and operator == at:
            native = running._executor.hand_over
            followed.append(native.loop.follows)
            running.report()
            assert not native.loop.follows

    assert session.run(during) == expected
    assert LAST in session.entered and any(followed)


@pytest.mark.usefixtures("native_loop")
@pytest.mark.parametrize("host", ["96KiB", "200KiB"])
def test_with_little_host_memory_it_trains(host: str) -> None:
    expected, session = plainly(plain), Session(plain, 14, host=host)
    assert session.run() == expected
    assert session.live == 0


@pytest.mark.usefixtures("native_loop")
def test_a_child_process_finds_python_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, session = plainly(plain), Session(plain, 12)
    followed: list[bool] = []

    def during(running: cm.SwapSession, step: Step, operator: int) -> None:
        native = running._executor.hand_over
        if step.number == LAST and operator == 9:
            child = os.fork()
            if child == 0:
                os._exit(int(native.loop.follows))
            followed.append(os.waitpid(child, 0)[1] != 0)

    assert session.run(during) == expected
    assert followed == [False]


# --- mutants

MUTANTS: list[tuple[Program, int, str, str]] = [
    (plain, 12, "must(cudaStreamWaitEvent(stream, ", "if (!is_out) must(cudaStreamWaitEvent(stream, "),
    (plain, 12, "must(cudaStreamWaitEvent(stream, ", "if (is_out) must(cudaStreamWaitEvent(stream, "),
    (plain, 12, "must(cudaStreamWaitEvent(compute, events[n], 0));  // Note [Reclaim]: its copy -> the next", "//"),
    (plain, 12, "must(cudaStreamWaitEvent(compute, events[slot->number], 0));  // Note [Swap-in]", "//"),
    (held_by_the_model, 26, "bool is_alone() const { return", "bool is_alone() const { return true ||"),
    (written, 12, " || !save->is_as_saved()", ""),
    (dropped_in_between, 12, "if (cudaStreamWaitEvent(compute, events[n], 0) != 0) wait_for_all();", ""),
]


@pytest.mark.slow
@pytest.mark.skipif(not control.is_loaded(), reason="a GPU names no violation")
@pytest.mark.usefixtures("fresh_blocks")
@pytest.mark.parametrize(("program", "room", "text", "instead"), MUTANTS)
def test_without_a_rule_it_goes_red(
    program: Program, room: int, text: str, instead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_first_plan(monkeypatch)
    mutated("loop", text, instead, tmp_path, monkeypatch)
    expected, session = plainly(program), Session(program, room)
    try:
        found = session.run()
    except RuntimeError as error:
        found = [[str(error)]]
    said = control.violations()
    assert session.entered
    assert found != expected or said
