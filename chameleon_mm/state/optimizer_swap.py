"""Swap an optimizer's state out after its step, and in again for the step, part by part.

    step:  for each bucket of parameters: compute waits for its state; queue the copies back of the next bucket's state;
           step it; queue the copies out of its state

At most three buckets are on the device: one is copied back, one is stepped, one is copied out. The optimizer's hooks run once.
"""

from __future__ import annotations

import functools
import logging
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn, optim
from torch.optim.optimizer import _default_to_fused_or_foreach
from torch.utils.hooks import RemovableHandle

from chameleon_mm.errors import TransferFailed, check_type
from chameleon_mm.state.swapped_state import StateHome, SwappedState, movable_bytes
from chameleon_mm.swap.executor import Executor
from chameleon_mm.units import MIB, format_size

if TYPE_CHECKING:
    from chameleon_mm.state.parameter_swap import ParameterSwap

# --- An optimizer's step in parts: a few parameters at a time, so that only their state must be on the device
#
# The optimizers of `torch.optim` listed here update each parameter from its own gradient and state, and have no common state.
# Their multi-tensor kernels do the same arithmetic for any set of tensors, so the result is identical, bit for bit. Other
# optimizers are stepped as a whole.

SPLITTABLE = (
    optim.Adadelta, optim.Adafactor, optim.Adagrad, optim.Adam, optim.Adamax, optim.AdamW, optim.ASGD, optim.NAdam, optim.RAdam,
    optim.RMSprop, optim.Rprop, optim.SGD,
)  # fmt: skip


def is_splittable(optimizer: torch.optim.Optimizer) -> bool:
    return any(isinstance(optimizer, kind) and type(optimizer).step is kind.step for kind in SPLITTABLE)


def raw_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """Return the step function of the optimizer's class without the hooks that torch calls around it."""
    step = type(optimizer).step
    raw: Callable[..., Any] = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
    return raw


def buckets_of(optimizer: torch.optim.Optimizer, bytes_of: Callable[[Tensor], int], bucket_bytes: int) -> list[dict[str, Any]]:
    """Group the parameters that have a gradient, in order, into buckets of up to `bucket_bytes` of state, `bytes_of(p)`
    each."""
    buckets = []
    for group in optimizer.param_groups:
        with_grad = [p for p in group["params"] if p.grad is not None]
        if not with_grad:
            continue
        settled = _settled(group, with_grad)
        params: list[Tensor] = []
        nbytes = 0
        for p in with_grad:
            if params and nbytes + bytes_of(p) > bucket_bytes:
                buckets.append({**settled, "params": params})
                params, nbytes = [], 0
            params.append(p)
            nbytes += bytes_of(p)
        buckets.append({**settled, "params": params})
    return buckets


def _settled(group: dict[str, Any], params: list[Tensor]) -> dict[str, Any]:
    """Return the group with `foreach` False if torch would step its parameters one by one.

    If torch would use one call for many tensors, it does so for any part of them too.
    """
    if "foreach" not in group or group["foreach"] is not None or group.get("fused"):
        return group
    _, foreach = _default_to_fused_or_foreach(params, group.get("differentiable", False), use_fused=False)
    return group if foreach else {**group, "foreach": False}


@contextmanager
def alone(optimizer: torch.optim.Optimizer, bucket: dict[str, Any]) -> Iterator[None]:
    """Context in which `optimizer` has only the group `bucket`."""
    groups = optimizer.param_groups
    optimizer.param_groups = [bucket]
    try:
        yield
    finally:
        optimizer.param_groups = groups


_log = logging.getLogger(__name__)

BUCKET_BYTES = 64 * MIB
"""Bytes of state in a bucket. Copies of this size reach the link's rate, and three buckets take little of a GPU."""

BUCKETS_AT_ONCE = 3
"""Number of buckets whose state is on the device at the same time: one copied back, one stepped, one copied out."""

STATE_PER_PARAMETER = 2
"""Assumed number of state tensors per parameter before the optimizer has made its state: two, as for Adam."""


def check_optimizer(optimizer: object, model: nn.Module | None) -> torch.optim.Optimizer:
    """Return the optimizer. Raises `TypeError` if it is not one, `ValueError` if it has parameters of another model."""
    check_type("optimizer", optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer or None", "pass what is stepped")
    assert isinstance(optimizer, torch.optim.Optimizer)
    if model is None:
        raise ValueError("optimizer: expected its model beside it, got none; pass model=, too")
    known = {id(p) for p in model.parameters()}
    foreign = sum(id(p) not in known for group in optimizer.param_groups for p in group["params"])
    if foreign:
        raise ValueError(
            f"optimizer: expected one of the model's parameters alone, got one with {foreign} others; pass the model that it "
            f"trains, or several in an nn.ModuleList"
        )
    return optimizer


class OptimizerSwap:
    """Keeps the state of one optimizer in host memory between its steps."""

    def __init__(self, executor: Executor, optimizer: torch.optim.Optimizer, *, bucket_bytes: int) -> None:
        self.parameters: ParameterSwap | None = None
        """Swap of the model's parameters; None: they stay on the device."""
        self._optimizer = optimizer
        self.home = StateHome(executor)
        self.bucket_bytes = bucket_bytes
        """Maximum bytes of state in a bucket. A bucket has fewer if less of the budget is free."""
        self._splits = is_splittable(optimizer)
        self._active = False
        self._before: Any = None
        self._ours: Any = None
        self._plain: RemovableHandle | None = None

    # --- attaching

    def attach(self) -> None:
        """Swap all state out, and make steps swap it in part by part."""
        raw, me = raw_step(self._optimizer), weakref.ref(self)  # weak: the optimizer holds the step, and we hold the optimizer

        @functools.wraps(raw)
        def step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # a scheduler asks for it, and does not wrap this step
            run = raw if (it := me()) is None else it._step
            return run(optimizer) if closure is None else run(optimizer, closure)

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # as the step of an optimizer that has a scheduler
        # Wrapped by torch's own wrapper, so that hooks run once around all parts.
        hooked = torch.optim.Optimizer.profile_hook_step(step)
        self._before = self._optimizer.__dict__.get("step")
        self._ours = types.MethodType(hooked, self._optimizer)
        self._optimizer.__dict__["step"] = self._ours
        self._plain = self._optimizer.register_state_dict_post_hook(_as_plain)
        self._active = True
        self.leave(list(self._optimizer.state))

    def detach(self) -> None:
        """Bring all state to the device, in plain dicts, and restore the original step. If some state no longer fits, move it
        to pageable host memory and warn."""
        if not self._active:
            return
        self._active = False
        if self._plain is not None:
            self._plain.remove()
        if self._optimizer.__dict__.get("step") is self._ours:
            if self._before is None:
                del self._optimizer.__dict__["step"]
            else:
                self._optimizer.__dict__["step"] = self._before
        self._ours = self._before = None
        on_host = sum(state.end() for state in list(self.home.states.values()))
        for p, state in list(self._optimizer.state.items()):
            if isinstance(state, SwappedState):
                self._optimizer.state[p] = state.copy()
        if on_host:
            _log.warning(
                "chameleon_mm: %s of optimizer state do not fit on the device and are in host memory now; "
                "step this optimizer inside a session, which takes them from there",
                format_size(on_host),
            )

    @property
    def resident_bytes(self) -> int:
        """Bytes of state that are on the device now and may be swapped out."""
        states = (state for state in self._optimizer.state.values() if isinstance(state, dict))
        return sum(movable_bytes(value, self.home) for state in states for value in dict.values(state))

    # --- a step

    def _step(self, optimizer: torch.optim.Optimizer, *given: Callable[[], Any]) -> Any:
        """Step as `optimizer.step` does. `given`: the closure, if there is one."""
        raw = raw_step(optimizer)
        if not self._active or self.home.device.capturing():
            return raw(optimizer, *given)
        if not self._splits:
            self._arrive(list(optimizer.state))
            try:
                return raw(optimizer, *given)
            finally:
                self.leave(list(optimizer.state))
        (closure,) = given or (None,)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch._C.DisableTorchFunction():
            buckets = buckets_of(self._optimizer, self._state_bytes, self._fitting_bytes())
        left_bytes, budget = 0, self.home.budget
        for i, bucket in enumerate(buckets):
            # The copies out of the last bucket's state may run until the next bucket is stepped. Memory is read again, because
            # no autograd hook has read it since the backward.
            with self.home.entered():
                budget.reclaim.reclaim_until(lambda: budget.reclaim.pending_bytes <= left_bytes)  # noqa: B023 - called here
                budget.allocated_bytes()
            self._arrive(bucket["params"])
            if i + 1 < len(buckets):
                self._prefetch(buckets[i + 1]["params"])
            with alone(self._optimizer, bucket):
                raw(self._optimizer)
            left_bytes = self.leave(bucket["params"])
        return loss

    def _fitting_bytes(self) -> int:
        """Return the bucket size with which all buckets on the device, and temporaries of one more, fit into free memory."""
        with self.home.entered():
            free_bytes = self.home.budget.hbm_budget_bytes - self.home.budget.allocated_bytes()
        return min(self.bucket_bytes, max(0, free_bytes) // (BUCKETS_AT_ONCE + 1))

    def _state_bytes(self, p: Tensor) -> int:
        state = self._optimizer.state.get(p)
        if isinstance(state, SwappedState):
            return state.moved_bytes
        return STATE_PER_PARAMETER * p.numel() * p.element_size()

    def _away(self, params: list[Any]) -> list[SwappedState]:
        states = (self._optimizer.state.get(p) for p in params)
        with torch._C.DisableTorchFunction():
            return [state for state in states if isinstance(state, SwappedState) and state.away()]

    def _prefetch(self, params: list[Any]) -> None:
        """Queue the copies back of the state of `params`, as far as there is memory."""
        if states := self._away(params):
            with self.home.entered() as compute, suppress(torch.OutOfMemoryError, TransferFailed):  # not needed yet
                for state in states:
                    state.swap_in(compute)

    def _arrive(self, params: list[Any]) -> None:
        """Bring `params` and their state to the device. Raises `torch.OutOfMemoryError` and `TransferFailed`."""
        if self.parameters is not None:
            self.parameters.bring(params)
        if states := self._away(params):
            with self.home.entered() as compute:
                for state in states:
                    state.arrive(compute)

    def leave(self, params: list[Any]) -> int:
        """Queue the copies out of `params` and their state, which may be new. Returns the bytes of state queued."""
        if not self._active:
            return 0
        if self.parameters is not None:
            self.parameters.send_out(params)
        all_state, reclaim = self._optimizer.state, self.home.budget.reclaim
        with self.home.entered():
            before = reclaim.pending_bytes
            for p in params:
                state = all_state.get(p)
                if type(state) is dict and state:
                    state = all_state[p] = SwappedState(state, self.home)
                if isinstance(state, SwappedState):
                    state.leave()
            leaving_bytes = reclaim.pending_bytes - before
            self.home.context.out_queue.hand_over()
            self.home.context.back_queue.hand_over()
            reclaim.reclaim_complete()
        return leaving_bytes


def _as_plain(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Replace the state in a new `state_dict` of the optimizer by plain dicts of tensors on the device."""
    state = state_dict["state"]
    state_dict["state"] = {k: entry.copy() if isinstance(entry, SwappedState) else entry for k, entry in state.items()}
