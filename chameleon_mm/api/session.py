"""Session around a training loop: installs hooks while it is open, and marks the bounds of each optimizer step.

    session = SwapSession(hbm_budget="20GiB")
    with session:                                  # NEW -> OPEN: budget checked, hooks installed on this thread
        with session.step():                       # one optimizer step, micro-batches inside
            loss = model(batch); loss.backward(); opt.step(); opt.zero_grad()
        session.run_step(fn)                       # the same; runs the step again if it runs out of memory
    print(session.report())                        # OPEN -> CLOSED at the end of the block

This module only orders the calls; `plan`, `follow` and `swap` decide what moves and when.
"""

from __future__ import annotations

import enum
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Self, TypeVar

import torch
from torch import nn

from chameleon_mm.api.model_swap import ModelSwap, tensors_of
from chameleon_mm.api.pins import pinned_modules, text_of
from chameleon_mm.api.save_on_cpu import check_early
from chameleon_mm.api.torch_watch import TorchWatch
from chameleon_mm.device import Device
from chameleon_mm.device.region_partitions import partition_is_torchs_own, partitioned
from chameleon_mm.device.uncompiled import uncompiled
from chameleon_mm.errors import SessionClosedError, check_method, check_type
from chameleon_mm.follow.adaptation import Adaptation
from chameleon_mm.follow.link_rates import link_cost_for
from chameleon_mm.follow.plan_follower import plan_steps
from chameleon_mm.plan.rule import MIN_BYTES, Limits
from chameleon_mm.pool.host_memory import pinnable_bytes
from chameleon_mm.pool.pool import PinnedPool, pool_for
from chameleon_mm.record.recorder import ModuleNames
from chameleon_mm.report.report import Ranks, SwapReport
from chameleon_mm.report.step_history import StepFigures, StepHistory, teller_of
from chameleon_mm.state.rerun import StepRunner
from chameleon_mm.state.snapshots import Snapshot
from chameleon_mm.swap.budget import BudgetTaken, take_budget
from chameleon_mm.swap.calibration import replayable_on
from chameleon_mm.swap.classify import ProtectedStorages
from chameleon_mm.swap.executor import Executor, autograd_hooks
from chameleon_mm.swap.hook_counts import limits_problem, misuse
from chameleon_mm.units import AUTO, is_auto, parse_budget, parse_size, share_of

# --- Phases of a session, and their order
#
# NEW --enter--> OPEN --step--> IN_STEP --end--> OPEN ... --leave--> CLOSED


class Phase(enum.Enum):
    NEW = "new"
    """Made, not entered."""
    OPEN = "open"
    """Inside `with session:`, between steps."""
    IN_STEP = "in_step"
    """Inside `with session.step():`. If the session ends now, the step ends first."""
    CLOSED = "closed"
    """After `with session:`. Graphs made inside stay valid; the report stays readable."""

    def __str__(self) -> str:
        return self.value.replace("_", " ")


_log = logging.getLogger(__name__)

_R = TypeVar("_R")

STEPS_UNTIL_SAID = 3
"""Number of completed steps after which the log says why nothing can move."""


class SwapSession:
    """Keeps a training loop's activations within an HBM budget by swapping them to pinned host memory. Bit-identical.

    `hbm_budget`: bytes, text such as "20GiB", or a share, 0.8 or "80%", of the memory that is free on the device or held by
    this process there. None or "auto": nine tenths of that; the rest is for fragmentation and memory outside of torch's
    allocator. `host_budget`: the same for pinned memory. Shares are of this rank's part of the available host memory; None or
    "auto": half. `device`: a `Device`, "cuda", "cuda:1", "sim", "sim:a100"; None: CUDA if available, else the simulator.
    `min_bytes`: minimum size of a saved storage to move; None: 1 MiB. Those below 128 KiB are packed together. `pool`: a pool
    to share with others; None: a new pool of `host_budget`. `model`: its parameters (unless swapped) and buffers never move.
    The budget is checked against their bytes first. `optimizer`: an optimizer of the model. Its state is in host memory between
    its steps, and is copied back part by part for a step or a read. `parameters`: "keep" or "swap". "swap": the model's
    parameters and gradients share a part of the budget, and each is copied back before its use (on one device; plans do not
    recompute then). `plans`: True: record the first step, and each step unlike earlier ones; later steps like it follow a plan.
    False: the default rule moves everything in every step. `recompute`: True: plans may drop storages that are cheaper to
    recompute than to move, each only after its recomputation has made the same bits as the original. False: plans only swap.
    Compiled regions are different: the session chooses how much they save as they first compile, and compiles them at most once
    more (`compiled_partition`). False: torch chooses. `progress`: True: print a line to stderr for each step. A function: call
    it with each step's `StepFigures`, and log its errors. `keep`: modules of `model` whose saved tensors stay on the device,
    with those of modules that run inside them. `never_recompute`: modules whose saved tensors may be swapped, but not dropped.
    Both are lists of paths as in `named_modules` with `*` and `?` ("*.lm_head"), of modules, and of classes. A storage saved by
    several modules stays if one of them is named. The report shows the cost.

    Hooks act on the thread that entered the session, and that thread must exit it. Tensors saved by graphs that dynamo compiled
    are swapped too; dynamo never traces the hooks. Raises `TypeError` for arguments of another type, `ValueError` for malformed
    sizes or an unknown device. Entering raises `InfeasibleBudget` (a `ValueError`) if the budget is below the bytes already on
    the device.
    """

    _frozen = False
    """True if a closed session's model had no parameter to train."""
    _lowered_bytes: int | None = None
    """Lowered budget of a closed session in which steps ran again; None: no step did."""

    @uncompiled
    def __init__(
        self,
        hbm_budget: float | str | None = None,
        host_budget: float | str | None = None,
        device: Device | str | None = None,
        min_bytes: int | str | None = None,
        *,
        model: nn.Module | None = None,
        pool: PinnedPool | None = None,
        plans: bool = True,
        recompute: bool = True,
        optimizer: torch.optim.Optimizer | None = None,
        parameters: str = "keep",
        progress: bool | Callable[[StepFigures], object] = False,
        keep: Sequence[str | nn.Module | type[nn.Module]] = (),
        never_recompute: Sequence[str | nn.Module | type[nn.Module]] = (),
    ) -> None:
        check_early({"hbm_budget": hbm_budget, "host_budget": host_budget})
        stated = None if is_auto(host_budget) else host_budget
        host = None if stated is None else parse_budget(stated, pinnable_bytes, what="host_budget")
        least = MIN_BYTES if min_bytes is None else parse_size(min_bytes, what="min_bytes")
        check_early({"model": model, "plans": plans, "recompute": recompute})
        self._model_swap = ModelSwap(model, optimizer, parameters)
        self.pins = {"keep": keep, "never_recompute": never_recompute}
        pinned = {option: pinned_modules(option, pins, model) for option, pins in self.pins.items()}
        tell = teller_of(progress)
        if pool is not None and host is not None:
            raise ValueError("host_budget: expected none beside a pool, whose max_bytes is the limit; leave one of the two out")
        self.pool = pool_for(device, pool, max_bytes=host)
        self._owns_pool = pool is None
        self.device = self.pool.device
        self._set_budget(take_budget(AUTO if hbm_budget is None else hbm_budget, self.device))
        is_share = stated is not None and share_of(stated, "host_budget") is not None
        self._ranks, self._model = Ranks(host_budget_bytes=None if is_share else host), model
        self._executor = Executor(
            self._model_swap.device_for(self.device),
            self.pool,
            min_bytes=least,
            limits=Limits(hbm_budget_bytes=self.hbm_budget_bytes),
            protected=ProtectedStorages(tensors_of(model)),
            names=ModuleNames(model, **pinned),
        )
        self._model_swap.bind(self._executor, self.hbm_budget_bytes)
        self._recompute = recompute
        self._adaptation = self._plan_steps(recompute=recompute) if plans else None
        self._save, self._use = self._model_swap.hooks(*autograd_hooks(self._executor))
        self._watch = watch = TorchWatch(self.device, self._executor.protected, self._save)
        if self._adaptation is not None:
            self._adaptation.planning.outside_bytes = lambda: watch.most_bytes
        self._phase = Phase.NEW
        self._thread = threading.current_thread()
        self._stack = ExitStack()
        self._history = StepHistory(self.device, self._executor, self.pool, tell)
        self._executor.hook_counts.expects_steps = True
        self._runner: StepRunner | None = None

    def _plan_steps(self, *, recompute: bool) -> Adaptation:
        recomputes = recompute and not self._model_swap.swaps_parameters
        swap = weakref.ref(self._model_swap)  # weak: the swap holds the executor, which holds this function
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
        if self._phase is not Phase.NEW:
            raise SessionClosedError(f"expected a new session, got one that is {self._phase}; make another SwapSession")
        self._model_swap.check_budget(self.device, self.hbm_budget_bytes)
        self._ranks.enter(None if self._budget_taken.how else self.hbm_budget_bytes)
        self._history.open()
        with ExitStack() as stack:
            stack.enter_context(self.device.compute())
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._save, self._use))  # torch may refuse hooks here
            self._model_swap.attach(stack)
            self._watch.attach(stack)
            if (adaptation := self._chooses_partitions()) is not None:
                stack.enter_context(partitioned(adaptation.first_partitions))
            self._thread = threading.current_thread()
            self._phase = Phase.OPEN
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if threading is None:  # at the interpreter's end this module is cleared, and no hook runs
            return  # type: ignore[unreachable]  # not to mypy
        here = threading.current_thread()
        if self._phase not in (Phase.OPEN, Phase.IN_STEP):
            raise SessionClosedError(f"session: expected to be left once, got one that is {self._phase}; use `with session:`")
        if self._thread is not here and self._thread.is_alive():
            raise SessionClosedError(
                f"session: expected to be left on the thread that entered it ({self._thread.name}), got {here.name}: hooks are "
                f"each thread's own; leave it there"
            )
        try:
            # Before the device's own dispatch mode is left: torch removes the innermost mode.
            if not sys.is_finalizing():  # torch's modules may be gone by then, and no operator runs any more
                self._executor.recording.leave_all()
                self._history.end_peak()  # memory that comes back as the session ends does not count for its peak
                # Then at once: hooks must not outlive the block. Hooks of a thread that ended are gone with it.
                if self._thread is here:
                    self._stack.__exit__(kind, error, trace)
        finally:
            try:
                self._end_step(completed=False)  # the session may close while a generator is suspended in a step
            finally:
                self._phase = Phase.CLOSED
            self._history.close(wait=error is None)
            self._let_go()
        if error is None:
            (counts := self._executor.hook_counts).count_between_steps()
            if self._history.begun or counts.saves_between:
                self.say_problem()
            self._executor.hook_lock.raise_oldest()

    def _let_go(self) -> None:
        """Drop the model and its optimizer, because users keep a closed session for its report."""
        self._frozen, self._lowered_bytes = self._is_frozen(), self._lowered_budget_bytes()
        self.pins = {option: [text_of(pin) for pin in pins] for option, pins in self.pins.items()}
        self._model = self._runner = None
        self._model_swap.let_go()
        del self._save, self._use

    @contextmanager
    def step(self) -> Iterator[SwapSession]:
        """Context of one optimizer step. Raises `SessionClosedError` outside `with session:` and inside another step."""
        self._expect_open("step")
        self._phase, completed = Phase.IN_STEP, False
        try:
            self._begin_step()
            yield self
            self._executor.settle()  # settle a backward whose error the caller caught
            completed = True
        finally:
            self._end_step(completed=completed)

    def run_step(self, fn: Callable[[], _R], *, snapshot: bool = False) -> _R:
        """Run one optimizer step, `fn()`, again if it runs out of memory or raises `RecomputeMismatch`. Returns its result.

        After a `torch.OutOfMemoryError` that swapping could not prevent, everything that the step made is freed. Torch's random
        states (of the host's default generator and the device) and the model's gradients and buffers are restored, bit for bit.
        Then `fn` runs again, recorded and with a smaller budget, at most three times. The session keeps that budget, and the
        report shows it. After a `RecomputeMismatch`, `fn` runs again with the same budget, without recomputing that tensor.

        `fn` does not run again if an optimizer of the model had begun to step, if a parameter had changed, or with several
        ranks. Then the error is raised and names the reason. With `snapshot`, `snapshot()` is called before each step. If the
        session's `optimizer` had begun to step, the state is then restored from it. This costs that copy in each step.

        The caller is responsible for all other changes by `fn`. It should take its batch from outside, not step a scheduler
        before the optimizer, and not write a parameter through `.data`, which cannot be detected. `fn` may use a `GradScaler`;
        after `unscale_`, allowed once per step, a second run raises the scaler's `RuntimeError`.

        Gradients that exist when the step begins are first copied to the host. To avoid that, drop them at the end of the
        previous step (`zero_grad()`). Raises `ValueError` for a session without `model`, `SessionClosedError` as `step` does,
        `HostMemoryExhausted` if the host has no room for the gradients, and the errors of `fn`.
        """
        if self._phase is Phase.CLOSED:
            self._expect_open("run_step")
        if self._model is None:
            raise ValueError(
                "session.run_step(): expected a session that knows the model, whose gradients a second run needs as they were; "
                "make it SwapSession(model=model), or use `with session.step()`, which runs a step once"
            )
        check_method("fn", fn, "__call__", "a function of a step", "pass one that takes no argument")
        check_type("snapshot", snapshot, bool, "True or False", "pass one of the two")
        self._expect_open("run_step")
        if self._runner is None:
            copier = self._model_swap.copier(self._executor)
            self._runner = StepRunner(self._executor, copier, self._model, hbm_budget_bytes=self.hbm_budget_bytes)
        return self._runner.run(self.step, fn, self._model_swap.repair(self._executor) if snapshot else None)

    def snapshot(self) -> Snapshot:
        """Copy the next step's initial state to pinned host memory: parameters, buffers, gradients that exist, the state and
        settings of `optimizer`, and torch's random states. The caller saves schedulers, scalers and data loaders.

        The session holds the latest snapshot until the next one or its end; keep a reference to keep it. `Snapshot.write`
        writes a checkpoint. Its memory comes from the pool; beyond `host_budget` it is pageable. Raises `SessionClosedError` as
        `step` does, `ValueError` without `model` or for tensors that are not plain, and `HostMemoryExhausted`.
        """
        self._expect_open("snapshot")
        return self._model_swap.snapshots("snapshot", self._executor).take()

    def restore(self, snapshot: Snapshot | None = None) -> None:
        """Restore `snapshot` (None: the latest), bit for bit and in place. It may be restored several times.

        Raises `ValueError`, and changes nothing, if there is no snapshot, it was released, or it is of another model, optimizer
        or device. Raises `torch.OutOfMemoryError` if there is no room for missing state or gradients: then restore again.
        """
        self._expect_open("restore")
        self._model_swap.snapshots("restore", self._executor).restore(snapshot)

    def report(self) -> SwapReport:
        """Return the report of the session until now. After `with session:` it waits for the device, to count every copy.

        Also raises an error of a finalizer since the last hook or step, because a finalizer itself cannot raise.
        """
        self._executor.hook_lock.raise_oldest()
        self._executor.hand_over.come_back(wait=False)  # includes the loop's counts
        if self._phase is Phase.CLOSED:
            self.device.synchronize()
        else:
            self._history.note_peak()
        problems = (self._problem(), self._watch.problem())
        return SwapReport.of(
            self._history,
            hbm_budget_bytes=self.hbm_budget_bytes,
            hbm_budget_from=self._budget_taken.how,
            lowered_budget_bytes=self._lowered_budget_bytes(),
            problems=(*self._ranks.problems, *(problem for problem in problems if problem is not None)),
            adaptation=self._adaptation,
            pins={option: [text_of(pin) for pin in pins] for option, pins in self.pins.items() if pins},
        )

    # --- budgets, and the begin and end of a step

    @property
    def backward_has_run(self) -> bool:
        """True if a saved tensor was used since the last step began or ended."""
        return self._executor.hook_counts.uses > 0 or self._executor.hand_over.has_used()

    @property
    def hbm_budget(self) -> int:
        """Bytes of device memory that a step may take. Set it between steps, up or down, to a size, a share or "auto". "auto"
        reads the free memory again. It applies from the next step on, which follows a new plan made from earlier recordings.

        Setting it raises `TypeError` and `ValueError` for an invalid size, and `SessionClosedError` inside a step and after the
        session. It raises `InfeasibleBudget`, with the smallest possible budget, if a planned step needs more. The budget then
        stays unchanged.
        """
        return self.hbm_budget_bytes

    @hbm_budget.setter
    def hbm_budget(self, size: float | str) -> None:
        nbytes = (taken := take_budget(size, self.device)).nbytes
        self._expect_between_steps("hbm_budget")
        if self._phase is Phase.OPEN:
            self._model_swap.check_budget(self.device, nbytes)
        with self._model_swap.changing_budget(nbytes) as beside_bytes:
            self._executor.change_budget(beside_bytes, must_fit=True)
        lowered = nbytes < self.hbm_budget_bytes
        if nbytes != self.hbm_budget_bytes or taken.how:
            self._set_budget(taken)
        self._runner = None
        if self._phase is Phase.OPEN:
            self._history.open()
            if lowered:
                self.device.release_unused()

    @property
    def host_budget(self) -> int:
        """Maximum bytes of pinned host memory that the session reserves. Set it between steps, up or down, as `hbm_budget`:
        known steps follow new plans, made from earlier recordings. Pinned memory above it is returned to the driver at once,
        except chunks with live saved tensors. These are returned with their tensors; until then nothing else is pinned.

        Setting it raises `TypeError` and `ValueError` for an invalid size, and `SessionClosedError` inside a step and after the
        session. It raises `InfeasibleBudget`, whose `smallest_host_bytes` is enough, if a planned step needs more. The budget
        then stays unchanged. It raises `ValueError` for a session with a given `pool`, which may be shared: set
        `pool.limit_bytes` instead, which applies to later plans.
        """
        return self.pool.limit_bytes

    @host_budget.setter
    def host_budget(self, size: float | str) -> None:
        held_bytes, size = self.pool.stats().reserved_bytes, 0.5 if is_auto(size) else size
        nbytes = parse_budget(size, lambda: pinnable_bytes(held_bytes=held_bytes), what="host_budget")
        self._expect_between_steps("host_budget")
        if not self._owns_pool:
            raise ValueError("host_budget: expected a session with a pool of its own, got one with pool=; set pool.limit_bytes")
        self._executor.change_budget(host_bytes=nbytes, must_fit=True)
        self.pool.limit_bytes = nbytes

    def _set_budget(self, taken: BudgetTaken) -> None:
        self._budget_taken, self.hbm_budget_bytes = taken, taken.nbytes
        if taken.how:
            _log.info("chameleon_mm: hbm_budget: %s", taken.how)

    def _expect_open(self, what: str) -> None:
        """Raise `SessionClosedError` unless the session is open and between steps. `what`: name of the called method."""
        if self._phase is not Phase.OPEN:
            raise SessionClosedError(
                f"session.{what}(): expected an open session, got one that is {self._phase}; use it inside `with session:`, "
                f"one step at a time"
            )

    def _expect_between_steps(self, what: str) -> None:
        """Raise `SessionClosedError` inside a step and after the session. `what`: name of the attribute to set."""
        if self._phase in (Phase.IN_STEP, Phase.CLOSED):
            raise SessionClosedError(
                f"{what}: expected to be set between steps of an open session, got one that is {self._phase}; set it after the "
                f"step"
            )

    @uncompiled  # a compiled function may run steps
    def _begin_step(self) -> None:
        lowered_bytes = self._lowered_budget_bytes()
        timed = self._history.begin(self.hbm_budget_bytes if lowered_bytes is None else lowered_bytes)
        if self._adaptation is not None and not self._model_swap.swaps_parameters:  # parameters share the budget with all else
            self._adaptation.note_resident(self._history.began_bytes)
        self._model_swap.begin_step()
        self._executor.begin_step(timed=timed, pack_hook=self._save)

    @uncompiled
    def _end_step(self, *, completed: bool) -> None:
        """End the running step once: at its own end, or at the end of the session if that comes first."""
        if Phase is None:  # as in `__exit__`
            return
        if self._phase is Phase.IN_STEP:
            self._history.completed += completed
            self._phase = Phase.OPEN
            if not sys.is_finalizing():  # at the interpreter's end, a generator paused in a step ends too
                kind = self._executor.end_step(completed=completed)
                self._model_swap.end_step(completed=completed)
                self._history.end(kind)
                if (adaptation := self._chooses_partitions()) is not None and adaptation.choose_partition():
                    torch._dynamo.reset_code_caches()  # each function compiles again at its next call
                if self._history.completed == STEPS_UNTIL_SAID:
                    self.say_problem()

    def _chooses_partitions(self) -> Adaptation | None:
        """Return the object that chooses how much compiled regions save; None: torch chooses."""
        if not self._recompute or self._ranks.of > 1 or not partition_is_torchs_own():
            return None  # ranks that recompute different parts would differ in their collectives
        return None if self.pins["never_recompute"] else self._adaptation  # the module of a recomputed tensor is unknown here

    def say_problem(self) -> None:
        """Log once why nothing moves or how the session is misused, if either is the case."""
        counts, problem = self._executor.hook_counts, self._problem()
        if problem is not None and not counts.was_told:
            counts.was_told = True
            _log.warning("chameleon_mm: %s", problem)

    def _is_frozen(self) -> bool:
        """True if no parameter of the model requires a gradient. For a closed session: at its end."""
        return self._frozen if self._model is None else not any(p.requires_grad for p in self._model.parameters())

    def _lowered_budget_bytes(self) -> int | None:
        """Return the budget of `run_step` if a step had to run again; else None."""
        return self._lowered_bytes if self._runner is None else self._runner.lowered_budget_bytes

    def _problem(self) -> str | None:
        found = misuse(
            self._executor.hook_counts,
            steps_begun=self._history.begun,
            closed=self._phase is Phase.CLOSED,
            thread=self._thread.name,
            frozen=self._is_frozen(),
        )
        return found or limits_problem(
            self.hbm_budget_bytes, self.device.capacity, self.pool.limit_bytes, self._executor.min_bytes
        )
