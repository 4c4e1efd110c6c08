"""Swap a session's memory besides activations, if requested: an optimizer's state, a model's parameters and gradients.

swap = ModelSwap(model, optimizer, parameters="swap")      # checks them
executor = Executor(swap.device_for(device), ...)
swap.bind(executor, hbm_budget_bytes)
save, use = swap.hooks(save, use)
swap.attach(stack); swap.begin_step(); swap.end_step(completed=True)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from chameleon_mm.device import Device, check_placement
from chameleon_mm.state.hosted import Home
from chameleon_mm.state.optimizer_swap import BUCKET_BYTES, OptimizerSwap, check_optimizer
from chameleon_mm.state.parameter_swap import ParameterSwap, check_parameters
from chameleon_mm.state.rerun import Repair
from chameleon_mm.state.snapshots import Snapshots
from chameleon_mm.state.tensor_copy import Copier
from chameleon_mm.state.window import DeviceBesideWindow
from chameleon_mm.swap.budget import check_budget
from chameleon_mm.swap.executor import Executor

BUCKET_SHARE = 1 / 16
"""Share of the budget for the state of a bucket. Three buckets are on the device at once, with parameters and gradients of that
size: 3/8 of the budget. Measured like `WINDOW_SHARE`: with half of it a step is 1.7 % longer, with twice 1.1 % shorter."""


def tensors_of(model: nn.Module | None) -> list[Tensor]:
    """Return the parameters and buffers of a model, except lazy ones, which its first forward makes; empty for None."""
    return [] if model is None else [t for t in (*model.parameters(), *model.buffers()) if not is_lazy(t)]


class ModelSwap:
    """Swaps an optimizer's state and a model's parameters, each only if requested."""

    def __init__(self, model: nn.Module | None, optimizer: object, parameters: object) -> None:
        """Raises `TypeError` and `ValueError` for objects that cannot be swapped."""
        self._optimizer = None if optimizer is None else check_optimizer(optimizer, model)
        self._model = model if check_parameters(parameters, model) else None
        self._beside: DeviceBesideWindow | None = None
        self._state: OptimizerSwap | None = None
        self._given_model = model
        self._snapshots: Snapshots | None = None
        self._parameters: ParameterSwap | None = None

    @property
    def swaps_parameters(self) -> bool:
        return self._model is not None

    def device_for(self, device: Device) -> Device:
        """Return the device for the executor: it may count a window for parameters."""
        if self._model is None:
            return device
        self._beside = DeviceBesideWindow(device)
        return cast(Device, self._beside)  # which takes all other members from `device`

    def bind(self, executor: Executor, hbm_budget_bytes: int) -> None:
        """Swap with the executor's link, pool and budget. Raises `InfeasibleBudget`."""
        if self._optimizer is not None:
            self._state = OptimizerSwap(executor, self._optimizer, bucket_bytes=bucket_bytes_within(hbm_budget_bytes))
        if self._model is not None and self._beside is not None:
            self._parameters = ParameterSwap(
                executor, self._model, self._beside, hbm_budget_bytes=hbm_budget_bytes, other_movable_bytes=self.movable_bytes
            )
            if self._state is not None:
                self._state.parameters = self._parameters

    @contextmanager
    def changing_budget(self, hbm_budget_bytes: int) -> Iterator[int]:
        """Context for a change of the budget. Yields the executor's budget. If the block raises, changes nothing here.

        Raises `InfeasibleBudget` if the budget is too small for the parameters.
        """
        if self._parameters is None:
            yield hbm_budget_bytes
        else:
            limit_bytes = self._parameters.window_bytes(hbm_budget_bytes)
            yield self._parameters.window.beside_bytes(hbm_budget_bytes, limit_bytes)
            self._parameters.change_window(limit_bytes)
        if self._state is not None:
            self._state.bucket_bytes = bucket_bytes_within(hbm_budget_bytes)

    def hooks(
        self, save: Callable[[Tensor], Any], use: Callable[[Any], Tensor]
    ) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
        """Return autograd's two hooks, extended to bring used parameters to the device."""
        if self._parameters is None:
            return save, use
        return self._parameters.save_hook(save), self._parameters.use_hook(use)

    def is_hidden(self, storage: torch.UntypedStorage) -> bool:
        """True if the memory of `storage` is not part of the executor's plans."""
        if self._parameters is not None and self._parameters.window.find(storage) is not None:
            return True
        return self._state is not None and self._state.home.find(storage) is not None

    @property
    def movable_bytes(self) -> int:
        """Bytes that are on the device now and may be swapped out."""
        state = 0 if self._state is None else self._state.resident_bytes
        return state + (0 if self._parameters is None else self._parameters.resident_bytes)

    def check_budget(self, device: Device, hbm_budget_bytes: int) -> None:
        """Raise `InfeasibleBudget` if memory that never moves already exceeds the budget. Raise `ValueError` for a model on
        another kind of device."""
        check_placement(tensors_of(self._given_model))
        check_budget(
            device,
            hbm_budget_bytes,
            tensors=() if self.swaps_parameters else tensors_of(self._given_model),
            movable_bytes=self.movable_bytes,
            window_bytes=0 if self._parameters is None else self._parameters.window_bytes(hbm_budget_bytes),
        )

    def attach(self, stack: ExitStack) -> None:
        """Swap until `stack` is closed. Then bring everything back to the device."""
        stack.callback(setattr, self, "_snapshots", None)  # snapshots held by other code live on
        if self._parameters is not None:
            self._parameters.attach(stack)
        if self._state is not None:
            stack.callback(self._state.detach)
            self._state.attach()

    def let_go(self) -> None:
        """Drop the model and the optimizer, once their memory is no longer swapped."""
        self._optimizer = self._model = self._given_model = None
        self._state = self._parameters = None

    def snapshots(self, what: str, executor: Executor) -> Snapshots:
        """Return snapshots of model and optimizer, for the session's method `what`. Raises `ValueError` without a model."""
        if self._given_model is None:
            raise ValueError(f"session.{what}(): expected a session that knows its model; make it SwapSession(model=model)")
        if self._snapshots is None:
            hosts = (self._parameters, self._state)
            self._snapshots = Snapshots(executor, self._given_model, self._optimizer, *hosts)
        return self._snapshots

    def copier(self, executor: Executor) -> Copier:
        """Return a copier of the session's tensors on device or host."""
        return Copier(Home(executor), self._parameters, self._state)

    def repair(self, executor: Executor) -> Repair:
        """Take a snapshot for the step that begins, and return how to restore it. Raises the errors of `snapshots` and `take`,
        and `ValueError` without an optimizer."""
        snapshots = self.snapshots("run_step", executor)
        if self._optimizer is None:
            raise ValueError(
                "session.run_step(snapshot=True): expected a session that knows the optimizer, whose state would be put back; "
                "make it SwapSession(model=model, optimizer=optimizer)"
            )
        taken = snapshots.take()
        return Repair(self._optimizer, lambda: snapshots.restore(taken))

    def begin_step(self) -> None:
        if self._parameters is not None:
            self._parameters.begin_step()

    def end_step(self, *, completed: bool) -> None:
        if self._parameters is not None:
            self._parameters.end_step(completed=completed)


def bucket_bytes_within(hbm_budget_bytes: int) -> int:
    """Return the bytes of optimizer state that are stepped together within a budget."""
    return min(BUCKET_BYTES, int(hbm_budget_bytes * BUCKET_SHARE))
