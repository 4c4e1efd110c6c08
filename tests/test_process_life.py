"""Processes that fork or end while tensors are swapped: the parent unharmed, exit codes as asked, stderr empty, no hang.

    this file as a script, for each case:
        fork; child: stderr into a file -> the case -> the end of the interpreter, like any other's
        wait; exit code and stderr of each -> JSON
    one test per case reads what became of its own

One interpreter imports torch for all of them. The cases train on a simulated device whose copies never finish by luck.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import chameleon_mm as cm
from chameleon_mm.device import SPECS
from chameleon_mm.device.sim.machine import SimEvent, SimStream
from chameleon_mm.units import MIB
from tests._programs import deep
from tests._run_scripts import ROOT, python, ready_to_fork
from tests.observed import observe_all

CHILD_SECONDS = 60
"""Time limit of a case: beyond it, the case hangs."""

SLOW_LINK = dataclasses.replace(SPECS["h200"], h2d_gbps=0.5, d2h_gbps=0.5, duplex_gbps=0.8)

KEPT: list[object] = []
"""Objects that a case keeps alive until the interpreter itself clears this module."""


class Case(NamedTuple):
    """Work of a process before it ends, and how it must end."""

    work: Callable[[], None]
    exit_code: int = 0
    last_line: str = ""
    """Last line of stderr, which is empty except for a traceback that the case requests."""


CASES: dict[str, Case] = {}


def case(exit_code: int = 0, last_line: str = "") -> Callable[[Callable[[], None]], Callable[[], None]]:
    def register(work: Callable[[], None]) -> Callable[[], None]:
        CASES[work.__name__] = Case(work, exit_code, last_line)
        return work

    return register


# --- what is alive


def leaf() -> Tensor:
    return torch.randn(64, 64, requires_grad=True)


def a_session(*, plans: bool = True) -> cm.SwapSession:
    return cm.SwapSession(64 * MIB, 8 * MIB, cm.SimDevice(SLOW_LINK), min_bytes=0, plans=plans)


def entered(session: cm.SwapSession) -> cm.SwapSession:
    KEPT.append(session)
    return session.__enter__()


def a_graph(session: cm.SwapSession) -> Tensor:
    out = deep(leaf()).sum()
    assert session.pool.stats().num_live > 0
    KEPT.append(out)
    return out


# --- ends


@case()
def a_graph_is_alive_after_its_session() -> None:
    with a_session() as session, session.step():
        a_graph(session)


@case()
def a_graph_is_in_a_cycle() -> None:
    gc.disable()
    with a_session() as session, session.step():
        cycle: list[object] = [a_graph(session)]
        cycle.append(cycle)


@case(exit_code=1, last_line="ValueError: of the program")
def an_error_ends_the_program_while_blocks_and_snapshots_are_held() -> None:
    model, pool = nn.Linear(8, 8), cm.PinnedPool(1 * MIB, device=cm.SimDevice())
    KEPT.extend([pool, pool.allocate(4096), pool.empty((16,), torch.float32)])
    KEPT.append(entered(cm.SwapSession(64 * MIB, 8 * MIB, cm.SimDevice(), model=model)).snapshot())
    raise ValueError("of the program")


@case()
def a_session_is_in_step() -> None:
    session = entered(a_session())
    step = session.step()
    KEPT.append(step)
    step.__enter__()
    a_graph(session).backward(retain_graph=True)


@case()
def a_generator_is_paused_in_a_step() -> None:
    def losses() -> Iterator[Tensor]:
        with a_session() as session:
            while True:
                with session.step():
                    yield a_graph(session)

    paused = losses()
    KEPT.append(paused)
    next(paused)


@case()
def hooks_are_entered() -> None:
    device = cm.SimDevice(SLOW_LINK)
    manager = cm.save_on_cpu(pool=cm.PinnedPool("8MiB", device=device), min_bytes=0)
    KEPT.append(manager)
    manager.__enter__()
    KEPT.append(deep(leaf()))
    assert manager.pool.stats().num_live > 0


@case()
def a_handler_at_exit_uses_a_graph_and_reports() -> None:
    session = entered(a_session())
    step = session.step()
    step.__enter__()
    x = leaf()
    out = deep(x).sum()

    def late() -> None:
        out.backward()
        assert x.grad is not None
        step.__exit__(None, None, None)
        session.__exit__(None, None, None)
        assert session.report().bytes_swapped_in > 0

    atexit.register(late)


@case()
def a_thread_goes_on_when_main_has_ended() -> None:
    main = threading.main_thread()

    def trains() -> None:
        main.join()
        with a_session() as session:
            for _ in range(2):
                with session.step():
                    deep(leaf()).sum().backward()
            a_graph(session)

    threading.Thread(target=trains).start()


@case(exit_code=5)
def sys_exit_inside_a_step() -> None:
    with a_session() as session, session.step():
        a_graph(session)
        sys.exit(5)


@case(exit_code=6)
def os_exit_inside_a_step() -> None:
    with a_session() as session, session.step():
        a_graph(session)
        os._exit(6)


@case(exit_code=1, last_line="RuntimeError: the user's own")
def an_exception_that_nobody_handles_inside_a_step() -> None:
    with a_session() as session, session.step():
        a_graph(session)
        raise RuntimeError("the user's own")


# --- forks


def forbid_the_device_in_children() -> None:
    """Make a forked child that calls a device die from now on: on a GPU it would, for CUDA does not survive a fork."""
    parent = os.getpid()

    def guarded(kind: type, name: str) -> None:
        original = getattr(kind, name)

        def guard(self: object, *args: object, **kwargs: object) -> Any:
            if os.getpid() != parent:
                sys.stderr.write(f"{kind.__name__}.{name} was called in a forked child\n")
                sys.stderr.flush()
                os._exit(99)
            return original(self, *args, **kwargs)

        setattr(kind, name, guard)

    for name in ("alloc", "free", "copy", "record", "wait"):
        guarded(SimStream, name)
    for name in ("query", "synchronize"):
        guarded(SimEvent, name)
    for name in ("alloc_pinned", "free_pinned", "alloc_pageable", "synchronize", "read_memory"):
        guarded(cm.SimDevice, name)


def forked(work: Callable[[], None]) -> None:
    """Run `work` in a forked child that ends without cleaning up, as multiprocessing's children do. It must end well."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


class Training:
    """Graph in the middle of a step, blocks live and copies pending (`moves`), and its expected gradient."""

    def __init__(self, session: cm.SwapSession, *, moves: bool = True) -> None:
        self.session = session
        self.x = leaf()
        (self.expected,) = torch.autograd.grad(deep(self.x).sum(), self.x)
        self.out: Tensor | None = deep(self.x).sum()
        assert (session.pool.stats().num_live > 0) is moves

    def drop(self) -> None:
        self.out = None
        gc.collect()

    def finish(self) -> None:
        assert self.out is not None
        (got,) = torch.autograd.grad(self.out, self.x)
        assert torch.equal(got, self.expected)
        self.out = None
        assert self.session.pool.stats().num_live == 0


@case()
def a_child_drops_the_graph() -> None:
    forbid_the_device_in_children()
    gc.disable()
    with a_session() as session, session.step():
        training = Training(session)
        forked(training.drop)
        training.finish()


class Rows(Dataset[Tensor]):
    """Rows that a worker computes: torch's own random numbers, seeded by their index."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.tanh(torch.randn(16, generator=generator)) * 2


@case()
def a_data_loader_forks_workers_inside_a_session() -> None:
    forbid_the_device_in_children()

    def trained(session: cm.SwapSession | None, device: cm.SimDevice) -> list[Tensor]:
        torch.manual_seed(1)
        seen: list[Tensor] = []
        with device.compute(), session or contextlib.nullcontext():
            model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 16))
            for _ in range(2):  # the second time there is something to be forked in the middle of
                held = deep(leaf())
                for rows in DataLoader(Rows(), batch_size=6, num_workers=2, multiprocessing_context="fork"):
                    with session.step() if session else contextlib.nullcontext():
                        loss = (model(rows) - rows).square().mean()
                        loss.backward()
                        seen.append(loss.detach())
                        with torch.no_grad():
                            for p in model.parameters():
                                assert p.grad is not None
                                p.sub_(p.grad, alpha=0.1)
                                p.grad = None
                        del loss
                held.sum().backward()
                del held
        return [*seen, *(p.detach() for p in model.parameters())]

    expected = trained(None, cm.SimDevice(SLOW_LINK))
    session = a_session()
    got = trained(session, session.device)  # type: ignore[arg-type]  # the one it was made with
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert session.report().bytes_swapped_in > 0
    assert session.pool.stats().num_live == 0


@case()
def a_child_exits_inside_a_step() -> None:
    forbid_the_device_in_children()
    with a_session() as session, session.step():
        training = Training(session)
        child = os.fork()
        if child == 0:
            sys.exit(7)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 7
        training.finish()


def drop_in_the_middle_of_a_backward(training: Training) -> None:
    """Forks where some storages are back, some on their way, some on the host."""
    half = deep(training.x)
    half.register_hook(lambda grad, training=training: forked(training.drop))  # bound now
    (got,) = torch.autograd.grad(deep(half).sum(), training.x)
    (expected,) = torch.autograd.grad(deep(deep(training.x)).sum(), training.x)
    assert torch.equal(got, expected)
    del half
    training.finish()


@case()
def a_child_drops_a_graph_that_is_coming_back() -> None:
    forbid_the_device_in_children()
    gc.disable()
    with a_session(plans=False) as session:
        for _ in range(2):  # from the second step on, uses prefetch
            with session.step():
                drop_in_the_middle_of_a_backward(Training(session))


@case()
def a_child_is_forked_in_a_recorded_step_and_in_planned_ones() -> None:
    """It inherits the recorder on its thread; the parent's trace is none the worse: the budget is ample, so nothing moves."""
    forbid_the_device_in_children()
    gc.disable()
    with a_session() as session:
        for step in range(3):
            with session.step():
                drop_in_the_middle_of_a_backward(Training(session, moves=step == 0))
    report = session.report()
    assert (report.detailed_steps, report.plans, report.plan_cache_hits) == (1, 1, 2)


@case()
def a_child_is_forked_while_another_thread_records() -> None:
    """The recorder's lock is held for ever in the child, which runs operators under it and drops saved tensors."""
    forbid_the_device_in_children()
    gc.disable()
    with a_session() as session, session.step():
        training = Training(session)
        recorder: Any = torch._C._get_dispatch_stack_at(torch._C._len_torch_dispatch_stack() - 1)
        held, done = threading.Event(), threading.Event()

        def holds() -> None:
            with recorder._lock:
                held.set()
                done.wait()

        holder = threading.Thread(target=holds)
        holder.start()
        held.wait()

        def trains_and_drops() -> None:
            x = torch.linspace(-1, 1, 64, requires_grad=True)
            deep(x).sum().backward()
            training.drop()

        forked(trains_and_drops)
        done.set()
        holder.join()
        training.finish()


# --- the script


def start(work: Callable[[], None], stderr: Path) -> int:
    """The pid of a child that does `work` and then ends as any interpreter does. In the child: does not return."""
    child = os.fork()
    if child:
        return child
    with stderr.open("wb") as file:
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    work()
    sys.exit()


def end(child: int) -> int:
    """Its exit code; minus a signal's number if one ended it, or had to."""
    ends_at = time.monotonic() + CHILD_SECONDS
    while time.monotonic() < ends_at:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -signal.SIGKILL


def main(folder: Path) -> None:
    # What is imported is set aside from the collector: an end takes a third of the time, and what a case has made is collected
    # as ever. Triton is left out, whose binding would tell stderr of what nobody collected.
    sys.modules["triton"] = None  # type: ignore[assignment]  # as an import that fails
    ready_to_fork()
    gc.collect()
    gc.freeze()
    became = {}
    names = list(CASES)
    for pair in zip(names[::2], [*names[1::2], None], strict=False):  # two at once: most of a case is torch's own end
        children = {name: start(CASES[name].work, folder / name) for name in pair if name is not None}
        for name, child in children.items():
            became[name] = end(child), (folder / name).read_text()
    sys.stdout.write(json.dumps(became))


# --- the tests


@pytest.fixture(scope="module")
def became(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Exit code and stderr of each case."""
    # Newer Pythons warn on every fork of a process that has threads; the tests check that the process survives it.
    silent = ["-W", "ignore:This process:DeprecationWarning"]
    ended = python([*silent, str(Path(__file__)), str(tmp_path_factory.mktemp("lives"))], ROOT)
    assert (ended.code, ended.err) == (0, "")
    result: dict[str, tuple[int, str]] = json.loads(ended.out)
    return result


@pytest.mark.slow
@pytest.mark.timeout(len(CASES) * CHILD_SECONDS + 60)  # the first one runs them all
@pytest.mark.parametrize("name", CASES)
def test_a_process_ends_as_it_should(name: str, became: dict[str, tuple[int, str]]) -> None:
    exit_code, stderr = became[name]
    lines = stderr.splitlines()
    assert (exit_code, lines[-1] if lines else "") == (CASES[name].exit_code, CASES[name].last_line), stderr
    assert stderr.count("Traceback") == (CASES[name].last_line != "")
    assert "Exception ignored" not in stderr


if __name__ == "__main__":
    observe_all()
    main(Path(sys.argv[1]))


ENDS_AFTER_A_BACKWARD = """
import torch
from chameleon_mm.swap.calling_thread import let_go_at_exit
let_go_at_exit(torch.device("cuda", 0))
x = torch.ones(4, device="cuda", requires_grad=True)
y = x * 2
y.register_hook(lambda gradient: torch.autograd.Variable._execution_engine.queue_callback(lambda: None))
y.sum().backward()
"""


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(4))
def test_a_program_may_end_as_soon_as_a_backward_has_returned(number: int) -> None:
    """Autograd's thread frees a backward's objects after it has returned: most such programs of plain torch abort."""
    ended = python(["-c", ENDS_AFTER_A_BACKWARD], ROOT)
    assert (ended.code, ended.err) == (0, "")
