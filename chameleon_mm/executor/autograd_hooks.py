"""Autograd's two hooks: the loop, a short way for what stays where nobody plans, the executor's for all else.

save, use = autograd_hooks(executor)                          # once its director is set
with torch.autograd.graph.saved_tensors_hooks(save, use): ...

The short way is for a session without plans, as `save_on_cpu` is: most saved tensors of most models stay there, and nothing is
noted of them. The reasons are those of `facts_of`, but that a small one is small whatever device and layout it has. Whatever is
not as simple goes the executor's way: a recorded or watched step, a tracer, a forked child; a finished operator, a queued copy
or an ended claim that has something due.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

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
    parts, hook_lock, plans, loop = executor.parts, executor.hook_lock, executor.director.plans, executor.loop
    counts, recording, totals, executor_save = executor.hook_counts, executor.recording, executor.metrics.totals, executor.save
    pid, lock, protected, min_bytes = ThisProcess.pid, hook_lock.lock, executor.protected, executor.rule.min_bytes
    outs, ended, errors, leaving = parts.outs, hook_lock.ended, hook_lock.errors, parts.budget.reclaim.entries
    held, (queued_out, queued_in) = parts.context.held, parts.context.transfer.queued
    run, capturing = hook_lock.run, executor.device.capturing

    def save(t: Tensor) -> Handle:
        counts.saves += 1
        if not recording.is_over or (num_modes() and tracer_is_on()) or ThisProcess.pid != pid:
            return executor_save(t)
        if plans:
            handle = run(loop.save, t) if loop.follows and not (ended and capturing()) else None
            return executor_save(t) if handle is None else handle
        reason = reason_to_stay(t, protected, min_bytes)
        if reason is None:
            return executor_save(t)
        with lock:
            if not (outs.fresh or leaving or held or outs.waiting_bytes or queued_out or queued_in or ended or errors):
                totals.kept_by_reason[reason] += 1
                return KeptTensor(t, by_reference=reason == "parameter")
        return executor_save(t)

    return save


def _use_hook(executor: Executor) -> _Use:
    hook_lock, plans, loop, executor_use = executor.hook_lock, executor.director.plans, executor.loop, executor.use
    counts, recording, pid, ended = executor.hook_counts, executor.recording, ThisProcess.pid, hook_lock.ended
    run, capturing = hook_lock.run, executor.device.capturing

    def use(handle: Handle) -> Tensor:
        counts.uses += 1
        if not recording.is_over:
            return executor_use(handle)
        if loop.follows and not (num_modes() and tracer_is_on()) and ThisProcess.pid == pid:
            handle.check_version()
            used = None if ended and capturing() else run(loop.use, handle)
            if used is not None:
                return used
        elif not plans and type(handle) is KeptTensor and (t := handle.tensor)._version == handle.expected:
            return t
        return executor_use(handle)

    return use
