"""Autograd's two hooks: the loop, the short way for what stays on the device while nothing is due, the executor's for all else.

save, use = autograd_hooks(executor)                          # once its director is set
with torch.autograd.graph.saved_tensors_hooks(save, use): ...

Most saved tensors of most models stay: parameters, statistics, small ones. What a hook has to do for them is little, and it is
done here in one function: it tells the tensor's reason to stay, notes the save or use for the step's plan, and counts. The
reasons are those of `facts_of`, but that a small one is small whatever device and layout it has. Whatever is not as simple goes
the executor's way, with nothing noted: a recorded or watched step, a tracer, a forked child; a plan, a finished operator, a
queued copy or an ended claim that has something due at this hook; a step that is no longer the one that it was.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from chameleon_mm.executor.director import ON_SAVE
from chameleon_mm.executor.executor import Executor
from chameleon_mm.process import ThisProcess
from chameleon_mm.profiler.dispatch_state import num_modes, tracer_is_on
from chameleon_mm.saved.classify import reason_to_stay
from chameleon_mm.saved.handles import Handle, KeptTensor
from chameleon_mm.uncompiled import uncompiled

_Save = Callable[[Tensor], Handle]
_Use = Callable[[Handle], Tensor]


def autograd_hooks(executor: Executor) -> tuple[_Save, _Use]:
    """The two hooks of an executor, whose director is set. Dynamo compiles neither, nor what they call."""
    return uncompiled(_save_hook(executor)), uncompiled(_use_hook(executor))


def _save_hook(executor: Executor) -> _Save:
    parts, director, hook_lock = executor.parts, executor.director, executor.hook_lock
    counts, recording, registry, totals = executor.hook_counts, executor.recording, parts.registry, executor.metrics.totals
    pid, lock, protected, min_bytes = ThisProcess.pid, hook_lock.lock, executor.protected, executor.rule.min_bytes
    outs, ended, errors, leaving = parts.outs, hook_lock.ended, hook_lock.errors, parts.budget.reclaim.entries
    held, (queued_out, queued_in) = parts.context.held, parts.context.transfer.queued
    saves_at_rest, executor_save, loop = director.saves_at_rest, executor.save, executor.loop
    run, capturing = hook_lock.run, executor.device.capturing

    def save(t: Tensor) -> Handle:
        counts.saves += 1
        if not recording.is_over or (num_modes() and tracer_is_on()) or ThisProcess.pid != pid:
            return executor_save(t)
        if loop.follows:
            if ended and capturing():
                return executor_save(t)
            handle = run(loop.save, t)
            if handle is not None:
                return handle
        reason = reason_to_stay(t, protected, min_bytes)
        if reason is None:
            return executor_save(t)
        with lock:
            if not (
                outs.fresh or leaving or held or outs.waiting_bytes or queued_out or queued_in or ended or errors
                or loop.follows
            ):  # fmt: skip
                hook = saves_at_rest(t)
                if hook != ON_SAVE:
                    totals.kept_by_reason[reason] += 1
                    if hook == 0:
                        executor.enter_loop(hook)
                    return KeptTensor(t, (registry.epoch, hook), by_reference=reason == "parameter")
        return executor_save(t)

    return save


def _use_hook(executor: Executor) -> _Use:
    parts, director, hook_lock = executor.parts, executor.director, executor.hook_lock
    counts, recording, pid, lock = executor.hook_counts, executor.recording, ThisProcess.pid, hook_lock.lock
    outs, ended, errors, leaving = parts.outs, hook_lock.ended, hook_lock.errors, parts.budget.reclaim.entries
    held, (queued_out, queued_in) = parts.context.held, parts.context.transfer.queued
    plans, uses_at_rest, executor_use, loop = director.plans, director.uses_at_rest, executor.use, executor.loop
    run, capturing = hook_lock.run, executor.device.capturing

    def use(handle: Handle) -> Tensor:
        counts.uses += 1
        if loop.follows and recording.is_over and not (num_modes() and tracer_is_on()) and ThisProcess.pid == pid:
            handle.check_version()
            used = None if ended and capturing() else run(loop.use, handle)
            if used is not None:
                return used
        if type(handle) is KeptTensor and recording.is_over:
            t = handle.tensor
            if t._version == handle.expected:
                if not plans:
                    return t
                if not (num_modes() and tracer_is_on()) and ThisProcess.pid == pid:
                    with lock:
                        if not (
                            outs.fresh or leaving or held or outs.waiting_bytes or queued_out or queued_in or ended or errors
                            or loop.follows
                        ) and uses_at_rest(handle.saved_at):  # fmt: skip
                            return t
        return executor_use(handle)

    return use
