"""Swaps an optimizer's state out after its step, and back for it, part by part.

    step:  for each bucket of parameters: compute waits for its state; queue the copies back of the next one's;
           step it; queue the copies out of its state

At most three buckets are on the device: one that comes, one that is stepped, one that leaves. Hooks of the optimizer run once.
"""

from __future__ import annotations

import functools
import logging
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _default_to_fused_or_foreach
from torch.utils.hooks import RemovableHandle

from chameleon_mm.errors import TransferFailed, check_type
from chameleon_mm.state.swapped_state import StateHome, SwappedState, movable_bytes
from chameleon_mm.swap.executor import Executor
from chameleon_mm.units import KIB, MIB, format_size

# --- An optimizer's step, taken apart: a few parameters at a time, so that the state of no more than those has to be there
#
# The optimizers of `torch.optim` that are named here update each parameter from its own gradient and state, with nothing that
# is counted once a step for all. Their kernels for many tensors do the same arithmetic whatever the tensors beside: so the
# result is the same, bit for bit. Others are not taken apart.

SPLITTABLE = (
    torch.optim.Adadelta,
    torch.optim.Adafactor,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)


class Bucket(NamedTuple):
    """Parameters of one group that are stepped together."""

    group: dict[str, Any]
    params: list[Tensor]


def is_splittable(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step is one of those that may be taken apart."""
    return any(isinstance(optimizer, kind) and type(optimizer).step is kind.step for kind in SPLITTABLE)


def raw_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """The step of the optimizer's class, without the hooks that torch calls around it."""
    step = type(optimizer).step
    raw: Callable[..., Any] = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
    return raw


def buckets_of(optimizer: torch.optim.Optimizer, bytes_of: Callable[[Tensor], int], bucket_bytes: int) -> list[Bucket]:
    """The parameters that have a gradient, in order, up to `bucket_bytes` of state together; `bytes_of(p)` is that of one."""
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
                buckets.append(Bucket(settled, params))
                params, nbytes = [], 0
            params.append(p)
            nbytes += bytes_of(p)
        buckets.append(Bucket(settled, params))
    return buckets


def _settled(group: dict[str, Any], params: list[Tensor]) -> dict[str, Any]:
    """The group, with one call for each tensor chosen where torch chooses that for all of its parameters.

    Where torch would take many tensors in one call, it does so for any part of them, too; or has reasons that are no part's.
    """
    if "foreach" not in group or group["foreach"] is not None or group.get("fused"):
        return group
    _, foreach = _default_to_fused_or_foreach(params, group.get("differentiable", False), use_fused=False)
    return group if foreach else {**group, "foreach": False}


@contextmanager
def alone(optimizer: torch.optim.Optimizer, bucket: Bucket) -> Iterator[None]:
    """Context in which `optimizer` has the parameters of `bucket` alone."""
    groups = optimizer.param_groups
    optimizer.param_groups = [{**bucket.group, "params": bucket.params}]
    try:
        yield
    finally:
        optimizer.param_groups = groups


# --- optimizer swap

_log = logging.getLogger(__name__)

BUCKET_BYTES = 64 * MIB
"""Bytes of state that are stepped together: copies of that size reach the link's rate, and three are a small part of a GPU."""

MIN_BYTES = 64 * KIB
"""Bytes from which a tensor of state leaves: smaller ones are a small part of all, and cost a copy each."""

_STATE_PER_PARAMETER = 2
"""Tensors of a parameter's size that an optimizer is taken to make for it, before it has."""


def check_optimizer(optimizer: object, model: nn.Module | None) -> torch.optim.Optimizer:
    """Return the optimizer. Raises `TypeError` for what is none, `ValueError` for one with parameters of another model."""
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


class SwappedParameters(Protocol):
    """Whoever swaps the parameters that the optimizer steps."""

    def bring(self, params: Iterable[Tensor]) -> None:
        """Have `params` and their gradients on the device."""

    def send_out(self, params: Iterable[Tensor]) -> None:
        """Queue the copies out of `params`, which were written."""


class OptimizerSwap:
    """Keeps the state of one optimizer in host memory between its steps."""

    def __init__(
        self,
        executor: Executor,
        optimizer: torch.optim.Optimizer,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        min_bytes: int = MIN_BYTES,
    ) -> None:
        self.parameters: SwappedParameters | None = None
        """Whoever swaps the parameters; None: they stay."""
        self._optimizer = optimizer
        self._home = StateHome(executor, min_bytes=min_bytes)
        self.bucket_bytes = bucket_bytes
        self._splits = is_splittable(optimizer)
        self._active = False
        self._before: Any = None
        self._ours: Any = None
        self._plain: RemovableHandle | None = None

    # --- attaching

    def attach(self) -> None:
        """Send all state away, and have steps bring it back part by part."""
        raw, me = raw_step(self._optimizer), weakref.ref(self)  # weak: the optimizer holds the step, and this the optimizer

        @functools.wraps(raw)
        def step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            run = raw if (it := me()) is None else it._step
            return run(optimizer, closure) if closure is not None else run(optimizer)

        # torch's own wrapper: its hooks run once around all parts.
        hooked = torch.optim.Optimizer.profile_hook_step(step)
        self._before = self._optimizer.__dict__.get("step")
        self._ours = types.MethodType(hooked, self._optimizer)
        if getattr(self._before, "_wrapped_by_lr_sched", False):
            self._ours = _noting_call(hooked, self._optimizer)
        self._optimizer.__dict__["step"] = self._ours
        self._plain = self._optimizer.register_state_dict_post_hook(_as_plain)
        self._active = True
        self._leave(list(self._optimizer.state))

    def detach(self) -> None:
        """Have all state back on the device, in plain dicts, and step as before. What does not fit any more becomes ordinary
        host memory, and is said."""
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
        on_host = sum(state.end() for state in list(self._home.states.values()))
        for p, state in list(self._optimizer.state.items()):
            if isinstance(state, SwappedState):
                self._optimizer.state[p] = state.copy()
        if on_host:
            _log.warning(
                "chameleon_mm: %s of optimizer state do not fit on the device and are in host memory now; "
                "step this optimizer inside a session, which takes them from there",
                format_size(on_host),
            )

    def is_state(self, storage: torch.UntypedStorage) -> bool:
        """Whether state came back into `storage`, to leave again."""
        return self._home.is_state(storage)

    @property
    def resident_bytes(self) -> int:
        """Bytes of state that is on the device now and may leave."""
        states = (state for state in self._optimizer.state.values() if isinstance(state, dict))
        return sum(movable_bytes(value, self._home) for state in states for value in dict.values(state))

    def leave(self, params: list[Any]) -> None:
        """Have the state of `params` leave, which somebody has made, and themselves."""
        if self._active:
            self._leave(params)

    # --- a step

    def _step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        raw = raw_step(optimizer)
        if not self._active or self._home.device.capturing():
            return raw(optimizer, closure) if closure is not None else raw(optimizer)
        if not self._splits:
            return self._step_whole(raw, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        buckets = buckets_of(self._optimizer, self._state_bytes, self.bucket_bytes)
        left_bytes = 0
        for i, bucket in enumerate(buckets):
            self._reclaim_but(left_bytes)
            self._arrive(bucket.params)
            if i + 1 < len(buckets):
                self._prefetch(buckets[i + 1].params)
            with alone(self._optimizer, bucket):
                raw(self._optimizer)
            left_bytes = self._leave(bucket.params)
        return loss

    def _reclaim_but(self, nbytes: int) -> None:
        """Reclaim what is on its way out, but for the `nbytes` of the bucket that left last: their copies may take until the
        next one is stepped. Memory is read anew: no hook of autograd's has done so since the backward."""
        with self._home.entered():
            budget = self._home.budget
            budget.reclaim.reclaim_until(lambda: budget.reclaim.pending_bytes <= nbytes)
            budget.allocated_bytes()

    def _step_whole(self, raw: Callable[..., Any], closure: Callable[[], Any] | None) -> Any:
        """Step all parameters at once: all state comes back first."""
        self._arrive(list(self._optimizer.state))
        try:
            return raw(self._optimizer, closure) if closure is not None else raw(self._optimizer)
        finally:
            self._leave(list(self._optimizer.state))

    def _state_bytes(self, p: Tensor) -> int:
        state = self._optimizer.state.get(p)
        if isinstance(state, SwappedState):
            return state.moved_bytes
        return _STATE_PER_PARAMETER * p.numel() * p.element_size()

    def _states(self, params: list[Any]) -> list[SwappedState]:
        states = (self._optimizer.state.get(p) for p in params)
        return [state for state in states if isinstance(state, SwappedState)]

    def _prefetch(self, params: list[Any]) -> None:
        """Queue the copies back of the state of `params`, as far as there is memory."""
        states = [state for state in self._states(params) if state.away_bytes]
        if states:
            with self._home.entered() as compute, suppress(torch.OutOfMemoryError, TransferFailed):  # nobody needs it yet
                for state in states:
                    state.swap_in(compute)

    def _arrive(self, params: list[Any]) -> None:
        """Have the state of `params` on the device, and themselves. Raises `torch.OutOfMemoryError` and `TransferFailed`."""
        if self.parameters is not None:
            self.parameters.bring(params)
        states = [state for state in self._states(params) if state.away_bytes]
        if states:
            with self._home.entered() as compute:
                for state in states:
                    state.arrive(compute)

    def _leave(self, params: list[Any]) -> int:
        """Have the state of `params` leave, which may be new, and themselves. Returns the bytes of state that began to."""
        if self.parameters is not None:
            self.parameters.send_out(params)
        all_state, reclaim = self._optimizer.state, self._home.budget.reclaim
        with self._home.entered():
            before = reclaim.pending_bytes
            for p in params:
                state = all_state.get(p)
                if type(state) is dict and state:
                    state = all_state[p] = SwappedState(state, self._home)
                if isinstance(state, SwappedState):
                    state.leave()
            leaving_bytes = reclaim.pending_bytes - before
            self._home.context.transfer.hand_over()
            reclaim.reclaim_complete()
        return leaving_bytes


def _as_plain(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Have `state_dict`, which the optimizer has just made, hold plain dicts of tensors on the device."""
    state = state_dict["state"]
    state_dict["state"] = {k: entry.copy() if isinstance(entry, SwappedState) else entry for k, entry in state.items()}


def _noting_call(hooked: Callable[..., Any], optimizer: torch.optim.Optimizer) -> Any:
    """A step that tells a scheduler, which has wrapped the optimizer's own, that it was called."""

    @functools.wraps(hooked)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._opt_called = True
        return hooked(self, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # as torch's own wrapper has it
    return types.MethodType(step, optimizer)
