"""Swaps in Hugging Face's `Trainer`, and in the trainers that are made of it.

trainer = Trainer(model, args, train_dataset=data, callbacks=[SwapCallback(hbm_budget="20GiB")])
trainer.train()                    # attached as it begins, detached as it ends
print(trainer_callback.report())
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch

from chameleon_mm.arguments import check_type
from chameleon_mm.attach import Attachment, attach
from chameleon_mm.integrations._framework import Framework, check_session_args
from chameleon_mm.report import SwapReport

FRAMEWORK = Framework("transformers", first=(5, 0), last=(5, 23))


class SwapCallback(FRAMEWORK.load().TrainerCallback):  # type: ignore[misc]  # transformers is not followed by mypy
    """Swaps what the model of a `Trainer` keeps for backward, while `train` runs.

    `session_args` are those of `SwapSession`. With `optimizer_state`, the state of the trainer's optimizer is in host memory
    between its steps. One callback is for one training at a time, any number of them after each other.

    A training that raises tells no callback: what it left is detached when the callback begins the next training, when it is
    dropped, or by `detach`. Raises `TypeError` and `ValueError` for arguments that `SwapSession` refuses; `train` raises
    `InfeasibleBudget` before its first step where the budget is below what lies on the device.
    """

    frameworks: tuple[Framework, ...] = (FRAMEWORK,)
    """Those whose versions are checked before the first step."""

    def __init__(self, *, optimizer_state: bool = False, **session_args: Any) -> None:
        check_type("optimizer_state", optimizer_state, bool, "True or False", "pass one of the two")
        check_session_args("SwapCallback", session_args, without=("model", "optimizer"))
        self._optimizer_state = optimizer_state
        self._session_args = session_args
        self._attachment: Attachment | None = None
        self._thread = threading.current_thread()
        self._training: object = None
        """State of the trainer whose training is attached."""
        self._finalizer: weakref.finalize[..., Any] | None = None

    def report(self) -> SwapReport:
        """Report of the latest training; see `SwapSession.report`. Raises `RuntimeError` before the first."""
        if self._attachment is None:
            raise RuntimeError("SwapCallback.report(): expected a training that has begun, got none; call it after train()")
        return self._attachment.report()

    def detach(self) -> None:
        """End swapping after a training that raised, on the thread that trained. Does nothing where nothing is attached."""
        self._training = None
        if self._attachment is not None:
            self._attachment.detach()
        if self._finalizer is not None:
            self._finalizer.detach()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach to the model, which is on its device by now, as is a checkpoint that training resumes from."""
        if self._training is not None and self._thread is not threading.current_thread() and self._thread.is_alive():
            raise RuntimeError(
                f"SwapCallback: expected one training at a time, got a second one while one runs on {self._thread.name}; "
                f"make a callback for each trainer"
            )
        if getattr(args, "activation_offloading", False):
            raise ValueError(
                "SwapCallback: expected activation_offloading=False, got True, which moves the same tensors; leave it out"
            )
        self.detach()
        for framework in self.frameworks:
            framework.check_version()
        optimizer: torch.optim.Optimizer | None = kwargs["optimizer"] if self._optimizer_state else None
        self._attachment = attach(kwargs["model"], optimizer, **self._session_args)
        self._thread = threading.current_thread()
        self._training = state
        self._finalizer = weakref.finalize(self, self._attachment.detach)
        self._finalizer.atexit = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check that this training is the one that is attached."""
        if state is not self._training:
            raise RuntimeError(
                "SwapCallback: expected to be in the trainer when train() begins, and in one training at a time, got a step of "
                "a training that it is not attached to; pass a new callback to each Trainer(callbacks=[...])"
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Detach, if this training is the one that is attached."""
        if state is self._training:
            self.detach()
