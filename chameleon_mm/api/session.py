"""The session around a training loop: installs hooks for as long as it is open, and marks the bounds of every optimizer step.

    session = SwapSession(hbm_budget="20GiB")
    with session:                                  # NEW -> OPEN: budget checked, hooks installed on this thread
        with session.step():                       # one optimizer step, micro-batches inside
            loss = model(batch); loss.backward(); opt.step(); opt.zero_grad()
        session.run_step(fn)                       # the same, run again where memory runs out all the same
    print(session.report())                        # OPEN -> CLOSED at the end of the block

This module only keeps order: what moves and when is decided in `plan`, `follow` and `swap`.
"""

from __future__ import annotations

import enum
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Self, TypeVar

import torch
from torch import nn

from chameleon_mm.api.model_swap import ModelSwap, tensors_of
from chameleon_mm.device import Device
from chameleon_mm.device.uncompiled import uncompiled
from chameleon_mm.errors import SessionClosedError, check_type
from chameleon_mm.follow.adaptation import Adaptation
from chameleon_mm.follow.link_rates import link_cost_for
from chameleon_mm.follow.plan_follower import plan_steps
from chameleon_mm.plan.rule import DEFAULT_BUDGET_SHARE, DefaultRule, Limits
from chameleon_mm.pool.pool import PinnedPool, pool_for
from chameleon_mm.report.report import Ranks, SwapReport
from chameleon_mm.report.step_history import Progress, StepFigures, StepHistory
from chameleon_mm.state.rerun import StepRunner
from chameleon_mm.state.snapshots import Snapshot
from chameleon_mm.swap.calibration import replayable_on
from chameleon_mm.swap.classify import ProtectedStorages
from chameleon_mm.swap.copy_queue import Thresholds
from chameleon_mm.swap.executor import Executor, autograd_hooks
from chameleon_mm.swap.hook_counts import misuse
from chameleon_mm.units import MIB, parse_size

# --- Phases of a session, and which may follow which
#
# NEW --enter--> OPEN --step--> IN_STEP --end--> OPEN ... --leave--> CLOSED


class Phase(enum.Enum):
    """State of a session."""

    NEW = "new"
    """Made, not entered."""
    OPEN = "open"
    """Inside `with session:`, between steps."""
    IN_STEP = "in_step"
    """Inside `with session.step():`. A session that is left in a step ends the step first."""
    CLOSED = "closed"
    """After `with session:`. Graphs made inside stay valid; the report stays readable."""

    def __str__(self) -> str:
        return self.value.replace("_", " ")


NEXT = {
    Phase.NEW: (Phase.OPEN,),
    Phase.OPEN: (Phase.IN_STEP, Phase.CLOSED),
    Phase.IN_STEP: (Phase.OPEN,),
    Phase.CLOSED: (),
}


class Lifecycle:
    """The phase of one session. What is not allowed in it raises `SessionClosedError`."""

    def __init__(self) -> None:
        self.phase = Phase.NEW

    def to(self, phase: Phase) -> None:
        """Enter `phase`."""
        if phase not in NEXT[self.phase]:
            raise SessionClosedError(f"a session that is {self.phase} cannot become {phase}")
        self.phase = phase

    def begin_step(self) -> None:
        """From OPEN to IN_STEP."""
        self.expect_open("step")
        self.to(Phase.IN_STEP)

    def expect_new(self) -> None:
        """Allow entering the session, once."""
        if self.phase is not Phase.NEW:
            raise SessionClosedError(f"expected a new session, got one that is {self.phase}; make another SwapSession")

    def expect_open(self, what: str) -> None:
        """Allow the session's method `what` between steps alone."""
        if self.phase is not Phase.OPEN:
            raise SessionClosedError(
                f"session.{what}(): expected an open session, got one that is {self.phase}; use it inside "
                f"`with session:`, one step at a time"
            )

    def expect_between_steps(self, what: str) -> None:
        """Allow setting `what` before the session and between steps."""
        if self.phase in (Phase.IN_STEP, Phase.CLOSED):
            raise SessionClosedError(
                f"{what}: expected to be set between steps of an open session, got one that is {self.phase}; set it "
                f"after the step"
            )


# --- session

_log = logging.getLogger(__name__)

_R = TypeVar("_R")


class SwapSession:
    """Keeps a training loop's activations within an HBM budget by swapping them to pinned host memory. Bit-identical.

    `hbm_budget` and `host_budget` are bytes or text such as "20GiB"; None decides: nine tenths of the device's capacity, and
    half of the host memory available, divided among the local ranks. `device` is a `Device`, "cuda", "cuda:1", "sim",
    "sim:a100", or None for CUDA where there is one and the simulator otherwise. Saved storages of `min_bytes` or more may move
    (None: 1 MiB), by the way that `thresholds` says for their size (None: packed together below 128 KiB and each alone from
    there on). `pool` is one to share with others; None makes one of `host_budget`. `model`, where given, names the parameters
    and buffers that never move, and whose bytes the budget is checked against first. `optimizer`, one of the model's: its state
    is in host memory between its steps, and comes back for them part by part; whoever reads it gets it on the device.
    `parameters`: "keep", or "swap", by which the model's parameters and gradients share a part of the budget, and each comes
    back before it is used (on one device; plans do not recompute then). The first step, and one like none before it, is
    recorded; steps like it then follow a plan. `plans` off
    leaves every step to the default rule, by which everything moves. `recompute` lets plans drop what is cheaper to recompute
    than to move, each storage only after it was recomputed bit for bit beside the original; off, they only swap. `verify`
    checksums what goes out against what comes back and raises `SwapMismatch`, naming tensor, operator and step; slow, and takes
    a thousandth of the budget, from 16 KiB to 16 MiB, for as long as the session is there. `progress` on, each step is a line
    on stderr; or it is a function, called with each step's `StepFigures`, whose errors are logged.

    Hooks act on the thread that entered the session, and that thread leaves it. What dynamo compiles is swapped where it saves
    something; it never traces the hooks. Raises `TypeError` for arguments of another type, `ValueError` for malformed sizes or
    an unknown device, and `InfeasibleBudget` (a `ValueError`) on entering when the budget is below what already lies on the
    device.
    """

    @uncompiled
    def __init__(
        self,
        hbm_budget: int | str | None = None,
        host_budget: int | str | None = None,
        device: Device | str | None = None,
        min_bytes: int | str | None = None,
        *,
        model: nn.Module | None = None,
        pool: PinnedPool | None = None,
        thresholds: Thresholds | None = None,
        verify: bool = False,
        plans: bool = True,
        recompute: bool = True,
        optimizer: torch.optim.Optimizer | None = None,
        parameters: str = "keep",
        progress: bool | Callable[[StepFigures], object] = False,
    ) -> None:
        budget = None if hbm_budget is None else parse_size(hbm_budget, what="hbm_budget")
        host = None if host_budget is None else parse_size(host_budget, what="host_budget")
        self._rule = DefaultRule(min_bytes=MIB if min_bytes is None else parse_size(min_bytes, what="min_bytes"))
        if model is not None:
            check_type("model", model, nn.Module, "a torch.nn.Module or None", "put several into an nn.ModuleList")
        if thresholds is not None:
            check_type(
                "thresholds", thresholds, Thresholds, "a chameleon_mm.swap.copy_queue.Thresholds or None", "leave it out"
            )
        self._model_swap = ModelSwap(model, optimizer, parameters)
        for name, switch in (("verify", verify), ("plans", plans), ("recompute", recompute)):
            check_type(name, switch, bool, "True or False", "pass one of the two")
        teller = Progress(progress)
        if pool is not None and host is not None:
            raise ValueError("host_budget: expected none beside a pool, whose max_bytes is the limit; leave one of the two out")
        self.pool = pool_for(device, pool, max_bytes=host)
        self._owns_pool = pool is None
        self.device = self.pool.device
        self.hbm_budget_bytes = int(self.device.capacity * DEFAULT_BUDGET_SHARE) if budget is None else budget
        self._ranks, self._model = Ranks(host_budget_bytes=host), model
        self._executor = Executor(
            self._model_swap.device_for(self.device),
            self.pool,
            rule=self._rule,
            limits=Limits(hbm_budget_bytes=self.hbm_budget_bytes),
            protected=ProtectedStorages(tensors_of(model)),
            thresholds=thresholds or Thresholds(),
            verify=verify,
        )
        self._model_swap.bind(self._executor, self.hbm_budget_bytes)
        self._adaptation = self._plan_steps(recompute=recompute) if plans else None
        self._save, self._use = self._model_swap.hooks(*autograd_hooks(self._executor))
        self._life = Lifecycle()
        self._thread = threading.current_thread()
        self._stack = ExitStack()
        self._history = StepHistory(self.device, self._executor, self.pool, teller)
        self._executor.hook_counts.expects_steps = True
        self._runner: StepRunner | None = None

    def _plan_steps(self, *, recompute: bool) -> Adaptation:
        recomputes = recompute and not self._model_swap.swaps_parameters
        swap = weakref.ref(self._model_swap)  # weak: it holds the executor, which holds whoever asks
        return plan_steps(
            self._executor,
            self.pool,
            model=self._model,
            link_cost=link_cost_for(self.device),
            replayable=replayable_on(self.device) if recomputes else frozenset(),
            is_hidden=lambda storage: (it := swap()) is not None and it.is_hidden(storage),
        )

    # --- the session

    def __enter__(self) -> Self:
        self._life.expect_new()
        self._check_budget(self.hbm_budget_bytes)
        self._ranks.enter(self.hbm_budget_bytes)
        self._history.open()
        with ExitStack() as stack:
            stack.enter_context(self.device.compute())
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._save, self._use))  # torch may refuse them here
            self._model_swap.attach(stack)
            self._thread = threading.current_thread()
            self._life.to(Phase.OPEN)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        here = threading.current_thread()
        if self._thread is not here and self._thread.is_alive():
            raise SessionClosedError(
                f"session: expected to be left on the thread that entered it ({self._thread.name}), got {here.name}: hooks are "
                f"each thread's own; leave it there"
            )
        try:
            # Before the device's own dispatch mode is left: torch takes away whichever is the innermost.
            if not sys.is_finalizing():  # torch's modules may be taken apart by then, and no operator runs any more
                self._executor.leave_recorders()
                self._history.end_peak()  # what comes back as the session ends is no part of what it promised
                # Then at once: hooks must not outlive the block, however it is left. A thread that ended took its own.
                if self._thread is here:
                    self._stack.__exit__(kind, error, trace)
        finally:
            try:
                self._end_step(completed=False)  # an exception ends the session before a generator that is paused in a step
            finally:
                self._life.to(Phase.CLOSED)
            self._history.close(wait=error is None)
        if error is None:
            counts, problem = self._executor.hook_counts, self._problem()
            if problem is not None and (self._history.begun or counts.saves_between) and not counts.was_told:
                _log.warning("chameleon_mm: %s", problem)
            self._executor.raise_late_error()

    @contextmanager
    def step(self) -> Iterator[SwapSession]:
        """Context of one optimizer step. Raises `SessionClosedError` outside `with session:` and inside another step."""
        self._life.begin_step()
        completed = False
        try:
            self._begin_step()
            yield self
            self._executor.settle()  # of a backward that raised, and was forgiven
            completed = True
        finally:
            self._end_step(completed=completed)

    def run_step(self, fn: Callable[[], _R], *, snapshot: bool = False) -> _R:
        """Run one optimizer step, `fn()`, and run it again where it finds no memory, or ends in a `RecomputeMismatch`. Returns
        what `fn` does.

        After a `torch.OutOfMemoryError` that swapping could not prevent, what the step had made is dropped; torch's random
        states (the host's default generator and the device's), the model's gradients and its buffers are put back, bit for
        bit; and `fn` runs again, recorded and within a tighter budget, at most three times. The tighter budget is the session's
        from then on, and the report tells it. After a `RecomputeMismatch` it runs again within the same budget, without
        recomputing that tensor.

        It does not run again where an optimizer of the model had begun to step, where a parameter had changed, or beside other
        ranks, which would not follow: the error goes on and says so. With `snapshot`, `snapshot()` is called first, and a step
        in which the session's `optimizer` had begun is repaired from it, at the price of that copy in each step.

        All else that `fn` changes is the caller's: let it take its batch from outside, make no scheduler step before the
        optimizer's, and write no parameter through `.data`, which leaves no trace. A `GradScaler` may be used in it; after
        `unscale_`, which it allows once per step, a second run raises its `RuntimeError`.

        Gradients that exist when the step begins are copied to the host first: drop them at the end of the step before
        (`zero_grad()`), and there is nothing to copy. Raises `ValueError` for a session without `model`, `SessionClosedError`
        as `step` does, `HostMemoryExhausted` where the gradients find no room, and what `fn` raises.
        """
        if self._model is None:
            raise ValueError(
                "session.run_step(): expected a session that knows the model, whose gradients a second run needs as they were; "
                "make it SwapSession(model=model), or use `with session.step()`, which runs a step once"
            )
        self._life.expect_open("run_step")
        if self._runner is None:
            self._runner = StepRunner(self._executor, self.pool, self._model, hbm_budget_bytes=self.hbm_budget_bytes)
        return self._runner.run(self.step, fn, self._model_swap.repair(self._executor) if snapshot else None)

    def snapshot(self) -> Snapshot:
        """Copy to pinned host memory what the next step begins with: parameters, buffers, gradients that exist, the state and
        settings of `optimizer`, torch's random states. Schedulers, scalers and data loaders are the caller's to save.

        The session holds the latest snapshot until it has taken another, or ends; hold one to keep it. `Snapshot.write` writes
        it to a checkpoint. Its memory is the pool's, and beyond `host_budget` ordinary. Raises `SessionClosedError` as `step`
        does, `ValueError` without `model` and for one not of plain tensors, and `HostMemoryExhausted` with nothing changed.
        """
        self._life.expect_open("snapshot")
        return self._model_swap.snapshots("snapshot", self._executor).take()

    def restore(self, snapshot: Snapshot | None = None) -> None:
        """Put back, bit for bit and in place, what `snapshot` holds (None: the latest); it may be restored again.

        Raises `ValueError` with nothing changed where there is none, it was released, or it is of another model, optimizer or
        device; `torch.OutOfMemoryError` where state or a gradient that is gone meanwhile finds no room: restore again then.
        """
        self._life.expect_open("restore")
        self._model_swap.snapshots("restore", self._executor).restore(snapshot)

    def report(self) -> SwapReport:
        """Report of what the session has done so far. After `with session:` it waits for the device, so that every copy is
        counted.

        Raises an error that came up where nobody could be told, in a finaliser, since the last hook or step.
        """
        self._executor.raise_late_error()
        if self._life.phase is Phase.CLOSED:
            self.device.synchronize()
        else:
            self._history.note_peak()
        problem = self._problem()
        return SwapReport.of(
            self._executor.metrics,
            self.pool.stats(),
            self.device,
            steps=self._history.completed,
            hbm_budget_bytes=self.hbm_budget_bytes,
            lowered_budget_bytes=None if self._runner is None else self._runner.lowered_budget_bytes,
            peak=self._history.peak(),
            problems=(*self._ranks.problems, *(() if problem is None else (problem,))),
            adaptation=self._adaptation,
            step_figures=self._history.figures(),
            rank=self._ranks.rank,
        )

    # --- what it keeps in order

    @property
    def backward_has_run(self) -> bool:
        """Whether a saved tensor was used since the last step began or ended."""
        return self._executor.hook_counts.uses > 0

    @property
    def hbm_budget(self) -> int:
        """Bytes of device memory that a step may take. Set it, to bytes or text such as "16GiB", between two steps, up or down:
        it holds from the next step on, which follows a plan made from what is known of it, and is not recorded again.

        Setting it raises `TypeError` and `ValueError` for what is no size, `SessionClosedError` inside of a step and after the
        session, and `InfeasibleBudget`, which names the smallest one that is, for less than a step needs that has a plan now.
        The budget is as before then.
        """
        return self.hbm_budget_bytes

    @hbm_budget.setter
    def hbm_budget(self, size: int | str) -> None:
        nbytes = parse_size(size, what="hbm_budget")
        self._life.expect_between_steps("hbm_budget")
        if self._life.phase is Phase.OPEN:
            self._check_budget(nbytes)
        with self._model_swap.changing_budget(nbytes) as beside_bytes:
            self._executor.change_budget(beside_bytes, must_fit=True)
        lowered, self.hbm_budget_bytes = nbytes < self.hbm_budget_bytes, nbytes
        self._runner = None
        if self._life.phase is Phase.OPEN:
            self._history.open()
            if lowered:
                self.device.release_unused()

    @property
    def host_budget(self) -> int:
        """Bytes of pinned host memory that the session reserves at most. Set it between two steps, up or down, as `hbm_budget`:
        steps that are known follow plans made for it, without being recorded again. Pinned memory beyond it goes back to the
        driver at once, but for what saved tensors that are still alive lie in: that goes with them, and until then nothing
        else is pinned.

        Setting it raises `TypeError` and `ValueError` for what is no size, `SessionClosedError` inside of a step and after the
        session, and `InfeasibleBudget`, whose `smallest_host_bytes` is enough, for less than a step needs that has a plan now.
        The budget is as before then. It raises `ValueError` for a session that was given its `pool`: others may use that too,
        so the limit is set where it belongs, as `pool.limit_bytes`, and holds for the plans that are made after that.
        """
        return self.pool.limit_bytes

    @host_budget.setter
    def host_budget(self, size: int | str) -> None:
        nbytes = parse_size(size, what="host_budget")
        self._life.expect_between_steps("host_budget")
        if not self._owns_pool:
            raise ValueError("host_budget: expected a session with a pool of its own, got one with pool=; set pool.limit_bytes")
        self._executor.change_budget(host_bytes=nbytes, must_fit=True)
        self.pool.limit_bytes = nbytes

    def _begin_step(self) -> None:
        timed = self._history.begin(self._budget_now())
        self._model_swap.begin_step()
        self._executor.begin_step(timed=timed, pack_hook=self._save)

    def _end_step(self, *, completed: bool) -> None:
        """End the running step, once: at its own end, or at the session's where that comes first."""
        if self._life.phase is Phase.IN_STEP:
            self._history.completed += completed
            self._life.to(Phase.OPEN)
            if not sys.is_finalizing():  # else a generator that was paused in a step ends with the interpreter
                kind = self._executor.end_step(completed=completed)
                self._model_swap.end_step(completed=completed)
                self._history.end(kind)

    def _budget_now(self) -> int:
        lowered_bytes = None if self._runner is None else self._runner.lowered_budget_bytes
        return self.hbm_budget_bytes if lowered_bytes is None else lowered_bytes

    def _problem(self) -> str | None:
        return misuse(
            self._executor.hook_counts,
            steps_begun=self._history.begun,
            closed=self._life.phase is Phase.CLOSED,
            thread=self._thread.name,
        )

    def _check_budget(self, hbm_budget_bytes: int) -> None:
        self._model_swap.check_budget(self.device, hbm_budget_bytes, self._executor.checksums)
