"""Record one step as a `Trace`: a dispatch mode records every operator, and saved-tensor hooks report saves and uses.

    recorder = Recorder(device, model=model)
    with recorder:                                   # enter it after `device.compute()`, to see operators first
        loss = model(x); loss.backward(); optimizer.step()
    trace = recorder.finish(fingerprint)

Calls by the hooks that swap, in this order:

    save:  recorder.sendable(traced)                 # for earlier saves whose operator is over
           with recorder.paused(): ...               # around allocations and operators of swapping itself
               recorder.restored(traced, storage)    # new memory with its bytes: the same tensor of the trace
               with recorder.untimed(): ...          # around waits and kernels of swapping on compute
           traced = recorder.add_claim(storage)      # once per claim on a storage
           recorder.on_save([traced])                # once per hook call, also if a wrapper holds several tensors
    use:   ... recorder.on_use([traced])
    end:   recorder.retired(traced)                  # the claim has ended; any thread, at any time

The recorder decides what to record and when to stop, and holds the lock. `StepLog` stores the step.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils._python_dispatch import _pop_mode, _push_mode, is_traceable_wrapper_subclass_type

from chameleon_mm.device import Device
from chameleon_mm.device.compiled_regions import Region, Run, find_regions
from chameleon_mm.device.operators import GPU, OpCall, OpFactsCache, run_in_parts, runs_in_parts
from chameleon_mm.device.uncompiled import uncompiled
from chameleon_mm.errors import ChameleonError
from chameleon_mm.plan.trace import SavePlace, Trace
from chameleon_mm.record.dispatch_state import PLAIN_DISPATCH, DispatchState, StepMode, has_other_formula, is_on, leave
from chameleon_mm.record.retry import OomRetry, ReclaimSome
from chameleon_mm.record.step_log import UNMOVABLE, OpTimes, RunningRegion, StepLog
from chameleon_mm.record.storages import TracedStorage

# --- Module whose forward runs, by its path in `named_modules`, and the line of the program
#
# Both are read from the stack, without hooks. Only locals of `nn.Module.__call__` are read. Its frames hold them until they
# return anyway, so reading them keeps no tensor alive. In the user's own frames, only file and line are read.

_CALL = nn.Module._call_impl.__code__
_NOT_THE_PROGRAMS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")
"""Beginnings of the file names of torch, of this library, and of code without a file."""


class ModuleNames:
    """Paths of modules: in `model` if it is given and contains them, else in the outermost running module."""

    def __init__(
        self, model: nn.Module | None, *, keep: Iterable[nn.Module] = (), never_recompute: Iterable[nn.Module] = ()
    ) -> None:
        """`keep`, `never_recompute`: modules whose forwards set these marks of `SavePlace`."""
        self._paths: weakref.WeakKeyDictionary[nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()
        self._model = None if model is None else weakref.ref(model)
        self._keep, self._never_recompute = weakref.WeakSet(keep), weakref.WeakSet(never_recompute)
        self.keeps_some = bool(self._keep)

    def here(self) -> SavePlace:
        """Return the innermost module whose forward runs on this thread (a root by its class), the innermost line of the
        program, and the marks of all running modules."""
        innermost: nn.Module | None = None
        outermost: nn.Module | None = None
        line, keep, never_recompute = "", False, False
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if not line and not frame.f_code.co_filename.startswith(_NOT_THE_PROGRAMS):
                line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            if frame.f_code is _CALL:
                outermost = frame.f_locals["self"]
                innermost = innermost if innermost is not None else outermost
                keep = keep or outermost in self._keep
                never_recompute = never_recompute or outermost in self._never_recompute
            frame = frame.f_back
        if innermost is None or outermost is None:
            return SavePlace(line=line)
        model = None if self._model is None else self._model()
        path = None if model is None else self._paths_in(model).get(id(innermost))
        if path is None:
            path = self._paths_in(outermost).get(id(innermost), "")
        return SavePlace(path or type(innermost).__name__, line, keep, never_recompute)

    def _paths_in(self, root: nn.Module) -> dict[int, str]:
        paths = self._paths.get(root)
        if paths is None:
            paths = self._paths[root] = {id(module): path for path, module in root.named_modules()}
        return paths


# --- recorder

_log = logging.getLogger(__name__)

NO_HOOK = -1
"""Number of a hook call that was not recorded."""

_COMPILED = "dynamo compiled in it: it took longer, and ran other kernels, than steps like it will"
_IN_A_GRAPH = (
    "chameleon_mm: what the compiled region in %s saves lies in memory that a CUDA graph keeps, as under "
    'mode="reduce-overhead": it stays on the device, and the graph keeps it between steps; compile it without CUDA graphs, and '
    "it moves"
)
_INTERRUPTED = "it was interrupted: what ran by then, nobody knows"


class Recorder(StepMode):
    """Recorder of one step, which begins with the construction and runs inside the recorder.

    `model` and `optimizers` determine the kinds of storages that are on `device` before the step. Without them, parameters are
    known by class, gradients by their parameters, buffers and optimizer state by the time of writes. `times` measures operators
    (None: events on the device). With `reclaim_some`, an operator that finds no memory runs again after it: see `OomRetry`.

    Recording changes no bit, except that under any dispatch mode autograd uses other formulas for a few operators. Code that
    dynamo compiles stays compiled. Each direction of a compiled region is one operator (`device/compiled_regions.py`). If the
    recorder cannot see the whole step, it stops and `flaw` gives the reason; the step continues. The recorder holds no storage.
    Under a `FakeTensorMode` it records the step that would run. Operators of a tracer in the middle of the step, or of a forked
    child, are not recorded. Thread-safe.
    """

    def __init__(
        self,
        device: Device,
        *,
        model: nn.Module | None = None,
        optimizers: Iterable[Optimizer] = (),
        times: OpTimes | None = None,
        reclaim_some: ReclaimSome | None = None,
        is_hidden: Callable[[torch.UntypedStorage], bool] = lambda storage: False,
        warn: Callable[..., None] = logging.Logger.warning,
        names: ModuleNames | None = None,
    ) -> None:
        """`warn(log, message, *values)` logs a warning. `names`: None: names in `model`, without marks."""
        super().__init__()
        self._warn = warn
        self._device_type = device.torch_device.type
        self._dispatch = DispatchState(device)
        self._flaw: str | None = None
        self.must_leave = False
        """True if the recorder must be exited before the step's backward, because bits would change."""
        self._log = StepLog(device, model=model, optimizers=optimizers, times=times, is_hidden=is_hidden)
        self._table = self._log.table
        self._module_names = names or ModuleNames(model)
        self._places: dict[int, SavePlace] = {}
        self._facts = OpFactsCache(GPU if self._dispatch.fake else self._device_type)
        self._retry = None if reclaim_some is None else OomRetry(device, self._reclaiming(reclaim_some))
        self._lock = threading.RLock()
        self._stopped = False

    @property
    def oom_retries(self) -> int:
        return 0 if self._retry is None else self._retry.retries

    @property
    def trained(self) -> Sequence[weakref.ref[Tensor]]:
        """Parameters whose gradients the finished step made and kept."""
        return self._log.trained

    @property
    def flaw(self) -> str | None:
        """Reason, as far as known, why no plan must be made from the step; None: there is none."""
        if self._flaw is None and self._dispatch.compiled:
            return _COMPILED
        return self._flaw

    def __enter__(self) -> Self:
        find_regions()
        super().__enter__()  # type: ignore[no-untyped-call]  # torch annotates no method of it
        self._thread.entered = getattr(self._thread, "entered", 0) + 1
        if self._thread.entered == 1:
            self._thread.backward = torch._C._current_graph_task_id()
        return self

    def __exit__(self, *error: object) -> None:
        entered = getattr(self._thread, "entered", 0)
        if is_on(self):
            leave(self)
        elif entered and self._thread.backward not in (-1, torch._C._current_graph_task_id()):
            # Entered within a backward, and removed by autograd at the end of that backward.
            _push_mode(self)
            leave(self)
        elif entered:  # an earlier exit of another mode removed this one, the innermost then
            _pop_mode()
        else:
            self._give_up("it was left on a thread that had not entered it")
            return
        self._thread.entered = entered - 1
        if entered == 1 and self.is_paused:
            self._give_up(_INTERRUPTED)

    # --- operators

    def __torch_dispatch__(
        self, func: Any, types: Iterable[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default and type(args[0]) is FakeTensor:
            return args[0].device  # autograd's query, more frequent than operators
        kwargs = kwargs or {}
        dispatch = self._dispatch
        if dispatch.forked or dispatch.tracing:
            return func(*args, **kwargs)
        for kind in types:
            if not issubclass(kind, FakeTensor):
                if kind.__torch_dispatch__ is not PLAIN_DISPATCH:
                    return NotImplemented  # torch then calls the subclass, with this mode active for its inner tensors
            elif not dispatch.fake:
                return func(*args, **kwargs)
        if self.is_paused:
            return func(*args, **kwargs)
        facts = self._facts[func]
        if runs_in_parts(facts, args, kwargs):
            return run_in_parts(func, args, kwargs, self)
        if facts.question:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():  # unseen by function modes, as any operator called from C++
            call = OpCall(facts, func, args, kwargs, device_type=self._device_type)
            if (region := self._region) is not None:
                return self._run_in(region, call)
            if has_other_formula(call):
                self.must_leave = True
                self._give_up(f"autograd takes another formula for {facts.name} while it looks")
            return self._record(call) if self._writes() else self._run(call)

    def _run(self, call: OpCall) -> Any:
        return call.run() if self._retry is None else self._retry.run(call)

    def _record(self, call: OpCall) -> Any:
        read: list[TracedStorage] = []
        new_storages: list[torch.UntypedStorage] = []
        with self._lock, self._forgiving(call.facts.name):
            read, new_storages = self._log.before(call)
        try:
            out = self._run(call)
        except Exception:
            raise  # as without a recorder: the operator did nothing
        except BaseException:
            self._give_up(_INTERRUPTED)
            raise
        with self._lock, self._forgiving(call.facts.name):
            if not self._stopped:
                self._log.after(call, read, new_storages)
        return out

    # --- compiled regions: one operator each

    @property
    def _region(self) -> RunningRegion | None:
        """Compiled region that runs on this thread."""
        region: RunningRegion | None = getattr(self._thread, "region", None)
        return region

    def run_region(self, region: Region, run: Run, args: list[Any]) -> Any:
        dispatch = self._dispatch
        if self.is_paused or self._region is not None or dispatch.fake or dispatch.tracing or not self._writes():
            return run(args)
        if region.compiles():
            self._give_up(_COMPILED)
        running: RunningRegion | None = None
        with self._lock, self._forgiving(region.name):
            if not self._stopped:
                running = self._thread.region = self._log.enter_region(region, args)
        try:
            out = run(args)
        finally:
            self._thread.region = None
        with self._lock, self._forgiving(region.name):
            if running is not None and not self._stopped and self._log.leave_region(running, out):
                self._warn(_log, _IN_A_GRAPH, str(self._module_names.here()) or "the program")
        return out

    def _run_in(self, region: RunningRegion, call: OpCall) -> Any:
        """Run an operator of a region. It does not count as an operator of the step, but shows the region's memory."""
        out = self._run(call)
        if self._writes():
            with self._lock, self._forgiving(call.facts.name):
                region.readings.take()
        return out

    def _writes(self) -> bool:
        """True if the step is still recorded. Called before any lock is taken and before any query of the device."""
        if self._stopped or self._dispatch.forked:
            return False
        if self._dispatch.capturing:
            self._give_up("a graph was captured in it: replays run what no operator tells of")
            return False
        return True

    @contextmanager
    def _forgiving(self, name: str) -> Iterator[None]:
        """Context in which an error in recording the operator `name` ends the recording, not the step."""
        try:
            yield
        except ChameleonError:
            raise
        except Exception as error:  # noqa: BLE001 - any error, because the operator itself may be right
            # Only the text: a log record with the error would keep its frames and their tensors alive.
            self._warn(_log, "chameleon_mm: this step gives no plan: recording the operator %s failed: %s", name, str(error))
            self._give_up(f"{name} could not be written down: {type(error).__name__}: {error}")
        except BaseException:
            self._give_up(_INTERRUPTED)
            raise

    # --- called by the hooks

    def add_claim(self, storage: torch.UntypedStorage) -> TracedStorage:
        """Add a handle's claim on a saved storage of this device. Returns the storage's record, for the calls below.

        The handle holds the storage by its Python object, or by its own tensors, whose number it adds to `aliases`. Any other
        reference prevents the storage from counting as released.
        """
        if not self._writes():
            return TracedStorage(UNMOVABLE, 0, -1, None, counted=False, owner=None)  # a dummy
        with self._lock:
            return self._log.add_claim(storage)

    def on_save(self, saved: Iterable[TracedStorage | None]) -> int:
        """Record that autograd saved a tensor with these storages. Only a single one may move. Returns the hook's number."""
        if not self._sees_autograd():
            return NO_HOOK
        with self._lock:
            hook = self._log.save(saved)
            self._places[hook] = self._module_names.here()
            return hook

    def on_use(self, used: Iterable[TracedStorage | None]) -> int:
        """Record that autograd uses a tensor that it saved in these storages. Returns the hook's number."""
        if not self._sees_autograd():
            return NO_HOOK
        with self._lock:
            return self._log.use(used)

    def sendable(self, *traced: TracedStorage | None) -> None:
        """Note that the operators that saved `traced` are over. Called by the running hook, before its `on_save` or `on_use`.

        Called again if other operators save more of a storage, because an earlier copy would lack their bytes.
        """
        with self._lock:
            for one in traced:
                if one is not None and one.owner is self._table.owner:
                    one.sendable = self._log.builder.num_hooks

    def restored(self, traced: TracedStorage | None, storage: torch.UntypedStorage) -> None:
        """Note that `storage`, made inside `paused()`, has the bytes of `traced` again. Both are one storage in the trace."""
        if traced is not None and traced.owner is self._table.owner and self._writes():
            with self._lock:
                self._table.restored(traced, storage)

    def retired(self, traced: TracedStorage | None) -> None:
        """Note that a claim on `traced` ended. Any thread may call this at any time, as it waits for no lock."""
        if traced is not None and not self._stopped and traced.owner is self._table.owner:
            self._table.retired(traced)

    def hide(self, storage: torch.UntypedStorage) -> None:
        """Note that `storage` is not part of the step from now on, because `is_hidden` is True for it."""
        if self._writes():
            with self._lock:
                self._table.hide(storage)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which the operators of this thread are not part of the step. May be nested."""
        try:
            with super().paused():
                yield
        finally:
            if not self.is_paused and self._writes():
                with self._lock:
                    self._log.read_memory()

    @contextmanager
    def untimed(self) -> Iterator[None]:
        """Context for waits and kernels of swapping on compute. Their time does not count for any operator."""
        if self._writes():
            with self._lock:
                self._log.times.pause()
        try:
            yield
        finally:
            if self._writes():
                with self._lock:
                    self._log.times.resume()

    def stop(self) -> None:
        """Stop recording, because the step needs no trace. Until the recorder is exited, operators that find no memory still
        run again."""
        with self._lock:
            self._stopped = True
            self._log.forget()

    def _sees_autograd(self) -> bool:
        """True if the recorder is active on this thread, so that it sees the operators around the running hook."""
        if not self._writes():
            return False
        if not is_on(self):
            self._give_up("autograd ran where it does not look: on another thread, under a tracer, or within another operator")
            return False
        return True

    def _give_up(self, flaw: str) -> None:
        """Stop recording because of `flaw`: the log is incomplete."""
        if not self._dispatch.forked:
            self._flaw = self._flaw or flaw
            self.stop()

    def number_of(self, storage: torch.UntypedStorage) -> int | None:
        """Return the number of a storage in the trace; None: no operator has touched it. Call it before `finish`."""
        with self._lock:
            traced = self._log.table.find(storage)
        return None if traced is None else traced.number

    # --- the end

    def finish(self, fingerprint: int = 0) -> Trace:
        """Return the trace of the finished step. Waits for the device. Call once, outside of `with recorder`.

        Raises `RuntimeError` after `stop`, at a second call, or if a flaw ended the recording; raises the errors of `Trace`.
        """
        with self._lock:
            if self._stopped:
                raise RuntimeError(
                    f"finish: expected a recorder that saw the whole step, got one that ended before "
                    f"({self._flaw or 'it was stopped or has finished'}); make one for the next step"
                )
            trace = dataclasses.replace(self._log.finish(fingerprint), places=self._places)
            self._stopped = True
        return trace

    def _reclaiming(self, reclaim_some: ReclaimSome) -> ReclaimSome:
        """Return a callback that reclaims memory. It holds the recorder weakly, because the recorder holds the callback."""
        me = weakref.ref(self)

        def free(nbytes: int, excluded: Sequence[torch.UntypedStorage]) -> bool:
            recorder = me()
            if recorder is None:
                return False
            with recorder.paused(), recorder.untimed():
                return reclaim_some(nbytes, excluded)

        return free


# --- Saved-tensor hooks for a recorded step without swaps: they only call the recorder
#
# For a plan without a GPU, under fake tensors, and without an executor. A saved tensor is kept unchanged.

_sequence_nr = torch._C._autograd._get_sequence_nr
"""Number of the thread's next differentiable operator: it increases once the saving operator is over. Note [Swap-out]."""


class RecordingHooks(torch.autograd.graph.saved_tensors_hooks):
    """Hooks that report each save and use on this thread, and in its backward, to `recorder`.

    Storages of at least `min_bytes` are recorded. For smaller storages, parameters, leaves and wrapper subclasses, the hook
    call has no storage. Eager's check for in-place writes is off inside, so record only a step that is known to be right.
    Raises the errors of `saved_tensors_hooks`.
    """

    @uncompiled
    def __init__(self, recorder: Recorder, *, min_bytes: int = 1) -> None:
        teller = _HookPair(recorder, min_bytes)
        super().__init__(teller.on_save, teller.on_use)


class _HookPair:
    """Pair of hooks. They are not methods of the manager, because the manager would then hold itself."""

    def __init__(self, recorder: Recorder, min_bytes: int) -> None:
        self._recorder = recorder
        self._min_bytes = min_bytes
        self._fresh: list[tuple[TracedStorage, int]] = []
        self._seen: set[Hashable] = set()
        """Saved views, with the numbers of their storages, and storages saved whole."""

    @uncompiled
    def on_save(self, t: Tensor) -> _Handle:
        self._note_copyable()
        traced = self._claim(t) if self._may_move(t) else None
        self._recorder.on_save([traced])
        with self._recorder.paused():
            # A new tensor, as `aliases` counts it; a result held by reference would keep its node, and so itself, alive.
            kept = t if t.is_leaf and traced is None else t.detach()
            handle = _Handle(kept, traced, self._recorder)
        if traced is not None:
            traced.aliases += 1
        return handle

    @uncompiled
    def on_use(self, handle: _Handle) -> Tensor:
        self._note_copyable()
        self._recorder.on_use([handle.traced])
        return handle.tensor

    def _claim(self, t: Tensor) -> TracedStorage:
        storage = t.untyped_storage()
        traced = self._recorder.add_claim(storage)
        whole = (traced.number, None)
        is_whole = t.numel() * t.element_size() == storage.nbytes()
        view = whole if is_whole else (traced.number, (t.storage_offset(), t.stride(), t.shape))
        # A copy out must begin after the last save of bytes that no earlier save had.
        if whole not in self._seen and view not in self._seen:
            self._seen.add(view)
            self._fresh.append((traced, _sequence_nr()))
        return traced

    def _note_copyable(self) -> None:
        now = _sequence_nr()
        self._recorder.sendable(*(traced for traced, number in self._fresh if number < now))
        self._fresh = [(traced, number) for traced, number in self._fresh if number >= now]

    def _may_move(self, t: Tensor) -> bool:
        if isinstance(t, Parameter) or isinstance(t._base, Parameter) or (t.is_leaf and t.requires_grad):
            return False
        if is_traceable_wrapper_subclass_type(type(t)) or t.layout is not torch.strided or t.is_nested:
            return False
        return t.untyped_storage().nbytes() >= self._min_bytes


class _Handle:
    """Handle that autograd holds, with the detached tensor, or with the tensor itself if it is a leaf without a claim."""

    __slots__ = ("_recorder", "tensor", "traced")

    def __init__(self, tensor: Tensor, traced: TracedStorage | None, recorder: Recorder) -> None:
        self.tensor, self.traced, self._recorder = tensor, traced, recorder

    @uncompiled
    def __del__(self) -> None:
        if self.traced is not None:
            self.traced.aliases -= 1
            self._recorder.retired(self.traced)
