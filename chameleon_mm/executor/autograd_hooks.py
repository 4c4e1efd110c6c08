"""Autograd's two hooks: the short way for what stays on the device while nothing is due, the executor's for all else.

save, use = autograd_hooks(executor)                          # once its director is set
with torch.autograd.graph.saved_tensors_hooks(save, use): ...

Most saved tensors of most models stay: parameters, statistics, small ones. What a hook has to do for them is little, and it is
done here in one function: it tells the tensor's reason to stay, notes the save or use for the step's plan, and counts. The
reasons are those of `facts_of`, but that a small one is small whatever device and layout it has. Whatever is not as simple goes
the executor's way, with nothing noted: a recorded or watched step, a tracer, a forked child; a plan, a finished operator, a
queued copy or an ended claim that has something due at this hook; a step that is no longer the one that it was.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import Parameter

from chameleon_mm import native
from chameleon_mm.executor.director import ON_SAVE
from chameleon_mm.executor.executor import Executor
from chameleon_mm.process import ThisProcess
from chameleon_mm.profiler.dispatch_state import num_modes, tracer_is_on
from chameleon_mm.saved.handles import Handle, KeptTensor
from chameleon_mm.saved.version import Origin
from chameleon_mm.trace import StepPhase
from chameleon_mm.uncompiled import uncompiled

_Save = Callable[[Tensor], Handle]
_Use = Callable[[Handle], Tensor]


def autograd_hooks(executor: Executor) -> tuple[_Save, _Use]:
    """The two hooks of an executor, whose director is set. Dynamo compiles neither, nor what they call."""
    on_save, on_use = uncompiled(_save_hook(executor)), uncompiled(_use_hook(executor))
    light = executor.director.light
    if light is not None and not executor.device.simulated and (planned := native.load("planned")) is not None:
        on_save, on_use = _planned_hooks(planned, on_save, on_use, executor)
    stays = native.load("stays")
    if stays is None or executor.director.plans != (light is not None):
        return on_save, on_use
    return _native_hooks(stays, on_save, on_use, executor)


def _save_hook(executor: Executor) -> _Save:
    parts, director, hook_lock = executor.parts, executor.director, executor.hook_lock
    counts, recording, registry, totals = executor.hook_counts, executor.recording, parts.registry, executor.metrics.totals
    pid, lock, protected, min_bytes = ThisProcess.pid, hook_lock.lock, executor.protected, executor.rule.min_bytes
    outs, ended, errors, leaving = parts.outs, hook_lock.ended, hook_lock.errors, parts.budget.reclaim.entries
    queued_out, queued_in = parts.context.transfer.queued
    saves_at_rest, executor_save = director.saves_at_rest, executor.save

    def save(t: Tensor) -> Handle:
        counts.saves += 1
        if not recording.is_over or (num_modes() and tracer_is_on()) or ThisProcess.pid != pid:
            return executor_save(t)
        if (kind := type(t)) is Parameter:
            reason = "parameter"
        elif kind is not Tensor:
            return executor_save(t)
        elif (base := t._base) is not None and type(base) is not Tensor:
            if not isinstance(base, Parameter):
                return executor_save(t)
            reason = "parameter"
        elif t.requires_grad and t.is_leaf:
            reason = "leaf"
        else:
            try:
                storage = t.untyped_storage()
            except (NotImplementedError, RuntimeError):  # a sparse tensor, or one of a functorch transform: it has no storage
                return executor_save(t)
            nbytes = storage.nbytes()
            if id(storage) in protected.refs and storage in protected:
                reason = "persistent"
            elif nbytes < min_bytes:
                reason = "small" if nbytes else "empty"
            else:
                return executor_save(t)
        with lock:
            if not (outs.fresh or leaving or outs.waiting_bytes or queued_out or queued_in or ended or errors):
                hook = saves_at_rest(t)
                if hook != ON_SAVE:
                    totals.kept_by_reason[reason] += 1
                    return KeptTensor(t, (registry.epoch, hook), by_reference=reason == "parameter")
        return executor_save(t)

    return save


def _use_hook(executor: Executor) -> _Use:
    parts, director, hook_lock = executor.parts, executor.director, executor.hook_lock
    counts, recording, pid, lock = executor.hook_counts, executor.recording, ThisProcess.pid, hook_lock.lock
    outs, ended, errors, leaving = parts.outs, hook_lock.ended, hook_lock.errors, parts.budget.reclaim.entries
    queued_out, queued_in = parts.context.transfer.queued
    plans, uses_at_rest, executor_use = director.plans, director.uses_at_rest, executor.use

    def use(handle: Handle) -> Tensor:
        counts.uses += 1
        if type(handle) is KeptTensor and recording.is_over:
            t = handle.tensor
            if t._version == handle.expected:
                if not plans:
                    return t
                if not (num_modes() and tracer_is_on()) and ThisProcess.pid == pid:
                    with lock:
                        if not (
                            outs.fresh or leaving or outs.waiting_bytes or queued_out or queued_in or ended or errors
                        ) and uses_at_rest(handle.saved_at):  # fmt: skip
                            return t
        return executor_use(handle)

    return use


def _native_hooks(stays: ModuleType, save: _Save, use: _Use, executor: Executor) -> tuple[_Save, _Use]:
    """The hooks by the C++ helper for what stays, which calls `save` and `use` for all else."""
    parts, director, hook_lock = executor.parts, executor.director, executor.hook_lock
    protected, light = executor.protected, director.light
    # Functions that C++ calls have no marked frame above them: each is marked itself.
    is_protected = uncompiled(protected.__contains__)
    at_rest, enter_backward = uncompiled(director.saves_at_rest), None if light is None else uncompiled(light.enter_backward)
    hooks: tuple[_Save, _Use] = stays.hooks(
        save, use, executor.hook_counts, executor.recording, hook_lock.lock.acquire, hook_lock.lock.release, parts.outs,
        parts.budget.reclaim.entries, *parts.context.transfer.queued, hook_lock.ended, hook_lock.errors,
        executor.metrics.totals, is_protected, protected.refs, parts.registry, director, light, at_rest, enter_backward,
        StepPhase.BACKWARD, KeptTensor, Origin, torch._C._current_autograd_node,
        min(executor.rule.min_bytes, sys.maxsize),
    )  # fmt: skip
    return hooks


def _planned_hooks(helper: ModuleType, save: _Save, use: _Use, executor: Executor) -> tuple[_Save, _Use]:
    """The hooks of planned steps by the C++ helper, which calls `save` and `use` where anything is not usual; these themselves
    where every storage is unusual, as it is checked, and where the helper does not know a part of the executor: a device that
    counts for others too, thresholds that are no whole numbers."""
    if executor.parts.context.checksums is not None:
        return save, use
    hooks: tuple[_Save, _Use]
    try:
        hooks = helper.hooks(save, use, executor)
    except (TypeError, AttributeError):
        return save, use
    return hooks
